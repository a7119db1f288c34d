"""How many experts each rank holds, and the ids under which they are loaded and run. Pure numbers.

Experts 0, 1, ... go to the ranks in order: rank r of the split (108, 92, 92, 92) holds those from
the sum of what comes before it. FlashInfer's CUTLASS kernel knows even splits only: with n weights
on a rank it takes the ids from rank * n on, n of them, for its own, out of n for each rank. So each
rank sees ids of its own: those it holds in its window, and one beside it for all the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.errors import ConfigError

GIB_PER_EXPERT = 0.70
"""Of a rank's memory, for one expert in all layers of DeepSeek V4.1 Flash: 3 matrices of
5120 x 2304, in mxfp4 with a scale for 32 numbers, in 40 layers."""


def parse_split(value: str) -> tuple[int, ...] | None:
    """Experts of each rank; None for "auto". Raises ConfigError for anything else."""
    if value.strip().lower() == "auto":
        return None
    try:
        split = tuple(int(part) for part in value.split(","))
    except ValueError:
        split = ()
    if len(split) < 2 or min(split) < 1:
        raise ConfigError(
            f"KVTIER_EXPERT_SPLIT is {value}: give the number of experts of each rank, such as "
            "108,92,92,92, or auto."
        )
    return split


def derive_split(memory_gib: Sequence[float], experts: int) -> tuple[int, ...]:
    """The split that leaves the same memory free on all cards. Raises ConfigError if none does."""
    even = experts / len(memory_gib)
    mean = sum(memory_gib) / len(memory_gib)
    exact = [even + (memory - mean) / GIB_PER_EXPERT for memory in memory_gib]
    split = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda rank: split[rank] - exact[rank])
    for rank in by_rest[: experts - sum(split)]:
        split[rank] += 1
    if min(split) < 1:
        sizes = ", ".join(f"{memory:.1f}" for memory in memory_gib)
        raise ConfigError(
            f"Cards of {sizes} GiB are too unlike for {experts} experts of {GIB_PER_EXPERT} GiB: "
            "set KVTIER_EXPERT_SPLIT to the number of experts of each rank."
        )
    return tuple(split)


class Share(NamedTuple):
    """The experts of one rank."""

    split: tuple[int, ...]
    rank: int

    @property
    def first(self) -> int:
        return sum(self.split[: self.rank])

    @property
    def held(self) -> int:
        return self.split[self.rank]

    def slot(self, expert: int) -> int:
        """Where this rank loads an expert; -1 for one of another rank."""
        return expert - self.first if self.first <= expert < self.first + self.held else -1

    def kernel_ids(self) -> list[int]:
        """What the kernel of this rank must be given in place of expert 0, 1, ..."""
        beside = (self.rank + 1) % len(self.split) * self.held
        slots = (self.slot(expert) for expert in range(sum(self.split)))
        return [beside if slot < 0 else self.rank * self.held + slot for slot in slots]
