"""The critic's output layer: one value per token in place of the vocabulary's logits."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

# not `output_layer.weight`: a checkpoint of an actor has a matrix of another shape under that key
CHECKPOINT_KEY = "value_head.weight"


def has_value_head(args: argparse.Namespace) -> bool:
    """Whether these are the arguments of a critic."""
    return args.loss_type == "value_loss"


class LinearForLastLayer(torch.nn.Linear):
    """hidden states [sequence, batch, hidden] -> (values [sequence, batch, outputs] in float32, no bias), called like
    Megatron's output layers. Written for megatron-core 0.16.1.

    Every tensor-parallel rank holds the whole weight. With sequence parallelism a rank sees its part of the sequence:
    the values are gathered, and the weight's gradient is summed over the ranks as a layer norm's is.
    """

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig, seed: int = 1234) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        self.sequence_parallel = config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel
        # from a generator of its own, so that the head doesn't depend on the parallel layout
        drawn = torch.randn(output_size, input_size, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.weight.copy_(drawn * config.init_method_std)

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        values = super().forward(input_).float()
        if self.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weight under `CHECKPOINT_KEY`, the same on all tensor-parallel ranks."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        for tensor in state.values():
            tensor.key = CHECKPOINT_KEY
        return state


def attach_value_head(model: torch.nn.Module, seed: int) -> None:
    """Replace the output layer of a model chunk that ends the model.

    Raises:
        ValueError: it has none.
    """
    if not hasattr(model, "output_layer"):
        raise ValueError(f"a critic needs a model with an output_layer; {type(model).__name__} has none")
    model.output_layer = LinearForLastLayer(model.config.hidden_size, 1, model.config, seed)


def take_missing_value_heads(args: argparse.Namespace, state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Take the value head out of `state`, what is to be loaded, if the checkpoint in `directory` has none: a critic
    then starts from an actor's weights with its new head.

    Returns:
        {key of the model chunk: {name: the weight that the head has now}}
    """
    if not has_value_head(args):
        return {}
    from megatron.core import dist_checkpointing

    if CHECKPOINT_KEY in dist_checkpointing.load_tensors_metadata(str(directory)):
        return {}
    heads: dict[str, Any] = {}
    for key in [key for key in state if key.startswith("model")]:
        for name in [name for name, tensor in state[key].items() if getattr(tensor, "key", "") == CHECKPOINT_KEY]:
            heads[key] = {name: state[key].pop(name).data}
    return heads
