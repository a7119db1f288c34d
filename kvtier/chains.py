"""Chains of pages: who hangs on whom, what can be reached and restored, what a session is.

For tools (inspect, gc, fsck): built from all runs of an index, in flat arrays, without a disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.catalog import StoredRun, page_prints
from kvtier.entries import Ints
from kvtier.index import Index
from kvtier.pages import KEY_BYTES, ROOT, Bools

Keys = Collection[bytes]


@dataclass(frozen=True)
class Session:
    """A leaf and the chain above it. Lengths in pages."""

    key: bytes
    """Key of the leaf's page."""
    pages: int
    restorable: int
    """Longest prefix that has all its parts, and trailing parts at its end."""
    tails: int
    """Boundaries of the chain that have trailing parts."""
    own_bytes: int
    """Payload of the pages that no other session shares."""
    bytes: int
    """Payload of the whole chain."""
    used_ns: int
    """When it was last restored or extended, in ns since 1970."""


@dataclass(frozen=True)
class Chains:
    """All pages of one namespace. Arrays of shape (n,) over pages unless said otherwise."""

    namespace: bytes
    keys: npt.NDArray[np.uint8]
    """(n, 32)"""
    parent: Ints
    """Index of the page before; n at the start of a chain, n + 1 if it is not stored."""
    depth: Ints
    """Pages up to and with this one."""
    complete: Bools
    """It has a part in every column that is needed at every page."""
    reachable: Bools
    """It and all pages before it are complete."""
    restorable: Bools
    """A boundary: reachable, with its whole window of every trailing column."""
    useful: Bools
    """A boundary is at it or hangs on it: some restore can use it."""
    tail: Bools
    """It has trailing parts."""
    window: int
    """Pages of trailing columns that a boundary needs before it; 0 without such columns."""
    bytes: Ints
    """Payload of all its parts."""
    used_ns: Ints
    """Latest time at which it, or a page below it, was stored, restored or extended."""
    children: Ints
    """Number of pages that hang on it."""
    longest: Ints
    """The leaf of the longest chain it is part of. Pages with the same one form a path."""
    parts: Ints
    """(m,): page of each stored part; `part_run` and `part_position` say where it is."""
    part_run: Ints
    part_position: Ints
    part_bytes: Ints
    part_time: Ints
    """When it was written, in ns since 1970."""
    runs: list[StoredRun]

    def __len__(self) -> int:
        return len(self.keys)

    def leaves(self) -> Ints:
        """Pages nothing hangs on, complete or not, without those that have only trailing parts."""
        return np.flatnonzero((self.children == 0) & (self.complete | ~self.tail))

    def sessions(self) -> list[Session]:
        """One for each leaf, last used first."""
        if not len(self):
            return []
        leaves = self.leaves()
        kept = nearest(self.parent, self.restorable)
        tails = _sum_to_root(self.parent, self.tail.astype(np.int64))
        total = _sum_to_root(self.parent, self.bytes)
        shared = nearest(self.parent, self._forks())
        depth = np.append(self.depth, (0, 0))
        above = np.append(total, (0, 0))
        leaves = leaves[np.argsort(-self.used_ns[leaves], kind="stable")]
        return [
            Session(
                self.keys[leaf].tobytes(),
                int(self.depth[leaf]),
                int(depth[kept[leaf]]),
                int(tails[leaf]),
                int(total[leaf] - above[shared[leaf]]),
                int(total[leaf]),
                int(self.used_ns[leaf]),
            )
            for leaf in leaves.tolist()
        ]

    def pages_of(self, keys: Keys) -> Ints:
        """Where pages of these keys are, as far as they are stored."""
        wanted = set(keys)
        if not wanted:
            return np.zeros(0, np.int64)
        there = [page for page, key in enumerate(self.keys) if key.tobytes() in wanted]
        return np.array(there, np.int64)

    def own(self, leaf: int) -> Ints:
        """The pages of a session that no other session shares, its leaf first."""
        forks, pages = self._forks(), []
        while leaf < len(self) and not forks[leaf]:
            pages.append(leaf)
            leaf = int(self.parent[leaf])
        return np.array(pages, np.int64)

    def useful_without(self, gone: Bools) -> Bools:
        """`useful` if the pages `gone`, (n,), were not there."""
        return _any_below(self.parent, _levels(self.depth), self.restorable & ~gone)

    def above(self, pages: Ints) -> Bools:
        """The pages and all before them; bool (n,)."""
        marked = np.zeros(len(self), np.bool_)
        marked[pages] = True
        return _any_below(self.parent, _levels(self.depth), marked)

    def _forks(self) -> Bools:
        """Pages that more than one leaf hangs on, somewhere below."""
        below = np.zeros(len(self) + 2, np.int64)
        below[self.leaves()] = 1
        for level in _levels(self.depth):
            np.add.at(below, self.parent[level], below[level])
        return below[:-2] > 1


def chains(index: Index) -> list[Chains]:
    """The chains of every namespace that has a live page."""
    by_namespace: dict[bytes, list[StoredRun]] = {}
    for stored in index.runs():
        by_namespace.setdefault(stored.run.namespace, []).append(stored)
    return [
        build(namespace, runs, index.uses(namespace)) for namespace, runs in by_namespace.items()
    ]


def build(namespace: bytes, runs: list[StoredRun], uses: dict[bytes, int]) -> Chains:
    """The chains of one namespace from its live runs and {page key: time in ns}."""
    windows: dict[int, int] = {}
    for stored in runs:
        for block in stored.run.blocks:
            windows[block.column] = max(stored.run.window, windows.get(block.column, 0))
    needed = {column for column, window in windows.items() if not window}
    trailing = windows.keys() - needed
    parts = _flatten(runs)
    prints = page_prints(parts.keys.tobytes())
    _, first, page = np.unique(prints, return_index=True, return_inverse=True)
    count = len(first)
    has = _columns_of(runs, parts, page, needed | trailing)
    complete = np.ones(count, np.bool_)
    for column in needed:
        complete &= has[column]
    parent = _parents(parts, first, page)
    reachable = _all_to_root(parent, complete)
    tail = np.zeros(count, np.bool_)
    restorable = reachable.copy()
    for column in trailing:
        tail |= has[column]
        restorable &= _all_above(parent, has[column], windows[column])
    depth = _sum_to_root(parent, np.ones(count, np.int64))
    total = np.zeros(count, np.int64)
    np.add.at(total, page, parts.size)
    used = np.zeros(count + 2, np.int64)
    np.maximum.at(used, page, parts.time_ns)
    places = {parts.keys[at].tobytes(): number for number, at in enumerate(first.tolist())}
    for key, when in uses.items():
        if key in places:
            used[places[key]] = max(used[places[key]], when)
    levels = _levels(depth)
    for level in levels:
        np.maximum.at(used, parent[level], used[level])
    return Chains(
        namespace=namespace,
        keys=parts.keys[first],
        parent=parent,
        depth=depth,
        complete=complete,
        reachable=reachable,
        restorable=restorable,
        useful=_any_below(parent, levels, restorable),
        tail=tail,
        window=max(windows.values(), default=0),
        bytes=total,
        used_ns=used[:-2],
        children=np.bincount(parent, minlength=count + 2)[:count],
        longest=_longest(parent, levels, np.where(reachable, depth, 0)),
        parts=page,
        part_run=parts.run,
        part_position=parts.position,
        part_bytes=parts.size,
        part_time=parts.time_ns,
        runs=runs,
    )


class _Parts(NamedTuple):
    """One entry a live page of each run; arrays of shape (m,) unless said otherwise."""

    keys: npt.NDArray[np.uint8]
    """(m, 32)"""
    parents: npt.NDArray[np.uint8]
    """(m, 32)"""
    link: Ints
    """0: parent unknown, 1: start of a chain, 2: has a parent."""
    run: Ints
    position: Ints
    size: Ints
    time_ns: Ints


def _flatten(runs: list[StoredRun]) -> _Parts:
    pieces = []
    for number, stored in enumerate(runs):
        run, at = stored.run, stored.positions
        keys = np.frombuffer(run.keys, np.uint8).reshape(-1, KEY_BYTES)
        head = np.frombuffer((run.parent or ROOT).ljust(KEY_BYTES, b"\0"), np.uint8)
        before = np.concatenate((head[None], keys[:-1]))
        link = np.full(len(run), 2)
        link[0] = 0 if run.parent is None else (1 if run.parent == ROOT else 2)
        size = sum(block.part_bytes for block in run.blocks)
        of_run = (np.full(len(at), value) for value in (number, size, stored.time_ns))
        numbers, sizes, times = of_run
        pieces.append((keys[at], before[at], link[at], numbers, at, sizes, times))
    return _Parts(*(np.concatenate(column) for column in zip(*pieces, strict=True)))


def _columns_of(
    runs: list[StoredRun], parts: _Parts, page: Ints, columns: Iterable[int]
) -> dict[int, Bools]:
    """For each column, which pages have a part in it."""
    has = {}
    for column in columns:
        with_column = np.array([s.run.block(column) is not None for s in runs], np.bool_)
        pages = np.zeros(int(page.max()) + 1, np.bool_)
        pages[page[with_column[parts.run]]] = True
        has[column] = pages
    return has


def _parents(parts: _Parts, first: Ints, page: Ints) -> Ints:
    """Index of each page's parent: n for none, n + 1 if it is not stored. Where parts of a page
    differ in what they know, the one that knows a parent wins."""
    count = len(first)
    prints = page_prints(parts.keys[first].tobytes())
    wanted = page_prints(parts.parents.tobytes())
    place = np.searchsorted(prints, wanted)
    place[place == count] = 0
    found = np.where(prints[place] == wanted, place, count + 1)
    found[parts.link != 2] = count
    parent: Ints = np.full(count, count, np.int64)
    order = np.argsort(parts.link, kind="stable")
    parent[page[order]] = found[order]
    return parent


def _levels(depth: Ints) -> list[Ints]:
    """Pages by depth, deepest first."""
    order = np.argsort(-depth, kind="stable")
    cuts = np.flatnonzero(np.diff(depth[order])) + 1
    return np.split(order, cuts) if len(order) else []


def _doubled(parent: Ints) -> Ints:
    """Parents with the two places past the end, which are their own."""
    count = len(parent)
    return np.append(parent, (count, count + 1))


def _all_to_root(parent: Ints, value: Bools) -> Bools:
    """Whether `value` holds for a page and all before it."""
    above, holds = _doubled(parent), np.append(value, (True, False))
    for _ in range(max(1, len(parent)).bit_length() + 1):
        holds = holds & holds[above]
        above = above[above]
    return holds[:-2]


def _all_above(parent: Ints, value: Bools, length: int) -> Bools:
    """Whether `value` holds for a page and the `length` - 1 before it, or all to the root."""
    above, holds = _doubled(parent), np.append(value, (True, False))
    result = np.ones(len(holds), np.bool_)
    place = np.arange(len(holds))
    while length:
        # `holds` answers for a power of two of pages, `place` is where the pages left to ask end.
        if length & 1:
            result &= holds[place]
            place = above[place]
        holds = holds & holds[above]
        above = above[above]
        length >>= 1
    return result[:-2]


def _any_below(parent: Ints, levels: list[Ints], value: Bools) -> Bools:
    """Whether `value` holds for a page or any that hangs on it, near or far."""
    holds = np.append(value, (False, False))
    for level in levels:
        np.logical_or.at(holds, parent[level], holds[level])
    return holds[:-2]


def _longest(parent: Ints, levels: list[Ints], length: Ints) -> Ints:
    """The page of greatest `length` at or below each page; of equals, any one."""
    best = np.append(length << 32 | np.arange(len(length)), (0, 0))
    for level in levels:
        np.maximum.at(best, parent[level], best[level])
    return best[:-2] & 0xFFFFFFFF


def _sum_to_root(parent: Ints, value: Ints) -> Ints:
    """Sum of `value` over a page and all before it."""
    above, total = _doubled(parent), np.append(value, (0, 0))
    for _ in range(max(1, len(parent)).bit_length() + 1):
        total = total + np.where(above < len(parent), total[above], 0)
        above = above[above]
    return total[:-2]


def nearest(parent: Ints, marked: Bools) -> Ints:
    """The deepest marked page at or before each page; a place past the end if none."""
    above = _doubled(parent)
    own = np.arange(len(parent))
    step = np.append(np.where(marked, own, parent), above[-2:])
    for _ in range(max(1, len(parent)).bit_length() + 1):
        step = step[step]
    return step[:-2]
