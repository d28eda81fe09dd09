"""SGLang servers that others have started and that a run uses (--rollout-external-engine-addrs): their addresses, and
what they say of themselves (GET /server_info, sglang 0.5.23)."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from slime.backends.sglang_utils.control_client import ControlClient, ControlError
from slime.backends.sglang_utils.server_args import NOT_SERVER_ARGS
from slime.ray.ports import host_port
from slime.utils.arguments.errors import ConfigError

INFO_SECONDS = 30.0
_PREFIX = "sglang_"
# What may differ from this run's settings: addresses, devices and memory are the server's own affair.
_NOT_COMPARED = NOT_SERVER_ARGS | {
    "tp_size", "dp_size", "pp_size", "ep_size", "mem_fraction_static", "max_total_tokens", "max_running_requests",
    "device", "api_key", "log_level", "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size",
    "expert_parallel_size",
}  # fmt: skip


class ExternalEngineError(ConfigError):
    """An address that is none, or a server that does not answer or is set up in another way than the run needs."""


@dataclasses.dataclass(frozen=True)
class ExternalEngineInfo:
    """One server.

    Attributes:
        url: such as http://[::1]:30000.
        worker_type: regular, prefill, decode or encoder.
        num_gpus: devices of the whole engine.
        bootstrap_port: of a prefill server.
        server_args: its `ServerArgs` and more, as it answered.
    """

    url: str
    worker_type: str
    num_gpus: int
    bootstrap_port: int | None = None
    server_args: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def is_pd_worker(self) -> bool:
        return self.worker_type in ("prefill", "decode")

    @property
    def parallel_config(self) -> dict[str, int]:
        """How the engine is laid out."""
        return {name: int(self.server_args.get(name) or 1) for name in ("tp_size", "pp_size", "dp_size", "ep_size")}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def normalize_external_engine_addr(addr: str) -> str:
    """`host:port`, `[v6]:port` or `http://host:port` as a URL.

    Raises:
        ExternalEngineError: it is none of these.
    """
    text = addr if "://" in addr else f"http://{addr}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ExternalEngineError(f"--rollout-external-engine-addrs {addr}: {error}") from error
    unbracketed = parts.netloc.count(":") > 1 and not parts.netloc.startswith("[")
    if parts.scheme != "http" or not host or port is None or unbracketed or parts.path not in ("", "/"):
        raise ExternalEngineError(
            f"--rollout-external-engine-addrs {addr}: expected host:port, [IPv6 address]:port or http://host:port"
        )
    return f"http://{host_port(host, port)}"


def get_server_info(url: str, timeout: float = INFO_SECONDS, api_key: str | None = None) -> dict[str, Any]:
    """What a server says of itself.

    Raises:
        ExternalEngineError: it does not answer, or with something else.
    """
    try:
        info = ControlClient(url, api_key).get("/server_info", timeout=timeout)
    except ControlError as error:
        raise ExternalEngineError(
            f"--rollout-external-engine-addrs: no SGLang server answers at {url}: {error}"
        ) from error
    if not isinstance(info, dict) or "tp_size" not in info:
        raise ExternalEngineError(f"--rollout-external-engine-addrs: {url}/server_info is not SGLang's: {info!r:.200}")
    return info


def engine_info(url: str, info: Mapping[str, Any]) -> ExternalEngineInfo:
    """The facts that a run needs, from the server's answer."""
    mode = info.get("disaggregation_mode") or "null"
    worker_type = "encoder" if info.get("encoder_only") else "regular" if mode == "null" else mode
    return ExternalEngineInfo(
        url=url,
        worker_type=worker_type,
        num_gpus=int(info["tp_size"]) * int(info.get("pp_size") or 1),
        bootstrap_port=info.get("disaggregation_bootstrap_port") if worker_type == "prefill" else None,
        server_args=dict(info),
    )


def discover_external_engines(
    addrs: Sequence[str], timeout: float = INFO_SECONDS, api_key: str | None = None
) -> list[ExternalEngineInfo]:
    """Ask all servers at once, in the order of their addresses.

    Raises:
        ExternalEngineError: an address is wrong or given twice, or a server does not answer; with all problems.
    """
    urls = [normalize_external_engine_addr(addr) for addr in addrs]
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if twice:
        raise ExternalEngineError(f"--rollout-external-engine-addrs names {', '.join(twice)} more than once")

    def ask(url: str) -> ExternalEngineInfo | ExternalEngineError:
        try:
            return engine_info(url, get_server_info(url, timeout, api_key))
        except ExternalEngineError as error:
            return error

    with ThreadPoolExecutor(len(urls)) as pool:
        found = list(pool.map(ask, urls))
    problems = [problem for item in found if isinstance(item, ExternalEngineError) for problem in item.problems]
    if problems:
        raise ExternalEngineError(problems)
    return [item for item in found if isinstance(item, ExternalEngineInfo)]


def mismatches(args: Namespace, infos: Iterable[ExternalEngineInfo]) -> list[str]:
    """Where servers differ from the `--sglang-*` flags that the user gave, and from what the run needs of them."""
    given = {name.removeprefix(_PREFIX): name for name in args.set_by_user if name.startswith(_PREFIX)}
    wanted = {name: getattr(args, dest) for name, dest in given.items() if name not in _NOT_COMPARED}
    if getattr(args, "use_rollout_routing_replay", False):
        wanted["enable_return_routed_experts"] = True
    return [
        f"the server at {info.url} has {name}={info.server_args[name]!r}, but the run "
        f"{'is given' if name in given else 'needs'} {value!r}"
        for info in infos
        for name, value in wanted.items()
        if name in info.server_args and info.server_args[name] != value
    ]


def external_engine_infos_from_args(args: Namespace) -> list[ExternalEngineInfo]:
    """The servers that were found when the arguments were parsed; asks them now where that has not been done."""
    infos = getattr(args, "rollout_external_engine_infos", None)
    if infos is None:
        infos = discover_external_engines(
            args.rollout_external_engine_addrs, api_key=getattr(args, "sglang_api_key", None)
        )
    return list(infos)
