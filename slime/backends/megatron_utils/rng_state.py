"""The random state of this rank as one object that a checkpoint can hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from slime.utils.accelerator import current


def get_rng_state() -> dict[str, Any]:
    """Python, NumPy, torch, the device, and Megatron's model-parallel streams (dropout, initialisation)."""
    from megatron.core import tensor_parallel

    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "device_rng_state": current().get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue from what `get_rng_state` returned."""
    from megatron.core import tensor_parallel

    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    current().set_rng_state(state["device_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
