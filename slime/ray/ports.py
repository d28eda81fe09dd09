"""TCP ports that are found and held until the server they are for listens on them.

A port that is only looked up is free for anyone until it is bound (check, then use). Here each port stays bound
by a socket that never listens. Servers bind with SO_REUSEADDR, which Linux lets share a port with a socket that
has the option and does not listen; an allocator's first bind is without it, so no second allocator gets the
port.
"""

from __future__ import annotations

import socket
from types import TracebackType

LOWEST, HIGHEST = 1024, 65535


class HeldPorts:
    """Ports that this process keeps from everyone but a server that binds with SO_REUSEADDR."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets
        self.ports = [sock.getsockname()[1] for sock in sockets]

    def release(self) -> None:
        """Let go of the ports; call it once the server listens, or is gone."""
        for sock in self._sockets:
            sock.close()
        self._sockets = []

    def __enter__(self) -> HeldPorts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def hold_ports(count: int = 1, start: int = 15000, consecutive: bool = False) -> HeldPorts:
    """Find `count` free ports at or above `start` and hold them.

    Args:
        count: how many.
        start: the first port to try. Keep it under the system's ephemeral range (32768 on Linux).
        consecutive: they must follow one another.

    Raises:
        OSError: there are not as many free ports from `start` on.
    """
    held: list[socket.socket] = []
    for port in range(start, HIGHEST + 1):
        if len(held) == count:
            break
        sock = _try_hold(port)
        if sock is not None:
            held.append(sock)
        elif consecutive:
            _close_all(held)
            held = []
    if len(held) < count:
        _close_all(held)
        kind = "consecutive free ports" if consecutive else "free ports"
        raise OSError(f"there are not {count} {kind} from {start} to {HIGHEST}")
    return HeldPorts(held)


def hold_port(port: int, purpose: str) -> HeldPorts:
    """Hold one given port.

    Raises:
        OSError: another process has it; the message names the port and what it was for.
    """
    sock = _try_hold(port)
    if sock is None:
        raise OSError(f"port {port} ({purpose}) is already in use on this host; give another one or free it")
    return HeldPorts([sock])


def is_port_available(port: int) -> bool:
    """Whether a server could bind the port on every address of this host now."""
    sock = _try_hold(port)
    if sock is None:
        return False
    sock.close()
    return True


def find_available_port(base_port: int) -> int:
    """The first port from `base_port` on that is free now; nothing keeps it free (see `hold_ports`)."""
    with hold_ports(1, base_port) as held:
        return held.ports[0]


def bracket_host(host: str) -> str:
    """`host` as it stands in a URL: an IPv6 address in brackets, anything else unchanged."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def host_port(host: str, port: int) -> str:
    """`host:port`, with brackets round an IPv6 address."""
    return f"{bracket_host(host)}:{port}"


def _try_hold(port: int) -> socket.socket | None:
    if not LOWEST <= port <= HIGHEST:
        return None
    family = socket.AF_INET6 if _has_ipv6() else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # the IPv4 addresses too
        sock.bind(("", port))
    except OSError:
        sock.close()
        return None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock


def _has_ipv6() -> bool:
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::", 0))
    except OSError:
        return False
    return True


def _close_all(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
