"""Legal boundaries of a chain: the prefix lengths from which the engine can go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.pages import Bools


@dataclass(frozen=True)
class BoundaryAnswer:
    """What a lookup found for a chain of n pages. Every number is a prefix length in pages.

    `kv_run`: how many KV pages are there without a gap from the first on, whatever the other
    pools hold. `all_pages` and `trailing`: the longest prefix each pool could serve within
    `kv_run`, in the order the pools were given. `restorable`: every legal boundary, ascending.
    """

    kv_run: int
    all_pages: tuple[int, ...]
    trailing: tuple[int, ...]
    restorable: tuple[int, ...]

    @property
    def longest(self) -> int:
        """The longest legal boundary, 0 if there is none."""
        return self.restorable[-1] if self.restorable else 0


def restorable(
    kv: Bools, all_pages: Sequence[Bools] = (), trailing: Sequence[tuple[Bools, int]] = ()
) -> BoundaryAnswer:
    """The legal boundaries of a chain of n pages, by intersection over its pools.

    `kv` and each of `all_pages`: bool (n,), which pages are stored; such a pool must have every
    page before a boundary. Each of `trailing`: a bool (n,) and a window of w >= 1 pages; such a
    pool must have the last w pages before a boundary (all of them where the prefix is shorter).

    A trailing pool has holes, so the longest boundary of each pool says nothing about the longest
    common one: 3 may be legal for one pool and 2 for another, and neither for both.
    """
    kv_run = run_length(kv)
    runs = tuple(run_length(present[:kv_run]) for present in all_pages)
    reach = min((kv_run, *runs))
    # legal[p - 1] answers for the prefix of p pages.
    legal = np.ones(reach, dtype=np.bool_)
    ends = []
    for present, window in trailing:
        full = _full_windows(present[:kv_run], window)
        ends.append(int(full.nonzero()[0][-1]) + 1 if full.any() else 0)
        legal &= full[:reach]
    lengths = tuple((legal.nonzero()[0] + 1).tolist())
    return BoundaryAnswer(kv_run, runs, tuple(ends), lengths)


def run_length(present: Bools) -> int:
    """How many leading entries are True."""
    return len(present) if present.all() else int(present.argmin())


def _full_windows(present: Bools, window: int) -> Bools:
    """For each end p in 1..n, whether pages p - window to p - 1 are all there (from 0 on)."""
    if window < 1:
        raise ValueError(f"A trailing window has at least one page, not {window}.")
    missing = np.zeros(len(present) + 1, dtype=np.int64)
    np.cumsum(~present, out=missing[1:])
    starts = np.maximum(np.arange(1, len(present) + 1) - window, 0)
    return np.asarray(missing[1:] == missing[starts])
