"""The real sglang-router, as slime starts it, in front of small HTTP servers that answer like engines."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.backends.sglang_utils.control_client import ControlClient, ControlError
from slime.ray.ports import hold_ports, host_port
from slime.ray.router import Router, RouterError, deregister_worker, register_worker, start_router
from slime.rollout.engine_request import request_headers
from slime.utils.http_utils import close_client, post
from slime.utils.types import Sample

SLIME_ROUTER = {"use_slime_router": True, "slime_router_middleware_paths": None}


class Worker:
    """Answers as an engine does when it is asked what it serves, and keeps the bodies of /generate."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({"model_path": "m", "is_generation": True})

            def do_POST(self) -> None:
                worker.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._answer({"from": worker.url})

            def _answer(self, content: dict[str, Any]) -> None:
                body = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def arguments(log_dir: Path, **given: Any) -> Namespace:
    defaults = {
        "log_dir": str(log_dir),
        "sglang_router_ip": None,
        "sglang_router_port": None,
        "sglang_router_request_timeout_secs": 60,
        "router_log_level": "warn",
    }
    return Namespace(**{**defaults, **given})


@pytest.fixture
def workers() -> Iterator[Callable[[int], list[Worker]]]:
    made: list[Worker] = []

    def make(count: int) -> list[Worker]:
        made.extend(Worker() for _ in range(count))
        return made

    yield make
    for worker in made:
        worker.stop()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    started = start_router(arguments(tmp_path))
    yield started
    started.stop()


def register(router: Router, workers: list[Worker]) -> None:
    for worker in workers:
        register_worker(router.url, {"url": worker.url, "worker_type": "regular"})
    router.wait_workers([worker.url for worker in workers], timeout=30)


def generate(router: Router, count: int) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        payload = {"input_ids": [1, 2, 3], "sampling_params": {"sampling_seed": 5}, "return_logprob": True}
        answers = [await post(f"{router.url}/generate", payload) for _ in range(count)]
        await close_client()
        return answers

    return asyncio.run(run())


def test_it_starts_fast_and_small(tmp_path: Path) -> None:
    started = time.monotonic()
    router = start_router(arguments(tmp_path))
    seconds = time.monotonic() - started
    process = psutil.Process(router._process.pid).children(recursive=True)[-1]
    assert "slime.ray.router_process" in process.cmdline()
    resident = process.memory_info().rss
    router.stop()
    assert resident < 150e6
    assert seconds < 20.0  # 0.5 s on a quiet machine; with SGLang's tracing imported it would be half a minute


def test_requests_with_token_ids_go_round(router: Router, workers: Callable[[int], list[Worker]]) -> None:
    three = workers(3)
    register(router, three)
    answers = generate(router, 12)
    assert [len(worker.bodies) for worker in three] == [4, 4, 4]
    assert {answer["from"] for answer in answers} == {worker.url for worker in three}
    body = three[0].bodies[0]
    assert (body["input_ids"], body["sampling_params"]["sampling_seed"], body["return_logprob"]) == (
        [1, 2, 3],
        5,
        True,
    )


def test_a_dead_worker_costs_no_request(router: Router, workers: Callable[[int], list[Worker]]) -> None:
    two = workers(2)
    register(router, two)
    two[0].stop()
    assert {answer["from"] for answer in generate(router, 8)} == {two[1].url}


def test_a_worker_can_be_taken_out(router: Router, workers: Callable[[int], list[Worker]]) -> None:
    two = workers(2)
    register(router, two)
    deregister_worker(router.url, two[0].url)
    deregister_worker(router.url, two[0].url)  # once more does no harm
    deadline = time.monotonic() + 20
    while len(router.workers()) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {answer["from"] for answer in generate(router, 4)} == {two[1].url}


def test_a_refused_registration_names_url_and_answer(router: Router) -> None:
    """L12."""
    with pytest.raises(ControlError, match=rf"POST {router.url}/workers: status 4\d\d: .*url"):
        register_worker(router.url, {"worker_type": "regular"})


def test_a_missing_worker_is_named(router: Router) -> None:
    with pytest.raises(RouterError, match=r"no healthy worker http://127\.0\.0\.1:9 after 0 s"):
        router.wait_workers(["http://127.0.0.1:9"], timeout=0.2)


def test_a_given_port_is_used_and_a_busy_one_named(tmp_path: Path) -> None:
    """L19."""
    with hold_ports(1, 23000) as held:
        port = held.ports[0]
    router = start_router(arguments(tmp_path, sglang_router_port=port))
    try:
        assert router.url.endswith(f":{port}")
        with pytest.raises(OSError, match=rf"port {port} \(--sglang-router-port\) is already in use"):
            start_router(arguments(tmp_path, sglang_router_port=port))
    finally:
        router.stop()


def test_a_running_router_is_used(router: Router, tmp_path: Path) -> None:
    given = arguments(tmp_path, sglang_router_ip=router.ip, sglang_router_port=router.port)
    used = start_router(given)
    assert used.url == router.url
    used.stop()  # it isn't ours
    router.wait_ready(timeout=5)


def test_a_router_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    given = arguments(tmp_path, router_policy="no_such_policy")
    with pytest.raises(RouterError, match=r"ended while starting\nlog of the router: .*router-\d+\.log(.|\n)*no_such"):
        start_router(given)


def test_proxies_in_the_environment_do_not_capture_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: Callable[[int], list[Worker]]
) -> None:
    """L11."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    router = start_router(arguments(tmp_path))
    try:
        register(router, workers(1))
        assert len(generate(router, 2)) == 2
    finally:
        router.stop()


def test_an_ipv6_address_is_bracketed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P11."""
    monkeypatch.setenv("SLIME_HOST_IP", "::1")
    router = start_router(arguments(tmp_path))
    try:
        assert router.url == f"http://{host_port('::1', router.port)}"
        assert router.workers() == []
    finally:
        router.stop()


@pytest.mark.parametrize(
    "chosen", [{"router_policy": "manual"}, {"router_policy": "consistent_hashing"}, SLIME_ROUTER]
)
def test_a_session_stays_on_one_engine(
    tmp_path: Path, workers: Callable[[int], list[Worker]], chosen: dict[str, Any]
) -> None:
    """L18: the same session ×5 over three engines goes to one; eight sessions go to more than one."""
    args = arguments(tmp_path, **chosen)
    router = start_router(args)

    async def send(session: str) -> str:
        headers = request_headers(args, Sample(session_id=session))
        return (await post(f"{router.url}/generate", {"input_ids": [1]}, headers=headers))["from"]

    async def run() -> list[set[str]]:
        answers = [{await send(f"session-{number}") for _ in range(5)} for number in range(8)]
        await close_client()
        return answers

    try:
        register(router, workers(3))
        answers = asyncio.run(run())
        assert all(len(engines) == 1 for engines in answers)
        assert len(set.union(*answers)) > 1
    finally:
        router.stop()


def test_slimes_own_router_passes_bodies_on_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: Callable[[int], list[Worker]]
) -> None:
    """In its own process, at an IPv6 address (P11), and started again by the owner of its object after its death."""
    monkeypatch.setenv("SLIME_HOST_IP", "::1")
    router = start_router(arguments(tmp_path, **SLIME_ROUTER))
    try:
        register(router, two := workers(2))
        generate(router, 4)
        payload = {"input_ids": [1], "return_routed_experts": True, "custom": {"a": 1}}
        assert ControlClient(router.url).post("/generate", payload, timeout=30)["from"] in {w.url for w in two}
        assert payload in two[0].bodies + two[1].bodies
        assert sorted(len(worker.bodies) for worker in two) == [2, 3]
        router.stop()
        assert router.has_ended
        router.restart()
        assert router.workers() == []
    finally:
        router.stop()


def test_it_ends_with_its_owner(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from slime.ray.router import start_router\n"
        "from tests.integration.test_router import arguments\n"
        f"router = start_router(arguments({str(tmp_path)!r})); print(router._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    repository = Path(__file__).parents[2]
    owner = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=repository, timeout=120, check=False
    )
    supervisor = int(owner.stdout)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(supervisor) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(supervisor)
