"""Traces of training by PyTorch's profiler: --use-pytorch-profiler."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def profiled(args: Namespace, target: str, rollout_id: int) -> Iterator[None]:
    """Profile the block if it is a target of these settings, for rollouts from --profile-step-start up to, without,
    --profile-step-end on the ranks of --profile-ranks.

    The trace, `{log_dir}/profile/{target}-rollout{n}-rank{m}.json.gz`, opens in Perfetto and chrome://tracing.
    """
    wanted = args.use_pytorch_profiler and target in args.profile_target
    if not (wanted and args.profile_step_start <= rollout_id < args.profile_step_end):
        yield
        return
    import torch

    rank = torch.distributed.get_rank()
    if rank not in args.profile_ranks:
        yield
        return

    path = Path(args.log_dir) / "profile" / f"{target}-rollout{rollout_id}-rank{rank}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler:
        yield
    profiler.export_chrome_trace(str(path))
    logger.info("profile of %s in rollout %d: %s", target, rollout_id, path)
