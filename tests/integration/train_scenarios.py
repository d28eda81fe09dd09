"""Scenarios of `test_training_layouts`: the same rollout trained under many layouts.

One process writes the reference (log-probs, metrics, gradient norms); every layout must give the same.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_tiny import init_layout
from tiny_hf import VOCAB
from torch import Tensor

from slime.backends.megatron_utils.model import prepare_for_training
from slime.utils.dp_schedule import build_dp_schedule

LENGTHS = [(13, 7), (40, 21), (7, 1), (25, 9), (9, 5), (31, 30), (3, 2), (17, 11), (5, 4), (22, 3), (12, 6), (28, 14)]
ROLLOUT_IDS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 9]  # the last four samples are two fan-out rollouts
STEPS = 2
BATCH = 5  # rollouts per step
MIS_FUNCTION = "slime.backends.megatron_utils.loss.mis_function"

RUN_FLAGS = f"""
    --debug-train-only --disable-rollout-global-dataset --num-rollout 10 --rollout-batch-size {STEPS * BATCH}
    --n-samples-per-prompt 1 --global-batch-size {BATCH} --use-dynamic-batch-size --max-tokens-per-gpu 48
    --lr 1e-2 --clip-grad 0.0 --rollout-max-response-len 64
    --normalize-advantages --eps-clip-high 0.28 --entropy-coef 0.01
    --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type low_var_kl --rollout-temperature 0.9
    --log-probs-chunk-size 7 --data-pad-size-multiplier 8 --no-check-for-nan-in-loss-and-grad
"""
ATTRIBUTES = {"kl_coef": 0.1, "use_tis": True}  # set after parsing


def layout_args(context: dict[str, str], flags: str = "", **attributes: Any) -> Namespace:
    """The parsed flags of a run on the tiny model; later flags win, attributes are set afterwards, as they are."""
    from slime.utils.arguments import parse_args

    devices = f"--actor-num-gpus-per-node {dist.get_world_size()}"
    args = parse_args(argv=f"--hf-checkpoint {context['model']} {devices} {RUN_FLAGS} {flags}".split())
    vars(args).update({**ATTRIBUTES, **attributes})
    return args


def parallel_config(args: Namespace, model: Sequence[Any]) -> dict[str, int]:
    from megatron.core import parallel_state as mpu

    return {
        "dp_size": mpu.get_data_parallel_world_size(),
        "cp_size": mpu.get_context_parallel_world_size(),
        "vpp_size": mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
        "microbatch_group_size_per_vp_stage": model[0].config.microbatch_group_size_per_vp_stage,
    }


def whole_rollout() -> dict[str, list[Any]]:
    """The columns of all samples, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    masks = [(torch.rand(n, generator=generator) > 0.2).int() for _, n in LENGTHS]
    masks[2][:] = 0  # a sample that is masked out
    sums = [
        float(sum(mask.sum() for mask, other in zip(masks, ROLLOUT_IDS, strict=True) if other == rollout_id))
        for rollout_id in ROLLOUT_IDS
    ]
    return {
        "tokens": [torch.randint(0, VOCAB, (total,), generator=generator) for total, _ in LENGTHS],
        "total_lengths": [total for total, _ in LENGTHS],
        "response_lengths": [n for _, n in LENGTHS],
        "loss_masks": masks,
        "rollout_mask_sums": [torch.tensor(s) for s in sums],
        "rewards": torch.randn(len(LENGTHS), generator=generator).tolist(),
        "rollout_log_probs": [-5.5 + torch.randn(n, generator=generator) * 0.2 for _, n in LENGTHS],
        "teacher_log_probs": [-5.5 + torch.randn(n, generator=generator) * 0.2 for _, n in LENGTHS],
        "values": [torch.randn(n, generator=generator) * 0.3 for _, n in LENGTHS],
    }


def rank_rollout(args: Namespace, model: Sequence[Any]) -> dict[str, Any]:
    """This rank's share, as the actor fetches it."""
    from megatron.core import parallel_state as mpu

    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
    from slime.backends.megatron_utils.data import prepare_rollout_data

    columns = whole_rollout()
    schedule = build_dp_schedule(
        args,
        parallel_config(args, model),
        columns["total_lengths"],
        global_batch_size=args.global_batch_size,
        rollout_indices=ROLLOUT_IDS,
    )
    rank = mpu.get_data_parallel_rank()
    data: dict[str, Any] = {name: [column[i] for i in schedule.partitions[rank]] for name, column in columns.items()}
    data["partition"] = schedule.partitions[rank]
    data["micro_batch_indices"] = schedule.micro_batch_indices[rank]
    data["num_microbatches"] = schedule.num_microbatches
    data["global_batch_sizes"] = schedule.global_batch_sizes
    lengths = zip(data["values"], data["total_lengths"], data["response_lengths"], strict=True)
    data["values"] = [slice_log_prob_with_cp(x, total, n) for x, total, n in lengths]
    return prepare_rollout_data(data, torch.device("cpu"))


def build(args: Namespace, role: str = "actor") -> tuple[Any, Any, Any]:
    from slime.backends.megatron_utils.optimizer import initialize_model_and_optimizer

    init_layout(args)
    model, optimizer, scheduler, _ = initialize_model_and_optimizer(args, role)
    return model, optimizer, scheduler


def perturb(model: Sequence[Any], scale: float) -> None:
    """Shift every weight by a function of its own value, so that shards of one weight move alike."""
    with torch.no_grad():
        for chunk in model:
            for parameter in chunk.parameters():
                parameter.add_(torch.sin(parameter * 1000.0) * scale)


def run_rollout(args: Namespace) -> dict[str, Any]:
    """Reference and own log-probs, advantages, then the gradient norm and metrics of each step without updating."""
    from slime.backends.megatron_utils.actor_training import add_advantages
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
    from slime.backends.megatron_utils.model import forward_only

    model, optimizer, scheduler = build(args)
    data = rank_rollout(args, model)
    iterator = get_data_iterator(data)
    counts = data["num_microbatches"]
    data |= forward_only(get_log_probs_and_entropy, args, model, iterator, counts, "ref_")
    perturb(model, 0.02)
    data |= forward_only(get_log_probs_and_entropy, args, model, iterator, counts)
    perturb(model, 0.02)  # the policy that trains is neither
    add_advantages(args, data)
    return run_steps(args, model, optimizer, scheduler, data) | {"log_probs": whole_responses(data, "log_probs")}


def run_critic(args: Namespace) -> dict[str, Any]:
    """The same for the critic: values in place of log-probs."""
    from slime.backends.megatron_utils.critic_training import CriticTraining
    from slime.backends.megatron_utils.data import get_data_iterator

    model, optimizer, scheduler = build(args, "critic")
    data = rank_rollout(args, model)
    del data["values"]
    CriticTraining(args, model, optimizer, scheduler).add_values_and_returns(get_data_iterator(data), data)
    perturb(model, 0.1)
    return run_steps(args, model, optimizer, scheduler, data) | {"log_probs": whole_responses(data, "values")}


def run_steps(args: Namespace, model: Any, optimizer: Any, scheduler: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Metrics and gradient norm of each step."""
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.model import train_one_step

    iterator, counts = get_data_iterator(data), data["num_microbatches"]
    prepare_for_training(model, optimizer)
    for one in iterator:
        one.reset()
    metrics, norms = [], []
    for step, count in enumerate(counts):
        reduced, norm = train_one_step(args, 0, step, iterator, model, NoUpdate(optimizer), scheduler, count, BATCH)
        metrics.append(reduced)
        norms.append(norm)
    return {"metrics": metrics, "grad_norms": norms}


class NoUpdate:
    """A Megatron optimizer that does all but change the weights, so that both steps see the same ones."""

    def __init__(self, optimizer: Any) -> None:
        self.inner = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step_with_ready_grads(self) -> bool:
        return True


def whole_responses(data: dict[str, Any], column: str) -> dict[int, Tensor] | None:
    """{sample: whole response's values of a column} of this data-parallel rank; None before the last stage."""
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp

    if column not in data:
        return None
    samples = zip(data["partition"], data[column], data["total_lengths"], data["response_lengths"], strict=True)
    return {i: all_gather_with_cp(values, total, n) for i, values, total, n in samples}


def check_against_reference(context: dict[str, str], name: str, flags: str = "") -> None:
    reference = torch.load(Path(context["root"]) / f"{name}.pt")
    result = run_mode(context, name, flags)
    if result["log_probs"] is not None:
        for i, values in result["log_probs"].items():
            torch.testing.assert_close(values, reference["log_probs"][i], rtol=0, atol=2e-5)
        for got, expected in zip(result["metrics"], reference["metrics"], strict=True):
            assert got.keys() == expected.keys()
            for key, value in expected.items():
                assert abs(got[key] - value) <= 2e-5 + 2e-4 * abs(value), (key, got[key], value)
    for got, expected in zip(result["grad_norms"], reference["grad_norms"], strict=True):
        assert abs(got - expected) <= 1e-4 * expected, (got, expected)


MODES: dict[str, dict[str, Any]] = {
    "mean": {},
    "token": {"flags": "--calculate-per-token-loss"},
    "sft": {"loss_type": "sft_loss", "use_tis": False},
    "gspo": {"advantage_estimator": "gspo"},
    "rpp": {"advantage_estimator": "reinforce_plus_plus"},
    # Dr. GRPO's reduction; whole sequences dropped by OPSM
    "opsm": {"flags": "--constant-loss-denominator 24 --use-opsm --opsm-delta 1e-3 --use-unbiased-kl"},
    "mis": {
        "flags": f"--use-tis --use-rs --custom-tis-function-path {MIS_FUNCTION} --tis-batch-normalize "
        "--tis-level geometric --tis-mode clip --tis-upper-bound 1.05 --rs-upper-bound 1.5 --rs-veto-threshold 0.6"
    },
    # advantages from values and from a teacher
    "ppo": {
        "flags": "--advantage-estimator ppo --lambd 0.9 --gamma 0.99 --use-opd --opd-type sglang --opd-kl-coef 0.5",
    },
    "critic": {"flags": "--advantage-estimator ppo --lambd 0.9 --gamma 0.99 --value-clip 0.01", "use_tis": False},
}
# a metric of a mode that shows that something happened to some of the tokens, but not to all
PARTIAL = {"opsm": "opsm_clipfrac", "mis": "mis_rs_veto_fraction", "critic": "value_clipfrac"}


def run_mode(context: dict[str, str], mode: str, flags: str) -> dict[str, Any]:
    """The rollout in one mode; the flags come after the mode's and win."""
    from slime.utils.arguments import parse_megatron_role_args

    attributes = dict(MODES[mode])
    args = layout_args(context, f"{attributes.pop('flags', '')} {flags}", **attributes)
    return run_critic(parse_megatron_role_args(args, None, "critic")) if mode == "critic" else run_rollout(args)


def scenario_reference(context: dict[str, str]) -> None:
    """Every sample in a micro-batch of its own, one process; also that the packed micro-batches give the same."""
    for name in MODES:
        result = run_mode(context, name, "--max-tokens-per-gpu 1")
        if name in PARTIAL:
            assert any(0 < metrics[PARTIAL[name]] < 1 for metrics in result["metrics"]), result["metrics"]
        assert len(result["log_probs"]) == len(LENGTHS)
        assert all(torch.isfinite(values).all() for values in result["log_probs"].values())
        assert all(norm > 1e-3 for norm in result["grad_norms"]), result["grad_norms"]
        torch.save(result, Path(context["root"]) / f"{name}.pt")
        check_against_reference(context, name)
        check_against_reference(context, name, "--max-tokens-per-gpu 1000 --data-pad-size-multiplier 64")


LAYOUTS = {
    "dp2": "",
    "dp2_balanced": "--balance-data --balance-by-flops",
    "dp2_overlap": "--overlap-grad-reduce --overlap-param-gather",
    "cp2": "--context-parallel-size 2",
    "tp2": "--tensor-model-parallel-size 2",
    "tp2_sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "pp2_vpp2": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
}
PAIRS = [
    *itertools.product(LAYOUTS, ["mean"]), *itertools.product(["dp2", "cp2", "pp2"], ["token"]),
    *itertools.product(["dp2", "cp2"], ["sft", "gspo", "rpp", "opsm", "mis", "ppo", "critic"]),
    *itertools.product(["tp2_sp", "pp2"], ["critic"]),
]  # fmt: skip


def scenario_layout(context: dict[str, str], name: str) -> None:
    """`<layout>_<mode>` of `PAIRS` against the reference."""
    layout, _, mode = name.rpartition("_")
    check_against_reference(context, mode, LAYOUTS[layout])


def scenario_on_policy(context: dict[str, str]) -> None:
    """Same weights: the passes agree bit for bit, so ppo_kl and kl_loss are exactly 0 at the first step."""
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns, get_log_probs_and_entropy
    from slime.backends.megatron_utils.model import forward_only, train

    for chunk_size, multiplier in ((-1, 128), (7, 1)):
        args = layout_args(
            context, log_probs_chunk_size=chunk_size, data_pad_size_multiplier=multiplier, clip_grad=1.0
        )
        model, optimizer, scheduler = build(args)
        data = rank_rollout(args, model)
        iterator = get_data_iterator(data)
        data |= forward_only(get_log_probs_and_entropy, args, model, iterator, data["num_microbatches"], "ref_")
        data |= forward_only(get_log_probs_and_entropy, args, model, iterator, data["num_microbatches"])
        assert all(map(torch.equal, data["log_probs"], data["ref_log_probs"]))
        compute_advantages_and_returns(args, data)
        history = train(
            args, 3, model, optimizer, scheduler, iterator, data["num_microbatches"], data["global_batch_sizes"]
        )
        assert history[0]["train/ppo_kl"] == 0.0 and history[0]["train/kl_loss"] == 0.0
        assert history[0]["train/pg_clipfrac"] == 0.0
        assert history[1]["train/ppo_kl"] != 0.0 and history[1]["train/kl_loss"] > 0.0
        assert [metrics["train/step"] for metrics in history] == [6, 7]


def poison_first_step(args: Namespace, rollout_id: int, step_id: int, model: Any, *_: Any) -> None:
    """Before-train-step hook: an infinite gradient in the first step."""
    if step_id == 0:
        next(model[0].parameters()).main_grad.fill_(float("inf"))


def scenario_infinite_gradient(context: dict[str, str]) -> None:
    """X13: the step is skipped and counted, its gradient norm is nan, and the next one trains."""
    import math

    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.model import train

    hook = f"--custom-megatron-before-train-step-hook-path {__name__}.poison_first_step"
    args = layout_args(context, hook, loss_type="sft_loss")
    model, optimizer, scheduler = build(args)
    data = rank_rollout(args, model)
    before = [parameter.detach().clone() for parameter in model[0].parameters()]
    steps_before = scheduler.num_steps
    changed: list[bool] = []
    inner = optimizer.step_with_ready_grads

    def spy() -> bool:
        changed.append(any(not torch.equal(x, y) for x, y in zip(before, model[0].parameters(), strict=True)))
        return inner()

    optimizer.step_with_ready_grads = spy
    history = train(
        args, 0, model, optimizer, scheduler, get_data_iterator(data), data["num_microbatches"],
        data["global_batch_sizes"],
    )  # fmt: skip
    assert math.isnan(history[0]["train/grad_norm"]) and history[0]["train/skipped_steps"] == 1
    assert changed == [False], "the first step must not reach the optimizer, and must leave the weights alone"
    assert history[1]["train/grad_norm"] > 0 and history[1]["train/skipped_steps"] == 1
    assert any(not torch.equal(x, y) for x, y in zip(before, model[0].parameters(), strict=True))
    assert all(torch.isfinite(parameter).all() for parameter in model[0].parameters())
    assert scheduler.num_steps == steps_before + BATCH


def scenario_reset_optimizer_states(context: dict[str, str]) -> None:
    """The second of two equal rollouts on restored weights repeats the first: nothing of Adam was left."""
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.model import train
    from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
    from slime.backends.megatron_utils.weights_backuper import WeightsBackuper

    args = layout_args(context, "--reset-optimizer-states", loss_type="sft_loss")
    model, optimizer, scheduler = build(args)
    data = rank_rollout(args, model)
    weights = WeightsBackuper(lambda: named_params_and_buffers(args, model))
    weights.backup("start")
    histories = []
    for rollout_id in range(2):
        weights.restore("start")
        optimizer.reload_model_params()
        history = train(
            args, rollout_id, model, optimizer, scheduler, get_data_iterator(data), data["num_microbatches"],
            data["global_batch_sizes"],
        )  # fmt: skip
        histories.append([(metrics["train/loss"], metrics["train/grad_norm"]) for metrics in history])
    assert histories[0] == histories[1] and histories[0][0] != histories[0][1]


def scenario_bf16(context: dict[str, str]) -> None:
    """The gate also holds in bf16: the passes agree bit for bit."""
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns, get_log_probs_and_entropy
    from slime.backends.megatron_utils.model import forward_only, train

    args = layout_args(context, "--bf16")
    model, optimizer, scheduler = build(args)
    data = rank_rollout(args, model)
    iterator = get_data_iterator(data)
    data |= forward_only(get_log_probs_and_entropy, args, model, iterator, data["num_microbatches"])
    data["ref_log_probs"] = data["log_probs"]
    compute_advantages_and_returns(args, data)
    history = train(args, 0, model, optimizer, scheduler, iterator, data["num_microbatches"], [BATCH] * STEPS)
    assert history[0]["train/ppo_kl"] == 0.0 and history[0]["train/kl_loss"] == 0.0
    assert dist.get_world_size() == 1


def scenario_stateless_adam(context: dict[str, str]) -> None:
    """A step without moments: the same as Adam's first, with no state on the device, in bf16 and in float32."""
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.model import train
    from slime.utils.accelerator.trainer_tensors import trainer_storages

    for dtype in ("--fp32", "--bf16"):
        histories, sizes = [], []
        for flags in (f"{dtype} --reset-optimizer-states", f"{dtype} --use-stateless-adam --no-save-optim"):
            args = layout_args(context, flags, loss_type="sft_loss")
            model, optimizer, scheduler = build(args)
            data = rank_rollout(args, model)
            history = []
            for rollout_id in range(2):  # one step each, as --reset-optimizer-states acts once per rollout
                steps = data["num_microbatches"][:1], data["global_batch_sizes"][:1]
                history += train(args, rollout_id, model, optimizer, scheduler, get_data_iterator(data), *steps)
            histories.append([(metrics["train/loss"], metrics["train/grad_norm"]) for metrics in history])
            sizes.append(sum(storage.nbytes() for storage in trainer_storages(model, optimizer)))
        torch.testing.assert_close(torch.tensor(histories[0]), torch.tensor(histories[1]), rtol=1e-3, atol=0)
        assert histories[0][0] != histories[0][1], "the first step must change the model"
        assert not any(part.optimizer.state for part in optimizer.chained_optimizers)
        parameters = sum(parameter.numel() for parameter in model[0].parameters())
        assert sizes[0] - sizes[1] >= 2 * 4 * parameters, "two float32 moments less"
