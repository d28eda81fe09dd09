"""What can go wrong with a grading that isn't the model's fault."""

from __future__ import annotations


class UngradableRow(ValueError):
    """The row's label or metadata lacks what its rm type needs: a mistake in the data, no wrong answer."""


class MissingResource(RuntimeError):
    """A grader needs something that isn't installed on this machine."""


class GraderError(RuntimeError):
    """A grader raised, or its process died."""


class GraderTimeout(GraderError):
    """A grader did not answer in time; its process is gone."""


class GraderUnavailable(RuntimeError):
    """What a rm type needs can't be imported or found: a mistake in the installation, not in an answer."""
