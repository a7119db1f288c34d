"""Keys, pages in memory, and stores for the tests of the core."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.config import Config
from kvtier.format import FrameType, scan_frames
from kvtier.identity import Identity
from kvtier.index import SNAPSHOT, Index
from kvtier.layout import Layout
from kvtier.pages import ROOT, Bools, Column, Link, PageBuffers, PoolPages
from kvtier.store import Namespace, Store

KV = Column("kv", "tp0")

PATIENCE = 240.0
"""Seconds that nothing takes which comes at all."""

GUARD = 0xA5
"""What fills the memory before, between and after pages."""

Place = tuple[str, int, int]
"""Segment, offset of the run's frame in its manifest, position in the run."""


def key(*name: object) -> bytes:
    """A page key."""
    return hashlib.sha256(repr(name).encode()).digest()


def keys(name: object, count: int) -> list[bytes]:
    """Keys of a chain."""
    return [key(name, number) for number in range(count)]


def content(size: int, *name: object) -> bytes:
    """Bytes of a part: they look random, and are the same for the same name."""
    return hashlib.shake_128(repr(name).encode()).digest(size)


def contents(page_keys: Sequence[bytes], size: int, *name: object) -> list[bytes]:
    """Bytes of the parts that belong to these keys."""
    return [content(size, page, *name) for page in page_keys]


def identity(model: str = "model") -> Identity:
    """The identity of a served model."""
    return Identity.of({"model": model})


def settings(root: Path, **changes: Any) -> Config:
    """Settings for small stores that commit at once, and wait for a busy drive."""
    values: dict[str, Any] = {
        "min_free": 0,
        "commit_interval": 0.0,
        "staging_size": 4 << 20,
        "commit_size": 1 << 20,
        "put_deadline": 120.0,
        "read_deadline": 120.0,
    }
    return Config(root=root, **(values | {"segment_size": 16 << 20} | changes))


class Memory:
    """Memory of n pages, each in pieces that lie apart, as a host pool lays them out."""

    def __init__(self, count: int, pieces: Sequence[int], gap: int = 24) -> None:
        self.pieces = tuple(pieces)
        steps = [size + gap for size in self.pieces]
        starts = np.cumsum([gap, *(step * count for step in steps)])
        self.bytes = np.full(int(starts[-1]) + gap, GUARD, np.uint8)
        self._places = [
            [int(start) + page * step for start, step in zip(starts, steps, strict=False)]
            for page in range(count)
        ]

    def buffers(self) -> PageBuffers:
        """Where the pages lie."""
        base = self.bytes.ctypes.data
        places = np.array(self._places, np.uint64).reshape(len(self._places), len(self.pieces))
        return PageBuffers(places + np.uint64(base), self.pieces)

    def fill(self, pages: Sequence[bytes]) -> None:
        """Write the parts of all pages."""
        for places, part in zip(self._places, pages, strict=True):
            at = 0
            for start, size in zip(places, self.pieces, strict=True):
                self.bytes[start : start + size] = np.frombuffer(part[at : at + size], np.uint8)
                at += size

    def read(self) -> list[bytes]:
        """The parts of all pages."""
        return [
            b"".join(
                self.bytes[start : start + size].tobytes()
                for start, size in zip(places, self.pieces, strict=True)
            )
            for places in self._places
        ]

    def untouched(self) -> list[bool]:
        """Which pages still hold nothing but the filling."""
        return [part == bytes([GUARD]) * len(part) for part in self.read()]

    def guards_hold(self) -> bool:
        """Whether nothing was written outside pages."""
        outside = np.ones(len(self.bytes), np.bool_)
        for places in self._places:
            for start, size in zip(places, self.pieces, strict=True):
                outside[start : start + size] = False
        return bool((self.bytes[outside] == GUARD).all())


def cut(size: int) -> tuple[int, ...]:
    """A part's size in up to three unequal pieces."""
    if size < 3:
        return (size,) if size else ()
    return (size // 3, 1, size - size // 3 - 1)


def put(
    namespace: Namespace,
    page_keys: Sequence[bytes],
    parts: Sequence[bytes],
    column: Column = KV,
    link: Link = Link(ROOT, 0),  # noqa: B008 (frozen)
    *,
    window: int = 0,
) -> Bools:
    """Put pages; the memory is overwritten before this returns, as an engine may do."""
    memory = Memory(len(page_keys), cut(len(parts[0]) if parts else 0))
    memory.fill(parts)
    answer = namespace.put(PoolPages(column, list(page_keys), memory.buffers(), window), link)
    memory.bytes[:] = 0
    return answer


def get(
    namespace: Namespace, page_keys: Sequence[bytes], size: int, column: Column = KV
) -> list[bytes | None]:
    """Get pages of one column, None where there is none. Nothing but those pages is written."""
    memory = Memory(len(page_keys), cut(size))
    request = PoolPages(column, list(page_keys), memory.buffers())
    [answer] = namespace.get([request])
    assert memory.guards_hold()
    found: list[bytes | None] = []
    for there, part, untouched in zip(answer, memory.read(), memory.untouched(), strict=True):
        assert there or untouched, "a page that was not delivered was written to"
        found.append(part if there else None)
    return found


def get_each(
    namespace: Namespace, page_keys: Sequence[bytes], size: int, column: Column = KV
) -> list[bytes | None]:
    """Get pages one by one, so that a missing one does not stop the others."""
    return [get(namespace, [one], size, column)[0] for one in page_keys]


@contextlib.contextmanager
def opened(root: Path, model: str = "model", **changes: Any) -> Iterator[tuple[Store, Namespace]]:
    """An open store and a namespace in it."""
    store = Store.open(settings(root, **changes))
    try:
        yield store, store.namespace(identity(model))
    finally:
        store.close()


def store_of(root: Path) -> Path:
    """The store directory in a root."""
    return root / "kvtier"


def fresh_index(store: Path) -> Index:
    """An index made from the manifests alone."""
    index = Index(Layout.open(store, create=False), readonly=True)
    index.rebuild()
    return index


def saved_index(store: Path) -> Index:
    """The index as the snapshot and the tails of the manifests say."""
    return Index(Layout.open(store, create=False), readonly=True)


def copies(index: Index) -> dict[tuple[bytes, int, bytes], set[Place]]:
    """Every live part, (namespace, column id, page key), and where its copies are."""
    found: dict[tuple[bytes, int, bytes], set[Place]] = {}
    for stored in index.runs():
        for position in stored.positions.tolist():
            for block in stored.run.blocks:
                part = (bytes(stored.run.namespace), block.column, stored.run.key(position))
                place = (stored.segment, stored.manifest_offset, position)
                found.setdefault(part, set()).add(place)
    return found


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and bytes of everything below a folder; of symbolic links, where they lead."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if path.is_symlink():
            data = str(path.readlink()).encode()
        else:
            data = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (mode, data)
    return found


def manifests(store: Path) -> list[Path]:
    """The manifests that hold a run, largest first."""
    found = [
        path
        for path in (store / "segments").glob("*.kvm")
        if any(
            frame is not None and frame.type == FrameType.RUN
            for _, frame, _ in scan_frames(path.read_bytes())
        )
    ]
    return sorted(found, key=lambda path: path.stat().st_size, reverse=True)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Turn one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def lose_index(store: Path) -> None:
    """Remove what can be rebuilt."""
    (store / "index" / SNAPSHOT).unlink(missing_ok=True)


def frozen_copy(store: Path, target: Path) -> Path:
    """The store as a kill at this moment would leave it, under another root.

    In the order index, manifests, payload: what one names is then in the next.
    """
    for order in ("index/*", "*.json", "namespaces/*", "segments/*.kvm", "segments/*.kvs"):
        for path in store.glob(order):
            copy = store_of(target) / path.relative_to(store)
            copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # replaced or removed meanwhile
                shutil.copy2(path, copy)
    return target


def until(holds: Callable[[], bool], what: str) -> None:
    """Poll until `holds`. TimeoutError naming what did not come."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.05)
