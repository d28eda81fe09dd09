"""The policy-gradient loss of a micro-batch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.cp_utils import all_gather_samples_with_cp
from slime.utils.misc import load_function
from slime.utils.ppo_utils import (
    compute_approx_kl,
    compute_cispo_loss,
    compute_gspo_kl,
    compute_opsm_mask,
    compute_policy_loss,
)

from .importance import correct_for_engine
from .log_probs import response_log_probs
from .reducers import Reducer, loss_reducer, metric_reducer


def policy_loss_function(
    args: Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped policy loss - entropy_coef * entropy + kl_loss_coef * KL to the reference.

    pi_old is `batch["rollout_log_probs"]` with `args.use_rollout_logprobs`, else `batch["log_probs"]`; where the batch
    has none of it, the current policy's own detached log-probs (the ratio is 1, its gradient the policy's).

    Args:
        batch: unconcat_tokens, total_lengths, response_lengths, loss_masks, advantages; as the flags ask for them
            log_probs, rollout_log_probs, ref_log_probs, opd_reverse_kl, tis_weight_means. Per-token values are per
            sample, local response tokens.
        logits: [1, packed tokens, vocabulary / tensor-parallel size].
        sum_of_sample_mean: the reduction of losses, see `loss_reducer`.

    Returns:
        (loss, metrics); metrics that are no losses are reduced with `metric_reducer`.
    """
    log_probs, entropy, lengths = response_log_probs(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        with_entropy_grad=args.entropy_coef != 0,
    )
    assert entropy is not None
    own_old, old_log_probs = _old_log_probs(args, batch, log_probs.detach())
    pg_loss, token_metrics = _pg_losses(args, batch, log_probs, old_log_probs, lengths)
    masks = batch["loss_masks"]
    if args.use_tis or args.use_rs or args.get_mismatch_metrics:
        pg_loss, masks, engine_metrics = correct_for_engine(args, batch, pg_loss, own_old, lengths)
        token_metrics |= engine_metrics | {"ois": (-token_metrics["ppo_kl"]).exp()}
    if batch.get("rollout_log_probs"):
        token_metrics["train_rollout_logprob_abs_diff"] = (own_old - torch.cat(batch["rollout_log_probs"])).abs()
    if batch.get("opd_reverse_kl"):
        token_metrics["opd_reverse_kl"] = torch.cat(batch["opd_reverse_kl"])

    reduce_pg_loss = _pg_loss_reducer(args, batch, masks, sum_of_sample_mean)
    terms = {"pg_loss": reduce_pg_loss(pg_loss), "entropy_loss": sum_of_sample_mean(entropy)}
    loss = terms["pg_loss"]
    if args.entropy_coef != 0:
        loss = loss - args.entropy_coef * terms["entropy_loss"]
    if args.use_kl_loss:
        terms["kl_loss"] = sum_of_sample_mean(_reference_kl(args, batch, log_probs, old_log_probs))
        loss = loss + args.kl_loss_coef * terms["kl_loss"]
    metrics = {"loss": loss.detach()} | {name: value.detach() for name, value in terms.items()}
    reduce_metric = metric_reducer(args, batch)
    return loss, metrics | {name: reduce_metric(value.detach()) for name, value in token_metrics.items()}


def _pg_losses(
    args: Namespace,
    batch: dict[str, Any],
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    lengths: list[int],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(the policy loss, its metrics), all flat over the local response tokens."""
    ppo_kl = old_log_probs - log_probs
    if args.advantage_estimator == "gspo":
        ppo_kl = _sequence_kl(batch, log_probs, old_log_probs, lengths)
    pg_loss, clipfrac = _token_losses(args, ppo_kl, log_probs, torch.cat(batch["advantages"]))
    metrics = {"pg_clipfrac": clipfrac, "ppo_kl": ppo_kl}
    if args.use_opsm:
        kept = _opsm_mask(args, batch, log_probs.detach(), old_log_probs, lengths)
        pg_loss, metrics["opsm_clipfrac"] = pg_loss * kept, 1 - kept
    return pg_loss, metrics


def _old_log_probs(args: Namespace, batch: dict[str, Any], current: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the trainer's own before this step, pi_old), flat over the local response tokens."""
    own = torch.cat(batch["log_probs"]) if batch.get("log_probs") else current
    return own, (torch.cat(batch["rollout_log_probs"]) if args.use_rollout_logprobs else own)


def _token_losses(
    args: Namespace, ppo_kl: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if args.advantage_estimator == "cispo":
        return compute_cispo_loss(ppo_kl, log_probs, advantages, args.eps_clip, args.eps_clip_high)
    return compute_policy_loss(ppo_kl, advantages, args.eps_clip, args.eps_clip_high, args.eps_clip_c)


def _whole(batch: dict[str, Any], flat: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """Whole responses from the local tokens: context-parallel ranks gather them."""
    return all_gather_samples_with_cp(flat.split(lengths), batch["total_lengths"], batch["response_lengths"])


def _sequence_kl(
    batch: dict[str, Any], log_probs: torch.Tensor, old_log_probs: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """GSPO's KL, one value per sequence, at every local token."""
    new, old = _whole(batch, log_probs, lengths), _whole(batch, old_log_probs, lengths)
    return compute_gspo_kl(new, old, list(log_probs.split(lengths)), batch["loss_masks"])


def _opsm_mask(
    args: Namespace, batch: dict[str, Any], log_probs: torch.Tensor, old_log_probs: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """0 at the tokens of the sequences that OPSM drops, else 1; decided on whole sequences."""
    new, old = _whole(batch, log_probs, lengths), _whole(batch, old_log_probs, lengths)
    advantages = _whole(batch, torch.cat(batch["advantages"]), lengths)
    masks, _ = compute_opsm_mask(args, new, old, advantages, batch["loss_masks"])
    # the same number at each of a sequence's tokens, so the first ones do for the local ones
    return torch.cat([mask[:count] for mask, count in zip(masks, lengths, strict=True)])


def _pg_loss_reducer(
    args: Namespace, batch: dict[str, Any], masks: Sequence[torch.Tensor], default: Reducer
) -> Reducer:
    """The user's reduction, or the loss's; masks that a TIS function changed only drop tokens from the numerator."""
    if args.custom_pg_loss_reducer_function_path:
        make_reducer = load_function(args.custom_pg_loss_reducer_function_path)
        return make_reducer(batch["total_lengths"], batch["response_lengths"], masks, args.calculate_per_token_loss)
    return default if masks is batch["loss_masks"] else loss_reducer(args, batch, masks)


def _reference_kl(
    args: Namespace, batch: dict[str, Any], log_probs: torch.Tensor, old_log_probs: torch.Tensor
) -> torch.Tensor:
    """KL to the reference per token; unbiased: weighted with the token's pi / pi_old, also where the loss's ratio is
    the sequence's (DeepSeek-V3.2, arXiv:2512.02556 §3.1)."""
    ratio = (log_probs - old_log_probs).exp() if args.use_unbiased_kl else None
    return compute_approx_kl(log_probs, torch.cat(batch["ref_log_probs"]), args.kl_loss_type, ratio)
