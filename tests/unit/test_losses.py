"""Losses of a micro-batch, one process: the formulas, and that packing into micro-batches does not matter."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
from slime.backends.megatron_utils.loss import (
    compute_advantages_and_returns,
    get_log_probs_and_entropy,
    get_values,
    icepop_function,
    loss_function,
    policy_loss_function,
    sft_loss_function,
    value_loss_function,
    vanilla_tis_function,
)
from slime.backends.megatron_utils.loss.passes import can_skip_own_log_probs

VOCAB = 13


def make_args(**changes: Any) -> Namespace:
    defaults: dict[str, Any] = {
        "loss_type": "policy_loss", "advantage_estimator": "grpo", "custom_advantage_function_path": None,
        "normalize_advantages": False, "kl_coef": 0.0, "use_rollout_logprobs": False, "gamma": 1.0,
        "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "entropy_coef": 0.0, "use_kl_loss": False,
        "kl_loss_coef": 0.0, "kl_loss_type": "k1", "use_unbiased_kl": False, "use_tis": False, "tis_clip": 2.0,
        "tis_clip_low": 0.0, "get_mismatch_metrics": False, "custom_tis_function_path": None,
        "custom_pg_loss_reducer_function_path": None, "calculate_per_token_loss": False,
        "custom_loss_function_path": None, "recompute_loss_function": False, "log_probs_chunk_size": -1,
        "rollout_temperature": 1.0, "vocab_size": VOCAB, "value_clip": 0.2, "use_rollout_entropy": False,
        "constant_loss_denominator": None, "use_opsm": False, "opsm_delta": 1e-4, "use_opd": False, "opd_kl_coef": 1.0,
        "lambd": 1.0, "keep_old_actor": False, "use_rs": False, "tis_level": "token", "tis_mode": "truncate",
        "tis_lower_bound": None, "tis_upper_bound": 2.0, "tis_batch_normalize": False, "rs_level": "token",
        "rs_lower_bound": None, "rs_upper_bound": None, "rs_veto_threshold": None, "use_routing_replay": False,
        "use_rollout_routing_replay": False,
    }  # fmt: skip
    return Namespace(**(defaults | changes))


def make_data(lengths: Sequence[tuple[int, int]], seed: int = 0) -> dict[str, Any]:
    """Random rollout data for samples of these (total, response) lengths; the last two share a rollout."""
    generator = torch.Generator().manual_seed(seed)

    def per_token(scale: float = 1.0) -> list[torch.Tensor]:
        return [torch.randn(n, generator=generator) * scale for _, n in lengths]

    masks = [(torch.rand(n, generator=generator) > 0.2).int() for _, n in lengths]
    sums = [mask.sum().float() for mask in masks]
    sums[-2:] = [sums[-2] + sums[-1]] * 2
    old = [-2.5 + x for x in per_token(0.3)]
    return {
        "unconcat_tokens": [torch.randint(0, VOCAB, (total,), generator=generator) for total, _ in lengths],
        "total_lengths": [total for total, _ in lengths],
        "response_lengths": [n for _, n in lengths],
        "loss_masks": masks,
        "rollout_mask_sums": sums,
        "advantages": per_token(),
        "log_probs": old,
        "ref_log_probs": [x + y for x, y in zip(old, per_token(0.2), strict=True)],
        "rollout_log_probs": [x + y for x, y in zip(old, per_token(0.1), strict=True)],
    }


LENGTHS = [(6, 4), (9, 1), (5, 4), (12, 7), (8, 3), (4, 2)]


def micro_batch(data: dict[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    return {key: [column[i] for i in indices] for key, column in data.items()}


def toy_logits(table: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """A bigram "model": logits of the next token from the current one, packed, with some padding at the end."""
    packed = torch.cat([*batch["unconcat_tokens"], torch.zeros(3, dtype=torch.long)])
    return table[packed][None]


def run_step(args: Namespace, data: dict[str, Any], layout: Sequence[Sequence[int]], executions: int) -> Any:
    """Gradient and summed metrics of a step, as Megatron's schedule accumulates them in one process."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)).requires_grad_()
    totals: dict[str, float] = {}
    tokens = 0
    for indices in layout:
        batch = micro_batch(data, indices)
        loss, normalizer, logged = loss_function(args, batch, len(layout), executions, toy_logits(table, batch))
        if args.calculate_per_token_loss:
            tokens += int(normalizer)
        else:
            loss = loss / normalizer.clamp(min=1) / len(layout)
        loss.backward()
        for key, value in zip(logged["keys"], logged["values"][1:].tolist(), strict=True):
            totals[key] = totals.get(key, 0.0) + value
    assert table.grad is not None
    return (table.grad / tokens if tokens else table.grad), totals


ALL_FEATURES = {
    "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "entropy_coef": 0.01, "use_tis": True,
    "eps_clip_c": 3.0, "rollout_temperature": 0.8,
}  # fmt: skip


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("loss_type", ["policy_loss", "sft_loss"])
def test_the_loss_does_not_depend_on_the_micro_batches(per_token: bool, loss_type: str) -> None:
    args = make_args(calculate_per_token_loss=per_token, loss_type=loss_type, **ALL_FEATURES)
    data = make_data(LENGTHS)
    expected, metrics = run_step(args, data, [[0, 1, 2, 3, 4, 5]], executions=5)
    for layout in ([[0], [1], [2], [3], [4], [5]], [[5, 0], [3, 1, 2], [4]], [[4, 5, 2], [0, 3, 1]]):
        gradient, other = run_step(args, data, layout, executions=5)
        torch.testing.assert_close(gradient, expected, rtol=2e-5, atol=1e-7)
        assert other == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_policy_loss_against_a_plain_float64_reference() -> None:
    args = make_args(**ALL_FEATURES)
    data = make_data(LENGTHS)
    gradient, metrics = run_step(args, data, [[0, 1, 2], [3, 4, 5]], executions=5)
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for i, (total, response) in enumerate(LENGTHS):
        tokens = data["unconcat_tokens"][i]
        for t in range(response):
            if not data["loss_masks"][i][t]:
                continue
            position = total - response + t
            log_p = (table[tokens[position - 1]] / 0.8).log_softmax(-1)
            new = log_p[tokens[position]]
            old, ref, engine = (float(data[key][i][t]) for key in ("log_probs", "ref_log_probs", "rollout_log_probs"))
            advantage = float(data["advantages"][i][t])
            ratio = torch.exp(new - old)
            value = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.28) * advantage)
            if advantage < 0:
                value = torch.minimum(value, torch.tensor(-3.0 * advantage, dtype=torch.float64))
            value = value * min(math.exp(old - engine), 2.0)
            value = value + 0.01 * (log_p.exp() * log_p).sum()
            value = value + 0.1 * (torch.exp(ref - new) - 1 - (ref - new)).clamp(max=10)
            loss = loss + value / float(data["rollout_mask_sums"][i])
    (loss / 5).backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert table.grad is not None
    torch.testing.assert_close(gradient.double(), table.grad, rtol=1e-4, atol=1e-6)


def test_the_first_step_is_on_policy() -> None:
    """Without old log-probs the ratio is 1: ppo_kl is 0, and so is the KL to a reference with the same weights."""
    args = make_args(use_kl_loss=True, kl_loss_type="low_var_kl", kl_loss_coef=0.1)
    data = make_data(LENGTHS)
    table = torch.randn(VOCAB, VOCAB).requires_grad_()
    logits = toy_logits(table, data)
    names = ("unconcat_tokens", "total_lengths", "response_lengths")
    _, own = get_log_probs_and_entropy(logits, args=args, **{name: data[name] for name in names})
    data["ref_log_probs"] = [x.detach() for x in own["log_probs"]]
    for old in (None, data["ref_log_probs"]):
        batch = data | {"log_probs": old}
        reducer = get_sum_of_sample_mean(data["total_lengths"], data["response_lengths"], data["loss_masks"])
        _, metrics = policy_loss_function(args, batch, logits, reducer)
        assert metrics["ppo_kl"].item() == 0.0
        assert metrics["kl_loss"].item() == 0.0
        assert metrics["pg_clipfrac"].item() == 0.0


def test_dual_clip_reaches_the_loss() -> None:
    """X3: ratio 10, A = -1, eps .2, c = 3 -> loss 3, not 10."""
    logits = torch.tensor([[[0.0, 0.0], [0.0, 0.0]]])
    batch = {
        "unconcat_tokens": [torch.tensor([0, 1])], "total_lengths": [2], "response_lengths": [1],
        "loss_masks": [torch.ones(1)], "advantages": [torch.tensor([-1.0])],
        "log_probs": [torch.tensor([math.log(0.5) - math.log(10.0)])],
    }  # fmt: skip
    reducer = get_sum_of_sample_mean([2], [1], batch["loss_masks"])
    loss, _ = policy_loss_function(make_args(vocab_size=2, eps_clip_c=3.0), batch, logits, reducer)
    assert loss.item() == pytest.approx(3.0)
    loss, _ = policy_loss_function(make_args(vocab_size=2), batch, logits, reducer)
    assert loss.item() == pytest.approx(10.0, rel=1e-5)


def test_temperature_divides_logits_but_not_values() -> None:
    """X8: logits [2, 0], T = 2 -> -.3133. X9: T = .5, value 1 -> 1."""
    where = {"unconcat_tokens": [torch.tensor([1, 0])], "total_lengths": [2], "response_lengths": [1]}
    logits = torch.tensor([[[2.0, 0.0], [9.0, 9.0]]])
    _, result = get_log_probs_and_entropy(logits, args=make_args(rollout_temperature=2.0, vocab_size=2), **where)
    assert result["log_probs"][0].item() == pytest.approx(-0.31326, abs=1e-5)
    _, result = get_values(torch.ones(1, 2, 1), args=make_args(rollout_temperature=0.5), **where)
    assert result["values"][0].tolist() == [1.0]


def test_rejected_tokens_stay_in_the_denominator() -> None:
    """X15: of 5 tokens 3 are rejected; the mean still divides by 5."""
    data = {
        "unconcat_tokens": [torch.tensor([0, 1, 1, 1, 1, 1])], "total_lengths": [6], "response_lengths": [5],
        "loss_masks": [torch.ones(5)], "advantages": [torch.full((5,), -1.0)], "log_probs": None,
        "rollout_log_probs": [torch.tensor([0.0, 0.0, -9.0, -9.0, -9.0]) + math.log(0.5)],
    }  # fmt: skip
    args = make_args(
        vocab_size=2, use_tis=True,
        custom_tis_function_path="slime.backends.megatron_utils.loss.icepop_function",
    )  # fmt: skip
    reducer = get_sum_of_sample_mean([6], [5], data["loss_masks"])
    loss, metrics = policy_loss_function(args, data, torch.zeros(1, 6, 2), reducer)
    assert loss.item() == pytest.approx(2 / 5)
    assert metrics["tis_clipfrac"].item() == pytest.approx(3 / 5)
    custom = args.__dict__ | {"custom_tis_function_path": f"{__name__}.reject_last_three"}
    loss, _ = policy_loss_function(Namespace(**custom), data, torch.zeros(1, 6, 2), reducer)
    assert loss.item() == pytest.approx(2 / 5)


def reject_last_three(args: Namespace, *, pg_loss: torch.Tensor, loss_masks: Any, **kwargs: Any) -> Any:
    """A TIS function that rejects by masks."""
    return pg_loss, [torch.cat([mask[:2], torch.zeros(3)]) for mask in loss_masks], {}


def test_mismatch_metrics_alone_do_not_change_the_loss() -> None:
    data = make_data(LENGTHS)
    plain, _ = run_step(make_args(), data, [[0, 1, 2, 3, 4, 5]], 5)
    measured, metrics = run_step(make_args(get_mismatch_metrics=True), data, [[0, 1, 2, 3, 4, 5]], 5)
    corrected, _ = run_step(make_args(use_tis=True), data, [[0, 1, 2, 3, 4, 5]], 5)
    torch.testing.assert_close(plain, measured, rtol=0, atol=0)
    assert {"tis", "tis_clipfrac", "tis_abs", "ois"} <= metrics.keys()
    assert not torch.allclose(plain, corrected)


def test_importance_weights() -> None:
    args = make_args(tis_clip=2.0, tis_clip_low=0.5)
    inputs: dict[str, Any] = {
        "pg_loss": torch.ones(3), "train_log_probs": [torch.tensor([0.0]), torch.tensor([1.0, -1.0])],
        "rollout_log_probs": [torch.zeros(1), torch.zeros(2)], "loss_masks": [torch.ones(1), torch.ones(2)],
    }  # fmt: skip
    loss, masks, metrics = vanilla_tis_function(args, **inputs)
    assert loss.tolist() == [1.0, 2.0, 0.5]
    assert metrics["tis"].tolist() == pytest.approx([1.0, math.e, 1 / math.e])
    assert metrics["tis_clipfrac"].tolist() == [0, 1, 1] and masks is inputs["loss_masks"]
    assert icepop_function(args, **inputs)[0].tolist() == [1.0, 0.0, 0.0]


def test_sft_loss_is_the_mean_negative_log_likelihood() -> None:
    data = micro_batch(make_data(LENGTHS), [0])
    logits = torch.randn(1, 6, VOCAB)
    data["rollout_mask_sums"] = None
    reducer = get_sum_of_sample_mean([6], [4], data["loss_masks"])
    loss, metrics = sft_loss_function(make_args(), data, logits, reducer)
    targets = data["unconcat_tokens"][0][2:]
    nll = torch.nn.functional.cross_entropy(logits[0, 1:5].double(), targets, reduction="none")
    mask = data["loss_masks"][0]
    assert loss.item() == pytest.approx(((nll * mask).sum() / mask.sum()).item(), rel=1e-5)
    assert metrics["loss"].item() == loss.item()


def test_value_loss_takes_the_larger_error() -> None:
    batch = {
        "unconcat_tokens": [torch.tensor([0, 1])], "total_lengths": [2], "response_lengths": [1],
        "loss_masks": [torch.ones(1)], "values": [torch.tensor([0.0])], "returns": [torch.tensor([1.0])],
    }  # fmt: skip
    reducer = get_sum_of_sample_mean([2], [1], [torch.ones(1)])
    loss, metrics = value_loss_function(make_args(), batch, torch.full((1, 2, 1), 0.5), reducer)
    assert loss.item() == pytest.approx(0.64)  # clipped to 0.2: (0.2 - 1)^2 > (0.5 - 1)^2
    assert metrics["value_clipfrac"].item() == 1.0


def test_custom_and_unknown_losses() -> None:
    data = make_data(LENGTHS)
    args = make_args(loss_type="custom_loss", custom_loss_function_path=f"{__name__}.count_loss_tokens")
    _, metrics = run_step(args, data, [[0, 1], [2, 3, 4, 5]], 5)
    assert metrics["executions"] == pytest.approx(5.0, rel=1e-6)  # six samples, two of them of one rollout
    recomputed, _ = run_step(make_args(recompute_loss_function=True), data, [[0, 1, 2, 3, 4, 5]], 5)
    plain, _ = run_step(make_args(), data, [[0, 1, 2, 3, 4, 5]], 5)
    torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)
    with pytest.raises(ValueError, match="unknown loss type 'nll'"):
        run_step(make_args(loss_type="nll"), data, [[0]], 1)


def count_loss_tokens(args: Namespace, batch: Any, logits: torch.Tensor, sum_of_sample_mean: Any) -> Any:
    """A user's loss whose metric is 1 per rollout execution."""
    tokens = sum(batch["response_lengths"])
    return logits.sum() * 0.0, {"executions": sum_of_sample_mean(torch.ones(tokens))}


def test_a_micro_batch_that_is_masked_out_gives_zero_gradients() -> None:
    for per_token in (False, True):
        data = make_data(LENGTHS)
        data["loss_masks"] = [torch.zeros_like(mask) for mask in data["loss_masks"]]
        data["rollout_mask_sums"] = [torch.zeros(())] * len(LENGTHS)
        gradient, metrics = run_step(make_args(calculate_per_token_loss=per_token), data, [[0, 1, 2, 3, 4, 5]], 5)
        assert not gradient.any()
        assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"])
def test_advantages_repeat_the_reward(estimator: str) -> None:
    data = make_data(LENGTHS) | {"rewards": [0.5, -0.5, 1.0, -1.0, 0.0, 2.0]}
    compute_advantages_and_returns(make_args(advantage_estimator=estimator), data)
    for (_, response), reward, advantage in zip(LENGTHS, data["rewards"], data["advantages"], strict=True):
        assert advantage.tolist() == [reward] * response
    assert [len(kl) for kl in data["kl"]] == data["response_lengths"] and not torch.cat(data["kl"]).any()


def test_kl_shapes_the_rewards() -> None:
    data = make_data(LENGTHS) | {"rewards": [1.0] * 6}
    args = make_args(advantage_estimator="reinforce_plus_plus", kl_coef=0.1)
    compute_advantages_and_returns(args, data)
    for i, mask in enumerate(data["loss_masks"]):
        kl = data["log_probs"][i] - data["ref_log_probs"][i]
        torch.testing.assert_close(data["kl"][i], kl)
        carry, expected = 0.0, [0.0] * len(mask)
        for t in reversed(range(len(mask))):
            is_last = bool(mask[t]) and not mask[t + 1 :].any()
            carry += -0.1 * float(kl[t]) * float(mask[t]) + (1.0 if is_last else 0.0)
            expected[t] = carry
        if mask.any():
            assert data["returns"][i].tolist() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match=r"--kl-coef 0\.1 needs log_probs and ref_log_probs"):
        compute_advantages_and_returns(args, data | {"ref_log_probs": None})


def test_custom_advantages_are_checked() -> None:
    data = make_data(LENGTHS) | {"rewards": [1.0] * 6}
    compute_advantages_and_returns(make_args(custom_advantage_function_path=f"{__name__}.all_twos"), data)
    assert data["advantages"][0].tolist() == [2.0] * 4
    for key in ("advantages", "returns"):
        data.pop(key)
    with pytest.raises(ValueError, match=r"must set\s+rollout_data\['advantages'\] to a list of 6"):
        compute_advantages_and_returns(make_args(custom_advantage_function_path=f"{__name__}.nothing"), data)


def all_twos(args: Namespace, rollout_data: dict[str, Any]) -> None:
    rollout_data["advantages"] = rollout_data["returns"] = [kl + 2.0 for kl in rollout_data["kl"]]


def nothing(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """A hook that forgets its job."""


def test_when_the_own_log_prob_pass_is_skipped() -> None:
    assert can_skip_own_log_probs(make_args(), num_steps=1)
    assert not can_skip_own_log_probs(make_args(), num_steps=2)
    assert can_skip_own_log_probs(make_args(use_rollout_logprobs=True), num_steps=2)
    for changes in (
        {"kl_coef": 0.1}, {"get_mismatch_metrics": True, "use_rollout_logprobs": True}, {"loss_type": "custom_loss"},
        {"advantage_estimator": "gspo"}, {"use_rollout_entropy": True}, {"use_opd": True}, {"keep_old_actor": True},
        {"tis_batch_normalize": True, "use_rollout_logprobs": True},
        {"use_routing_replay": True, "use_rollout_logprobs": True},
    ):  # fmt: skip
        assert not can_skip_own_log_probs(make_args(**changes), num_steps=1)
    engine = make_args(use_routing_replay=True, use_rollout_routing_replay=True)
    assert can_skip_own_log_probs(engine, num_steps=1), "the experts come with the samples"
