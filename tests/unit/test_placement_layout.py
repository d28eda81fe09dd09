"""Which bundles train and which serve, and in which order they are."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.ray.placement_group import Placement, address_key, placement_group_layout, sort_bundles


def layout_args(**given: object) -> Namespace:
    defaults = {
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 2,
        "rollout_num_gpus": 6,
        "colocate": False,
        "debug_train_only": False,
        "debug_rollout_only": False,
        "rollout_external": False,
        "use_critic": False,
    }
    return Namespace(**{**defaults, **given})


@pytest.mark.parametrize(
    ("given", "total", "offset"),
    [
        ({}, 8, 2),
        ({"colocate": True}, 6, 0),
        ({"colocate": True, "rollout_num_gpus": 2}, 2, 0),
        ({"debug_train_only": True}, 2, 0),
        ({"debug_rollout_only": True}, 6, 0),
        ({"rollout_external": True}, 2, 2),
        ({"rollout_external": True, "debug_rollout_only": True}, 2, 0),
        ({"rollout_num_gpus": None, "debug_train_only": True}, 2, 0),
    ],
)
def test_layout_of_every_mode(given: dict[str, object], total: int, offset: int) -> None:
    """P10: external engines with rollout only have as many bundles as actors."""
    assert placement_group_layout(layout_args(**given)) == (total, offset)


def test_critic_shares_the_actors_devices() -> None:
    """P7: colocating two devices with a critic leaves a rollout pool of two."""
    assert placement_group_layout(layout_args(colocate=True, rollout_num_gpus=2, use_critic=True)).total == 2


def test_engines_begin_after_the_trainers() -> None:
    """P9: actor 2 + rollout 6 puts engines on devices 2..7, none of them a trainer's."""
    everything = Placement(None, list(range(8)), list(range(8)))
    rollout = everything.from_offset(placement_group_layout(layout_args()).rollout_offset)
    assert rollout.device_ids == [2, 3, 4, 5, 6, 7]


def test_device_ids_sort_as_numbers() -> None:
    """P8: twelve devices are ordered 0, 1, 2, ..., 11."""
    ids = [10, 11, *range(10)]
    order = sort_bundles(["10.0.0.1"] * 12, ids)
    assert [ids[i] for i in order] == list(range(12))


def test_nodes_sort_by_address_then_device() -> None:
    addresses = ["10.0.0.10", "10.0.0.9", "10.0.0.10", "10.0.0.9"]
    assert sort_bundles(addresses, [1, 1, 0, 0]) == [3, 1, 2, 0]


def test_ipv6_addresses_have_an_order() -> None:
    assert address_key("10.0.0.1") < address_key("[::1]") < address_key("fe80::2")
