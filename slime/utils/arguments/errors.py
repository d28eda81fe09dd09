"""The error of a configuration that can't run, and the search for the name that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """One or more problems of the configuration, each a sentence that names the flag, key or file."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("; ".join(self.problems))


class Problems:
    """Collects problems so that one run of the checks reports all of them."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, problem: str) -> None:
        self.found.append(problem)

    def require(self, condition: object, problem: str) -> None:
        """Add `problem` unless `condition` holds."""
        if not condition:
            self.add(problem)

    def raise_if_any(self) -> None:
        """Raise ConfigError with everything found so far."""
        if self.found:
            raise ConfigError(self.found)


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names that look most like `name`, best first; a name that starts with `name` counts as near."""
    candidates = list(known)
    starts = sorted((other for other in candidates if other.startswith(name)), key=len)[:count]
    close = difflib.get_close_matches(name, candidates, n=count, cutoff=0.7)
    return list(dict.fromkeys([*close, *starts]))[:count]


def suggestion(name: str, known: Iterable[str]) -> str:
    """ " (did you mean a, b?)" or an empty string."""
    names = nearest(name, known)
    return f" (did you mean {', '.join(names)}?)" if names else ""
