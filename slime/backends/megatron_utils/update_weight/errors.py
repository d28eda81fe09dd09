"""What the driver learns of an update that failed. It imports nothing, since the driver has no torch."""

from __future__ import annotations


class WeightUpdateError(RuntimeError):
    """Not all engines have all weights. They stay paused, so that a mix is never served, until an update succeeds."""
