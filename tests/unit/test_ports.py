"""Ports that are found and held (pitfalls P11, P12, L19)."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket

import pytest

from slime.ray import ports
from slime.ray.ports import bracket_host, find_available_port, hold_port, hold_ports, host_port, is_port_available


def _allocate(start: int, barrier: object, queue: multiprocessing.Queue) -> None:
    barrier.wait()
    with hold_ports(5, start) as held:
        queue.put(held.ports)
        barrier.wait()


def test_parallel_allocators_get_disjoint_ports() -> None:
    """P12: two processes ask at the same moment for five ports each."""
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_allocate, args=(21000, barrier, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    first, second = queue.get(timeout=30), queue.get(timeout=30)
    for worker in workers:
        worker.join(30)
    assert len({*first, *second}) == 10


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")])
def test_a_server_listens_on_a_held_port_but_no_one_else_can_take_it(family: int, address: str) -> None:
    """P12: the port is kept until the server listens, not only looked up."""
    with hold_ports(1, 21100) as held, socket.socket(family) as server, socket.socket(family) as other:
        port = held.ports[0]
        assert not is_port_available(port)
        with pytest.raises(OSError):
            other.bind((address, port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        held.release()
        assert not is_port_available(port)


def test_an_asyncio_server_takes_over_a_held_port() -> None:
    """P12: uvicorn and the router bind this way."""

    async def serve(port: int) -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
        server.close()
        await server.wait_closed()

    with hold_ports(1, 21200) as held:
        asyncio.run(serve(held.ports[0]))


def test_released_ports_are_free_again() -> None:
    held = hold_ports(3, 21300)
    held.release()
    assert all(is_port_available(port) for port in held.ports)


def test_consecutive_ports_skip_a_taken_one() -> None:
    """P12: consecutive ports are reserved as a run."""
    with hold_ports(1, 21400) as taken, hold_ports(4, taken.ports[0] - 2, consecutive=True) as held:
        assert held.ports == list(range(held.ports[0], held.ports[0] + 4))
        assert held.ports[0] > taken.ports[0]


def test_a_given_port_that_is_busy_is_named() -> None:
    """L19."""
    with hold_ports(1, 21500) as taken, pytest.raises(OSError, match=rf"port {taken.ports[0]} \(the router\)"):
        hold_port(taken.ports[0], "the router")


def test_no_port_left_says_how_many_were_asked_for() -> None:
    with pytest.raises(OSError, match="not 3 free ports from 65534"):
        hold_ports(3, 65534)


def test_find_available_port_skips_held_ones() -> None:
    with hold_ports(1, 21600) as taken:
        assert find_available_port(taken.ports[0]) > taken.ports[0]


@pytest.mark.parametrize(
    ("host", "bracketed"),
    [("::1", "[::1]"), ("fd00::2", "[fd00::2]"), ("[::1]", "[::1]"), ("10.0.0.1", "10.0.0.1"), ("node-3", "node-3")],
)
def test_ipv6_hosts_are_bracketed(host: str, bracketed: str) -> None:
    """P11."""
    assert bracket_host(host) == bracketed
    assert host_port(host, 29500) == f"{bracketed}:29500"


def test_ports_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_has_ipv6", lambda: False)
    with hold_ports(1, 21700) as held:
        assert not is_port_available(held.ports[0])
