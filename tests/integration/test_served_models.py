"""Two models of one configuration file behind routers of their own: the one that is trained, and a frozen one whose
engine spans two nodes of one device each."""

from __future__ import annotations

import asyncio
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.ray.engine_group import start_rollout_servers
from slime.ray.placement_group import create_placement_groups
from slime.rollout.sglang_rollout import get_model_url
from slime.utils.http_utils import close_client, post
from tests.support.base_config import BaseConfig

TOKENS = [5, 6, 7, 8]
DEPLOYMENT = """
sglang:
  - name: actor
    server_groups: [{{num_gpus: 1, overrides: {{max_total_tokens: 4096}}}}]
  - name: frozen
    model_path: {frozen}
    server_groups: [{{num_gpus: 2, num_gpus_per_engine: 2, overrides: {{max_total_tokens: 2048}}}}]
"""


def make_other_model(model: Path, folder: Path) -> Path:
    """The same architecture with other weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight * 1.5 for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def log_probs(args: Namespace, models: list[str]) -> list[list[float]]:
    """What each model thinks of TOKENS."""

    async def ask(model: str) -> list[float]:
        payload = {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        output: dict[str, Any] = await post(get_model_url(args, model), {**payload, "logprob_start_len": 0})
        return [value for value, _, _ in output["meta_info"]["input_token_logprobs"][1:]]

    async def run() -> list[list[float]]:
        answers = await asyncio.gather(*map(ask, models))
        await close_client()
        return list(answers)

    return asyncio.run(run())


def expected(model: Path) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([TOKENS])).logits[0]
    chosen = logits.log_softmax(-1)[range(len(TOKENS) - 1), TOKENS[1:]]
    return chosen.tolist()


def test_requests_go_to_the_model_that_is_named(ray_cluster: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Also: overrides reach their own group, weights are for the trained model alone, and the nodes of an engine find
    each other where the engine's first rank of the run is odd."""
    import ray
    from ray.util.placement_group import remove_placement_group

    base = BaseConfig(tmp_path)
    frozen = make_other_model(tiny_model_dir, tmp_path / "frozen")
    path = base.write("serve.yaml", DEPLOYMENT.format(frozen=frozen))
    del base.flags["--colocate"]
    args = base.parse(
        "--sglang-config", path, "--debug-rollout-only", "--hf-checkpoint", tiny_model_dir, "--log-dir", tmp_path,
        "--num-gpus-per-node", 1,
    )  # fmt: skip
    placement = create_placement_groups(args)["rollout"]
    servers = start_rollout_servers(args, placement)
    try:
        for server in servers.values():
            server.wait_ready()
        assert [(name, server.update_weights) for name, server in servers.items()] == [
            ("actor", True), ("frozen", False),
        ]  # fmt: skip
        assert (args.sglang_router_ip, args.sglang_router_port) == args.sglang_model_routers["actor"]
        found = log_probs(args, ["actor", "frozen"])
        assert found[0] == pytest.approx(expected(tiny_model_dir), abs=1e-3)
        assert found[1] == pytest.approx(expected(frozen), abs=1e-3)
        assert found[0] != pytest.approx(found[1], abs=1e-2)
        infos = {name: ray.get(server.engines[0].get_server_info.remote()) for name, server in servers.items()}
        assert {name: info["max_total_tokens"] for name, info in infos.items()} == {"frozen": 2048, "actor": 4096}
        assert (infos["frozen"]["nnodes"], infos["frozen"]["tp_size"]) == (2, 2)
        assert [len(server.all_engines) for server in servers.values()] == [1, 2]
        with pytest.raises(KeyError, match="no model 'reward' is served"):
            get_model_url(args, "reward")
    finally:
        for server in servers.values():
            server.shutdown()
        remove_placement_group(placement.pg)
