"""What a technique found, as one line of the table and one object of the JSON file."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Result:
    """Runs of one technique; `violations` says what should never have happened."""

    technique: str
    runs: int = 0
    violations: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    _began: float = field(default_factory=time.monotonic, repr=False)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a figure."""
        self.figures[name] = self.figures.get(name, 0) + amount

    def fail(self, run: str, wrong: list[str]) -> None:
        """Something that should not be; `run` says how to see it again."""
        self.violations += [f"{run}: {text}" for text in wrong]

    def done(self) -> Result:
        self.seconds = time.monotonic() - self._began
        return self

    def document(self) -> dict[str, Any]:
        return {
            "technique": self.technique,
            "runs": self.runs,
            "violations": self.violations,
            "figures": self.figures,
            "seconds": round(self.seconds, 1),
        }
