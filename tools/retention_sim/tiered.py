"""kvtier as a store of the simulation: its own code chooses what is written and what goes."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from kvtier.catalog import StoredRun
from kvtier.chains import build
from kvtier.collector import TAIL_BYTES as LEAST_TAIL_BYTES
from kvtier.collector import TAILS
from kvtier.format import Block, Run, column_id
from kvtier.pages import KEY_BYTES, ROOT, Column
from kvtier.quota import margin
from kvtier.retention import Victims, plan
from kvtier.tails import TAILS_PER_CHAIN, grid_pages
from retention_sim.geometry import PAGE_TOKENS, POOLS, TAIL_BYTES, TAIL_POOL, WINDOW_PAGES
from retention_sim.stores import TAIL_NUMBER, Contents
from retention_sim.tiers import Ints

NAMESPACE = bytes(16)

_EPOCH_NS = 1_700_000_000 * 10**9
"""The traffic's begin. In the past, so that no page is too young for what `plan` thinks of it."""

_GRID = grid_pages(PAGE_TOKENS)


class Kvtier:
    """Puts as `kvtier/stager.py`, collections as `kvtier/collector.py` and `collection.py` do them.

    What differs: payload counts, not the file system's blocks; commits and collections take no
    time; a store that stands idle does not drop superseded tails before more are written.
    """

    AHEAD = 8
    """A collection frees one part in so many of the cap ahead: what the collector comes to when
    commits had to wait for it twice, since a prefill fills a 32nd of so small a cap in seconds."""

    def __init__(self, pages: int, cap: int, *, reoffer: bool = False) -> None:
        """`reoffer`: SGLang has the patch of this name (`integration/patches/reoffer.py`), and
        offers what the store has lost before what comes after it; here at once, without tails."""
        self.contents = Contents(pages)
        self.refused = 0
        """Pages that were not taken, since the page before them is not stored."""
        self._high = cap - margin(cap) - cap // self.AHEAD // 2
        self._reoffer = reoffer
        self._low = cap - margin(cap) - cap // self.AHEAD
        self._tail_bytes = 0
        """Written since the last collection."""
        digests = (hashlib.sha256(page.to_bytes(8, "little")).digest() for page in range(pages))
        self._keys = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, KEY_BYTES)
        self._runs: list[StoredRun] = []
        self._pages: list[Ints] = []
        """Numbers of the pages of each run."""
        self._uses: dict[bytes, int] = {}

    def offer(self, pages: Ints, first: int, tails: int, time: float) -> None:
        """See `Store`."""
        now = _ns(time)
        begin = len(pages) - tails
        there = self.contents.tails(pages[begin:])
        self._note(pages[begin:][there], now)
        # Each boundary's tail is a put of its own, so all are written at first.
        for start, end in _stretches(~there):
            self._add(pages, begin + start, begin + end, WINDOW_PAGES, now)
        there = self.contents.families(pages[first:])
        self._note(pages[first:][there], now)
        before = self.contents.families(pages[:first])
        if self._reoffer and not there[0]:
            for start, end in _stretches(~before):
                self._add(pages, start, end, 0, now)
        elif not there[0] and not before[-1:].all():
            self.refused += int((~there).sum())
            there[:] = True
        for start, end in _stretches(~there):
            self._add(pages, first + start, first + end, 0, now)
        stored = self.contents.stored
        if stored > self._high or self._tail_bytes > max(LEAST_TAIL_BYTES, stored // TAILS):
            self._collect()

    def read(self, pages: Ints, first: int, time: float) -> None:
        """See `Store`."""
        self._note(pages, _ns(time))

    def restart(self) -> None:
        """See `Store`. Uses are logged, and outlive it."""

    def _note(self, pages: Ints, now: int) -> None:
        """The last of these pages was used."""
        if len(pages):
            self._uses[self._keys[pages[-1]].tobytes()] = now

    def _add(self, pages: Ints, start: int, end: int, window: int, now: int) -> None:
        fresh = pages[start:end]
        parent = self._keys[pages[start - 1]].tobytes() if start else ROOT
        keys = self._keys[fresh].tobytes()
        sizes = {TAIL_POOL: TAIL_BYTES} if window else POOLS
        blocks = [
            Block(column_id(Column(pool)), 0, size, 0, np.zeros(len(fresh), np.uint64))
            for pool, size in sizes.items()
        ]
        run = Run(NAMESPACE, parent, start, window, keys, blocks)
        self._runs.append(StoredRun("", 0, now, run, np.arange(len(fresh))))
        self._pages.append(fresh)
        self._tail_bytes += TAIL_BYTES * len(fresh) if window else 0
        for page in fresh.tolist():
            for pool in _numbers(window):
                self.contents.add(page, pool)

    def _collect(self) -> None:
        """Drop superseded tails, and as much more as makes room ahead."""
        self._tail_bytes = 0
        while True:
            victims = plan(
                [build(NAMESPACE, self._runs, self._uses)],
                self.contents.stored - self._low,
                grids={NAMESPACE: _GRID},
                pins={},
                tails_per_chain=TAILS_PER_CHAIN,
            )
            if victims:
                self._delete(victims[0])
            if not victims or self.contents.stored <= self._low:
                return

    def _delete(self, victims: Victims) -> None:
        gone = victims.parts
        runs, positions = victims.chains.part_run[gone], victims.chains.part_position[gone]
        for number in np.unique(runs).tolist():
            lost = positions[runs == number]
            stored = self._runs[number]
            for page in self._pages[number][lost].tolist():
                for pool in _numbers(stored.run.window):
                    self.contents.drop(page, pool)
            left = np.setdiff1d(stored.positions, lost)
            self._runs[number] = replace(stored, positions=left)
        alive = [number for number, stored in enumerate(self._runs) if len(stored.positions)]
        self._runs = [self._runs[number] for number in alive]
        self._pages = [self._pages[number] for number in alive]


def _ns(time: float) -> int:
    return _EPOCH_NS + int(time * 1e9)


def _numbers(window: int) -> tuple[int, ...]:
    return (TAIL_NUMBER,) if window else tuple(range(len(POOLS)))


def _stretches(wanted: np.ndarray) -> list[tuple[int, int]]:
    """(start, end) of each stretch that is wanted."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], wanted.astype(np.int8), [0]))))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
