"""`train.py` on a server that others run: rollouts, and weights by the distributed route."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.support.tiny_run import tiny_run
from tests.support.train_cli import TrainCli

if TYPE_CHECKING:
    from tests.support.engine import SGLangServer

RUN_TIMEOUT_S = 300


@pytest.fixture
def server(sglang_server: SGLangServer) -> Iterator[SGLangServer]:
    """The shared server, which gets its own weights back."""
    version = sglang_server.client.get("/model_info", timeout=60)["weight_version"]
    yield sglang_server
    own = {"model_path": str(sglang_server.model_dir), "weight_version": version}
    sglang_server.client.post("/update_weights_from_disk", own, timeout=120)


def test_weights_reach_a_server_that_the_run_has_not_started(
    ray_cluster: str, train_cli: TrainCli, server: SGLangServer, tmp_path: Path
) -> None:
    """Bit for bit, after each step; and the server is there afterwards, with what was trained last."""
    flags = tiny_run(
        server.model_dir, tmp_path, colocate=None, rollout_external_engine_addrs=[urlsplit(server.url).netloc],
        check_weight_update_equal=True, use_kl_loss=None, kl_loss_coef=None, kl_loss_type=None, ref_load=None,
    )  # fmt: skip
    result = train_cli.run(*flags, timeout=RUN_TIMEOUT_S).check()
    assert set(result.series("train/loss")) == {0, 1}
    assert server.client.get("/model_info", timeout=60)["weight_version"] == "3"
    answer = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    assert server.client.post("/generate", answer, timeout=60)["meta_info"]["completion_tokens"] == 1
