"""What `kvtier inspect` knows about a store, as plain data: the same for tables and `--json`."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.backends.local import disk_usage
from kvtier.chains import Chains, Keys, Session, chains
from kvtier.errors import IdentityError
from kvtier.identity import Identity, stored_identity
from kvtier.index import Health, Index
from kvtier.layout import (
    GATE,
    INDEX,
    LOCK,
    MANIFEST_SUFFIX,
    NAMESPACES,
    PAYLOAD_SUFFIX,
    PINS,
    SEGMENTS,
    SUPERBLOCK,
    Layout,
    segment_id,
)
from kvtier.limits import FILE as LIMITS
from kvtier.pins import pinned
from kvtier.status import Status, statuses


@dataclass(frozen=True)
class NamespaceReport:
    """One namespace: what it is of, and how much of it is there. Sizes in bytes."""

    id: str
    identity: Identity | None
    """None if its document is missing or damaged; its pages are served all the same to a server
    that has the same identity."""
    columns: list[dict[str, Any]]
    pages: int
    complete: int
    restorable: int
    """Pages that some restore can use: complete as all before them, and a boundary comes after."""
    bytes: int
    restorable_bytes: int
    tails: int
    sessions: list[Session]
    pins: Keys = ()
    """Keys of pages that go last, with all before them."""

    @property
    def page_tokens(self) -> int | None:
        """Tokens of a page, None if the identity is not known."""
        return (self.identity.page_tokens or None) if self.identity else None

    def tokens(self, pages: int) -> int | None:
        """Tokens of so many pages."""
        return None if self.page_tokens is None else pages * self.page_tokens


@dataclass(frozen=True)
class StoreReport:
    """A store as it is now. Sizes in bytes."""

    path: Path
    store_id: str
    disk: int
    """What all files take on the file system, foreign ones included."""
    free: int
    """Free on the file system."""
    foreign: list[str]
    """Files that kvtier did not make."""
    uncommitted: int
    """Payload on disk that no manifest names yet: a running server's last moments, or what a
    crash left."""
    health: Health
    processes: list[Status]
    """What the processes that have the store open say."""
    namespaces: list[NamespaceReport] = field(default_factory=list)


def report(layout: Layout, index: Index) -> StoreReport:
    """Look at everything; changes nothing. OSError if the directory cannot be read."""
    found = {c.namespace: c for c in chains(index)}
    pins = pinned(layout)
    names = set(found) | set(_documents(layout))
    system = os.statvfs(layout.path)
    return StoreReport(
        path=layout.path,
        store_id=layout.store_id.hex(),
        disk=disk_usage(layout.path),
        free=system.f_bavail * system.f_frsize,
        foreign=foreign_files(layout),
        uncommitted=_uncommitted(layout, index),
        health=index.health(),
        processes=statuses(layout),
        namespaces=[
            _namespace(layout, index, name, found.get(name), pins.get(name, {}).keys())
            for name in sorted(names)
        ],
    )


def foreign_files(layout: Layout) -> list[str]:
    """Paths below the store that are not kvtier's, relative to it."""
    strangers = []
    for folder, _, files in os.walk(layout.path):
        place = Path(folder).relative_to(layout.path)
        strangers += [
            str(place / name) for name in files if not _ours(Path(folder), str(place), name)
        ]
    return sorted(strangers)


def _ours(folder: Path, place: str, name: str) -> bool:
    if name.startswith(".") and name.endswith(".tmp"):
        return True
    try:
        if not stat.S_ISREG((folder / name).lstat().st_mode):
            return False
    except FileNotFoundError:
        return True  # a running collection has removed it
    stem, _, ending = name.rpartition(".")
    return {
        ".": name in (SUPERBLOCK, LOCK, GATE, LIMITS),
        SEGMENTS: f".{ending}" in (PAYLOAD_SUFFIX, MANIFEST_SUFFIX) and bool(segment_id(stem)),
        NAMESPACES: ending == "json" and len(stem) == 32,
        INDEX: True,
        PINS: True,
    }.get(place, False)


def _documents(layout: Layout) -> list[bytes]:
    stems = [path.stem for path in layout.namespaces.glob("*.json")]
    return [bytes.fromhex(stem) for stem in stems if len(stem) == 32 and _is_hex(stem)]


def _is_hex(text: str) -> bool:
    return not set(text) - set("0123456789abcdef")


def _uncommitted(layout: Layout, index: Index) -> int:
    total = 0
    for segment in index.segments():
        try:
            size = layout.payload(segment.name).stat().st_size
        except FileNotFoundError:
            continue
        total += max(0, size - segment.payload_end)
    return total


def _namespace(
    layout: Layout, index: Index, name: bytes, found: Chains | None, pins: Keys
) -> NamespaceReport:
    try:
        identity: Identity | None = stored_identity(layout.namespaces, name.hex())
    except IdentityError:
        identity = None
    columns = [
        {"pool": column.pool, "shard": column.shard}
        for column in sorted(index.columns(name).values())
    ]
    if found is None:
        return NamespaceReport(name.hex(), identity, columns, 0, 0, 0, 0, 0, 0, [])
    return NamespaceReport(
        id=name.hex(),
        identity=identity,
        columns=columns,
        pages=len(found),
        complete=int(found.complete.sum()),
        restorable=int(found.useful.sum()),
        bytes=int(found.bytes.sum()),
        restorable_bytes=int(found.bytes[found.useful].sum()),
        tails=int(found.tail.sum()),
        sessions=found.sessions(),
        pins=pins,
    )
