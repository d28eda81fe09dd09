"""The optimizer's part of a checkpoint: what must exist before it is saved, and moving it to another layout.

Written for megatron-core 0.16.1. Under expert parallelism its optimizer is a chain of two, one for the experts; else
it is a single one, and its loader takes only what has its own form. The tensors are stored by weight either way; what
differs is where the parameter groups stand, which this module rearranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

_EXPERTS = "is_expert_parallel"


def create_missing_moments(optimizer: MegatronOptimizer) -> None:
    """Adam's moments, which come into being with the first step: zeros, so that a run can be saved before it."""
    for part in optimizer_parts(optimizer):
        if part.optimizer is not None and len(part.optimizer.state) == 0:
            part.init_state_fn(part.optimizer, part.config)


def optimizer_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers of a chain, or the only one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def fit_optimizer_state(optimizer: MegatronOptimizer, loaded: dict[Any, Any]) -> dict[Any, Any]:
    """`loaded`, a chain's state or a single optimizer's, in the form that `optimizer` loads.

    A group of experts' weights that has no counterpart takes the settings of the other weights' group, and the other
    way round; they are alike but for the mark.

    Raises:
        ValueError: the checkpoint has no group of parameters like one of this run's.
    """
    parts = optimizer_parts(optimizer)
    saved = [loaded[index] for index in sorted(key for key in loaded if isinstance(key, int))]
    saved_parts = [part for part in [loaded, *saved] if "optimizer" in part]
    if [_marks(part.optimizer.param_groups) for part in parts] == [
        _marks(part["optimizer"]["param_groups"]) for part in saved_parts
    ]:
        return loaded
    groups = [group for part in saved_parts for group in part["optimizer"]["param_groups"]]
    common = {name: value for name, value in saved_parts[0].items() if isinstance(name, str) and name != "param_state"}
    fitted = []
    for index, part in enumerate(parts):
        own = loaded if len(parts) == 1 else loaded[index]
        matching = [_matching_group(group, groups) for group in part.optimizer.param_groups]
        inner = {**saved_parts[0]["optimizer"], "param_groups": matching}
        fitted.append({**common, "optimizer": inner, "param_state": own["param_state"]})
    return fitted[0] if len(parts) == 1 else dict(enumerate(fitted))


def _marks(groups: Sequence[dict[str, Any]]) -> set[bool]:
    """Whether a part has the experts' weights, others, or both."""
    return {bool(group.get(_EXPERTS)) for group in groups}


def _matching_group(ours: dict[str, Any], saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    from megatron.core.optimizer import param_group_identifier_keys

    def differences(group: dict[str, Any]) -> set[str]:
        return {key for key in param_group_identifier_keys if group.get(key) != ours.get(key)}

    candidates = [group for group in saved if differences(group) <= {_EXPERTS}]
    if not candidates:
        shown = {key: ours.get(key) for key in param_group_identifier_keys}
        raise ValueError(f"the checkpoint's optimizer has no group of parameters like {shown}")
    return {**min(candidates, key=lambda group: len(differences(group))), _EXPERTS: ours[_EXPERTS]}
