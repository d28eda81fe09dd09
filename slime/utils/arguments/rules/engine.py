"""What SGLang's settings need."""

from __future__ import annotations

import socket

from slime.utils.arguments.rules.context import Context
from slime.utils.arguments.rules.loading import is_hf_checkpoint, read_hf_config

# SGLang's short attribute -> the long spelling that older scripts read
_LONG_NAMES = {
    "sglang_tp_size": "sglang_tensor_parallel_size",
    "sglang_dp_size": "sglang_data_parallel_size",
    "sglang_pp_size": "sglang_pipeline_parallel_size",
    "sglang_ep_size": "sglang_expert_parallel_size",
}
_EXPERTS_IN_EVERY_LAYER = ("qwen2_moe", "qwen3_moe", "qwen3_next")


def resolve_engine(context: Context) -> None:
    """Parallel sizes of one engine, and the router's address as it stands in a URL."""
    args = context.args
    pipeline = getattr(args, "sglang_pp_size", 1)
    args.sglang_tp_size = max(1, args.rollout_num_gpus_per_engine // pipeline)
    for short, long in _LONG_NAMES.items():
        if hasattr(args, short):
            setattr(args, long, getattr(args, short))
    address = args.sglang_router_ip
    if address is not None and ":" in address and not address.startswith("["):
        args.sglang_router_ip = f"[{address}]"


def check_engine(context: Context) -> None:
    """Sizes that divide, and a router port that is free."""
    args = context.args
    pipeline, data = getattr(args, "sglang_pp_size", 1), getattr(args, "sglang_dp_size", 1)
    context.require(
        args.rollout_num_gpus_per_engine % pipeline == 0,
        f"{context.shown('rollout_num_gpus_per_engine')} is not a multiple of --sglang-pp-size {pipeline}",
    )
    if data > 1 and not getattr(args, "sglang_enable_dp_attention", False):
        context.problems.add(f"--sglang-dp-size {data} needs --sglang-enable-dp-attention")
    fraction = getattr(args, "sglang_mem_fraction_static", None)
    if fraction is not None and not 0 < fraction < 1:
        context.problems.add(f"--sglang-mem-fraction-static {fraction:g} is not between 0 and 1")
    _check_router(context)
    _check_dense_layers(context)


def _check_router(context: Context) -> None:
    args = context.args
    if args.sglang_router_ip is not None:
        context.needs("sglang_router_ip", "sglang_router_port")
    elif args.sglang_router_port is not None and not _is_free(args.sglang_router_port):
        context.problems.add(f"{context.shown('sglang_router_port')}: the port is in use")


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError:
            return False
    return True


def _check_dense_layers(context: Context) -> None:
    """Mixed models that SGLang 0.5.23 would serve wrongly, without a word: it builds experts in every layer."""
    folder = context.args.hf_checkpoint
    if not is_hf_checkpoint(folder):
        return
    config = read_hf_config(folder)
    if config.get("model_type") not in _EXPERTS_IN_EVERY_LAYER:
        return
    for name, published in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        if config.get(name, published) != published:
            context.problems.add(
                f"{folder}/config.json has {name} {config[name]}, but SGLang serves every layer of "
                f"{config['model_type']} as one with experts"
            )
