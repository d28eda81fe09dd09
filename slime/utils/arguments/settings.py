"""What a user has set, and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Settings:
    """Explicit values by attribute, and for each where it stands ("--lr", "run.yaml: lr")."""

    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)

    def set(self, dest: str, value: Any, origin: str) -> None:
        self.values[dest] = value
        self.origin[dest] = origin

    def over(self, lower: Settings) -> Settings:
        """These settings, and those of `lower` that these don't have."""
        return Settings({**lower.values, **self.values}, {**lower.origin, **self.origin})
