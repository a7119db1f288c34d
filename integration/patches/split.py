"""How many experts each rank holds, and the ids under which they are loaded and run. Pure numbers.

Experts 0, 1, ... go to the ranks in order: rank r of the split (108, 92, 92, 92) holds those from
the sum of what comes before it. FlashInfer's CUTLASS kernel knows even splits only: with n weights
on a rank it takes the ids from rank * n on, n of them, for its own, out of n for each rank. So each
rank sees ids of its own: those it holds in its window, and one beside it for all the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
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


def derive_split(
    memory_gib: Sequence[float], experts: int, each: float = GIB_PER_EXPERT
) -> tuple[int, ...]:
    """The split that leaves the same memory free on all cards: as much on equal cards, as nearly as
    whole experts allow on others. `each`: GiB of an expert. Raises ConfigError if none does.

    Two equal cards report a few MiB more or less, and 3 of 4 cards get the same number only if it
    is looked for: each card by itself would be rounded to 109, 92, 92, 91.
    """
    even = experts / len(memory_gib)
    mean = sum(memory_gib) / len(memory_gib)
    groups = _equal(memory_gib)
    exact = [0.0] * len(memory_gib)
    for group in groups:
        usual = sum(memory_gib[card] for card in group) / len(group)
        for card in group:
            exact[card] = even + (usual - mean) / each
    split = min(_splits(exact, groups, experts), key=lambda some: _cost(some, exact))
    if min(split) < 1:
        sizes = ", ".join(f"{memory:.1f}" for memory in memory_gib)
        raise ConfigError(
            f"Cards of {sizes} GiB are too unlike for {experts} experts of {each:.2f} GiB: "
            "set KVTIER_EXPERT_SPLIT to the number of experts of each rank."
        )
    return split


_EQUAL_SHARE = 0.01
"""Cards whose memory differs by less than this are equal."""


def _equal(memory_gib: Sequence[float]) -> list[list[int]]:
    """The cards in groups of equals."""
    groups: list[list[int]] = []
    for card in sorted(range(len(memory_gib)), key=lambda card: memory_gib[card]):
        least = memory_gib[groups[-1][0]] if groups else 0.0
        if groups and memory_gib[card] - least <= _EQUAL_SHARE * least:
            groups[-1].append(card)
        else:
            groups.append([card])
    return groups


def _splits(
    exact: Sequence[float], groups: Sequence[Sequence[int]], experts: int
) -> Iterator[tuple[int, ...]]:
    """Splits near `exact`: those in which equal cards hold the same, if there are any, and the one
    in which each card is rounded by itself."""
    yield _rounded(exact, range(len(exact)), experts)
    several = [group for group in groups if len(group) > 1]
    single = [group[0] for group in groups if len(group) == 1]
    for steps in itertools.product((0, 1), repeat=len(several)):
        shares = list(exact)
        for group, step in zip(several, steps, strict=True):
            for card in group:
                shares[card] = math.floor(exact[card]) + step
        left = experts - sum(shares)
        for card in single:
            shares[card] += left / len(single)
        if abs(sum(shares) - experts) < 0.5:
            yield _rounded(shares, single, experts)


def _rounded(shares: Sequence[float], cards: Sequence[int], experts: int) -> tuple[int, ...]:
    """Whole numbers whose sum is `experts`; what is left over goes to `cards`, the largest rests
    first."""
    split = [math.floor(share) for share in shares]
    by_rest = sorted(cards, key=lambda card: split[card] - shares[card])
    for card in by_rest[: experts - sum(split)]:
        split[card] += 1
    return tuple(split)


def _cost(split: Sequence[int], exact: Sequence[float]) -> tuple[float, bool, float]:
    """How far the fullest card is above its share, to a whole expert; whether equal cards hold
    different numbers; the same exactly."""
    above = max(held - share for held, share in zip(split, exact, strict=True))
    uneven = len(set(zip(split, exact, strict=True))) > len(set(exact))
    return math.ceil(above), uneven, above


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
