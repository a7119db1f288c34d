"""PCIe links and errors while the weights go to the cards: the only time before serving when the
links are busy. An idle card shows a slow link, so one look at a quiet machine tells nothing."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.integration.launcher import machine

_QUERY = (
    "--query-gpu=pci.bus_id,pcie.link.gen.current,pcie.link.width.current,"
    "pcie.link.gen.max,pcie.link.width.max"
)

_PAUSE = 3.0
"""Seconds between two looks: nvidia-smi takes up to one."""


@dataclass
class LoadWatch:
    """The best link each card was seen with, and PCIe errors since the beginning."""

    run: Callable[..., str] = machine.run_tool
    top: Path = Path("/")
    _best: dict[str, tuple[int, int]] = field(default_factory=dict)
    _most: dict[str, tuple[int, int]] = field(default_factory=dict)
    _errors: int = field(init=False)
    _next: float = 0.0

    def __post_init__(self) -> None:
        self._errors = self._count_errors()

    def look(self) -> None:
        """Look once more, unless it was done a moment ago."""
        if time.monotonic() < self._next:
            return
        for line in self.run("nvidia-smi", _QUERY, "--format=csv,noheader,nounits").splitlines():
            bus, *numbers = (cell.strip() for cell in line.split(","))
            if len(numbers) == 4 and all(number.isdigit() for number in numbers):
                generation, width, most_generation, most_width = map(int, numbers)
                self._best[bus] = max(self._best.get(bus, (0, 0)), (width, generation))
                self._most[bus] = (most_width, most_generation)
        self._next = time.monotonic() + _PAUSE

    def findings(self) -> list[str]:
        """What is wrong with the links, in words."""
        found = []
        usual = Counter(self._best.values()).most_common(1)
        for bus, best in sorted(self._best.items()):
            less = [bound for bound in (self._most[bus], usual[0][0]) if best < bound]
            if less:
                found.append(
                    f"{bus} ran at PCIe {best[1]}.0 x{best[0]} while loading, and could at "
                    f"{less[0][1]}.0 x{less[0][0]}: look at the slot or riser (x8 cost a rig 15 %)."
                )
        errors = self._count_errors() - self._errors
        if errors > 0:
            found.append(f"{errors} PCIe errors (AER) while loading: a riser or a slot is bad.")
        return found

    def _count_errors(self) -> int:
        files = (self.top / "sys/bus/pci/devices").glob("*/aer_dev_*")
        total = 0
        for path in files:
            try:
                found = re.search(r"^TOTAL_ERR_\w+ (\d+)", path.read_text(), re.MULTILINE)
            except OSError:
                continue
            total += int(found[1]) if found else 0
        return total
