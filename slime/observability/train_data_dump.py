"""Dumps of what the trainers trained on: --save-debug-train-data."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.utils.types import RolloutBatch

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
SCHEDULE = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")
WHOLE = ("raw_reward",)  # columns that every rank has for the whole batch
CONTEXT_PARALLEL = (  # columns of which each context-parallel rank has its part
    "log_probs", "ref_log_probs", "teacher_log_probs", "rollout_log_probs", "values", "advantages", "returns", "kl",
    "entropy", "ref_entropy", "opd_reverse_kl",
)  # fmt: skip


def save_debug_train_data(args: Namespace, rollout_id: int, rollout_data: RolloutBatch) -> Path | None:
    """Write this data-parallel rank's samples, on the rank that has log-probs and stands for its tensor- and
    context-parallel group; a collective over context-parallel ranks.

    The file holds {"format_version", "rollout_id", "rank", "samples", "dp_shards", "raw_reward"}: per sample every
    column of the train data, whole along the sequence, and the shard's place in the schedule.

    Returns:
        The file, None on ranks that write none.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    if mpu.get_tensor_model_parallel_rank() != 0 or not mpu.is_pipeline_last_stage():
        return None
    data = {name: _whole(name, column, rollout_data) for name, column in rollout_data.items()}
    if mpu.get_context_parallel_rank() != 0:
        return None
    rank, dp_rank = dist.get_rank(), mpu.get_data_parallel_rank()
    partition = [int(position) for position in data["partition"]]
    columns = {name: column for name, column in data.items() if _is_per_sample(name, column, len(partition))}
    samples = [
        {
            "data_parallel_rank": dp_rank,
            "rollout_position": position,
            "sample_index": columns["sample_indices"][i],
            **{name: column[i] for name, column in columns.items()},
        }
        for i, position in enumerate(partition)
    ]
    shard = {"rank": rank, "data_parallel_rank": dp_rank, "sample_indices": columns["sample_indices"]}
    shard |= {name: data[name] for name in SCHEDULE}
    path = Path(args.save_debug_train_data.format(rollout_id=rollout_id, rank=rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format_version": FORMAT_VERSION,
        "rollout_id": rollout_id,
        "rank": rank,
        "samples": samples,
        "dp_shards": [shard],
        "raw_reward": data.get("raw_reward"),
    }
    torch.save(content, path)
    logger.info("saved the train data of rollout %d, %d samples, to %s", rollout_id, len(samples), path)
    return path


def _is_per_sample(name: str, column: Any, count: int) -> bool:
    return name not in (*SCHEDULE, *WHOLE) and hasattr(column, "__len__") and len(column) == count


def _whole(name: str, column: Any, data: RolloutBatch) -> Any:
    """The column on the host, per-token values over all context-parallel ranks."""
    import torch

    from slime.backends.megatron_utils.cp_utils import all_gather_samples_with_cp, current_context_parallel

    cp = current_context_parallel()
    is_tensors = isinstance(column, list) and bool(column) and isinstance(column[0], torch.Tensor)
    if name in CONTEXT_PARALLEL and is_tensors and cp.size > 1:
        column = all_gather_samples_with_cp(column, data["total_lengths"], data["response_lengths"], cp)
    if is_tensors:
        return [tensor.detach().cpu() for tensor in column]
    return column.detach().cpu() if isinstance(column, torch.Tensor) else column
