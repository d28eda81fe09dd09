"""Policy-optimisation maths against float64 references written out in plain Python or PyTorch."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest
import torch

from slime.utils.ppo_utils import (
    KL_LOSS_TYPES,
    calculate_log_probs_and_entropy,
    chunked_discounted_returns,
    chunked_gae,
    compute_approx_kl,
    compute_cispo_loss,
    compute_gspo_kl,
    compute_opsm_mask,
    compute_policy_loss,
    get_advantages_and_returns_batch,
    get_grpo_returns,
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
    vanilla_gae,
)


@pytest.mark.parametrize("kl_loss_type", KL_LOSS_TYPES)
def test_every_kl_estimator_is_finite(kl_loss_type: str) -> None:
    """X12: each choice of the flag gives its formula's value on [-.1] against [-.2]."""
    kl = compute_approx_kl(torch.tensor([-0.1]), torch.tensor([-0.2]), kl_loss_type)
    expected = {"k1": 0.1, "k2": 0.005, "k3": math.exp(-0.1) - 1 + 0.1, "low_var_kl": math.exp(-0.1) - 1 + 0.1}
    assert kl.item() == pytest.approx(expected[kl_loss_type], abs=1e-7)


def test_kl_estimators_against_float64() -> None:
    torch.manual_seed(0)
    new, old = torch.randn(50) * 0.5, torch.randn(50) * 0.5
    ratio = torch.rand(50) + 0.5
    for kl_loss_type in KL_LOSS_TYPES:
        for weight in (None, ratio):
            got = compute_approx_kl(new, old, kl_loss_type, weight)
            for i in range(50):
                ell = float(new[i]) - float(old[i])
                value = {"k1": ell, "k2": ell * ell / 2}.get(kl_loss_type, math.exp(-ell) - 1 + ell)
                if weight is not None:
                    value *= float(weight[i])
                assert got[i].item() == pytest.approx(value, rel=2e-5, abs=1e-6)


def test_low_var_kl_is_clamped_and_an_unknown_estimator_is_refused() -> None:
    far = compute_approx_kl(torch.tensor([-9.0]), torch.tensor([0.0]), "low_var_kl")
    assert far.item() == 10.0
    with pytest.raises(ValueError, match=r"k9.*k1, k2, k3, low_var_kl"):
        compute_approx_kl(torch.zeros(1), torch.zeros(1), "k9")


def test_equal_log_probs_give_exactly_zero_kl() -> None:
    x = torch.randn(100)
    for kl_loss_type in KL_LOSS_TYPES:
        assert torch.equal(compute_approx_kl(x, x.clone(), kl_loss_type), torch.zeros(100))


def test_dual_clip_bounds_the_loss() -> None:
    """X3: ratio 10, A = -1, eps .2, c = 3 -> loss 3, not 10."""
    kl, advantage = torch.tensor([-math.log(10.0)]), torch.tensor([-1.0])
    assert compute_policy_loss(kl, advantage, 0.2, 0.2, 3.0)[0].item() == pytest.approx(3.0)
    assert compute_policy_loss(kl, advantage, 0.2, 0.2)[0].item() == pytest.approx(10.0, rel=1e-6)
    with pytest.raises(ValueError, match="eps_clip_c"):
        compute_policy_loss(kl, advantage, 0.2, 0.2, 0.9)


def test_policy_loss_against_the_formula() -> None:
    torch.manual_seed(1)
    kl, advantages = torch.randn(200) * 0.5, torch.randn(200)
    loss, clipfrac = compute_policy_loss(kl, advantages, 0.2, 0.28, 3.0)
    for k, a, got, clipped in zip(kl.tolist(), advantages.tolist(), loss.tolist(), clipfrac.tolist(), strict=True):
        ratio = math.exp(-k)
        first, second = -ratio * a, -min(max(ratio, 0.8), 1.28) * a
        value = max(first, second)
        if a < 0:
            value = min(value, -3.0 * a)
        assert got == pytest.approx(value, rel=1e-5, abs=1e-6)
        assert clipped == float(second > first)


def test_cispo_gradient_is_the_clipped_ratio() -> None:
    old = torch.tensor([-1.0, -1.0])
    new = torch.tensor([-0.2, -1.1], requires_grad=True)
    loss, clipfrac = compute_cispo_loss(old - new, new, torch.tensor([1.0, 2.0]), 0.2, 0.28)
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1.28, -2 * math.exp(-0.1)], rel=1e-6)
    assert clipfrac.tolist() == [1.0, 0.0]


def test_gspo_kl_is_one_value_per_sequence() -> None:
    """X11: two samples of length 2 and 3 give 5 values, equal within a sequence."""
    new = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0, -4.0])]
    old = [torch.tensor([-2.0, -2.0]), torch.tensor([-1.0, -2.0, -9.0])]
    masks = [torch.tensor([1, 1]), torch.tensor([1, 1, 0])]
    assert compute_gspo_kl(new, old, new, masks).tolist() == [-0.5, -0.5, -0.5, -0.5, -0.5]
    nothing = compute_gspo_kl(new[:1], old[:1], new[:1], [torch.tensor([0, 0])])
    assert nothing.tolist() == [0.0, 0.0]


def test_opsm_drops_whole_sequences() -> None:
    """X2: old - new log-prob = 1 each, delta .1, advantages [-1, .5, -1] -> mask [0, 0, 0]."""
    args = Namespace(opsm_delta=0.1)
    new, old = torch.full((3,), -2.0), torch.full((3,), -1.0)
    ones = torch.ones(3)
    masks, dropped = compute_opsm_mask(
        args, [new, new], [old, old], [torch.tensor([-1.0, 0.5, -1.0]), ones], [ones] * 2
    )
    assert masks[0].tolist() == [0, 0, 0]
    assert masks[1].tolist() == [1, 1, 1]
    assert dropped.item() == 1


def test_grpo_returns_repeat_the_reward() -> None:
    returns = get_grpo_returns(torch.tensor([0.5, -1.0]), [torch.zeros(2), torch.zeros(3)])
    assert [r.tolist() for r in returns] == [[0.5, 0.5], [-1.0, -1.0, -1.0]]


def test_reinforce_plus_plus_leaves_out_the_kl_of_masked_tokens() -> None:
    """X4: kl 1,1,1; mask 1,0,1; coefficient .1; gamma 1; reward 1 -> returns .8, .9, .9."""
    mask = torch.tensor([1, 0, 1])
    [returns] = get_reinforce_plus_plus_returns(torch.tensor([1.0]), [torch.ones(3)], [mask], 0.1, 1.0)
    assert returns.tolist() == pytest.approx([0.8, 0.9, 0.9])


def test_reinforce_plus_plus_survives_a_sample_that_is_masked_out() -> None:
    returns = get_reinforce_plus_plus_returns(
        torch.tensor([1.0, 2.0]), [torch.ones(2), torch.ones(1)], [torch.zeros(2), torch.ones(1)], 0.1, 1.0
    )
    assert [r.tolist() for r in returns] == [[1.0, 1.0], pytest.approx([1.9])]


def test_reinforce_plus_plus_baseline() -> None:
    [a] = get_reinforce_plus_plus_baseline_advantages(torch.tensor([0.5]), [torch.tensor([0.0, 1.0])], 0.1)
    assert a.tolist() == pytest.approx([0.5, 0.4])


@pytest.mark.parametrize("time", [1, 7, 128, 300])
def test_discounted_returns_and_gae_against_a_plain_loop(time: int) -> None:
    torch.manual_seed(time)
    rewards, values = torch.randn(2, time, dtype=torch.float64), torch.randn(2, time, dtype=torch.float64)
    for discount in (1.0, 0.95, 0.0):
        got = chunked_discounted_returns(rewards, discount)
        for b in range(2):
            carry = 0.0
            for t in reversed(range(time)):
                carry = float(rewards[b, t]) + discount * carry
                assert got[b, t].item() == pytest.approx(carry, rel=1e-9, abs=1e-9)
    advantages, returns = chunked_gae(rewards, values, 0.99, 0.95)
    slow_advantages, slow_returns = vanilla_gae(rewards, values, 0.99, 0.95)
    torch.testing.assert_close(advantages, slow_advantages, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(returns, slow_returns, rtol=1e-9, atol=1e-9)


def test_gae_of_samples_with_different_lengths_equals_each_alone() -> None:
    torch.manual_seed(2)
    values, rewards = [torch.randn(n) for n in (3, 5)], [torch.randn(n) for n in (3, 5)]
    advantages, _ = get_advantages_and_returns_batch(values, rewards, 0.9, 0.8)
    for v, r, a in zip(values, rewards, advantages, strict=True):
        carry, after, expected = 0.0, 0.0, []
        for t in reversed(range(len(v))):
            carry = float(r[t]) + 0.9 * after - float(v[t]) + 0.9 * 0.8 * carry
            after = float(v[t])
            expected.insert(0, carry)
        assert a.tolist() == pytest.approx(expected, rel=1e-5)


def test_log_probs_are_divided_by_the_temperature() -> None:
    """X8: logits [2, 0], T = 2 -> log p(0) = -.3133, not -.1269."""
    log_probs, _ = calculate_log_probs_and_entropy(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), temperature=2.0)
    assert log_probs.item() == pytest.approx(-0.31326, abs=1e-5)


@pytest.mark.parametrize("chunk_size", [-1, 3])
@pytest.mark.parametrize("with_entropy_grad", [True, False])
def test_log_probs_entropy_and_gradients_against_float64(chunk_size: int, with_entropy_grad: bool) -> None:
    torch.manual_seed(3)
    logits = (torch.randn(12, 11) * 3).requires_grad_()
    rows, tokens = torch.tensor([7, 0, 3, 11, 5, 2, 8]), torch.randint(0, 9, (7,))
    log_probs, entropy = calculate_log_probs_and_entropy(
        logits, tokens, None, True, chunk_size, None, with_entropy_grad, rows=rows, temperature=0.7, vocab_size=9
    )
    assert entropy is not None
    weights, entropy_weights = torch.randn(7), torch.randn(7)
    loss = (log_probs * weights).sum()
    if with_entropy_grad:
        loss = loss + (entropy * entropy_weights).sum()
    loss.backward()

    reference = logits.detach().double().requires_grad_()
    log_p = (reference[rows, :9] / 0.7).log_softmax(-1)
    picked, spread = log_p[torch.arange(7), tokens], -(log_p.exp() * log_p).sum(-1)
    total = (picked * weights).sum()
    if with_entropy_grad:
        total = total + (spread * entropy_weights).sum()
    total.backward()
    torch.testing.assert_close(log_probs.double(), picked, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), spread, rtol=1e-5, atol=1e-5)
    assert logits.grad is not None and reference.grad is not None
    torch.testing.assert_close(logits.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)


def test_keep_mask_restricts_the_log_prob_but_not_the_entropy() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    keep = torch.tensor([[False, False, True, True]])
    log_probs, entropy = calculate_log_probs_and_entropy(
        logits, torch.tensor([0]), None, True, log_prob_keep_mask=keep
    )
    assert entropy is not None
    log_probs.sum().backward()
    kept = torch.tensor([1.0, 3.0, 4.0], dtype=torch.float64).log_softmax(-1)  # the target is always kept
    assert log_probs.item() == pytest.approx(kept[0].item(), abs=1e-6)
    full = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).log_softmax(-1)
    assert entropy.item() == pytest.approx(-(full.exp() * full).sum().item(), abs=1e-6)
    assert logits.grad is not None and logits.grad[0, 1] == 0


def test_no_rows_still_reach_the_logits() -> None:
    """A micro-batch without a response token on this rank must give zero gradients, not none."""
    logits = torch.randn(4, 5, requires_grad=True)
    log_probs, _ = calculate_log_probs_and_entropy(logits, torch.zeros(0, dtype=torch.long))
    log_probs.sum().backward()
    assert logits.grad is not None and not logits.grad.any()
