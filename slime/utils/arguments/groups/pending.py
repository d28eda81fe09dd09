"""What the settings that aren't built yet wait for, in the words of the error message."""

from __future__ import annotations

DISAGGREGATED = "it is not built yet"
FAULT_TOLERANCE = "it comes with fault tolerance"
ROLLOUT = "it comes with the wider set of rollout features"
MODELS = "it comes with more model families"
TEACHER = "it comes with the teacher server"
DEBUGGING = "it comes with dumps and profiling"
