"""Under which address other processes reach this host."""

from __future__ import annotations

import ipaddress
import os
import socket


def get_host_info() -> tuple[str, str]:
    """(host name, address) under which other processes reach this host.

    SLIME_HOST_IP wins; else the address of the interface of the default route (IPv6 first when SLIME_PREFER_IPV6 is
    set); else the loopback address. The address stands without brackets.
    """
    name = socket.gethostname()
    given = os.environ.get("SLIME_HOST_IP")
    if given:
        return name, given.strip("[]")
    families = [(socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888")]
    if os.environ.get("SLIME_PREFER_IPV6", "0").lower() in ("1", "true", "yes"):
        families.reverse()
    for family, outside in families:
        address = _address_towards(family, outside)
        if address is not None:
            return name, address
    return name, "127.0.0.1"


def _address_towards(family: int, outside: str) -> str | None:
    """This host's address on the way to `outside`; no packet is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((outside, 80))
            address = sock.getsockname()[0]
    except OSError:
        return None
    return None if ipaddress.ip_address(address.partition("%")[0]).is_unspecified else address
