"""Engines that others run: their addresses, what they say of themselves, and an actor that only speaks to them."""

from __future__ import annotations

import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils import external_engine
from slime.backends.sglang_utils.external import (
    ExternalEngineError,
    ExternalEngineInfo,
    discover_external_engines,
    normalize_external_engine_addr,
)
from slime.backends.sglang_utils.external_engine import ExternalEngine
from slime.backends.sglang_utils.server_process import ServerDied
from slime.ray.external_group import external_deployment
from slime.ray.placement_group import placement_group_layout
from slime.utils.http_utils import get_rollout_num_engines
from tests.support.base_config import BaseConfig
from tests.support.info_server import InfoServer


@pytest.fixture
def serve() -> Iterator[Callable[..., InfoServer]]:
    made: list[InfoServer] = []

    def make(**info: Any) -> InfoServer:
        made.append(InfoServer({"tp_size": 1, "pp_size": 1, **info}))
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def base(tmp_path: Path) -> BaseConfig:
    made = BaseConfig(tmp_path)
    del made.flags["--colocate"]
    return made


def refused(base: BaseConfig, capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    with pytest.raises(SystemExit):
        base.parse(*words)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("addr", "url"),
    [
        ("10.0.0.1:30000", "http://10.0.0.1:30000"),
        ("http://node-3:30000/", "http://node-3:30000"),
        ("[fe80::2]:30000", "http://[fe80::2]:30000"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_addresses(addr: str, url: str) -> None:
    """P11: IPv6 hosts stay in brackets."""
    assert normalize_external_engine_addr(addr) == url


@pytest.mark.parametrize("addr", ["10.0.0.1", "fe80::2:30000", "https://h:1", "h:1/generate", "h:port", "h:70000"])
def test_what_is_no_address(addr: str) -> None:
    with pytest.raises(ExternalEngineError, match="--rollout-external-engine-addrs"):
        normalize_external_engine_addr(addr)


def test_servers_are_asked_when_the_arguments_are_parsed(base: BaseConfig, serve: Callable[..., InfoServer]) -> None:
    """P10: their devices are not the run's, which has as many bundles as trainers."""
    addrs = [serve(tp_size=4, pp_size=2).addr, serve(tp_size=2).addr]
    args = base.parse("--rollout-external-engine-addrs", *addrs)
    assert [info.url for info in args.rollout_external_engine_infos] == [f"http://{addr}" for addr in addrs]
    assert (args.rollout_num_gpus, get_rollout_num_engines(args)) == (10, 2)
    assert placement_group_layout(args) == (1, 1)
    assert args.rollout_external_engine_infos[0].parallel_config == {
        "tp_size": 4, "pp_size": 2, "dp_size": 1, "ep_size": 1,
    }  # fmt: skip
    (model,) = external_deployment(args).models
    assert model.update_weights and [group.num_gpus for group in model.server_groups] == [8, 2]


def test_kinds_of_servers(serve: Callable[..., InfoServer]) -> None:
    prefill = serve(disaggregation_mode="prefill", disaggregation_bootstrap_port=8998)
    decode = serve(disaggregation_mode="decode", disaggregation_bootstrap_port=8998)
    kinds = [
        (info.worker_type, info.bootstrap_port) for info in discover_external_engines([prefill.addr, decode.addr])
    ]
    assert kinds == [("prefill", 8998), ("decode", None)]
    (regular,) = discover_external_engines([serve(disaggregation_mode="null").addr])
    assert regular.worker_type == "regular" and not regular.is_pd_worker


def test_problems_are_reported_at_the_start(
    base: BaseConfig, capsys: pytest.CaptureFixture[str], serve: Callable[..., InfoServer]
) -> None:
    flag = "--rollout-external-engine-addrs"
    one = serve(tp_size=1, attention_backend="fa3")
    assert "no SGLang server answers at http://127.0.0.1:9" in refused(base, capsys, flag, one.addr, "127.0.0.1:9")
    assert f"names http://{one.addr} more than once" in refused(base, capsys, flag, one.addr, one.addr)
    error = refused(base, capsys, flag, one.addr, "--sglang-attention-backend", "torch_native")
    assert f"{one.addr} has attention_backend='fa3', but the run is given 'torch_native'" in error
    assert base.parse(flag, one.addr, "--sglang-attention-backend", "fa3").rollout_num_gpus == 1
    assert "exclude each other" in refused(base, capsys, flag, one.addr, "--colocate")
    assert "exclude each other" in refused(base, capsys, flag, one.addr, "--prefill-num-servers", 1)
    assert "prefill servers but no decode" in refused(base, capsys, flag, serve(disaggregation_mode="prefill").addr)
    other = InfoServer({"status": "fine"})
    assert "/server_info is not SGLang's" in refused(base, capsys, flag, other.addr)
    other.stop()


def attached(server: InfoServer, log_dir: Path) -> ExternalEngine:
    args = Namespace(log_dir=str(log_dir), engine_start_timeout=5.0, update_weight_timeout=5.0)
    return ExternalEngine(args, 0, ExternalEngineInfo(f"http://{server.addr}", "regular", 1))


def test_the_actor_only_speaks_to_the_server(serve: Callable[..., InfoServer], tmp_path: Path) -> None:
    """It wakes a server that a killed run left paused, and neither puts it to sleep nor ends it."""
    server = serve()
    engine = attached(server, tmp_path)
    engine.attach()
    assert server.paths == ["/continue_generation", "/health_generate"]
    engine.release_memory_occupation()
    engine.resume_memory_occupation()
    with pytest.raises(RuntimeError, match="is not ended by it"):
        engine.simulate_crash()
    engine.shutdown()
    engine.watch()
    assert server.paths == ["/continue_generation", "/health_generate"]


def test_a_server_that_is_gone_is_noticed(
    serve: Callable[..., InfoServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_engine, "WATCH_SECONDS", 0.05)
    server = serve()
    engine = attached(server, tmp_path)
    threading.Timer(0.3, server.stop).start()
    started = time.monotonic()
    with pytest.raises(ServerDied, match=f"http://{server.addr} is gone"):
        engine.watch()
    assert time.monotonic() - started > 0.3
