"""The shared SGLang server: log-probs against transformers, weights sent as trainers send them, and their proof.

Each test that changes the server's weights puts the tiny model's back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime.backends.megatron_utils.update_weight.tensor_payload import LOAD_FORMAT, TensorPayload
from slime.backends.sglang_utils.control_client import ControlError
from slime.backends.sglang_utils.weight_check import WeightCheck, WeightMismatch
from tests.support.engine import SGLangServer

LOG_PROB_TOLERANCE = 5e-5
SECONDS = 120.0
Weights = dict[str, Tensor]


def generate(server: SGLangServer, ids: list[int], **sampling: Any) -> dict[str, Any]:
    payload = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True, **sampling},
        "return_logprob": True,
    }
    return server.client.post("/generate", payload, timeout=SECONDS)


def output(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    entries = answer["meta_info"]["output_token_logprobs"]
    return [token for _, token, _ in entries], [log_prob for log_prob, _, _ in entries]


def weights_of(model_dir: Path) -> Weights:
    return {
        name: tensor for file in sorted(model_dir.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def perturbed(weights: Weights) -> Weights:
    generator = torch.Generator().manual_seed(3)
    return {
        name: tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }


def reference(model_dir: Path, weights: Weights | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    if weights is not None:
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
    return model


@torch.no_grad()
def expected_log_probs(model: Any, prompt: list[int], response: list[int], temperature: float) -> list[float]:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    return log_probs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


@torch.no_grad()
def greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    """The likeliest tokens, one after the other."""
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def send(server: SGLangServer, weights: Weights, version: str, bucket: int = 7) -> None:
    """As `UpdateWeightFromTensor` does, in buckets of `bucket` tensors."""
    call = server.client
    call.post("/pause_generation", {"mode": "abort"}, timeout=SECONDS)
    call.get("/flush_cache", timeout=SECONDS)
    call.post("/begin_weight_update", timeout=SECONDS)
    items = list(weights.items())
    for start in range(0, len(items), bucket):
        payload = TensorPayload(items[start : start + bucket])
        body = {"serialized_named_tensors": [payload.text], "load_format": LOAD_FORMAT}
        call.post("/update_weights_from_tensor", body, timeout=SECONDS)
    call.post("/end_weight_update", timeout=SECONDS)
    call.post("/update_weight_version", {"new_version": version, "abort_all_requests": False}, timeout=SECONDS)
    call.post("/continue_generation", timeout=SECONDS)


@pytest.fixture
def by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if shared memory were full: torch's manager of it would live as long as this test process."""
    monkeypatch.setattr("slime.backends.megatron_utils.update_weight.tensor_payload._SPARE_BYTES", 2**60)


@pytest.fixture
def server(sglang_server: SGLangServer, by_value: None) -> Iterator[SGLangServer]:
    yield sglang_server
    send(sglang_server, weights_of(sglang_server.model_dir), "default")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_transformers(sglang_server: SGLangServer, temperature: float) -> None:
    """X8's engine side: they are divided by the temperature."""
    model = reference(sglang_server.model_dir)
    rng = random.Random(0)
    top = min(300, model.config.vocab_size)
    prompts = [[rng.randrange(3, top) for _ in range(length)] for length in (1, 3, 17, 64, 5, 30)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: generate(sglang_server, ids, temperature=temperature), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        response, log_probs = output(answer)
        assert len(response) == 12
        assert log_probs == pytest.approx(
            expected_log_probs(model, prompt, response, temperature), abs=LOG_PROB_TOLERANCE
        )


def test_weights_that_are_sent_are_served_and_named(server: SGLangServer) -> None:
    changed = perturbed(weights_of(server.model_dir))
    prompt = [5, 10, 20, 30]
    send(server, changed, "17")
    answer = generate(server, prompt)
    response, log_probs = output(answer)
    new, old = (reference(server.model_dir, weights) for weights in (changed, None))
    assert log_probs == pytest.approx(expected_log_probs(new, prompt, response, 1.0), abs=LOG_PROB_TOLERANCE)
    assert log_probs != pytest.approx(expected_log_probs(old, prompt, response, 1.0), abs=100 * LOG_PROB_TOLERANCE)
    assert answer["meta_info"]["weight_version"] == "17"
    assert [part["version"] for part in answer["meta_info"]["weight_versions"]] == ["17"]


def test_weights_outside_of_an_update_are_refused(server: SGLangServer) -> None:
    payload = TensorPayload(list(weights_of(server.model_dir).items()))
    body = {"serialized_named_tensors": [payload.text], "load_format": LOAD_FORMAT}
    with pytest.raises(ControlError, match=r"update_weights_from_tensor: status 400: .*begin_weight_update"):
        server.client.post("/update_weights_from_tensor", body, timeout=SECONDS)


def test_equal_weights_are_proven_equal(server: SGLangServer, tmp_path: Path) -> None:
    """Also when they are not those that the server started from, as after a resume."""
    check = WeightCheck(server.client.request)
    changed = perturbed(weights_of(server.model_dir))
    check.run("snapshot")
    check.run("reset_tensors")
    with pytest.raises(WeightMismatch, match="not sent by the trainer"):
        check.run("compare")
    send(server, changed, "1")
    save_file(changed, tmp_path / "model-00000.safetensors")
    count = check.verify(str(tmp_path))
    assert check.run("compare") == count > 10


def test_one_value_that_differs_is_found(server: SGLangServer, tmp_path: Path) -> None:
    check = WeightCheck(server.client.request)
    weights = weights_of(server.model_dir)
    send(server, weights, "1")
    name = next(name for name in weights if name.endswith("layers.1.self_attn.k_proj.weight"))
    weights[name] = weights[name].clone()
    weights[name][3, 5] = torch.nextafter(weights[name][3, 5], torch.tensor(1e9))
    save_file(weights, tmp_path / "model-00000.safetensors")
    with pytest.raises(WeightMismatch, match=r"trainer's: 1 of \d+ tensors: .*layers\.1\.self_attn\.qkv"):
        check.verify(str(tmp_path))


def test_a_tensor_that_was_not_sent_is_found(server: SGLangServer, tmp_path: Path) -> None:
    check = WeightCheck(server.client.request)
    weights = weights_of(server.model_dir)
    save_file(weights, tmp_path / "model-00000.safetensors")
    check.run("reset_tensors")
    name = next(name for name in weights if name.endswith("layers.0.mlp.down_proj.weight"))
    send(server, {other: tensor for other, tensor in weights.items() if other != name}, "1")
    with pytest.raises(WeightMismatch, match=r"1 of \d+ tensors: .*layers\.0\.mlp\.down_proj"):
        check.verify(str(tmp_path))


def test_weights_that_change_after_the_proof_are_found(server: SGLangServer, tmp_path: Path) -> None:
    check = WeightCheck(server.client.request)
    weights = weights_of(server.model_dir)
    send(server, weights, "1")
    save_file(weights, tmp_path / "model-00000.safetensors")
    check.verify(str(tmp_path))
    send(server, perturbed(weights), "2")
    with pytest.raises(WeightMismatch, match="changed since they were verified"):
        check.run("compare")


def test_releasing_memory_does_no_harm(sglang_server: SGLangServer) -> None:
    before = output(generate(sglang_server, [5, 6], temperature=0.0))
    sglang_server.client.post("/release_memory_occupation", timeout=SECONDS)
    for tags in (["weights"], ["kv_cache", "cuda_graph"]):
        sglang_server.client.post("/resume_memory_occupation", {"tags": tags}, timeout=SECONDS)
    assert output(generate(sglang_server, [5, 6], temperature=0.0))[0] == before[0]
