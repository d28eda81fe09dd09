"""One rank of a `GlooWorld`: joins the group, then runs what it is sent until the connection closes."""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import random
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

COLLECTIVE_TIMEOUT_S = 60
SEED = 1234
STORE = "SLIME_TEST_STORE"


def main(
    rank: int, size: int, store: str, folder: str, connection: Connection, *, join: bool, share_groups: bool
) -> None:
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), STORE: store}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from slime.utils import accelerator

    torch.set_num_threads(1)
    accelerator.current().prepare_megatron()
    if join:
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    if share_groups:
        _share_groups()
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # skip the teardown of groups whose peers may be gone
        connection.send_bytes(pickle.dumps(_run(job)))


def with_rank(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`function(rank, world size, store path, *args)` of this process."""
    return function(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ[STORE], *args)


def _run(job: bytes) -> tuple[str, Any]:
    try:
        path, module, name, call = pickle.loads(job)
        sys.path += [entry for entry in path if entry not in sys.path]
        function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        args, kwargs = pickle.loads(call)
        _reset()
        return "ok", pickle.dumps(function(*args, **kwargs))
    except BaseException:
        return "error", traceback.format_exc()


def _reset() -> None:
    """Forget what the function before left in Megatron and in the generators."""
    import numpy as np
    import torch

    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    calculator = sys.modules.get("megatron.core.num_microbatches_calculator")
    if calculator is not None:
        calculator.unset_num_microbatches_calculator()
    megatron_random = sys.modules.get("megatron.core.tensor_parallel.random")
    if megatron_random is not None:
        megatron_random.initialize_rng_tracker(force_reset=True)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(False)


def _share_groups() -> None:
    """Let every layout use one group per set of ranks.

    Megatron makes 17 groups per layout, whose 51 threads live as long as any model that was built with them.
    """
    import torch.distributed as dist

    new_group = dist.new_group
    shared: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(new_group)
    def shared_group(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        key = (ranks and tuple(sorted(ranks)), kwargs.get("timeout"), kwargs.get("backend"))
        if key not in shared:
            shared[key] = new_group(ranks, *args, **kwargs)
        return shared[key]

    dist.new_group = shared_group
