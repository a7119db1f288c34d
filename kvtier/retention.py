"""What a store keeps: superseded tails go, then the ends of the sessions that were not used for
longest, whole families at a time, never a page that another hangs on. No disk here."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from kvtier.chains import Chains, nearest
from kvtier.entries import Ints
from kvtier.pages import Bools
from kvtier.tails import kept

SETTLE_NS = 60_000_000_000
"""A page that is still incomplete after this time stays so."""

_FORK_TAILS = 8
"""Tails kept beyond those of `kvtier.tails` where chains part: whoever shares a prompt's head, and
nothing more, goes on from there."""


@dataclass(frozen=True)
class Victims:
    """What is to go of one namespace."""

    chains: Chains
    pages: Ints
    """Pages that go as a whole."""
    tails: Ints
    """Parts of trailing columns that go on their own."""

    @property
    def parts(self) -> Bools:
        """All parts that go; bool (m,)."""
        gone = np.isin(self.chains.parts, self.pages)
        gone[self.tails] = True
        return gone

    @property
    def bytes(self) -> int:
        """Payload of all that."""
        return int(self.chains.part_bytes[self.parts].sum())


def plan(
    found: Collection[Chains],
    need: int,
    *,
    grids: Mapping[bytes, int],
    pins: Mapping[bytes, Collection[bytes]],
    tails_per_chain: int,
) -> list[Victims]:
    """What is to go: tails that others supersede, and as much more as `need` bytes ask for.

    `grids`: namespace to `tails.grid_pages` of its pages. `pins`: namespace to keys of pages that
    go last, with all before them.
    """
    held = {c.namespace: c.pages_of(pins.get(c.namespace, ())) for c in found}
    tails = {
        c.namespace: superseded(
            c, grids.get(c.namespace, 0), tails_per_chain, anchors=held[c.namespace]
        )
        for c in found
    }
    need -= sum(int(c.part_bytes[tails[c.namespace]].sum()) for c in found)
    pages = choose(found, need, held)
    victims = [Victims(c, pages[c.namespace], tails[c.namespace]) for c in found]
    return [v for v in victims if len(v.pages) or len(v.tails)]


def superseded(c: Chains, grid: int, per_chain: int, *, anchors: Ints) -> Ints:
    """Parts of trailing columns that no boundary worth keeping needs; indices into `c.parts`.

    `anchors`: pages whose nearest boundary before them is kept in any case.
    """
    if not c.window or not grid:
        return np.zeros(0, np.int64)
    keep = np.zeros(len(c) + 2, np.bool_)
    boundaries = np.flatnonzero(c.restorable)
    boundaries = boundaries[np.argsort(c.depth[boundaries], kind="stable")]
    for path in _by_path(c, boundaries):
        end = int(c.depth[c.longest[path[0]]])
        keep[path[kept(c.depth[path], end, grid, per_chain)]] = True
    before = nearest(c.parent, c.restorable)
    keep[before[anchors]] = True
    room = per_chain - np.bincount(c.longest[np.flatnonzero(keep[:-2])], minlength=len(c))
    for forks in _by_path(c, _forks(c)):
        free = min(_FORK_TAILS, int(room[c.longest[forks[0]]]))
        keep[before[forks[: max(0, free)]]] = True
    keep = _windows(c, keep[:-2])
    trailing = np.array([stored.run.trailing for stored in c.runs], np.bool_)[c.part_run]
    # Parts of a boundary that other ranks or pools are about to complete are not superseded.
    settled = _windows(c, c.restorable)[c.parts] | (c.part_time < _now([c]) - SETTLE_NS)
    return np.flatnonzero(trailing & c.reachable[c.parts] & ~keep[c.parts] & settled)


def _windows(c: Chains, boundaries: Bools) -> Bools:
    """Pages whose tails these boundaries need; both bool (n,)."""
    needed, mark = boundaries.copy(), boundaries
    for _ in range(c.window - 1):
        above = np.zeros(len(c) + 2, np.bool_)
        above[c.parent[mark]] = True
        mark = above[:-2] & ~needed
        needed |= mark
    return needed


def choose(found: Collection[Chains], need: int, held: Mapping[bytes, Ints]) -> dict[bytes, Ints]:
    """Namespace to pages to forget, in all at least `need` bytes if there are as many.

    First what can never be restored, then by last use, pinned chains (`held`: namespace to pages
    that are held with all before them) last; a page never before what hangs on it. What is left of
    a session ends at a boundary.
    """
    if need <= 0 or not found:
        return {c.namespace: np.zeros(0, np.int64) for c in found}
    owner = np.concatenate([np.full(len(c), number) for number, c in enumerate(found)])
    page = np.concatenate([np.arange(len(c)) for c in found])
    used = np.concatenate([c.used_ns for c in found])
    # Parts of a family that other ranks are about to commit are no reason to drop the rest.
    young = used > _now(found) - SETTLE_NS
    pinned = np.concatenate([c.above(held[c.namespace]) for c in found])
    worth = np.concatenate([c.useful for c in found]) | young
    depth = np.concatenate([c.depth for c in found])
    size = np.concatenate([c.bytes for c in found])
    # A page's last use is never older than that of what hangs on it, and its depth is less, so in
    # this order children come before their parents. A page without bytes costs nothing to keep
    # and nothing to drop, but its children need it: the same order serves.
    order = np.lexsort((-depth, used, worth, pinned))
    freed = np.cumsum(size[order])
    gone = np.zeros(len(order), np.bool_)
    gone[order[: int(np.searchsorted(freed, need)) + 1]] = True
    chosen = {}
    for number, c in enumerate(found):
        mine = owner == number
        lost = gone[mine]
        if lost.any():
            lost |= ~(c.useful_without(lost) | young[mine] | pinned[mine])
        chosen[c.namespace] = page[mine][lost]
    return chosen


def _now(found: Collection[Chains]) -> int:
    """The time by the stamps of these pages, which may be ahead of the system's clock."""
    return max(time.time_ns(), *(int(c.used_ns.max(initial=0)) for c in found))


def _by_path(c: Chains, pages: Ints) -> list[Ints]:
    """The pages by path, each in the order they come in."""
    if not len(pages):
        return []
    order = np.argsort(c.longest[pages], kind="stable")
    cuts = np.flatnonzero(np.diff(c.longest[pages][order])) + 1
    return np.split(pages[order], cuts)


def _forks(c: Chains) -> Ints:
    """Pages on which more than one useful page hangs, most first."""
    useful = c.parent[c.useful]
    branches = np.bincount(useful, minlength=len(c) + 2)[: len(c)]
    forks = np.flatnonzero(branches > 1)
    return forks[np.lexsort((c.depth[forks], -branches[forks]))]
