"""Every tensor that a trainer keeps between steps: weights, gradients, Megatron's DDP buffers, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

_PER_PARAMETER = ("grad", "main_grad", "main_param")  # the last two are Megatron's


def trainer_storages(model_chunks: Sequence[Any], optimizer: Any = None) -> list[torch.UntypedStorage]:
    """The distinct, non-empty storages behind `trainer_tensors`: views of one buffer count once."""
    storages = (tensor.untyped_storage() for tensor in trainer_tensors(model_chunks, optimizer))
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes() > 0}.values())


def trainer_tensors(model_chunks: Sequence[Any], optimizer: Any = None) -> Iterator[torch.Tensor]:
    """All tensors of the model chunks and of the optimizer, with repetitions."""
    for chunk in model_chunks:
        yield from _of_parameters(chunk.parameters())
        for module in chunk.modules():
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)
        yield from _ddp_buffers(chunk)
    for torch_optimizer in _torch_optimizers(optimizer):
        for group in torch_optimizer.param_groups:
            yield from _of_parameters(group["params"])
        for state in torch_optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def _of_parameters(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        yield parameter
        for name in _PER_PARAMETER:
            value = getattr(parameter, name, None)
            if torch.is_tensor(value):
                yield value


def _ddp_buffers(chunk: Any) -> Iterator[torch.Tensor]:
    """Megatron's DDP keeps the contiguous memory of parameters and gradients in lists of buffers."""
    for name in ("buffers", "expert_parallel_buffers"):
        buffers = getattr(chunk, name, None)
        if not isinstance(buffers, list):  # on a plain module `buffers` is a method
            continue
        for buffer in buffers:
            yield from (data for data in (buffer.param_data, buffer.grad_data) if data is not None)


def _torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
    elif hasattr(optimizer, "chained_optimizers"):
        for part in optimizer.chained_optimizers:
            yield from _torch_optimizers(part)
    elif getattr(optimizer, "optimizer", None) is not None:
        yield from _torch_optimizers(optimizer.optimizer)
