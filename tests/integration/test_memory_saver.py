"""The CPU's memory saver on a real Megatron model: memory falls, everything comes back bit-equal, views stay views."""

from __future__ import annotations

import resource

import pytest
import torch
import torch.distributed as dist

from slime.utils.accelerator.file_memory_saver import FileMemorySaver
from slime.utils.accelerator.trainer_tensors import trainer_storages
from slime.utils.memory_utils import resident_bytes
from tests.support.gloo_world import run_ranks

MIB = 1 << 20


def _trainer(rank: int, world_size: int, store: str, bf16: bool):
    """A dense model of 24 M parameters under Megatron's DDP and distributed optimizer, after one step."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime.utils import accelerator

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    device = accelerator.current()
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=4,
        hidden_size=640,
        num_attention_heads=8,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        add_bias_linear=False,
        bf16=bf16,
        params_dtype=dtype,
        **device.megatron_config_overrides(),
    )
    model = GPTModel(config, device.layer_spec(config), vocab_size=4096, max_sequence_length=64)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    chunk = DistributedDataParallel(config, ddp_config, Float16Module(config, model) if bf16 else model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, bf16=bf16, params_dtype=dtype, use_distributed_optimizer=True), [chunk]
    )
    _step(chunk, optimizer)
    return chunk, optimizer


def _step(chunk, optimizer) -> float:
    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    tokens = torch.arange(16)[None]
    loss = chunk(input_ids=tokens, position_ids=tokens, attention_mask=None).float().pow(2).mean()
    loss.backward()
    chunk.finish_grad_sync()
    optimizer.step()
    return loss.item()


def _snapshot(chunk, optimizer) -> list[torch.Tensor]:
    whole = [torch.tensor([], dtype=torch.uint8).set_(s) for s in trainer_storages([chunk], optimizer)]
    return [bytes_.clone() for bytes_ in whole]


def _swap(rank: int, world_size: int, store: str, bf16: bool) -> dict[str, float]:
    chunk, optimizer = _trainer(rank, world_size, store, bf16)
    expected = _snapshot(chunk, optimizer)
    size = sum(tensor.numel() for tensor in expected)
    parameter = next(chunk.parameters())
    address_in_buffer = parameter.storage_offset()
    saver = FileMemorySaver()
    before = resident_bytes()
    freed = saver.pause([chunk], optimizer)
    asleep = resident_bytes()
    assert saver.paused and freed == size
    with pytest.raises(RuntimeError, match="paused already"):
        saver.pause([chunk], optimizer)
    restored = saver.resume()
    awake = resident_bytes()
    assert restored == freed and not saver.paused

    actual = _snapshot(chunk, optimizer)
    assert len(actual) == len(expected)
    assert all(new.equal(old) for new, old in zip(actual, expected, strict=True))
    # DDP's buffers and the parameters that are views of them go on sharing memory
    buffer = chunk.buffers[0]
    assert parameter.untyped_storage().data_ptr() == buffer.param_data.untyped_storage().data_ptr()
    assert parameter.storage_offset() == address_in_buffer
    buffer.param_data.fill_(3.0)
    assert parameter.flatten()[0].item() == 3.0
    assert parameter.main_grad.untyped_storage().data_ptr() == buffer.grad_data.untyped_storage().data_ptr()
    return {"size": size, "fell": before - asleep, "rose": awake - asleep}


@pytest.mark.parametrize("bf16", [False, True])
def test_memory_falls_and_comes_back_bit_equal(bf16: bool) -> None:
    """Weights, gradients and two moments of 24 M parameters: at least 200 MB leave the resident memory, and return."""
    (result,) = run_ranks(_swap, 1, bf16)
    assert result["size"] > 200 * MIB
    assert result["fell"] > 0.9 * result["size"]
    assert result["rose"] > 0.9 * result["size"]


def _train_with_and_without_sleep(rank: int, world_size: int, store: str) -> tuple[list[float], list[float]]:
    chunk, optimizer = _trainer(rank, world_size, store, False)
    start = [tensor.clone() for tensor in _snapshot(chunk, optimizer)]
    group_steps = [group.get("step") for o in optimizer.chained_optimizers for group in o.optimizer.param_groups]
    plain = [_step(chunk, optimizer) for _ in range(2)]
    for storage, old in zip(trainer_storages([chunk], optimizer), start, strict=True):
        storage.copy_(old.untyped_storage())
    groups = (group for o in optimizer.chained_optimizers for group in o.optimizer.param_groups)
    for group, step in zip(groups, group_steps, strict=True):
        group["step"] = step
    saver, slept = FileMemorySaver(), []
    for _ in range(2):
        saver.pause([chunk], optimizer)
        saver.resume()
        slept.append(_step(chunk, optimizer))
    return plain, slept


def test_training_goes_on_as_if_it_had_not_slept() -> None:
    ((plain, slept),) = run_ranks(_train_with_and_without_sleep, 1)
    assert slept == plain


def test_a_file_that_cannot_grow_frees_nothing() -> None:
    """A limit on file sizes stands for a full disk."""
    linear = torch.nn.Linear(64, 64)
    weight = linear.weight.detach().clone()
    saver = FileMemorySaver()
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(OSError, match=r"swapping 16640 bytes of trainer memory out to .* failed: File too large"):
            saver.pause([linear])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not saver.paused and linear.weight.equal(weight)
    saver.pause([linear])
    saver.resume()
    assert linear.weight.equal(weight)


def test_plain_modules_and_optimizers_work_too() -> None:
    linear = torch.nn.Linear(64, 64)
    linear.register_buffer("scale", torch.full((3,), 2.0))
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    weight, moment = linear.weight.detach().clone(), optimizer.state[linear.weight]["exp_avg"].clone()
    gradient = linear.weight.grad.clone()
    saver = FileMemorySaver()
    saver.pause([linear], optimizer)
    assert linear.weight.untyped_storage().nbytes() == linear.scale.untyped_storage().nbytes() == 0
    saver.resume()
    assert linear.weight.equal(weight) and linear.weight.grad.equal(gradient)
    assert optimizer.state[linear.weight]["exp_avg"].equal(moment) and linear.scale.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="not paused"):
        saver.resume()
