"""Deleting pages: doomed first, so that nobody starts to count on them; after a grace time those
that nobody has used or built on since are logged as gone; only then is their space freed."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from kvtier.backends.local import SegmentWriter
from kvtier.chains import Chains, chains
from kvtier.entries import Ints
from kvtier.format import FrameType, Grave, encode_tombstone, new_id
from kvtier.index import Index
from kvtier.layout import Layout, write_durably
from kvtier.pages import Bools
from kvtier.quota import Quota
from kvtier.retention import Victims

BALLAST = "ballast"

BALLAST_BYTES = 1 << 20
"""Room that a full disk gives back for the log of deletions: 37,000 entries."""

_Done = TypeVar("_Done")

_GRAVES = 1 << 15
"""In one frame; a body has at most 16 MiB."""


def delete(
    layout: Layout,
    index: Index,
    victims: Sequence[Victims],
    *,
    since: tuple[int, int],
    wait: Callable[[], None],
) -> list[Victims]:
    """Doom, wait, and log as gone what nobody has used or built on as far as was not known when the
    victims were chosen; the victims that are gone. The index shows it at the end.

    `since`: the index's mark and the time in ns before it was read to choose. OSError if the store
    cannot be written; nothing is lost then.
    """
    mark, since_ns = since
    with _log(layout) as log:
        if index.health().live_writers:
            log(FrameType.DOOM, _all_graves(victims))
            index.ring()
            wait()
        with layout.lock():
            index.refresh(alone=True)
            parents, gone = index.parents_since(mark), []
            for v in victims:
                uses = index.uses(v.chains.namespace)
                gone.append(_without_used(v, parents, uses, since_ns))
            log(FrameType.TOMBSTONE, _all_graves(gone))
    index.refresh()
    index.ring()
    return gone


def forget(
    layout: Layout, index: Index, choose: Callable[[list[Chains]], Sequence[Victims]]
) -> list[Victims]:
    """Log as gone at once what `choose` picks of all chains, used or not; the victims. No commit
    is made meanwhile, so nobody builds on them. OSError if the store cannot be written."""
    with _log(layout) as log, layout.lock():
        index.refresh(alone=True)
        victims = list(choose(chains(index)))
        log(FrameType.TOMBSTONE, _all_graves(victims))
    index.refresh()
    index.ring()
    return victims


def bury(layout: Layout, dead: Sequence[Grave]) -> None:
    """Log places as gone at once."""
    with _log(layout) as log:
        log(FrameType.TOMBSTONE, dead)


def graves(c: Chains, parts: Bools) -> list[Grave]:
    """Places of these parts, neighbours joined."""
    run, position = c.part_run[parts], c.part_position[parts]
    order = np.lexsort((position, run))
    run, position = run[order], position[order]
    breaks = np.flatnonzero((np.diff(run) != 0) | (np.diff(position) != 1)) + 1
    found = []
    for span in np.split(np.arange(len(run)), breaks):
        if len(span):
            stored = c.runs[int(run[span[0]])]
            found.append(stored.grave(int(position[span[0]]), len(span)))
    return found


def drop_ballast(layout: Layout) -> None:
    """Give the room set aside back."""
    (layout.index / BALLAST).unlink(missing_ok=True)


def keep_ballast(layout: Layout, quota: Quota) -> None:
    """Set room aside for deletions on a disk that is full later. Without room there is none."""
    path = layout.index / BALLAST
    with contextlib.suppress(OSError):
        if not path.exists() and quota.reserve(BALLAST_BYTES):
            write_durably(path, (os.urandom(BALLAST_BYTES),))
            quota.spend(BALLAST_BYTES)


def _all_graves(victims: Sequence[Victims]) -> list[Grave]:
    return [grave for v in victims for grave in graves(v.chains, v.parts)]


def _without_used(
    v: Victims, parents: set[bytes], uses: dict[bytes, int], since_ns: int
) -> Victims:
    """Without the pages of these parents and of uses that are new to the victims' chains, and what
    is before them, and without the tails at exactly such pages."""
    c = v.chains

    def is_used(page: int) -> bool:
        # A use may be logged long after it was made, and clocks are set back.
        key = c.keys[page].tobytes()
        when = uses.get(key, 0)
        return key in parents or when >= since_ns or when > int(c.used_ns[page])

    def in_use(pages: Ints) -> Bools:
        return np.array([is_used(page) for page in pages.tolist()], np.bool_)

    spared = c.above(v.pages[in_use(v.pages)])
    return Victims(c, v.pages[~spared[v.pages]], v.tails[~in_use(c.parts[v.tails])])


@contextlib.contextmanager
def _log(layout: Layout) -> Iterator[Callable[[FrameType, Sequence[Grave]], None]]:
    """Appends places to a manifest of its own. What it dooms ends with it, also if it is killed."""

    writer = _with_ballast(layout, lambda: SegmentWriter(layout, new_id()[:12], 0, direct=False))

    def log(kind: FrameType, places: Sequence[Grave]) -> None:
        steps = range(0, len(places), _GRAVES)
        bodies = [(kind, encode_tombstone(places[at : at + _GRAVES])) for at in steps]
        # Not hidden: if this process is killed here, the store's lock may end before the
        # manifest's, and whoever commits then must not build on pages that are about to go.
        if bodies:
            _with_ballast(layout, lambda: writer.log(bodies, time.time_ns(), hidden=False))

    try:
        yield log
    finally:
        if writer.manifest_size:
            writer.close()
        else:
            writer.abandon()


def _with_ballast(layout: Layout, act: Callable[[], _Done]) -> _Done:
    """Do it; on a full disk once more, without the ballast."""
    try:
        return act()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        drop_ballast(layout)
        return act()
