"""Brings a store under a limit, beside running servers or without any: choose, delete, free."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.backends.local import disk_usage
from kvtier.chains import Chains, chains
from kvtier.compaction import compact, write_budget
from kvtier.config import Config
from kvtier.deletion import BALLAST_BYTES, delete, drop_ballast
from kvtier.errors import IdentityError
from kvtier.identity import stored_identity
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.limits import Amount, Limits
from kvtier.manifests import merge_manifests
from kvtier.pins import pinned
from kvtier.retention import Victims, plan
from kvtier.space import reclaim
from kvtier.status import statuses
from kvtier.tails import TAILS_PER_CHAIN, grid_pages

_ROUNDS = 8
"""Freeing is measured and repeated: shared blocks of the file system make estimates short."""

_SMALL = 64 * BALLAST_BYTES
"""A limit below this is better spent on pages than on ballast."""

Progress = Callable[[str], None]


@dataclass
class Collected:
    """What a collection did, or would do. Sizes in bytes of the file system."""

    before: int
    after: int
    limit: int
    pages: int = 0
    tails: int = 0
    """Parts of trailing pools that others supersede."""
    sessions: int = 0
    """Sessions that lost their end."""
    moved: int = 0
    """Bytes written to move what was left in sparse segments."""
    fault: str = ""
    """Why the number of files could not be brought down; empty if nothing failed."""
    stored: int = 0
    """Payload there was before a dry run."""
    lost: int = 0
    """Payload of `pages` in a dry run."""
    pinned: int = 0
    """Pinned sessions that a dry run would shorten."""
    leaves: set[bytes] = field(default_factory=set, repr=False)
    """Leaves there were before."""

    @property
    def enough(self) -> bool:
        """Whether the limit holds now."""
        return self.after <= self.limit

    def count(self, victims: Sequence[Victims]) -> None:
        """Add what was deleted."""
        for v in victims:
            self.pages += len(v.pages)
            self.tails += len(v.tails)
            keys = (v.chains.keys[page].tobytes() for page in v.pages.tolist())
            self.sessions += sum(key in self.leaves for key in keys)


def collect(
    layout: Layout,
    index: Index,
    limit: int,
    *,
    grace: float,
    tails_per_chain: int = TAILS_PER_CHAIN,
    limits: Limits | None = None,
    segment_size: int = Config.segment_size,
    dry_run: bool = False,
    progress: Progress = lambda text: None,
) -> Collected:
    """Drop superseded tails, and bring the store under `limit` bytes on disk; then see to it that
    it has few files.

    `grace`: seconds in which pages that are about to go are still read, and kept after all if
    somebody builds on them; not waited where no writer lives. `limits`: what holds while pages are
    in two places; `limit` if that is not given. `segment_size`: that of the store's writers.
    OSError if the store cannot be written.
    """
    before = disk_usage(layout.path)
    result = Collected(before, before, limit)
    if dry_run:
        progress("choosing pages")
        victims, found = _choose(layout, index, before - limit, tails_per_chain)
        result.leaves = _leaves(found)
        result.count(victims)
        result.after = before - sum(v.bytes for v in victims)
        result.stored = sum(int(c.bytes.sum()) for c in found)
        result.lost = sum(int(v.chains.bytes[v.pages].sum()) for v in victims)
        pins = pinned(layout)
        for v in victims:
            held = v.chains.pages_of(pins.get(v.chains.namespace, ()))
            result.pinned += int(np.isin(held, v.pages).sum())  # ends go first
        return result
    if limit < _SMALL:
        drop_ballast(layout)
    progress("freeing space of pages that are already gone")
    result.after = reclaim(layout, index)
    for _ in range(_ROUNDS):
        progress("choosing pages")
        since = index.mark(), index.stamp()
        victims, found = _choose(layout, index, result.after - limit, tails_per_chain)
        result.leaves = result.leaves or _leaves(found)
        if not victims:
            break
        progress(f"deleting; readers of running servers have {grace:g} s")
        gone = delete(layout, index, victims, since=since, wait=lambda: time.sleep(grace))
        result.count(gone)
        progress("freeing space")
        result.after = reclaim(layout, index)
        if result.enough:
            break
    progress("moving what is left in sparse segments")
    budget = write_budget(before - result.after)
    limits = limits or Limits(Amount(limit))
    try:
        moved = compact(layout, index, limits, segment_size=segment_size, budget=budget)
        result.moved = moved.bytes
        if moved.pages or moved.damaged:
            if index.health().live_writers or statuses(layout):
                time.sleep(grace)
            result.after = reclaim(layout, index)
        merge_manifests(layout, index)
    except OSError as error:
        result.fault = f"could not move pages to fewer files: {error.strerror or error}"
    return result


def _choose(
    layout: Layout, index: Index, need: int, tails_per_chain: int
) -> tuple[list[Victims], list[Chains]]:
    found = chains(index)
    victims = plan(
        found,
        need,
        grids={c.namespace: _grid(layout, c.namespace) for c in found},
        pins=pinned(layout),
        tails_per_chain=tails_per_chain,
    )
    return victims, found


def _grid(layout: Layout, namespace: bytes) -> int:
    try:
        return grid_pages(stored_identity(layout.namespaces, namespace.hex()).page_tokens)
    except IdentityError:
        return 0


def _leaves(found: Sequence[Chains]) -> set[bytes]:
    return {c.keys[leaf].tobytes() for c in found for leaf in c.leaves().tolist()}
