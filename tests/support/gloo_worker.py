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


def main(rank: int, size: int, store: str, join: bool, folder: str, connection: Connection) -> None:
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
    _destroy_groups()
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


def _destroy_groups() -> None:
    """Megatron only forgets its groups; a hundred layouts would keep thousands of sockets."""
    import torch.distributed as dist

    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):  # no public list of groups
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
