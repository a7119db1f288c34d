"""Stores of which little is left, and processes that kill themselves, for the tests of what a
collection does about files."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from making import KV, contents, copies, get, keys, put

from kvtier.chains import Chains, chains
from kvtier.compaction import MOST_SEGMENTS
from kvtier.deletion import forget
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.pages import Column, Link
from kvtier.retention import Victims
from kvtier.space import live_extents
from kvtier.store import Namespace, Store

INDEXER, FACT, SWA = Column("indexer"), Column("fact"), Column("swa", "tp0")
SIZES = {KV: 5000, INDEXER: 700, FACT: 0, SWA: 900}
PAGES = 24
"""Of a session: one commit, that fills a segment."""

SEGMENT = 1 << 17
SMALL = {
    "segment_size": SEGMENT,
    "commit_size": SEGMENT,
    "staging_size": 1 << 20,
    "commit_interval": 60.0,
}


def session(name: object) -> list[bytes]:
    """Keys of a session's chain."""
    return keys(("session", name), PAGES)


def put_session(store: Store, namespace: Namespace, name: object) -> list[bytes]:
    """A chain with all kinds of columns, in one commit; a tail at its second page."""
    chain = session(name)
    tail = contents(chain[1:2], SIZES[SWA], SWA)
    assert put(namespace, chain[1:2], tail, SWA, Link(chain[0], 1), window=1).all()
    for column in (INDEXER, FACT, KV):
        assert put(namespace, chain, contents(chain, SIZES[column], column), column).all()
    assert store.flush(60)
    return chain


def exact(namespace: Namespace, chain: Sequence[bytes]) -> None:
    """These pages are there, byte for byte, once what others did is noticed."""
    namespace._store.index.refresh()
    for column in (KV, INDEXER, FACT):
        assert get(namespace, chain, SIZES[column], column) == contents(
            chain, SIZES[column], column
        )
    tails = list(chain[1:2])
    assert get(namespace, tails, SIZES[SWA], SWA) == contents(tails, SIZES[SWA], SWA)


def thin_out(layout: Layout, keep: dict[bytes, int]) -> None:
    """Delete all but the first pages of chains of the one namespace; `keep`: leaf to the number of
    pages kept."""

    def choose(found: list[Chains]) -> list[Victims]:
        [c] = found
        places = {key.tobytes(): at for at, key in enumerate(c.keys)}
        gone = [at for leaf, kept in keep.items() for at in _path(c, places[leaf])[kept:]]
        return [Victims(c, np.array(gone, np.int64), np.zeros(0, np.int64))]

    forget(layout, Index(layout), choose)


def _path(c: Chains, leaf: int) -> list[int]:
    path = []
    while leaf < len(c):
        path.append(leaf)
        leaf = int(c.parent[leaf])
    return path[::-1]


def copy_of(root: Path, target: Path) -> Path:
    """With its holes."""
    subprocess.run(["cp", "-a", "--sparse=always", root, target], check=True)
    return target


def layout_of(root: Path) -> Layout:
    """The store in a root."""
    return Layout.open(root / "kvtier", create=False)


def used_segments(index: Index) -> set[str]:
    """Segments with live pages."""
    return {stored.segment for stored in index.runs()}


def most_segments(index: Index) -> int:
    """How many there may be."""
    live = sum(int((e[:, 1] - e[:, 0]).sum()) for e in live_extents(index).values())
    return MOST_SEGMENTS + 2 * live // SEGMENT


def state_of(index: Index) -> list[object]:
    """Everything about the live pages but where they are."""
    found: list[object] = []
    for c in chains(index):
        keys_ = [key.tobytes() for key in c.keys]
        parents = [keys_[at] if at < len(c) else at - len(c) for at in c.parent.tolist()]
        rows = zip(keys_, parents, c.depth.tolist(), c.used_ns.tolist(), strict=True)
        found += [c.namespace, c.window, c.reachable.all(), sorted(rows, key=repr)]
        found.append(sorted(set(copies(index))))
        found.append([session.key for session in c.sessions()])
    return found


CALLS = ("pwrite", "fdatasync", "fsync", "rename", "unlink")
"""Functions of `os` before which a process may kill itself."""


def killed(act: Callable[[], object], at: int) -> int:
    """Do it in a process that kills itself before the change of files with this number; how many it
    made, 0 if it was killed."""
    done, said = os.pipe()
    child = os.fork()
    if not child:
        count = 0

        def counted(real: Callable[..., object]) -> Callable[..., object]:
            def call(*words: object, **named: object) -> object:
                nonlocal count
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*words, **named)

            return call

        try:
            write = os.write
            for name in CALLS:
                setattr(os, name, counted(getattr(os, name)))
            act()
            write(said, count.to_bytes(4, "little"))
        finally:
            os._exit(0)
    os.close(said)
    with os.fdopen(done, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return int.from_bytes(answer, "little")
