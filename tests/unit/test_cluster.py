"""A cluster that is too small, by what Ray would say of it (a stand-in: the tests share one cluster)."""

from __future__ import annotations

import pytest
import ray

from slime.ray.cluster import NotEnoughDevices, _check_devices
from tests.unit.test_placement_layout import layout_args


def test_too_few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many were asked for, how many there are, and which flags ask."""
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    with pytest.raises(NotEnoughDevices, match="asks for 9 CPU") as raised:
        _check_devices(layout_args())
    assert "has 4 CPU" in str(raised.value) and "--rollout-num-gpus 6" in str(raised.value)


def test_enough_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 9.0})
    _check_devices(layout_args())
