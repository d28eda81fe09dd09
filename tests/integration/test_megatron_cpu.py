"""Real megatron-core on the CPU: initialisation, our attention and norm in its layers, and sleeping process groups."""

from __future__ import annotations

import functools
import random
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from slime.backends.megatron_utils import initialize
from slime.utils import accelerator, distributed_utils, reloadable_process_group
from tests.support.gloo_world import run_ranks

LENGTHS = [13, 40, 7, 20, 20, 3]
VOCABULARY = 96


def _args(**changed: Any) -> Namespace:
    values = {
        "seed": 1234,
        "distributed_timeout_minutes": 1,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "offload_train": False,
    }
    return Namespace(**{**values, **changed})


def _join(rank: int, world_size: int, port: int, **changed: Any) -> Namespace:
    args = _args(**changed)
    initialize.init_process_group(args, rank, world_size, "127.0.0.1", port)
    initialize.init(args)
    return args


def _again(**changed: Any) -> None:
    """Another layout in the same processes."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    initialize.init(_args(**changed))


def _config(**changed: Any):
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = {
        "num_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 80,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "variable_seq_lengths": True,
        "pipeline_dtype": torch.float32,
        **accelerator.current().megatron_config_overrides(),
    }
    return TransformerConfig(**{**values, **changed})


def _model(config):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    return GPTModel(
        config,
        accelerator.current().layer_spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=128,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def _packed(lengths: list[int]):
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _free_port() -> int:
    from slime.utils.misc import get_free_port

    return get_free_port("127.0.0.1")


def _pack_equals_sequences_alone(rank: int, world_size: int, store: str, port: int) -> None:
    _join(rank, world_size, port)
    model = _model(_config())
    tokens = torch.randint(0, VOCABULARY, (1, sum(LENGTHS)))
    together = model(input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=_packed(LENGTHS))
    parts = tokens.split(LENGTHS, dim=1)
    apart = torch.cat([model(input_ids=part, position_ids=None, attention_mask=None) for part in parts], dim=1)
    torch.testing.assert_close(together, apart, rtol=0, atol=2e-6)
    weights = torch.randn_like(together)
    ours = torch.autograd.grad((together * weights).sum(), list(model.parameters()))
    theirs = torch.autograd.grad((apart * weights).sum(), list(model.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 5e-6 * b.abs().max() + 1e-7
    attention = model.decoder.layers[0].self_attention.core_attention
    query, key = torch.randn(103, 4, 16), torch.randn(103, 2, 16)
    with pytest.raises(ValueError, match="the pack has 103 tokens on this rank, its cu_seqlens 100"):
        attention(query, key, key, packed_seq_params=_packed([60, 40]))


def test_a_pack_equals_its_sequences_alone() -> None:
    run_ranks(_pack_equals_sequences_alone, 1, _free_port())


def _zigzag(x: torch.Tensor, rank: int, cp: int) -> torch.Tensor:
    chunks = x.chunk(2 * cp)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])


def _context_parallel_attention(rank: int, world_size: int, store: str, port: int) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    from slime.backends.megatron_utils.cpu.attention import SdpaCoreAttention

    _join(rank, world_size, port, context_parallel_size=world_size)
    config = _config(context_parallel_size=world_size)
    attention = SdpaCoreAttention(config, 1, AttnMaskType.causal, "self")
    lengths = [4 * world_size, 12 * world_size, 4 * world_size, 2 * world_size]
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(sum(lengths), heads, 16, generator=generator) for heads in (4, 2, 2)]
    weights = torch.randn(sum(lengths), 64, generator=generator)

    def local(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([_zigzag(part, rank, world_size) for part in x.split(lengths)])

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outputs = []
        for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
            q1, k1, v1 = (part.transpose(0, 1)[None] for part in parts)
            out = F.scaled_dot_product_attention(q1, k1, v1, is_causal=True, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)

    inputs = [x.clone().requires_grad_() for x in whole]
    expected = reference(*inputs)
    gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    mine = [local(x).requires_grad_() for x in whole]
    out = attention(*mine, packed_seq_params=_packed(lengths))
    torch.testing.assert_close(out, local(expected), rtol=0, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad((out * local(weights)).sum(), mine), gradients, strict=True):
        torch.testing.assert_close(ours, local(theirs), rtol=0, atol=2e-6)

    # a padded batch of two sequences of equal length, s b h d
    q, k, v = (torch.stack([x[: 8 * world_size], x[8 * world_size : 16 * world_size]], 1) for x in whole)
    out = attention(*(_zigzag(x, rank, world_size) for x in (q, k, v)))
    for index in range(2):
        q1, k1, v1 = (x[:, index].transpose(0, 1)[None] for x in (q, k, v))
        alone = F.scaled_dot_product_attention(q1, k1, v1, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(
            out[:, index], _zigzag(alone.flatten(1), rank, world_size).detach(), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("world_size", [1, 2])
def test_attention_over_context_parallel_ranks_equals_one_rank(world_size: int) -> None:
    run_ranks(_context_parallel_attention, world_size, _free_port())


def _layouts(rank: int, world_size: int, store: str, port: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    args = _join(rank, world_size, port, tensor_model_parallel_size=2)
    assert (args.rank, args.world_size) == (rank, world_size)
    assert initialize.describe_model_parallel() == "tp=2 pp=1 vpp=1 cp=1 dp=1 ep=1 etp=2"
    assert initialize.is_megatron_main_rank() == (rank == 0)
    draws = _everybody((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]  # tensor-parallel ranks draw alike outside the model-parallel region
    with tensor_parallel.get_cuda_rng_tracker().fork():
        inside = torch.rand(1).item()
    inside = _everybody(inside)
    assert inside[0] != inside[1]

    _again(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert initialize.describe_model_parallel() == "tp=1 pp=2 vpp=2 cp=1 dp=1 ep=1 etp=1"
    assert initialize.is_megatron_main_rank() == (rank == 1)
    draws = _everybody((random.random(), torch.rand(1).item()))
    assert draws[0] != draws[1]

    _again(context_parallel_size=2)
    assert initialize.is_megatron_main_rank() == (rank == 0)
    _again(expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    assert initialize.describe_model_parallel() == "tp=1 pp=1 vpp=1 cp=1 dp=2 ep=2 etp=1"
    draws = _everybody(torch.rand(1).item())
    assert draws[0] == draws[1]
    _again(data_parallel_random_init=True)
    draws = _everybody(torch.rand(1).item())
    assert draws[0] != draws[1]
    parallel_state.destroy_model_parallel()
    with pytest.raises(RuntimeError, match="not divisible"):
        initialize.init(_args(tensor_model_parallel_size=3))
    initialize.init_model_parallel(_args())
    with pytest.raises(ValueError, match="--seed must be a positive integer"):
        initialize.set_random_seed(_args(seed=0))


def _everybody(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=distributed_utils.get_gloo_group())
    return values


def test_layouts_and_seeds() -> None:
    run_ranks(_layouts, 2, _free_port())


def _custom_init(args: Namespace) -> None:
    args.custom_init_saw = initialize.describe_model_parallel()


def _hooks_and_determinism(rank: int, world_size: int, store: str, port: int) -> None:
    path = "tests.integration.test_megatron_cpu._custom_init"
    args = _join(rank, world_size, port, deterministic_mode=True, custom_megatron_init_path=path)
    assert args.custom_init_saw.startswith("tp=1")
    assert torch.are_deterministic_algorithms_enabled()


def test_custom_init_runs_last_and_deterministic_mode_is_set() -> None:
    run_ranks(_hooks_and_determinism, 1, _free_port())


def _training_step(config, model) -> tuple[float, float]:
    """Loss on the last stage and the norm of this rank's gradients, by Megatron's own schedule, two micro-batches."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward(batches, model):
        tokens = next(batches)
        out = model(input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=_packed(LENGTHS))

        def loss(output):
            value = output.float().pow(2).mean()
            return value, {"loss": value.detach()}

        return out, loss

    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, VOCABULARY, (1, sum(LENGTHS) + 1), generator=generator)[:, :-1] for _ in range(2)]
    model.zero_grad()
    results = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=2,
        seq_length=sum(LENGTHS),
        micro_batch_size=1,
        forward_only=False,
    )
    norm = sum(p.grad.pow(2).sum().item() for p in model.parameters() if p.grad is not None) ** 0.5
    return sum(r["loss"].item() for r in results), norm


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "none",
}


def _sleeping_groups(rank: int, world_size: int, store: str, port: int, layout: dict[str, int]) -> None:
    """Modules keep the groups that they were built with; steps before, between and after sleeps are bit-equal."""
    _join(rank, world_size, port, offload_train=True, **layout)
    experts = EXPERTS if "expert_model_parallel_size" in layout else {}
    model = _model(config := _config(**layout, **experts))
    config.finalize_model_grads_func = None
    step = functools.partial(_training_step, config, model)
    awake = step()
    assert awake[1] > 0
    for _ in range(2):
        reloadable_process_group.destroy_process_groups()
        assert _everybody(rank) == list(range(world_size))  # the gloo group stays
        with pytest.raises(RuntimeError, match="destroyed while the trainer sleeps"):
            step()
        reloadable_process_group.reload_process_groups()
        assert step() == awake


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ],
    ids=["tp2", "pp2", "ep2"],
)
def test_megatron_modules_keep_their_groups_over_sleep(layout: dict[str, int]) -> None:
    """P16 for Megatron's collectives: all-reduce and gather (TP), batched sends with shapes (PP), all-to-all (EP)."""
    run_ranks(_sleeping_groups, 2, _free_port(), layout)


def _norm_and_refusals(rank: int, world_size: int, store: str, port: int) -> None:
    from slime.backends.megatron_utils.cpu.norm import CpuRMSNorm

    _join(rank, world_size, port)
    norm = CpuRMSNorm(_config(sequence_parallel=False), 48, eps=1e-6)
    x = torch.randn(5, 48)
    expected = x / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x).double(), expected, rtol=0, atol=1e-6)
    centred = CpuRMSNorm(_config(layernorm_zero_centered_gamma=True), 48, eps=1e-6)
    assert centred(x).equal(norm(x)) and centred.weight.abs().max() == 0
    assert norm.weight.sequence_parallel is False
    with pytest.raises(ValueError, match="attention windows"):
        _model(_config(window_size=(4, 0)))


def test_norm_and_refusals() -> None:
    run_ranks(_norm_and_refusals, 1, _free_port())
