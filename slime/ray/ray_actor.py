"""What each Ray actor can tell about the node that it runs on."""

from __future__ import annotations

import ray

from slime.utils.misc import get_free_port


class RayActor:
    """Mixin of actors that others must find by address."""

    @staticmethod
    def get_node_ip() -> str:
        return ray.util.get_node_ip_address().strip("[]")

    def get_master_addr_and_port(self) -> tuple[str, int]:
        """Address and free port for a process group whose rank 0 is this actor."""
        return self.get_node_ip(), get_free_port()
