"""Corrections between trainer and engine: MIS, OPSM and reducers in the loss, against plain float64."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_losses import LENGTHS, make_args, make_data, micro_batch, run_step

from slime.backends.megatron_utils.loss import mis_function
from slime.backends.megatron_utils.loss.mis import mean_weights_of_steps
from slime.utils.ppo_utils.mismatch import bound_weights, importance_ratio

EVERYTHING = [[0, 1, 2, 3, 4, 5]]
MIS = {"use_tis": True, "custom_tis_function_path": "slime.backends.megatron_utils.loss.mis_function"}


def run_mis(args: Namespace, data: dict[str, Any], **extra: Any) -> tuple[torch.Tensor, list[torch.Tensor], Any]:
    return mis_function(
        args,
        pg_loss=torch.ones(sum(data["response_lengths"])),
        train_log_probs=data["log_probs"],
        **{k: data[k] for k in ("rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")},
        **extra,
    )


def plain_ratio(data: dict[str, Any], i: int, level: str) -> list[float]:
    pairs = zip(data["log_probs"][i].tolist(), data["rollout_log_probs"][i].tolist(), strict=True)
    diffs = [pi - mu for pi, mu in pairs]
    mask = data["loss_masks"][i].tolist()
    total = sum(d for d, m in zip(diffs, mask, strict=True) if m)
    of_sequence = {"sequence": total, "geometric": total / max(sum(mask), 1)}
    return [math.exp(of_sequence.get(level, d)) for d in diffs]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_weights_against_plain_float64(level: str, mode: str) -> None:
    data = make_data(LENGTHS)
    args = make_args(use_tis=True, tis_level=level, tis_mode=mode, tis_lower_bound=0.95, tis_upper_bound=1.02)
    loss, masks, metrics = run_mis(args, data)
    weights, kept, acted = [], [], 0
    for i in range(len(LENGTHS)):
        for ratio, m in zip(plain_ratio(data, i, level), data["loss_masks"][i].tolist(), strict=True):
            inside = 0.95 <= ratio <= 1.02
            acted += not inside
            weights.append({"truncate": min(ratio, 1.02), "clip": min(max(ratio, 0.95), 1.02)}.get(mode, ratio))
            kept.append(float(m and (mode != "mask" or inside)))
    assert 0 < acted < len(weights)
    assert loss.tolist() == pytest.approx(weights, rel=1e-5)
    assert torch.cat(masks).tolist() == kept
    assert metrics["mis_tis_weight"].tolist() == pytest.approx(weights, rel=1e-5)
    assert {name.removeprefix(f"mis_tis_{mode}_fraction") for name in metrics if mode in name} == (
        {""} if mode == "truncate" else {"_low", "_high"}
    )


def test_the_lower_bound_defaults_to_the_inverse_of_the_upper() -> None:
    ratio = torch.tensor([0.1, 0.6, 3.0])
    weights, kept, _ = bound_weights(ratio, "clip", None, 2.0)
    assert weights.tolist() == pytest.approx([0.5, 0.6, 2.0]) and kept.tolist() == [1, 1, 1]
    assert bound_weights(ratio, "mask", None, 2.0)[1].tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="unknown mode"):
        bound_weights(ratio, "cut", None, 2.0)
    with pytest.raises(ValueError, match="unknown level"):
        importance_ratio(ratio, ratio, "word")
    assert importance_ratio(torch.tensor([90.0]), torch.ones(1), "token").item() == pytest.approx(math.exp(20))


def test_rejection_and_veto() -> None:
    """A token ratio below the threshold rejects its whole sequence; a masked token has no say."""
    data = make_data([(6, 4), (6, 4), (6, 4)])
    data["log_probs"] = [torch.zeros(4) for _ in range(3)]
    data["rollout_log_probs"] = [
        torch.tensor([0.0, 12.0, 0.0, 0.0]),  # ratio exp(-12)
        torch.tensor([0.0, 12.0, 0.0, 0.0]),
        torch.tensor([0.0, -1.0, 0.0, 0.0]),  # ratio e, above the bound
    ]
    data["loss_masks"] = [torch.ones(4), torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.ones(4)]
    args = make_args(use_rs=True, rs_upper_bound=2.0, rs_lower_bound=0.0, rs_veto_threshold=1e-4)
    loss, masks, metrics = run_mis(args, data)
    assert loss.tolist() == [1.0] * 12, "without --use-tis nothing is weighted"
    assert [mask.tolist() for mask in masks] == [[0, 0, 0, 0], [1, 0, 1, 1], [1, 0, 1, 1]]
    assert metrics["mis_rs_veto_fraction"].tolist() == [1] * 4 + [0] * 8
    assert metrics["mis_rs_mask_fraction_high"].tolist() == [0] * 9 + [1] + [0] * 2
    _, masks, _ = run_mis(make_args(use_rs=True, rs_level="sequence", tis_upper_bound=2.0), data)
    assert [mask.tolist() for mask in masks] == [[0] * 4, [1, 0, 1, 1], [0] * 4]


def test_mismatch_metrics_against_plain_float64() -> None:
    data = make_data(LENGTHS)
    _, _, metrics = run_mis(make_args(), data)
    position = 0
    for i, (_, n) in enumerate(LENGTHS):
        mask = data["loss_masks"][i].double()
        pi, mu = data["log_probs"][i].double(), data["rollout_log_probs"][i].double()
        mean = lambda x, m=mask: float((x * m).sum() / m.sum().clamp(min=1))  # noqa: E731
        for t in range(n):
            diff = float(pi[t] - mu[t])
            expected = {
                "kl": -diff, "k3_kl": math.exp(diff) - 1 - diff, "chi2_token": math.exp(2 * diff) - 1,
                "chi2_seq": math.exp(2 * float(((pi - mu) * mask).sum())) - 1, "training_log_ppl": -mean(pi),
                "rollout_ppl": math.exp(-mean(mu)), "ppl_ratio": math.exp(mean(mu) - mean(pi)),
                "log_ppl_abs_diff": abs(mean(mu) - mean(pi)),
            }  # fmt: skip
            for name, value in expected.items():
                assert float(metrics[f"mis_{name}"][position]) == pytest.approx(value, rel=1e-4, abs=1e-6), name
            position += 1


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_normalised_weights_have_mean_one_in_each_step(level: str) -> None:
    data = make_data(LENGTHS)
    data |= {"micro_batch_indices": [[2, 0], [1], [3, 4, 5]], "num_microbatches": [2, 1]}
    args = make_args(**MIS, tis_level=level, tis_batch_normalize=True)
    means = mean_weights_of_steps(args, data, data["log_probs"], None)
    loss, masks, _ = run_mis(args, data, tis_weight_means=means)
    weights = loss.split(data["response_lengths"])
    for samples in ([0, 1, 2], [3, 4, 5]):
        if level == "token":
            kept = torch.cat([masks[i] for i in samples]).bool()
            values = torch.cat([weights[i] for i in samples])[kept]
        else:
            values = torch.stack([weights[i][0] for i in samples if masks[i].any()])
        assert float(values.mean()) == pytest.approx(1.0, rel=1e-5)


def test_rejected_tokens_leave_the_numerator_whatever_the_micro_batches() -> None:
    """X15: also through a user's reduction, which gets the masks after the rejection."""
    args = make_args(**MIS, use_rs=True, tis_upper_bound=1.02, rs_veto_threshold=0.8)
    data = make_data(LENGTHS)
    expected, metrics = run_step(args, data, EVERYTHING, 5)
    assert metrics["mis_rs_mask_fraction_high"] > 0
    for layout in ([[0], [1], [2], [3], [4], [5]], [[4, 1], [5, 0, 2, 3]]):
        gradient, other = run_step(args, data, layout, 5)
        torch.testing.assert_close(gradient, expected, rtol=2e-5, atol=1e-7)
        assert other == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    own = Namespace(**(vars(args) | {"custom_pg_loss_reducer_function_path": f"{__name__}.count_kept"}))
    _, counted = run_step(own, data, EVERYTHING, 5)
    _, masks, _ = run_mis(args, data)
    assert counted["pg_loss"] == pytest.approx(float(torch.cat(masks).sum()))
    assert counted["pg_loss"] < float(torch.cat(data["loss_masks"]).sum())


def count_kept(total_lengths: Any, response_lengths: Any, loss_masks: Any, per_token: bool) -> Callable[..., Any]:
    """A user's reduction: the number of tokens that count (with the loss's graph)."""
    return lambda x: (x * 0.0).sum() + sum(mask.sum() for mask in loss_masks)


def test_a_function_that_returns_other_masks_is_refused() -> None:
    args = make_args(use_tis=True, custom_tis_function_path=f"{__name__}.wrong_masks")
    with pytest.raises(ValueError, match=r"wrong_masks must return one mask per sample over its whole response"):
        run_step(args, make_data(LENGTHS), EVERYTHING, 5)


def wrong_masks(args: Namespace, *, pg_loss: torch.Tensor, loss_masks: Any, **kwargs: Any) -> Any:
    return pg_loss, [torch.cat(list(loss_masks))], {}


def test_opsm_in_the_loss() -> None:
    """X2: bad sequences far from pi_old vanish as a whole, also their tokens with positive advantages."""
    data = make_data(LENGTHS)
    data["log_probs"] = [x + 2.0 for x in data["log_probs"]]  # pi_old above pi everywhere
    signs = [-1.0, 1.0, -1.0, 1.0, 1.0, 1.0]
    data["advantages"] = [torch.full_like(x, sign) for x, sign in zip(data["advantages"], signs, strict=True)]
    data["advantages"][2][0] = 0.5
    args = make_args(use_opsm=True, opsm_delta=0.1)
    gradient, metrics = run_step(args, data, EVERYTHING, 5)
    zeroed = data | {
        "advantages": [a if sign > 0 else a * 0 for a, sign in zip(data["advantages"], signs, strict=True)]
    }
    expected, _ = run_step(make_args(), zeroed, EVERYTHING, 5)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)
    assert metrics["opsm_clipfrac"] == pytest.approx(2.0), "two of the executions, before the division by their number"
    split, other = run_step(args, data, [[0], [1, 2], [5, 3, 4]], 5)
    torch.testing.assert_close(split, gradient, rtol=2e-5, atol=1e-7)
    assert other == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_the_constant_reduction_leaves_metrics_means() -> None:
    data = make_data(LENGTHS)
    _, mean = run_step(make_args(), data, EVERYTHING, 5)
    gradient, constant = run_step(make_args(constant_loss_denominator=7), data, EVERYTHING, 5)
    for name in ("pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff"):
        assert constant[name] == pytest.approx(mean[name])
    sums = data | {"rollout_mask_sums": [torch.tensor(7.0)] * len(LENGTHS)}
    expected, _ = run_step(make_args(), sums, EVERYTHING, 5)
    torch.testing.assert_close(gradient, expected)


def test_the_unbiased_kl_takes_the_ratio_of_tokens() -> None:
    """The same with a sequence ratio in the policy term (gspo): the estimate needs each token's own."""
    data = micro_batch(make_data(LENGTHS), [0])
    args = make_args(use_kl_loss=True, kl_loss_coef=0.0, kl_loss_type="k3", use_unbiased_kl=True)
    _, token = run_step(args, data, [[0]], 1)
    _, sequence = run_step(Namespace(**(vars(args) | {"advantage_estimator": "gspo"})), data, [[0]], 1)
    assert sequence["kl_loss"] == pytest.approx(token["kl_loss"]) and sequence["ppo_kl"] != 0
