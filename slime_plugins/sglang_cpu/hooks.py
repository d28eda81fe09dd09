"""Hooks into SGLang 0.5.23 that its CPU platform needs, through SGLang's public hook registry.

SGLang only logs a hook that fails, so `verify` is called by the server launcher after the plug-ins were loaded.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from slime_plugins.sglang_cpu.murmur_hash import murmur_hash32
from slime_plugins.sglang_cpu.shared_expert_gate import fused_gate_sigmoid_mul, fused_gate_sigmoid_mul_add


def _no_op(*args: Any, **kwargs: Any) -> None:
    """Stand in for a function that only makes sense on a GPU."""


def _fork_workers(result: Any, *args: Any, **kwargs: Any) -> None:
    """Start scheduler and detokenizer by fork: they share what the server has imported.

    SGLang spawns them, so that each imports everything again: 32 s to start and 1.5 GB in place of 12 s and 1.0 GB. It
    must on a GPU, whose context doesn't survive a fork. Here the server has run no tensor operation and no thread yet.
    """
    running = threading.enumerate()
    if len(running) > 1:
        raise RuntimeError(f"sglang started threads before its worker processes, so they can't be forked: {running}")
    import sglang.srt.managers.scheduler  # noqa: F401  so that the workers needn't

    gc.collect()
    gc.freeze()  # what is shared stays shared: the collector no longer writes to it
    multiprocessing.set_start_method("fork", force=True)


def _load_file(ipc_name: str) -> str:
    """Where the scheduler publishes its load: in the server's temporary folder, which is removed with the server.

    SGLang's own place is /dev/shm, where a file stays for every server that ever ran.
    """
    return os.path.join(tempfile.gettempdir(), f"{os.path.basename(ipc_name)}.load")


REPLACED: dict[str, Callable[..., Any]] = {
    # Batch-invariant mode patches torch operators with Triton kernels; the CPU's operators stay as they are.
    "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode": _no_op,
    # Pinning host memory for a GPU.
    "sglang.srt.mem_cache.pool_host.common._cuda_host_register": _no_op,
    "sglang.srt.managers.load_snapshot.shm_path_for": _load_file,
    # A Triton kernel on GPUs and an sgl_kernel operator on CPUs; here plain PyTorch, the same hash.
    "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32": murmur_hash32,
    # Triton kernels.
    "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul": fused_gate_sigmoid_mul,
    "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add": fused_gate_sigmoid_mul_add,
}

AFTERWARDS: dict[str, Callable[..., Any]] = {
    "sglang.srt.entrypoints.engine._set_envs_and_config": _fork_workers,
}


def register() -> None:
    """Register every hook, and allow deterministic inference on the attention backend that CPUs use."""
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_deterministic_attention_backend_choices(["torch_native"])
    for target, replacement in REPLACED.items():
        HookRegistry.register(target, replacement, HookType.REPLACE)
    for target, hook in AFTERWARDS.items():
        HookRegistry.register(target, hook, HookType.AFTER)


def verify() -> None:
    """Raise RuntimeError naming each hook that SGLang has not applied."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = sorted({*REPLACED, *AFTERWARDS} - HookRegistry._patched)
    if missing:
        raise RuntimeError(
            f"sglang did not apply these hooks of slime_plugins.sglang_cpu: {', '.join(missing)} "
            "(written for sglang 0.5.23; see the lines above in this log)"
        )
