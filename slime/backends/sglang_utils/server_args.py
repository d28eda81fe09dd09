"""The `ServerArgs` of an engine, from what the device needs, what slime fixes, the user's flags and a group's
overrides.

The layers go to the server process as JSON and are merged there, where `ServerArgs` and its defaults are known: the
process that asks for an engine never imports SGLang. Written for sglang 0.5.23.
"""

from __future__ import annotations

import dataclasses
import difflib
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

FLAG_PREFIX = "sglang_"
# Attributes of slime itself that begin like an SGLang flag.
NOT_SERVER_ARGS = frozenset(
    {"router_ip", "router_port", "router_request_timeout_secs", "server_concurrency", "config", "model_routers"}
)

# Attributes that exist under both names; the field has the short one.
LONG_NAMES = {
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "expert_parallel_size": "ep_size",
}


class ServerArgsError(ValueError):
    """Settings of an engine that contradict each other, or that the installed SGLang does not have."""


@dataclasses.dataclass(frozen=True)
class EngineAddress:
    """Where one node of an engine listens, and where its first node waits for the others."""

    host: str
    port: int
    nccl_port: int
    dist_init_addr: str | None = None
    bootstrap_port: int | None = None


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """An engine's size and this process's part of it."""

    num_gpus: int
    nnodes: int = 1
    node_rank: int = 0
    base_gpu_id: int = 0
    worker_type: str = "regular"


@dataclasses.dataclass(frozen=True)
class ServerArgsLayers:
    """`ServerArgs` fields in rising precedence, but that nothing may contradict `owned`.

    Attributes:
        device: what the accelerator needs.
        fixed: what training needs of an engine.
        flags: every `--sglang-*` of the namespace; those at their default don't count.
        overrides: of the engine's group in the SGLang YAML.
        owned: addresses and layout, which slime works out.
    """

    device: dict[str, Any]
    fixed: dict[str, Any]
    flags: dict[str, Any]
    overrides: dict[str, Any]
    owned: dict[str, Any]


def compute_layers(
    args: Namespace,
    rank: int,
    shape: EngineShape,
    address: EngineAddress,
    device: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
) -> ServerArgsLayers:
    """The layers for engine `rank` of the run."""
    flags = server_flags(args)
    pipeline = int(flags.pop("pp_size", None) or 1)
    flags.pop("tp_size", None)
    if shape.num_gpus % pipeline:
        raise ServerArgsError(f"an engine of {shape.num_gpus} devices can't have --sglang-pp-size {pipeline}")
    owned = {
        "host": address.host,
        "port": address.port,
        "nccl_port": address.nccl_port,
        "nnodes": shape.nnodes,
        "node_rank": shape.node_rank,
        "base_gpu_id": shape.base_gpu_id,
        "gpu_id_step": 1,
        "tp_size": shape.num_gpus // pipeline,
        "pp_size": pipeline,
    }
    if address.dist_init_addr is not None:
        owned["dist_init_addr"] = address.dist_init_addr
    return ServerArgsLayers(
        device=dict(device),
        fixed=_fixed(args, rank, shape, address, device),
        flags=flags,
        overrides=dict(overrides or {}),
        owned=owned,
    )


def server_flags(args: Namespace) -> dict[str, Any]:
    """The namespace's `sglang_*` attributes that are `ServerArgs` fields, by field name."""
    found = {name[len(FLAG_PREFIX) :]: value for name, value in vars(args).items() if name.startswith(FLAG_PREFIX)}
    for long_name, name in LONG_NAMES.items():
        value = found.pop(long_name, None)
        found.setdefault(name, value)
    return {name: value for name, value in found.items() if name not in NOT_SERVER_ARGS and value is not None}


def merge_layers(layers: ServerArgsLayers, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `ServerArgs`.

    Args:
        defaults: every field of `ServerArgs` with its default; a flag with this value was not given.

    Raises:
        ServerArgsError: a name that is no field, or an override of what slime works out.
    """
    flags = {name: value for name, value in layers.flags.items() if name not in defaults or value != defaults[name]}
    for source, values in (("--sglang-* flag", flags), ("override of a server group", layers.overrides)):
        _check_names(source, values, defaults)
        for name in values.keys() & layers.owned.keys():
            if values[name] != layers.owned[name]:
                raise ServerArgsError(
                    f"{source} {name}={values[name]!r}: slime sets it to {layers.owned[name]!r}; leave it out"
                )
    known = {**layers.device, **layers.fixed}
    _check_names("setting of this version of slime", known, defaults)
    return {**known, **flags, **layers.overrides, **layers.owned}


def _check_names(source: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    for name in values:
        if name not in defaults:
            near = difflib.get_close_matches(name, defaults, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ServerArgsError(f"{source} {name}: the installed SGLang's ServerArgs has no such field{hint}")


def _fixed(
    args: Namespace, rank: int, shape: EngineShape, address: EngineAddress, device: Mapping[str, Any]
) -> dict[str, Any]:
    fixed = {
        "model_path": args.hf_checkpoint,
        "trust_remote_code": True,
        "random_seed": args.seed + rank,
        "enable_memory_saver": bool(args.offload_rollout),
        "skip_server_warmup": True,
        "enable_metrics": True,
    }
    if getattr(args, "fp16", False):
        fixed["dtype"] = "float16"
    elif "dtype" in device:  # where the checkpoint's own dtype is not the device's default
        fixed["dtype"] = getattr(args, "params_dtype", device["dtype"])
    if getattr(args, "use_rollout_routing_replay", False):
        fixed["enable_return_routed_experts"] = True
    if shape.worker_type in ("prefill", "decode"):
        fixed["disaggregation_mode"] = shape.worker_type
    if shape.worker_type == "prefill":
        fixed["disaggregation_bootstrap_port"] = address.bootstrap_port
        fixed["load_balance_method"] = "follow_bootstrap_room"  # where the decode engine looks for the KV cache
    if shape.worker_type == "encoder":
        fixed["encoder_only"] = True
    return fixed
