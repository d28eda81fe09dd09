"""An engine actor that has no server, and fails as it is told."""

from __future__ import annotations

import threading
import time


class StandInEngine:
    """An engine actor without a server."""

    def __init__(self, name: str, breaks: bool) -> None:
        self.name = name
        self.breaks = breaks
        self.registered = 0
        self.hangs = threading.Event()
        self.dies = threading.Event()

    def init(self) -> None:
        if self.breaks:
            raise RuntimeError(f"{self.name} has no memory")

    def get_url(self) -> str:
        return f"http://127.0.0.1:9/{self.name}"

    def register(self, router_ip: str, router_port: int) -> None:
        self.registered += 1

    def registrations(self) -> int:
        return self.registered

    def watch(self) -> None:
        self.dies.wait()
        raise RuntimeError(f"{self.name} has died")

    def health_generate(self, timeout: float) -> bool:
        if self.hangs.is_set():
            time.sleep(60)
        return True

    get_server_info = health_generate

    def hang(self) -> None:
        self.hangs.set()

    def die(self) -> None:
        self.dies.set()
