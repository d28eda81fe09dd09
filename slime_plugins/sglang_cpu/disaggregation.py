"""Prefill and decode engines on a CPU (sglang 0.5.23): the KV cache travels by mooncake over TCP.

Needs the package mooncake-transfer-engine-non-cuda, libibverbs (which it links to, also for TCP), and
--sglang-disaggregation-transfer-backend mooncake_tcp.
"""

from __future__ import annotations

from typing import Any

_SWITCH = "supports_host_tensor_indices"


def prepare(settings: dict[str, Any]) -> None:
    """Let a prefill server hand over page numbers without the pinned memory and the event of a GPU.

    Raises:
        RuntimeError: SGLang has no such switch any more.
    """
    if settings.get("disaggregation_mode") != "prefill":
        return
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    if not hasattr(MooncakeKVSender, _SWITCH):
        raise RuntimeError(f"sglang's MooncakeKVSender has no {_SWITCH} (written for sglang 0.5.23)")
    setattr(MooncakeKVSender, _SWITCH, False)
