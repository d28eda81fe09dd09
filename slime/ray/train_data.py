"""Samples → columns of train data → one share per data-parallel rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import count
from typing import Any

from slime.ray.reward_post_process import post_process_rewards
from slime.rollout.hook_errors import hook_errors
from slime.rollout.sample_checks import check_samples
from slime.utils.data import get_source
from slime.utils.dp_schedule import build_dp_schedule, count_trimmed
from slime.utils.misc import load_function
from slime.utils.types import Sample

OPTIONAL_COLUMNS = {  # column → Sample attribute; present when the samples have it, all or none
    "rollout_log_probs": "rollout_log_probs",
    "rollout_top_p_token_ids": "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets": "rollout_top_p_token_offsets",
    "rollout_routed_experts": "rollout_routed_experts",
    "teacher_log_probs": "teacher_log_probs",
}
SPARSE_COLUMNS = {"metadata": "train_metadata", "multimodal_train_inputs": "multimodal_train_inputs"}
WHOLE_COLUMNS = ("raw_reward", "total_lengths")  # every rank gets these for the whole batch
SCHEDULE_COLUMNS = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")


def flatten_samples(groups: Iterable[Any]) -> list[Sample]:
    """All samples of a rollout function's nested lists, in order.

    Raises:
        ValueError: a rollout fanned out into several samples that don't share a rollout_id.
        TypeError: something in the lists is not a Sample.
    """
    flat: list[Sample] = []
    for group in groups:
        for item in group if isinstance(group, list) else [group]:
            flat += _fan_out(item) if isinstance(item, list) else [item]
    for item in flat:
        if not isinstance(item, Sample):
            raise TypeError(f"the rollout function returned {type(item).__name__} where a Sample was expected")
    return flat


def _fan_out(samples: list[Sample]) -> list[Sample]:
    ids = {sample.rollout_id for sample in samples}
    if len(samples) > 1 and (len(ids) > 1 or None in ids):
        names = ", ".join(sample.name() for sample in samples)
        raise ValueError(f"samples of one rollout must share a rollout_id, these have {ids}: {names}")
    return samples


def convert_samples_to_train_data(args: Any, samples: list[Sample]) -> dict[str, Any]:
    """The columns of surface §5.6, one entry per sample; `--custom-convert-samples-to-train-data-path` replaces it.

    Raises:
        ValueError: a sample that can't be trained on, or a column that only some samples have.
    """
    check_samples(args, samples)
    if args.custom_convert_samples_to_train_data_path:
        with hook_errors(args.custom_convert_samples_to_train_data_path):
            return load_function(args.custom_convert_samples_to_train_data_path)(args, samples)
    raw_reward, rewards = post_process_rewards(args, samples)
    masks = [_loss_mask(sample) for sample in samples]
    rollout_ids = fill_rollout_ids([sample.rollout_id for sample in samples])
    data: dict[str, Any] = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": _logged_raw_reward(samples, raw_reward),
        "truncated": [int(sample.status is Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": rollout_ids,
        "loss_masks": masks,
        "rollout_mask_sums": _rollout_mask_sums(rollout_ids, masks),
    }
    return data | _optional_columns(samples)


def fill_rollout_ids(ids: list[int | None]) -> list[int]:
    """Missing ids become the smallest integers that aren't taken: each such sample is a rollout of its own."""
    taken = set(ids)
    free = (number for number in count() if number not in taken)
    return [next(free) if rollout_id is None else rollout_id for rollout_id in ids]


def _loss_mask(sample: Sample) -> list[int]:
    if sample.remove_sample:
        return [0] * sample.response_length
    return sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length


def _rollout_mask_sums(rollout_ids: list[int], masks: list[list[int]]) -> list[float]:
    """Trained tokens of the sample's whole rollout: the denominator that its samples share."""
    sums: Counter[int] = Counter()
    for rollout_id, mask in zip(rollout_ids, masks, strict=True):
        sums[rollout_id] += sum(mask)
    return [float(sums[rollout_id]) for rollout_id in rollout_ids]


def _logged_raw_reward(samples: list[Sample], raw_reward: list[float]) -> list[float]:
    return [sample.metadata.get("raw_reward", raw) for sample, raw in zip(samples, raw_reward, strict=True)]


def _optional_columns(samples: list[Sample]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for column, attribute in OPTIONAL_COLUMNS.items():
        values = [getattr(sample, attribute) for sample in samples]
        if all(value is None for value in values):
            continue
        for sample, value in zip(samples, values, strict=True):
            if value is None:
                raise ValueError(f"{sample.name()} has no {attribute}, other samples of the batch have it")
        columns[column] = values
    sparse = {column: [getattr(s, name) for s in samples] for column, name in SPARSE_COLUMNS.items()}
    sparse["round_number"] = [sample.metadata.get("round_number") for sample in samples]
    sparse["source_names"] = [get_source(sample) for sample in samples]
    return columns | {name: values for name, values in sparse.items() if any(v is not None for v in values)}


def split_train_data_by_dp(
    args: Any, data: dict[str, Any], train_parallel_config: dict[str, int]
) -> list[dict[str, Any]]:
    """One dict per data-parallel rank: its samples' columns as CPU tensors, and its micro-batch schedule.

    `trimmed_samples` counts the samples that no rank has because they fill no step. `raw_reward` and `total_lengths`
    stay whole on every rank (`slime.utils.data.process_rollout_data` cuts them).

    Args:
        data: columns of `convert_samples_to_train_data`.
        train_parallel_config: dp_size, cp_size, vpp_size, microbatch_group_size_per_vp_stage.
    """
    data = dict(data)
    data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
    schedule_of_rollout = build_dp_schedule(
        args,
        train_parallel_config,
        data["total_lengths"],
        global_batch_size=args.global_batch_size,
        rollout_indices=data["rollout_ids"],
    )
    partitions, micro_batch_indices, num_microbatches, global_batch_sizes = schedule_of_rollout
    trimmed = count_trimmed(schedule_of_rollout, len(data["tokens"]))
    shards = []
    for partition, micro_batches in zip(partitions, micro_batch_indices, strict=True):
        shard: dict[str, Any] = {"trimmed_samples": trimmed}
        shard |= {name: [column[i] for i in partition] for name, column in data.items() if name not in WHOLE_COLUMNS}
        shard |= {name: data[name] for name in WHOLE_COLUMNS if name in data}
        schedule = (partition, micro_batches, num_microbatches, global_batch_sizes)
        shard |= dict(zip(SCHEDULE_COLUMNS, schedule, strict=True))
        shards.append(_to_tensors(shard))
    return shards


def _to_tensors(shard: dict[str, Any]) -> dict[str, Any]:
    import torch

    dtypes = {
        "tokens": torch.long,
        "loss_masks": torch.int,
        "rollout_log_probs": torch.float32,
        "teacher_log_probs": torch.float32,
        "rollout_top_p_token_ids": torch.int32,
        "rollout_top_p_token_offsets": torch.int32,
    }
    for name, dtype in dtypes.items():
        if name in shard:
            shard[name] = [torch.as_tensor(values, dtype=dtype) for values in shard[name]]
    if "rollout_routed_experts" in shard:  # by far the largest column: layers x top-k ids per token
        shard["rollout_routed_experts"] = [_narrow(experts) for experts in shard["rollout_routed_experts"]]
    if "rollout_mask_sums" in shard:
        shard["rollout_mask_sums"] = torch.tensor(shard["rollout_mask_sums"], dtype=torch.float32)
    return shard


def _narrow(experts: Any) -> Any:
    """The ids in the smallest integers that hold them."""
    import torch

    experts = torch.as_tensor(experts)
    fits_byte = experts.numel() == 0 or int(experts.max()) < 128
    return experts.to(torch.int8 if fits_byte else torch.int16).contiguous()
