"""LoRA on every model family: what adapters compute, merging, PEFT folders, checkpoints, references."""

from __future__ import annotations

from collections.abc import Callable

import lora_scenarios
import pytest
import weight_scenarios
from lora_models import make_adapted
from lora_scenarios import RESUMES

from tests.support.gloo_world import GlooWorld

MODELS = [
    "qwen3",
    "qwen3_tied",
    "qwen2",
    "glm4",
    "qwen3_moe",
    "qwen2_moe",
    "glm4_moe",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5",
]
LAYOUTS = {
    "one process": "",
    "tp2": weight_scenarios.TP2,
    "pp2 vpp2": weight_scenarios.PP2_VPP2,
    "tp2 ep2": weight_scenarios.TP2_EP2,
    "tp2 etp2": weight_scenarios.ETP2,
}
ADAPTED = [("one process", name) for name in MODELS if name != "qwen3"]
ADAPTED += [("tp2", "qwen2"), ("tp2", "glm4"), ("pp2 vpp2", "qwen3_tied")]
ADAPTED += [("tp2 ep2", name) for name in ("qwen2_moe", "deepseek_v3")]
ADAPTED += [("tp2", "qwen3_5"), ("tp2 ep2", "qwen3_next")]
ADAPTED += [("tp2 etp2", name) for name in ("qwen3_moe", "glm4_moe")]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("lora")
    for name in MODELS:
        make_adapted(name, root)
    return {"root": str(root)}


@pytest.mark.parametrize(("layout", "name"), ADAPTED)
def test_adapted_model(
    gloo_world: Callable[[int], GlooWorld], context: dict[str, str], layout: str, name: str
) -> None:
    """A PEFT folder is loaded, computed, merged and exported as transformers does with the deltas added by hand."""
    size = 1 if layout == "one process" else 2
    gloo_world(size).run(lora_scenarios.check_adapted, context, name, LAYOUTS[layout])


@pytest.mark.parametrize("name", ["bf16", "targets", "refuses", "other_base", "critic"])
def test_one_process(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], name: str) -> None:
    gloo_world(1).run(getattr(lora_scenarios, f"scenario_{name}"), context)


def test_new_adapters(gloo_world: Callable[[int], GlooWorld], context: dict[str, str]) -> None:
    """They change no logit, bit for bit, and are the same under every layout."""
    gloo_world(1).run(lora_scenarios.scenario_new_adapters_change_nothing, context)
    gloo_world(2).run(lora_scenarios.scenario_new_adapters_by_layout, context)


@pytest.mark.parametrize("name", RESUMES)
def test_resume(gloo_world: Callable[[int], GlooWorld], context: dict[str, str], name: str) -> None:
    """C3 with adapters alone in the checkpoint."""
    size, *case = RESUMES[name]
    gloo_world(size).run(lora_scenarios.check_resume, context, *case)
