"""Brings a store under a limit: leaves of the least recently used sessions go first, whole
families at a time, never a page that another hangs on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvtier.backends.local import SegmentWriter, disk_usage
from kvtier.chains import Chains, chains
from kvtier.entries import Ints
from kvtier.format import FrameType, Grave, encode_tombstone, new_id
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.space import reclaim

_ROUNDS = 8
"""Freeing is measured and repeated: shared blocks of the file system make estimates short."""

_SETTLE_NS = 60_000_000_000
"""A page that is still incomplete after this time stays so."""

Progress = Callable[[str], None]


@dataclass
class Collected:
    """What a collection did, or would do. Sizes in bytes of the file system."""

    before: int
    after: int
    limit: int
    pages: int = 0
    sessions: int = 0
    """Sessions that lost their end."""
    leaves: set[bytes] = field(default_factory=set, repr=False)
    """Leaves there were before."""

    @property
    def enough(self) -> bool:
        """Whether the limit holds now."""
        return self.after <= self.limit


def collect(
    layout: Layout,
    index: Index,
    limit: int,
    *,
    grace: float,
    dry_run: bool = False,
    progress: Progress = lambda text: None,
) -> Collected:
    """Bring the store under `limit` bytes on disk, beside running servers or without any.

    `grace`: seconds between logging that pages are gone and freeing their space, so that readers
    of other processes notice first; not waited where no writer lives. OSError if the store
    cannot be written.
    """
    before = disk_usage(layout.path)
    result = Collected(before, before, limit)
    if before <= limit:
        return result
    if dry_run:
        progress("choosing pages")
        found = chains(index)
        result.leaves = _leaves(found)
        victims = _choose(found, before - limit)
        _count(result, victims)
        result.after = before - sum(int(c.bytes[v].sum()) for c, v in victims)
        return result
    progress("freeing space of pages that are already gone")
    result.after = reclaim(layout, index)
    for _ in range(_ROUNDS):
        if result.after <= limit:
            break
        progress("choosing pages")
        found = chains(index)
        result.leaves = result.leaves or _leaves(found)
        mark = index.mark()
        victims = _choose(found, result.after - limit)
        if not victims:
            break
        with layout.lock():
            index.refresh(alone=True)
            victims = _spare_parents(victims, index.parents_since(mark))
            bury(layout, [grave for c, pages in victims for grave in _graves(c, pages)])
            index.refresh()
        index.ring()
        _count(result, victims)
        if index.health().live_writers:
            progress(f"waiting {grace:g} s for readers of running servers")
            time.sleep(grace)
        progress("freeing space")
        result.after = reclaim(layout, index)
    return result


Victims = list[tuple[Chains, Ints]]


def _choose(found: list[Chains], need: int) -> Victims:
    """Pages to forget, at least `need` bytes if there are as many: what can never be restored,
    then by last use; a page never before what hangs on it."""
    if not found:
        return []
    owner = np.concatenate([np.full(len(c), number) for number, c in enumerate(found)])
    page = np.concatenate([np.arange(len(c)) for c in found])
    used = np.concatenate([c.used_ns for c in found])
    # Parts of a family that other ranks are about to commit are no reason to drop the rest.
    young = used > time.time_ns() - _SETTLE_NS
    useful = np.concatenate([c.reachable for c in found]) | young
    depth = np.concatenate([c.depth for c in found])
    size = np.concatenate([c.bytes for c in found])
    # A page's last use is never older than that of what hangs on it, and its depth is less, so in
    # this order children come before their parents. A page without bytes costs nothing to keep
    # and nothing to drop, but its children need it: the same order serves.
    order = np.lexsort((-depth, used, useful))
    freed = np.cumsum(size[order])
    last = int(np.searchsorted(freed, need)) + 1
    chosen = order[:last]
    return [
        (c, page[chosen[owner[chosen] == number]])
        for number, c in enumerate(found)
        if (owner[chosen] == number).any()
    ]


def _leaves(found: list[Chains]) -> set[bytes]:
    return {c.keys[leaf].tobytes() for c in found for leaf in c.leaves().tolist()}


def _spare_parents(victims: Victims, parents: set[bytes]) -> Victims:
    """Without the pages that something was hung on since they were chosen, and what is above."""
    if not parents:
        return victims
    spared = []
    for c, pages in victims:
        keep = np.zeros(len(c) + 2, np.bool_)
        for page in pages.tolist():
            above = page if c.keys[page].tobytes() in parents else len(c)
            while above < len(c) and not keep[above]:
                keep[above] = True
                above = int(c.parent[above])
        spared.append((c, pages[~keep[pages]]))
    return [(c, pages) for c, pages in spared if len(pages)]


def _graves(c: Chains, pages: Ints) -> list[Grave]:
    """Places of all parts of these pages, neighbours joined."""
    chosen = np.isin(c.parts, pages)
    run, position = c.part_run[chosen], c.part_position[chosen]
    order = np.lexsort((position, run))
    run, position = run[order], position[order]
    breaks = np.flatnonzero((np.diff(run) != 0) | (np.diff(position) != 1)) + 1
    graves = []
    for span in np.split(np.arange(len(run)), breaks):
        if len(span):
            stored = c.runs[int(run[span[0]])]
            graves.append(stored.grave(int(position[span[0]]), len(span)))
    return graves


def bury(layout: Layout, graves: list[Grave]) -> None:
    """Log tombstones in a manifest of our own, in frames of bounded size."""
    if not graves:
        return
    writer = SegmentWriter(layout, new_id()[:12], 0, direct=False)
    try:
        step = 1 << 15
        bodies = [
            (FrameType.TOMBSTONE, encode_tombstone(graves[start : start + step]))
            for start in range(0, len(graves), step)
        ]
        # Not hidden: if this process is killed here, the store's lock may end before the
        # manifest's, and whoever commits then must not build on pages that are about to go.
        writer.log(bodies, time.time_ns(), hidden=False)
    finally:
        writer.close()


def _count(result: Collected, victims: Victims) -> None:
    for c, pages in victims:
        result.pages += len(pages)
        result.sessions += sum(c.keys[page].tobytes() in result.leaves for page in pages.tolist())
