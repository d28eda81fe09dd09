"""The policy-gradient loss of a micro-batch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from slime.backends.megatron_utils.cp_utils import all_gather_samples_with_cp, get_sum_of_sample_mean
from slime.utils.misc import load_function
from slime.utils.ppo_utils import compute_approx_kl, compute_cispo_loss, compute_gspo_kl, compute_policy_loss

from .importance import vanilla_tis_function
from .log_probs import response_log_probs

Reducer = Callable[[torch.Tensor], torch.Tensor]


def policy_loss_function(
    args: Namespace, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped policy loss - entropy_coef * entropy + kl_loss_coef * KL to the reference.

    pi_old is `batch["rollout_log_probs"]` with `args.use_rollout_logprobs`, else `batch["log_probs"]`; where the batch
    has none of it, the current policy's own detached log-probs (the ratio is 1, its gradient the policy's).

    Args:
        batch: unconcat_tokens, total_lengths, response_lengths, loss_masks, advantages; as the flags ask for them
            log_probs, rollout_log_probs, ref_log_probs. Per-token values are per sample, local response tokens.
        logits: [1, packed tokens, vocabulary / tensor-parallel size].
        sum_of_sample_mean: see `get_sum_of_sample_mean`.

    Returns:
        (loss, metrics), reduced with `sum_of_sample_mean`.
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
    ppo_kl = old_log_probs - log_probs
    if args.advantage_estimator == "gspo":
        ppo_kl = _sequence_kl(batch, log_probs, old_log_probs, lengths)
    pg_loss, clipfrac = _token_losses(args, ppo_kl, log_probs, torch.cat(batch["advantages"]))
    token_metrics = {"pg_clipfrac": clipfrac, "ppo_kl": ppo_kl}

    reduce_pg_loss = sum_of_sample_mean
    if args.use_tis or args.get_mismatch_metrics:
        pg_loss, reduce_pg_loss, engine_metrics = _correct_for_engine(
            args, batch, pg_loss, own_old, lengths, sum_of_sample_mean
        )
        token_metrics |= engine_metrics | {"ois": (-ppo_kl).exp()}
    if args.custom_pg_loss_reducer_function_path:
        reduce_pg_loss = load_function(args.custom_pg_loss_reducer_function_path)(
            batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], args.calculate_per_token_loss
        )
    if batch.get("rollout_log_probs"):
        token_metrics["train_rollout_logprob_abs_diff"] = (own_old - torch.cat(batch["rollout_log_probs"])).abs()

    terms = {"pg_loss": reduce_pg_loss(pg_loss), "entropy_loss": sum_of_sample_mean(entropy)}
    loss = terms["pg_loss"]
    if args.entropy_coef != 0:
        loss = loss - args.entropy_coef * terms["entropy_loss"]
    if args.use_kl_loss:
        terms["kl_loss"] = sum_of_sample_mean(_reference_kl(args, batch, log_probs, ppo_kl))
        loss = loss + args.kl_loss_coef * terms["kl_loss"]
    metrics = {"loss": loss.detach()} | {name: value.detach() for name, value in terms.items()}
    return loss, metrics | {name: sum_of_sample_mean(value.detach()) for name, value in token_metrics.items()}


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


def _sequence_kl(
    batch: dict[str, Any], log_probs: torch.Tensor, old_log_probs: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """GSPO's KL: whole sequences are needed, so context-parallel ranks gather them."""

    def whole(flat: torch.Tensor) -> list[torch.Tensor]:
        return all_gather_samples_with_cp(flat.split(lengths), batch["total_lengths"], batch["response_lengths"])

    return compute_gspo_kl(whole(log_probs), whole(old_log_probs), list(log_probs.split(lengths)), batch["loss_masks"])


def _reference_kl(
    args: Namespace, batch: dict[str, Any], log_probs: torch.Tensor, ppo_kl: torch.Tensor
) -> torch.Tensor:
    ratio = torch.exp(-ppo_kl) if args.use_unbiased_kl else None
    return compute_approx_kl(log_probs, torch.cat(batch["ref_log_probs"]), args.kl_loss_type, ratio)


def _correct_for_engine(
    args: Namespace,
    batch: dict[str, Any],
    pg_loss: torch.Tensor,
    own_old: torch.Tensor,
    lengths: list[int],
    sum_of_sample_mean: Reducer,
) -> tuple[torch.Tensor, Reducer, dict[str, torch.Tensor]]:
    """Run the TIS function; (loss, the loss's reducer, token metrics).

    Masks that it changes only drop tokens from the numerator: denominators keep counting them. With
    `args.get_mismatch_metrics` alone it is run for its metrics and changes nothing.
    """
    if not batch.get("rollout_log_probs"):
        raise ValueError("--use-tis and --get-mismatch-metrics need the engine's log-probs (rollout_log_probs)")
    path = args.custom_tis_function_path
    corrected, masks, metrics = (load_function(path) if path else vanilla_tis_function)(
        args,
        pg_loss=pg_loss,
        train_log_probs=list(own_old.split(lengths)),
        rollout_log_probs=batch["rollout_log_probs"],
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    if not args.use_tis:
        return pg_loss, sum_of_sample_mean, metrics
    denoms = batch.get("rollout_mask_sums")
    if denoms is None:
        denoms = [mask.sum() for mask in batch["loss_masks"]]
    reducer = get_sum_of_sample_mean(
        batch["total_lengths"], batch["response_lengths"], masks, denoms, args.calculate_per_token_loss
    )
    return corrected, reducer, metrics
