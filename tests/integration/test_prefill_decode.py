"""Engines that prefill and engines that decode, on the CPU: the KV cache travels by mooncake over TCP.

Skipped where mooncake-transfer-engine-non-cuda (which needs libibverbs) is not installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from slime.backends.sglang_utils.control_client import ControlClient
from slime.ray.engine_group import start_rollout_servers
from slime.ray.placement_group import create_placement_groups
from tests.support.base_config import BaseConfig

if TYPE_CHECKING:
    from tests.support.engine import SGLangServer

pytest.importorskip("mooncake.engine", exc_type=ImportError)


def test_both_kinds_together_answer_as_one_engine(
    ray_cluster: str, sglang_server: SGLangServer, tmp_path: Path
) -> None:
    """The prefill engine is registered with its bootstrap port, where the decode engine finds the cache."""
    from ray.util.placement_group import remove_placement_group

    base = BaseConfig(tmp_path)
    del base.flags["--colocate"]
    args = base.parse(
        "--prefill-num-servers", 1, "--rollout-num-gpus", 2, "--debug-rollout-only", "--log-dir", tmp_path,
        "--hf-checkpoint", sglang_server.model_dir, "--sglang-disaggregation-transfer-backend", "mooncake_tcp",
        "--sglang-max-total-tokens", 4096,
    )  # fmt: skip
    placement = create_placement_groups(args)["rollout"]
    (server,) = start_rollout_servers(args, placement).values()
    try:
        server.wait_ready()
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        payload = {"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "return_logprob": True}
        clients = (ControlClient(server.router.url), sglang_server.client)
        apart, alone = (_tokens(client.post("/generate", payload, timeout=60)) for client in clients)
        assert [token for _, token in apart] == [token for _, token in alone]
        assert [value for value, _ in apart] == pytest.approx([value for value, _ in alone], abs=1e-4)
    finally:
        server.shutdown()
        remove_placement_group(placement.pg)


def _tokens(answer: dict[str, Any]) -> list[tuple[float, int]]:
    return [(value, token) for value, token, _ in answer["meta_info"]["output_token_logprobs"]]
