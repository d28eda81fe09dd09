"""Scenarios of `test_moe`: routing replay and what else belongs to experts, on the layouts of `layout_matrix`."""

from __future__ import annotations

from typing import Any

import layout_matrix
import torch
from layout_matrix import Case
from torch import Tensor


def save_outcome(case: Case, model_dir: str, path: str) -> None:
    """The reference for `layout_matrix.compare`, with its metrics as return value."""
    torch.save(layout_matrix.run_case(case, model_dir), path)


def replay_changes_nothing(case: Case, model_dir: str) -> None:
    """With the weights that recorded, replay gives the loss and gradients of a run without it, bit for bit."""
    plain = layout_matrix.run_case(case, model_dir)
    replayed = layout_matrix.run_case(with_flags(case, "--use-routing-replay"), model_dir)
    assert replayed.metrics[0].pop("train/routing_replay_changed") == 0.0
    assert plain.metrics[0] == replayed.metrics[0]
    for name, gradient in plain.gradients[0].items():
        assert torch.equal(gradient, replayed.gradients[0][name]), name


def replay_holds_choices(case: Case, model_dir: str) -> None:
    """The training pass and its recomputation choose what was recorded, though the routers were changed since, and
    the gate's gradient is that of the recorded experts' probabilities."""
    from megatron.core.transformer.moe.router import TopKRouter

    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
    from slime.backends.megatron_utils.model import forward_only, train
    from slime.backends.megatron_utils.moe.routing_replay import RoutingReplay
    from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer

    args = layout_matrix.case_args(with_flags(case, "--use-routing-replay"), model_dir)
    layout_matrix.init_layout(args)
    model, optimizer, scheduler, _ = initialize_model_and_optimizer(args, "actor")
    args.loss_type = "sft_loss"
    data = layout_matrix.rank_rollout(args, case, model)
    iterator, counts = get_data_iterator(data), data["num_microbatches"]
    replay = RoutingReplay(args, model)
    routers = [module for chunk in model for module in chunk.modules() if isinstance(module, TopKRouter)]
    seen: list[list[Tensor]] = [[] for _ in routers]
    for router, maps in zip(routers, seen, strict=True):
        router.register_forward_hook(lambda _, __, output, maps=maps: maps.append(output[1].clone()))
    with replay.record():
        forward_only(get_log_probs_and_entropy, args, model, iterator, counts, replay=replay)
    recorded = [list(maps) for maps in seen]
    for router, maps in zip(routers, seen, strict=True):
        maps.clear()
        with torch.no_grad():
            router.weight.copy_(router.weight.flip(0) * 1.5)
    first = counts[:1]
    metrics = train(
        args, 0, model, optimizer, scheduler, iterator, first, data["global_batch_sizes"][:1], replay=replay
    )
    assert metrics[0]["train/routing_replay_changed"] > 0.5
    assert routers
    for router, maps, expected in zip(routers, seen, recorded, strict=True):
        passes = 2 if args.recompute_granularity is not None else 1
        assert len(maps) == passes * first[0] and len(expected) == sum(counts)
        wanted = sorted(chosen.flatten().tolist() for chosen in expected[: first[0]] * passes)
        assert sorted(chosen.flatten().tolist() for chosen in maps) == wanted
        assert router.weight.main_grad.abs().sum() > 0
        assert not torch.equal(router.router_replay.experts[0], torch.zeros_like(router.router_replay.experts[0]))
    without = sum(1 for maps, expected in zip(seen, recorded, strict=True) if torch.equal(maps[0], expected[0]))
    assert without == len(routers), "the first micro-batch's choices come first"


def with_flags(case: Case, flags: str) -> Case:
    return Case(case.model, f"{case.layout} {flags}", case.batching, case.permuted, case.rollout)


def outcome_metrics(path: str) -> list[dict[str, Any]]:
    return torch.load(path, weights_only=False).metrics


ENGINE_FLAGS = """
    --debug-train-only --disable-rollout-global-dataset --num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 1
    --global-batch-size 2 --lr 1e-3 --micro-batch-size 1 --data-pad-size-multiplier 8 --rollout-max-response-len 64
    --num-experts 8 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-router-load-balancing-type none
    --moe-router-dtype fp32 --use-rollout-routing-replay --loss-type sft_loss
"""


def _engine_rollout(model_dir: str, columns: dict[str, Any], flags: str) -> tuple[Any, ...]:
    """(args, model, optimizer, scheduler, this rank's data) of a run on an engine's samples."""
    from megatron.core import parallel_state as mpu

    from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer
    from slime.ray.train_data import split_train_data_by_dp
    from slime.utils.arguments import parse_args

    devices = f"--actor-num-gpus-per-node {torch.distributed.get_world_size()}"
    args = parse_args(argv=f"--hf-checkpoint {model_dir} {devices} {ENGINE_FLAGS} {flags}".split())
    layout_matrix.init_layout(args)
    model, optimizer, scheduler, _ = initialize_model_and_optimizer(args, "actor")
    masks = columns["loss_masks"]
    data = columns | {"rollout_ids": [0, 1], "rollout_mask_sums": [float(sum(mask)) for mask in masks]}
    config = {"dp_size": 1, "cp_size": mpu.get_context_parallel_world_size(), "vpp_size": 1}
    data = split_train_data_by_dp(args, data, config | {"microbatch_group_size_per_vp_stage": 1})[0]
    return args, model, optimizer, scheduler, data


def engine_experts_are_the_trainers(model_dir: str, columns: dict[str, Any]) -> None:
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
    from slime.backends.megatron_utils.model import forward_only, train
    from slime.backends.megatron_utils.moe.routing_replay import RoutingReplay

    args, model, optimizer, scheduler, data = _engine_rollout(model_dir, columns, "")
    iterator, counts = get_data_iterator(data), data["num_microbatches"]
    replay = RoutingReplay(args, model)
    with replay.record():
        forward_only(get_log_probs_and_entropy, args, model, iterator, counts, replay=replay)
    equal = shifted = total = 0
    for layers in replay._layers.values():
        for number, layer in layers:
            for micro_batch, indices in enumerate(data["micro_batch_indices"]):
                engine = data["rollout_routed_experts"][indices[0]][:, number].sort(dim=1).values
                own = layer.experts[micro_batch][: len(engine) + 1].sort(dim=1).values
                equal += int((own[:-1] == engine).all(dim=1).sum())
                shifted += int((own[1:] == engine).all(dim=1).sum())
                total += len(engine)
    assert equal / total > 0.99 and shifted / total < 0.5, (equal, shifted, total)
    replay.fill(iterator)
    sizes = data["global_batch_sizes"]
    history = train(args, 0, model, optimizer, scheduler, iterator, counts, sizes, replay=replay)
    assert history[0]["train/routing_replay_changed"] < 0.01


def engine_experts_reach_the_routers(model_dir: str, columns: dict[str, Any]) -> None:
    """Foreign experts: every layout gives each token its own; all tokens before the last but one are replayed."""
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.model import train
    from slime.backends.megatron_utils.moe.routing_replay import RoutingReplay

    generator = torch.Generator().manual_seed(0)
    foreign = []
    for rows in columns["rollout_routed_experts"]:
        scores = torch.rand(len(rows), len(rows[0]), 8, generator=generator)
        foreign.append(scores.topk(2).indices.tolist())
    results = []
    for flags in (
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2",
        "--context-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ):
        inputs = columns | {"rollout_routed_experts": foreign}
        args, model, optimizer, scheduler, data = _engine_rollout(model_dir, inputs, flags)
        iterator = get_data_iterator(data)
        replay = RoutingReplay(args, model)
        replay.fill(iterator)
        step = data["num_microbatches"], data["global_batch_sizes"]
        metrics = train(args, 0, model, optimizer, scheduler, iterator, *step, replay=replay)[0]
        assert 0.9 < metrics["train/routing_replay_changed"] < 1.0
        results.append(metrics)
    for name, value in results[0].items():
        if not name.startswith("train/lr-pg"):
            assert abs(value - results[1][name]) <= 1e-5 * abs(value), f"{name}: {value} and {results[1][name]}"


def actor_trains_with_replay(model_dir: str, flag: str) -> None:
    """A rollout as the actor takes it: the first step's policy is the old one, exactly, with the experts of either."""
    from slime.backends.megatron_utils.actor_training import ActorTraining
    from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer

    from_engine = flag == "--use-rollout-routing-replay"
    case = Case("qwen3_moe", flag, "--use-dynamic-batch-size --max-tokens-per-gpu 60")
    args = layout_matrix.case_args(case, model_dir)
    layout_matrix.init_layout(args)
    model, optimizer, scheduler, _ = initialize_model_and_optimizer(args, "actor")
    data = layout_matrix.rank_rollout(args, case, model)
    if from_engine:
        generator = torch.Generator().manual_seed(0)
        scores = (torch.rand(len(tokens) - 1, 4, 6, generator=generator) for tokens in data["tokens"])
        data["rollout_routed_experts"] = [each.topk(2).indices.to(torch.int8) for each in scores]
    actor = ActorTraining(args, model, optimizer, scheduler, -1)
    actor.load_other_checkpoint("ref", model_dir)
    history = actor.train(0, data, None)
    shares = [metrics["train/routing_replay_changed"] for metrics in history]
    assert shares[0] > 0.8 if from_engine else shares[0] == 0.0 < shares[1]
    assert history[0]["train/ppo_kl"] == 0.0 and history[1]["train/ppo_kl"] != 0.0
    assert (history[0]["train/kl_loss"] == 0.0) != from_engine, "the reference chooses for itself"
    assert "rollout_routed_experts" not in data
