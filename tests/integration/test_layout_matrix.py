"""Loss, every gradient and the parameters after three steps do not depend on how the work is laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import layout_matrix
import pytest
from layout_matrix import Case
from tiny_hf import make_model

from tests.support.gloo_world import GlooWorld

TP2, SP = "--tensor-model-parallel-size 2", "--sequence-parallel"
PP2, CP2 = "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
EP2, ETP1, ETP2 = (
    "--expert-model-parallel-size 2",
    "--expert-tensor-parallel-size 1",
    "--expert-tensor-parallel-size 2",
)

# name -> (processes, flags)
DENSE = {
    "tp2": (2, TP2),
    "tp2_sp": (2, f"{TP2} {SP}"),
    "pp2": (2, PP2),
    "pp2_vpp2": (2, VPP2),
    "dp2": (2, ""),
    "cp2": (2, CP2),
    "tp2_pp2": (4, f"{TP2} {PP2}"),
    "tp2_cp2": (4, f"{TP2} {CP2}"),
    "pp2_cp2": (4, f"{PP2} {CP2}"),
}
# experts split over tensor-parallel ranks need sequence parallelism, and expert-tensor parallelism or experts apart
MOE = {
    "tp2_sp": (2, f"{TP2} {SP} {ETP2}"),
    "pp2": (2, PP2),
    "pp2_vpp2": (2, VPP2),
    "dp2": (2, ""),
    "cp2": (2, CP2),
    "ep2": (2, EP2),
    "tp2_pp2": (4, f"{TP2} {SP} {PP2} {ETP2}"),
    "tp2_cp2": (4, f"{TP2} {SP} {CP2} {ETP2}"),
    "pp2_cp2": (4, f"{PP2} {CP2}"),
    "ep2_tp2": (2, f"{EP2} {TP2} {SP} {ETP1}"),
    "ep2_tp2_etp2": (4, f"{EP2} {TP2} {SP} {ETP2}"),
    "ep2_dp2": (4, EP2),
}
SELECTIVE = "--recompute-granularity selective"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# name -> (flags, samples permuted, rollout)
BATCHINGS = {
    "packed": ("--use-dynamic-batch-size --max-tokens-per-gpu 48", False, "plain"),
    "packed_full": (f"--use-dynamic-batch-size --max-tokens-per-gpu 90 --balance-data {FULL}", True, "plain"),
    "mb1_padded": (f"--micro-batch-size 1 --data-pad-size-multiplier 64 {SELECTIVE}", True, "plain"),
    "mb1_half_empty": (f"--micro-batch-size 1 {FULL}", False, "half_empty"),
    "mb2": (f"--micro-batch-size 2 {SELECTIVE}", False, "plain"),
    "mb4": ("--micro-batch-size 4 --data-pad-size-multiplier 16", True, "plain"),
}


# other families: norms after blocks, shared experts, latent attention under layouts that cut them
FAMILIES = {
    "glm4": ["tp2_sp", "pp2"],
    "qwen2_moe": ["tp2_sp"],
    "glm4_moe": ["ep2_tp2"],
    "deepseek_v3": ["tp2_sp", "ep2_tp2", "cp2", "pp2_vpp2"],
}


def cases() -> Iterator[pytest.param]:
    """Every layout with every batching that its data-parallel ranks can share out."""
    for model, layouts in (("qwen3_tied", DENSE), ("qwen3_moe", MOE)):
        for layout, (size, flags) in layouts.items():
            for batching, (batch_flags, permuted, rollout) in BATCHINGS.items():
                if layout == "ep2_dp2" and batching == "mb4":
                    continue  # 4 ranks x 4 samples are more than a step has
                case = Case(model, flags, batch_flags, permuted, rollout)
                yield pytest.param(size, case, id=f"{model}-{layout}-{batching}")
    for model, names in FAMILIES.items():
        for layout in names:
            size, flags = (DENSE if model == "glm4" else MOE)[layout]
            case = Case(model, flags, *BATCHINGS["packed_full"], tolerance=1e-4)
            yield pytest.param(size, case, id=f"{model}-{layout}-packed_full")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def references(folder: Path, gloo_world: Callable[[int], GlooWorld]) -> Callable[[str, str], tuple[str, str]]:
    """(model, rollout) -> (model directory, file of the single-process outcome), made at the first request."""

    def reference(model: str, rollout: str) -> tuple[str, str]:
        directory, path = folder / model, folder / f"{model}-{rollout}.pt"
        if not directory.exists():
            make_model(model, directory)
        if not path.exists():
            gloo_world(1).run(layout_matrix.save_reference, model, rollout, str(directory), str(path))
        return str(directory), str(path)

    return reference


@pytest.mark.parametrize(("size", "case"), cases())
def test_layout_equals_one_process(
    gloo_world: Callable[[int], GlooWorld],
    references: Callable[[str, str], tuple[str, str]],
    size: int,
    case: Case,
) -> None:
    """Float32, relative 1e-5. X1, X16, X17; one sample of each step is masked out, and lengths don't divide."""
    gloo_world(size).run(layout_matrix.compare, case, *references(case.model, case.rollout))
