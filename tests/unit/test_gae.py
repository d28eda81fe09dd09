"""PPO's token rewards and advantages, and what distillation adds. The terminal reward under context parallelism is
tested on gloo ranks (`test_training_layouts`, modes ppo and critic)."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from test_losses import make_args

from slime.backends.megatron_utils.loss import compute_advantages_and_returns
from slime.utils.ppo_utils import get_advantages_and_returns_batch, get_ppo_token_rewards


def plain_gae(rewards: list[float], values: list[float], mask: list[int], gamma: float, lambd: float) -> list[float]:
    """In float64, token by token from the end; tokens with mask 0 are skipped."""
    carry, after = 0.0, 0.0
    result = [0.0] * len(values)
    for t in reversed(range(len(values))):
        if mask[t]:
            carry = rewards[t] + gamma * after - values[t] + gamma * lambd * carry
            after = values[t]
            result[t] = carry
    return result


def test_token_rewards_do_not_change_the_kl() -> None:
    """X5: kl [.2, .4], coefficient .5, reward 1 -> token rewards [-.1, .8]; the kl that is logged stays [.2, .4]."""
    kl = torch.tensor([0.2, 0.4])
    [rewards] = get_ppo_token_rewards(torch.tensor([1.0]), [kl], [torch.ones(2)], 0.5)
    assert rewards.tolist() == pytest.approx([-0.1, 0.8])
    assert kl.tolist() == pytest.approx([0.2, 0.4])


def test_the_reward_stands_at_the_last_token_of_the_policy() -> None:
    masks = [torch.tensor([1, 1, 0]), torch.tensor([0, 0]), torch.zeros(0)]
    kl = [torch.ones(3), torch.ones(2), torch.zeros(0)]
    rewards = get_ppo_token_rewards(torch.tensor([1.0, 5.0, 5.0]), kl, masks, 0.1)
    assert rewards[0].tolist() == pytest.approx([-0.1, 0.9, 0.0])
    assert rewards[1].tolist() == [0.0, 0.0] and len(rewards[2]) == 0


def test_masked_tokens_take_no_part_in_gae() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 6, 150, 4)
    values = [torch.randn(n, generator=generator) for n in lengths]
    rewards = [torch.randn(n, generator=generator) for n in lengths]
    masks = [(torch.rand(n, generator=generator) > 0.3).int() for n in lengths]
    masks[3][:] = 0
    got, returns = get_advantages_and_returns_batch(values, rewards, 0.97, 0.9, masks)
    for v, r, m, a, g in zip(values, rewards, masks, got, returns, strict=True):
        expected = plain_gae(r.tolist(), v.tolist(), m.tolist(), 0.97, 0.9)
        assert a.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(g, a + v)


def ppo_data() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    lengths = [(2, 1), (3, 2), (9, 4), (30, 29), (17, 3)]

    def per_token() -> list[torch.Tensor]:
        return [torch.randn(n, generator=generator) for _, n in lengths]

    return {
        "total_lengths": [total for total, _ in lengths],
        "response_lengths": [n for _, n in lengths],
        "loss_masks": [(torch.rand(n, generator=generator) > 0.2).int() for _, n in lengths],
        "rewards": torch.randn(len(lengths), generator=generator).tolist(),
        "values": per_token(),
        "log_probs": per_token(),
        "ref_log_probs": per_token(),
    }


def test_advantages_of_ppo_against_a_plain_loop() -> None:
    args = make_args(advantage_estimator="ppo", kl_coef=0.1, gamma=0.97, lambd=0.9)
    data = ppo_data()
    compute_advantages_and_returns(args, data)
    for i, mask in enumerate(data["loss_masks"]):
        kl = data["log_probs"][i] - data["ref_log_probs"][i]
        token_rewards = (-0.1 * kl * mask).tolist()
        if mask.any():
            token_rewards[int(mask.nonzero()[-1])] += data["rewards"][i]
        expected = plain_gae(token_rewards, data["values"][i].tolist(), mask.tolist(), 0.97, 0.9)
        assert data["advantages"][i].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(data["kl"][i], kl)
    with pytest.raises(ValueError, match="needs the critic's values"):
        compute_advantages_and_returns(args, data | {"values": None})


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "ppo"])
def test_a_removed_sample_changes_nothing_for_the_others(estimator: str) -> None:
    """`Sample.remove_sample` makes a mask of zeros: finite numbers for it, the same as without it for the others."""
    args = make_args(advantage_estimator=estimator, kl_coef=0.1, gamma=0.9, lambd=0.9)
    data, without = ppo_data(), ppo_data()
    data["loss_masks"][3][:] = 0
    without = {name: column[:3] + column[4:] for name, column in without.items()}
    compute_advantages_and_returns(args, data)
    compute_advantages_and_returns(args, without)
    assert torch.isfinite(torch.cat(data["advantages"])).all()
    for name in ("advantages", "returns"):
        for got, expected in zip(data[name][:3] + data[name][4:], without[name], strict=True):
            torch.testing.assert_close(got, expected)


def test_rloo_and_grpo_repeat_the_reward() -> None:
    data = ppo_data()
    compute_advantages_and_returns(make_args(advantage_estimator="rloo"), data)
    for reward, advantage in zip(data["rewards"], data["advantages"], strict=True):
        assert advantage.tolist() == pytest.approx([reward] * len(advantage))


def test_distillation_subtracts_the_reverse_kl() -> None:
    data = ppo_data()
    teacher = [x + 0.5 for x in data["log_probs"]]
    args: Namespace = make_args(use_opd=True, opd_kl_coef=2.0)
    rollout = data | {"teacher_log_probs": teacher}
    compute_advantages_and_returns(args, rollout)
    for i, reward in enumerate(data["rewards"]):
        torch.testing.assert_close(rollout["opd_reverse_kl"][i], torch.full_like(teacher[i], -0.5))
        torch.testing.assert_close(rollout["advantages"][i], torch.full_like(teacher[i], reward + 1.0))
    with pytest.raises(ValueError, match="--use-opd needs teacher_log_probs"):
        compute_advantages_and_returns(args, data)
