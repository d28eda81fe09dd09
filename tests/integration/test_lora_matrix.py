"""Loss, adapter gradients and adapters after three steps do not depend on how the work is laid out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import lora_matrix
import pytest
from lora_matrix import LoraCase
from lora_models import write_random_adapter
from test_layout_matrix import CP2, EP2, ETP2, FULL, PP2, SELECTIVE, SP, TP2, VPP2
from tiny_hf import make_model

from tests.support.gloo_world import GlooWorld

PACKED = "--use-dynamic-batch-size --max-tokens-per-gpu 48"
PACKED_FULL = f"--use-dynamic-batch-size --max-tokens-per-gpu 90 {FULL}"
DENSE, MOE = "qwen3_tied", "qwen3_moe"

# name -> (processes, model, layout, batching)
CASES = {
    "dense-packed": (1, DENSE, "", PACKED_FULL),
    "dense-tp2": (2, DENSE, TP2, PACKED),
    "dense-tp2-recompute": (2, DENSE, TP2, PACKED_FULL),
    "dense-tp2_sp": (2, DENSE, f"{TP2} {SP}", PACKED),
    "dense-tp2_sp-recompute": (2, DENSE, f"{TP2} {SP}", PACKED_FULL),
    "dense-pp2": (2, DENSE, PP2, PACKED_FULL),
    "dense-pp2_vpp2": (2, DENSE, VPP2, "--micro-batch-size 1"),
    "dense-dp2": (2, DENSE, "", f"--micro-batch-size 2 {SELECTIVE}"),
    "dense-dp2-overlap": (2, DENSE, "--overlap-grad-reduce --overlap-param-gather", PACKED),
    "dense-cp2": (2, DENSE, CP2, PACKED),
    "moe-packed": (1, MOE, "", PACKED_FULL),
    "moe-tp2_sp": (2, MOE, f"{TP2} {SP} {ETP2}", PACKED),
    "moe-pp2": (2, MOE, PP2, PACKED_FULL),
    "moe-dp2": (2, MOE, "", PACKED),
    "moe-cp2": (2, MOE, CP2, PACKED_FULL),
    "moe-ep2": (2, MOE, EP2, PACKED),
    "moe-ep2_tp2": (2, MOE, f"{EP2} {TP2} {SP}", PACKED_FULL),
    # gate and up in one module; a delta net; latent attention and shared experts
    "qwen3_5-tp2_sp": (2, "qwen3_5", f"{TP2} {SP}", PACKED),
    "glm4-tp2_sp": (2, "glm4", f"{TP2} {SP}", PACKED_FULL),
    "deepseek-ep2_tp2": (2, "deepseek_v3", f"{EP2} {TP2} {SP} --expert-tensor-parallel-size 1", PACKED),
    "moe-ep2_tp2_etp2": (4, MOE, f"{EP2} {TP2} {SP} {ETP2}", "--micro-batch-size 1"),
}


@pytest.fixture(scope="module")
def references(
    tmp_path_factory: pytest.TempPathFactory, gloo_world: Callable[[int], GlooWorld]
) -> Callable[[str], tuple[LoraCase, str, str]]:
    """model -> (the single-process case, model directory, file of its outcome), made at the first request."""
    folder = tmp_path_factory.mktemp("lora")

    def reference(model: str) -> tuple[LoraCase, str, str]:
        directory, adapter, path = folder / model, folder / f"{model}-adapter", folder / f"{model}.pt"
        case = LoraCase(model, adapter=str(adapter))
        if not path.exists():
            make_model(model, directory)
            write_random_adapter(directory, adapter)
            gloo_world(1).run(lora_matrix.save_reference, case, str(directory), str(path))
        return case, str(directory), str(path)

    return reference


@pytest.mark.parametrize("name", CASES)
def test_layout_equals_one_process(
    gloo_world: Callable[[int], GlooWorld], references: Callable[[str], tuple[LoraCase, str, str]], name: str
) -> None:
    """Float32, relative 1e-5; the reference is the base with adapters off, and the base never changes."""
    size, model, layout, batching = CASES[name]
    case, *files = references(model)
    tolerance = 5e-5 if model == "qwen3_5" else case.tolerance  # its recurrence sums long in float32
    case = dataclasses.replace(case, layout=layout, batching=batching, permuted=size > 1, tolerance=tolerance)
    gloo_world(size).run(lora_matrix.compare, case, *files)
