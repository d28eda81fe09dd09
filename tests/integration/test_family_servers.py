"""A live SGLang server of each family that its CPU form can run beside Qwen3.

It gives transformers' greedy tokens and log-probs, with the weights of the folder and with others that are sent.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import test_engine_weights as engine
import tiny_hf
from safetensors.torch import save_file

from tests.support.engine import SGLangServer, start_server

START_SECONDS = 400.0
# SGLang pads an MLP to a multiple of 128 that it then can't fill, and knows no dense layers in Qwen2-MoE.
CHANGES: dict[str, dict[str, Any]] = {
    "glm4": {"intermediate_size": 128},
    "glm4_moe": {},
    "qwen2_moe": {"mlp_only_layers": []},
}
PROMPTS = ([5, 10, 20, 30], [7] * 9 + [3, 99, 120])


@pytest.mark.parametrize("family", list(CHANGES))
def test_a_server_of_the_family(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.backends.megatron_utils.update_weight.tensor_payload._SPARE_BYTES", 2**60)
    folder = tiny_hf.make_model(family, tmp_path / family, **CHANGES[family])
    (folder / "tokenizer_config.json").unlink()  # a stand-in that no tokenizer can be read from
    process = start_server(folder, tmp_path / "log", skip_tokenizer_init=True, context_length=100)
    try:
        process.wait_ready(START_SECONDS)
        server = SGLangServer(process.url, folder, process.log_path, process.client)
        check_answers(server, folder)
        changed = engine.perturbed(engine.weights_of(folder))
        engine.send(server, changed, "2")
        check_answers(server, with_weights(folder, tmp_path / "changed", changed))
    finally:
        process.stop()


def with_weights(folder: Path, copy: Path, weights: engine.Weights) -> Path:
    """A model folder with other weights."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def check_answers(server: SGLangServer, folder: Path) -> None:
    """Greedy answers of the server under transformers with the folder's weights."""
    model = engine.reference(folder)
    for prompt in PROMPTS:
        response, log_probs = engine.output(engine.generate(server, prompt, temperature=0.0))
        expected = engine.expected_log_probs(model, prompt, response, 1.0)
        assert log_probs == pytest.approx(expected, abs=engine.LOG_PROB_TOLERANCE)
        assert response == engine.greedy(model, prompt, len(response))
