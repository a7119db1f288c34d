"""The catalog of a store kept up with its files: manifests read, snapshot loaded and saved.

Every process of a host keeps one. The manifests are the truth; all else is computed from them.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvtier.backends.local import durable_end
from kvtier.catalog import Catalog, Located, Segment, StoredRun
from kvtier.clock import Clock
from kvtier.format import Grave, scan_frames
from kvtier.layout import MANIFEST_SUFFIX, Layout
from kvtier.memory import keep_resident
from kvtier.pages import Bools, Column
from kvtier.snapshot import Snapshot

SNAPSHOT = "snapshot"
DOORBELL = "doorbell"

_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW

LATE_PAGES = 1 << 16
"""Entries kept in a dict (about 130 bytes each) before a new snapshot is worth its write; and runs
kept as frames, of which most may be gone again."""

LATE_BYTES = 32 << 20
"""Bytes of such frames before a new snapshot is worth its write: what is stored bounds memory, and
not what went through."""

_SETTLED_NS = 2_000_000_000
"""A directory's time stamp older than this cannot hide a later change in the same tick."""


@dataclass
class Health:
    """What an operator wants to know about the manifests."""

    segments: int = 0
    live_writers: int = 0
    damaged: dict[str, int] = field(default_factory=dict)
    """Manifest name to places that held no frame."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Manifest name to why it could not be read."""


class Index:
    """Lookups over everything committed in a store. Safe to use from several threads.

    `_reading` serialises those who read files; `_lock` is held only for work in memory, so that a
    lookup never waits for a drive.
    """

    def __init__(self, layout: Layout, *, readonly: bool = False) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._reading = threading.RLock()
        self._bell = _Doorbell(layout, readonly=readonly)
        self._clock = Clock()
        self._load(Snapshot.load(layout.index / SNAPSHOT))

    # Questions

    def contains(
        self, namespace: bytes, column: int, keys: bytes, *, doomed: bool = False
    ) -> Bools:
        """Which of the 32-byte keys the column has; bool (n,). `doomed`: also those that somebody
        is about to delete; nobody should count on them, but they can be read, and what hangs on
        them keeps them."""
        with self._lock:
            return self._catalog.contains(namespace, column, keys, doomed=doomed)

    def contains_each(self, namespace: bytes, columns: Sequence[int], keys: bytes) -> list[Bools]:
        """Which of the 32-byte keys each column has; bool (n,) a column."""
        with self._lock:
            return self._catalog.contains_each(namespace, columns, keys)

    def locate(self, namespace: bytes, column: int, keys: bytes) -> list[Located]:
        """Where the pages are, run by run. Pages that are not there are left out."""
        with self._lock:
            return self._catalog.locate(namespace, column, keys)

    def runs(self) -> Iterator[StoredRun]:
        """Every run with its live pages, as they are at the call."""
        with self._lock:
            return self._catalog.runs()

    def columns(self, namespace: bytes) -> dict[int, Column]:
        """Column ids of a namespace and what they stand for."""
        return self._catalog.columns.get(namespace, {})

    def namespaces(self) -> list[bytes]:
        """Namespaces that ever had a column in the files that are there."""
        return list(self._catalog.columns)

    def uses(self, namespace: bytes) -> dict[bytes, int]:
        """Page key to the stamp at which it was last restored or extended."""
        used = list(self._catalog.used.items())
        return {key: time_ns for (owner, key), time_ns in used if owner == namespace}

    def stamp(self) -> int:
        """The time in ns for what is logged or used now, later than all that was read."""
        return self._clock.now()

    def segments(self) -> list[Segment]:
        """The segments whose manifest is there."""
        with self._reading:
            return [s for s in self._catalog.segments if s.name in self._present]

    def mark(self) -> int:
        """A point in time for `parents_since`; void after `save` or `rebuild`."""
        return self._catalog.late_runs

    def parents_since(self, mark: int) -> set[bytes]:
        """Parents of the runs that were read since the mark."""
        return self._catalog.parents_since(mark)

    def health(self) -> Health:
        """Manifests, live writers, and damage seen so far."""
        segments = self.segments()
        return Health(
            segments=len(segments),
            live_writers=len({s.ident[:12] for s in segments if s.live}),
            damaged={s.name: s.damaged for s in segments if s.damaged},
            unreadable={s.name: s.unreadable for s in segments if s.unreadable},
        )

    def __len__(self) -> int:
        with self._lock:
            return len(self._catalog)

    def holds(self, grave: Grave) -> bool:
        """Whether the first page of this place is live."""
        with self._lock:
            return self._catalog.holds(grave)

    # Changes

    def discard(self, grave: Grave) -> None:
        """Forget pages by place in this process only."""
        with self._lock:
            self._catalog.discard(grave)

    def note_use(self, namespace: bytes, key: bytes, time_ns: int) -> None:
        """A page was restored or extended."""
        with self._lock:
            self._catalog.note_use(namespace, key, time_ns)

    def ring(self) -> None:
        """Tell the host's other processes that there is something to read."""
        self._bell.ring()

    def rung(self) -> bool:
        """Whether anybody rang since the last call."""
        return self._bell.rung()

    def refresh(self, *, alone: bool = False) -> None:
        """Read what the manifests say since the last call.

        `alone`: the caller has the store's lock alone. Then whoever seems to be logging is dying,
        and what it wrote will count; a process that is killed may lose the store's lock before
        its own. OSError if the directory cannot be read; what was known stays.
        """
        with self._reading:
            self._read_tails(self._catalog, alone=alone)

    def stale(self) -> bool:
        """So much came since the snapshot that a new one is worth its write."""
        catalog = self._catalog
        late = max(catalog.late_pages, catalog.late_runs)
        return late > LATE_PAGES or catalog.late_bytes > LATE_BYTES

    def snapshot_bytes(self) -> int:
        """About what a snapshot of all this takes on disk, rather more."""
        with self._lock:
            return self._catalog.snapshot_bytes()

    def save(self) -> None:
        """Write a snapshot of all this and go on from it.

        OSError if it cannot be written; the old one stays.
        """
        path = self._layout.index / SNAPSHOT
        # In this order, which is that of the committer: it reads while it holds the store's lock.
        with self._layout.lock(), self._reading:
            self._read_tails(self._catalog)
            with self._lock:
                copies = self._catalog.copies()
            snapshot = self._catalog.compacted(self.segments(), copies)
            snapshot.save(path)
            self._load(Snapshot.load(path))

    def reload(self) -> None:
        """Forget what was discarded in this process only."""
        with self._reading:
            self._load(Snapshot.load(self._layout.index / SNAPSHOT))

    def rebuild(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Forget the snapshot and read every manifest from its first byte.

        `progress(done, total)` counts bytes of manifests.
        """
        with self._reading:
            self._load(None, progress)

    def close(self) -> None:
        """Know nothing any more and let go of the mapped files, or their file system would stay
        busy. Lookups go on, and find nothing."""
        with self._lock:
            self._catalog = Catalog(self._layout.store_id)
        self._bell.close()

    # Inside

    def _load(
        self,
        snapshot: Snapshot | None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        try:
            catalog = Catalog(self._layout.store_id, snapshot)
        except (KeyError, TypeError, ValueError, IndexError):
            catalog = Catalog(self._layout.store_id)  # a snapshot of another make: replay instead
        self._present: set[str] = set()
        self._directory_ns = -1
        self._read_tails(catalog, progress)
        with self._lock:
            self._catalog = catalog

    def _read_tails(
        self,
        catalog: Catalog,
        progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        alone: bool = False,
    ) -> None:
        self._list_segments(catalog)
        waiting = [s for s in catalog.segments if s.live and s.name in self._present]
        for done, segment in enumerate(waiting):
            self._read_tail(catalog, segment, alone)
            progress(done + 1, len(waiting))
        self._clock.saw(catalog.newest_ns)

    def _list_segments(self, catalog: Catalog) -> None:
        directory = self._layout.segments
        changed = directory.stat().st_mtime_ns
        if changed == self._directory_ns:
            return
        with os.scandir(directory) as entries:
            names = {
                entry.name.removesuffix(MANIFEST_SUFFIX)
                for entry in entries
                if entry.name.endswith(MANIFEST_SUFFIX) and entry.is_file(follow_symlinks=False)
            }
        with self._lock:
            for name in sorted(names):
                catalog.add_segment(name)
            gone = [s for s in catalog.segments if s.name not in names]
            first = not self._present
            if gone and (first or any(s.name in self._present for s in gone)):
                catalog.forget_segments(gone)
        self._present = names
        self._directory_ns = changed if time.time_ns() - changed > _SETTLED_NS else -1

    def _read_tail(self, catalog: Catalog, segment: Segment, alone: bool) -> None:
        try:
            data, size, live = self._tail(segment, alone)
        except FileNotFoundError:
            return
        except OSError as error:
            segment.unreadable = error.strerror or str(error)
            return
        segment.unreadable = ""
        start = segment.applied
        damage = 0
        with self._lock:
            for offset, frame, length in scan_frames(data):
                if frame is None:
                    damage += 1
                    continue
                whole = data[offset : offset + length]
                if not catalog.apply(segment, start + offset, frame, whole):
                    damage += 1
                segment.applied = start + offset + length
                segment.damaged += damage
                damage = 0
            if not live and size > segment.applied:
                # Nobody will finish a torn end any more.
                segment.damaged += damage
                segment.applied = size
            if not live:
                catalog.undoom(segment)
        segment.seen, segment.live = size, live

    def _tail(self, segment: Segment, alone: bool) -> tuple[bytes, int, bool]:
        """(durable bytes not yet applied, where they end, whether the manifest's writer lives)."""
        path = self._layout.manifest(segment.name)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            live = _held(fd)
            size = os.fstat(fd).st_size
            if live and not alone:
                # What its writer has not synced is not committed: a power cut may take it back.
                size = durable_end(fd, size)
                if size == segment.seen:
                    return b"", size, live
            elif size > segment.applied:
                # A writer that is killed may not have come to its sync. A drive that refuses will
                # refuse new commits as well; what it holds can be read all the same.
                with contextlib.suppress(OSError):
                    os.fdatasync(fd)
            return _read(fd, segment.applied, size), size, live
        finally:
            os.close(fd)


class _Doorbell:
    """Eight bytes shared by the host's processes: they change when somebody has committed.

    Only a hint that saves asking the file system at every lookup, so races are harmless: the
    keeper of a store looks from time to time even if nobody rang.
    """

    def __init__(self, layout: Layout, *, readonly: bool) -> None:
        self._path = layout.index / DOORBELL
        self._view: memoryview | None = None
        self._closed = False
        self._last = b""
        if readonly:
            return
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
        except OSError:
            return  # every lookup then asks the file system: slower, not wrong
        try:
            if os.fstat(fd).st_size < 8:
                os.pwrite(fd, bytes(8), 0)
            mapped = mmap.mmap(fd, 8, access=mmap.ACCESS_READ)
            if keep_resident(mapped):
                self._view = memoryview(mapped)
            layout.adopt(self._path)
        except OSError:
            return
        finally:
            os.close(fd)

    def ring(self) -> None:
        # Who rings has read everything just before: its own ring is no news to it.
        self._last = os.urandom(8)
        # Written, not stored to the mapping: there, a full or failing drive would be a SIGBUS.
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_WRONLY | _SAFELY)
            try:
                os.pwrite(fd, self._last, 0)
            finally:
                os.close(fd)

    def close(self) -> None:
        self._view, self._closed = None, True

    def rung(self) -> bool:
        view = self._view  # another thread may close it
        if view is None:
            return not self._closed
        now = bytes(view)
        changed = now != self._last
        self._last = now
        return changed


def _held(fd: int) -> bool:
    """Whether a live writer holds this manifest."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _read(fd: int, start: int, end: int) -> bytes:
    """Bytes from `start` to `end`, or to the end of the file if it is shorter."""
    pieces = []
    while start < end:
        piece = os.pread(fd, end - start, start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)
