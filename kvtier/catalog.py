"""What is stored and where, in memory: the sum of the frames applied so far. No disk, no locks.

A snapshot gives the bulk, frames what came since. They may be applied in any order of the files: a
tombstone that comes before its run waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.entries import Entries, Ints, pack, unpack
from kvtier.format import (
    MAX_RUN_PAGES,
    FormatError,
    Frame,
    FrameType,
    Grave,
    Run,
    align,
    checksum,
    decode_columns,
    decode_frame,
    decode_recency,
    decode_run,
    decode_tombstone,
    decode_wipe,
)
from kvtier.layout import segment_id
from kvtier.pages import KEY_BYTES, U64, Bools, Column
from kvtier.snapshot import Rows, Snapshot, compact
from kvtier.table import MISSING, Table

_CACHE = 1 << 16
"""Pages of decoded runs that are kept, a run counted as `_RUN` more: about 7 MB."""

_RUN = 16

Copies = tuple[U64, U64, U64, U64]
"""Keys and the places that stand for them, keys and places of further copies."""

_USES = 1 << 14
"""Newest uses that are kept; sessions are hundreds, and older ones rank by when they were
written."""


@dataclass
class Segment:
    """One manifest as far as this process has read it."""

    name: str
    ident: bytes
    applied: int = 0
    """Bytes of the manifest that need not be read again."""
    seen: int = 0
    """Size of the manifest when it was last read: torn bytes at its end are not read twice."""
    live: bool = True
    """Its writer may still append."""
    damaged: int = 0
    """Places that held no frame: between good ones, or at the end of a writer that died."""
    payload_end: int = 0
    """End of the last block that a frame of the manifest names."""
    unreadable: str = ""
    """Why the manifest could not be read the last time; empty if it could."""


@dataclass(frozen=True)
class StoredRun:
    """A run, where it is, and which of its pages are meant."""

    segment: str
    manifest_offset: int
    time_ns: int
    run: Run
    positions: Ints
    """Positions in the run, ascending for `Catalog.runs`, as asked for `Catalog.locate`."""

    def grave(self, first: int, pages: int) -> Grave:
        """The place of some of the run's pages, for a tombstone."""
        ident = segment_id(self.segment)
        assert ident is not None
        return Grave(ident, self.manifest_offset, first, pages)


@dataclass(frozen=True)
class Located:
    """Pages that were asked for, as far as they lie in one run."""

    stored: StoredRun
    wanted: Ints
    """Index of each page in the question; same shape as `stored.positions`."""


class _LateRun:
    """A run that came after the snapshot: its place and its frame's bytes."""

    __slots__ = ("frame", "manifest", "segment")

    def __init__(self, segment: int, manifest: int, frame: bytes) -> None:
        self.segment = segment
        self.manifest = manifest
        self.frame = frame


def page_prints(keys: bytes | memoryview) -> U64:
    """The first eight bytes of each 32-byte key; uint64 (n,)."""
    return np.frombuffer(keys, "<u8").reshape(-1, KEY_BYTES // 8)[:, 0]


def family_salt(namespace: bytes, columns: Sequence[int]) -> int:
    """Sets the pages of one namespace and set of columns apart in the table."""
    return checksum(namespace + np.array(sorted(columns), "<u8").tobytes())


class Catalog:
    """The live pages of a store. A run has a row: the snapshot's come first, then the late ones."""

    def __init__(self, store_id: bytes, snapshot: Snapshot | None = None) -> None:
        self._store_id = store_id
        self._entries = Entries()
        self._rows = snapshot.rows if snapshot else Rows.empty()
        self._frames = snapshot.frames if snapshot else memoryview(b"")
        self._places: tuple[U64, Ints] | None = None
        self._late_runs: list[_LateRun] = []
        self.late_bytes = 0
        """Of frames of runs that came since the snapshot, deleted ones included."""
        self._late_places: dict[tuple[int, int], int] = {}
        self._cache: dict[int, tuple[int, Run]] = {}
        self._cached = 0
        """About: threads that go over runs count without the lock."""
        self._graves: dict[tuple[bytes, int], list[tuple[int, int]]] = {}
        self._wipes: dict[tuple[bytes, bytes], int] = {}
        self._doomed: dict[bytes, list[Grave]] = {}
        self._doomed_places: U64 | None = None
        """Sorted; None if it is to be made anew from `_doomed`."""
        self._families: dict[bytes, dict[int, tuple[int, ...]]] = {}
        self.columns: dict[bytes, dict[int, Column]] = {}
        """Namespace to column ids and what they stand for."""
        self.used: dict[tuple[bytes, bytes], int] = {}
        """(namespace, page key) to the stamp at which it was last restored or extended."""
        self.newest_ns = 0
        """The greatest stamp seen."""
        self.segments: list[Segment] = []
        self._numbers: dict[bytes, int] = {}
        if snapshot:
            self._entries = Entries(snapshot.table, snapshot.state["spares"])
            self._load_state(snapshot.state)

    @property
    def late_pages(self) -> int:
        """Entries that came since the snapshot."""
        return self._entries.late

    @property
    def late_runs(self) -> int:
        """Runs that came since the snapshot."""
        return len(self._late_runs)

    def snapshot_bytes(self) -> int:
        """About what a snapshot of all this takes, rather more: frames, rows, and a table that
        may be a quarter full."""
        frames = len(self._frames) + sum(len(run.frame) for run in self._late_runs)
        return (1 << 20) + frames + 24 * (len(self._rows) + len(self._late_runs)) + 64 * len(self)

    def parents_since(self, mark: int) -> set[bytes]:
        """Parents of the runs that came after the first `mark` late ones."""
        runs = (decode_run(decode_frame(run.frame, 0).body) for run in self._late_runs[mark:])
        return {run.parent for run in runs if run.parent}

    def __len__(self) -> int:
        """Live entries: a page counts once for each set of columns stored for it together."""
        return len(self._entries.standing()[0])

    # Questions

    def contains(
        self, namespace: bytes, column: int, keys: bytes, *, doomed: bool = False
    ) -> Bools:
        """Which of the 32-byte keys the column has; bool (n,). `doomed`: also those about to be
        deleted."""
        return self.contains_each(namespace, [column], keys, doomed=doomed)[0]

    def contains_each(
        self, namespace: bytes, columns: Sequence[int], keys: bytes, *, doomed: bool = False
    ) -> list[Bools]:
        """Which of the 32-byte keys each column has; bool (n,) a column.

        Columns that are stored together, as the pools of one model are, cost one lookup.
        """
        prints = page_prints(keys)
        found = [np.zeros(len(prints), np.bool_) for _ in columns]
        for salt, family in self._families.get(namespace, {}).items():
            asked = [held for column, held in zip(columns, found, strict=True) if column in family]
            if asked:
                places = self._entries.find(prints ^ np.uint64(salt))
                there = places != MISSING
                if self._doomed and not doomed:
                    there &= ~self._are_doomed(places)
                for held in asked:
                    np.logical_or(held, there, out=held)
        return found

    def locate(self, namespace: bytes, column: int, keys: bytes) -> list[Located]:
        """Where the pages are, run by run. Pages that are not there are left out."""
        places = self._lookup(namespace, column, keys)
        wanted = np.flatnonzero(places != MISSING)
        rows, positions = unpack(places[wanted])
        found = []
        for span in _groups(rows):
            stored = self._stored(int(rows[span][0]), positions[span])
            if stored is not None:
                found.append(Located(stored, wanted[span]))
        return found

    def holds(self, grave: Grave) -> bool:
        """Whether the first page of this place is live."""
        row = self._row_at(grave.segment_id, grave.frame_offset)
        stored = None if row is None else self._stored(row, np.zeros(0, np.int64))
        if row is None or stored is None:
            return False
        run = stored.run
        salt = family_salt(run.namespace, [block.column for block in run.blocks])
        key = int(page_prints(run.key(grave.first))[0]) ^ salt
        return self._entries.holds(key, row, grave.first)

    def runs(self) -> Iterator[StoredRun]:
        """Every run with its live pages, further copies included, oldest file first. Damaged
        frames are left out. What changes after the call doesn't show."""
        _, standing, _, spares = self.copies()
        return self._runs(np.sort(np.concatenate((standing, spares))))

    def copies(self) -> Copies:
        """All live copies at this moment. Not to be called while another thread makes one stand
        for another: it would be in neither."""
        return (*self._entries.standing(), *self._entries.spares())

    def _runs(self, places: U64) -> Iterator[StoredRun]:
        rows, positions = unpack(places)
        for span in _groups(rows):
            stored = self._stored(int(rows[span][0]), positions[span])
            if stored is not None:
                yield stored

    # Changes

    def add_segment(self, name: str) -> None:
        """A manifest that was not there before; other names are ignored."""
        ident = segment_id(name)
        if ident is not None and ident not in self._numbers:
            self._numbers[ident] = len(self.segments)
            self.segments.append(Segment(name, ident))

    def forget_segments(self, gone: Sequence[Segment]) -> None:
        """Drop every page whose segment has been removed."""
        numbers = {self._numbers[segment.ident] for segment in gone}
        rows = np.flatnonzero(np.isin(self._rows.segment, list(numbers))).tolist()
        base = len(self._rows)
        rows += [base + i for i, run in enumerate(self._late_runs) if run.segment in numbers]
        self._entries.drop_rows(rows)
        for segment in gone:
            segment.live = False
            self.undoom(segment)

    def apply(self, segment: Segment, offset: int, frame: Frame, data: bytes) -> bool:
        """Take in one frame of a manifest; `data` is the whole frame. False if it is damaged or
        does not belong in this file."""
        if frame.segment_id != segment.ident or frame.store_id != self._store_id:
            return False
        self.newest_ns = max(self.newest_ns, frame.time_ns)
        try:
            if frame.type == FrameType.RUN:
                self._add_run(segment, offset, decode_run(frame.body), data)
            elif frame.type == FrameType.TOMBSTONE:
                for grave in decode_tombstone(frame.body):
                    self.bury(grave)
            elif frame.type == FrameType.DOOM:
                self._doom(segment.ident, decode_tombstone(frame.body))
            elif frame.type == FrameType.WIPE:
                namespace, ends = decode_wipe(frame.body)
                for ident, end in ends:
                    self._wipe(namespace, ident, end)
            elif frame.type == FrameType.RECENCY:
                namespace, used = decode_recency(frame.body)
                for key, time_ns in used:
                    self.note_use(namespace, key, time_ns)
            elif frame.type == FrameType.COLUMNS:
                namespace, columns = decode_columns(frame.body)
                self.columns.setdefault(namespace, {}).update(columns)
        except FormatError:
            return False
        return True

    def bury(self, grave: Grave) -> None:
        """Drop pages by place. Remembered: the run itself may come later."""
        ranges = self._graves.setdefault((grave.segment_id, grave.frame_offset), [])
        if (grave.first, grave.pages) not in ranges:
            ranges.append((grave.first, grave.pages))
        row = self._row_at(grave.segment_id, grave.frame_offset)
        if row is not None:
            self._drop(row, grave.first, grave.pages)

    def undoom(self, segment: Segment) -> None:
        """Whoever was about to delete through this segment's manifest is gone."""
        if self._doomed.pop(segment.ident, None):
            self._doomed_places = None

    def discard(self, grave: Grave) -> None:
        """Hide pages by place, in this catalog only: a snapshot of it has them."""
        row = self._row_at(grave.segment_id, grave.frame_offset)
        if row is not None:
            self._entries.hide(*self._copies(row, grave.first, grave.pages))

    def note_use(self, namespace: bytes, key: bytes, time_ns: int) -> None:
        """A page was restored or extended."""
        place = (namespace, key)
        self.newest_ns = max(self.newest_ns, time_ns)
        self.used[place] = max(time_ns, self.used.get(place, 0))
        if len(self.used) > 2 * _USES:
            self.used = dict(self._newest_uses())

    def compacted(self, present: Sequence[Segment], copies: Copies | None = None) -> Snapshot:
        """All this as a snapshot: live runs, and the segments that are still there.

        `copies`: what `copies` has just returned, if other threads use the catalog.
        """
        frames = bytes(self._frames) + b"".join(run.frame for run in self._late_runs)
        lengths = np.array([len(run.frame) for run in self._late_runs], np.uint64)
        ends = np.cumsum(lengths, dtype=np.uint64) + np.uint64(len(self._frames))
        manifest = np.array([run.manifest for run in self._late_runs], np.uint64)
        number = np.array([run.segment for run in self._late_runs], np.uint64)
        rows = Rows(
            np.concatenate((self._rows.frame, ends)),
            np.concatenate((self._rows.manifest, manifest)),
            np.concatenate((self._rows.segment, number)),
        )
        keys, standing, spare_keys, spares = copies or self.copies()
        old, position = unpack(np.concatenate((standing, spares)))
        keep = np.unique(old)
        rows, kept = compact(rows, memoryview(frames), keep)
        renumbered = np.zeros(len(self.segments), np.uint64)
        for place, segment in enumerate(present):
            renumbered[self._numbers[segment.ident]] = place
        rows.segment = renumbered[rows.segment.astype(np.int64)]
        places = pack(np.searchsorted(keep, old), position)
        table = Table.build(keys, places[: len(keys)])
        state = self._state(present)
        moved = places[len(keys) :].tolist()
        state["spares"] = list(zip(spare_keys.tolist(), moved, strict=True))
        return Snapshot(state, table, rows, memoryview(kept))

    # Inside

    def _doom(self, by: bytes, graves: Sequence[Grave]) -> None:
        self._doomed.setdefault(by, []).extend(graves)
        self._doomed_places = None

    def _are_doomed(self, places: U64) -> Bools:
        if self._doomed_places is None:
            pieces = [np.zeros(0, np.uint64)]
            for grave in itertools.chain.from_iterable(self._doomed.values()):
                row = self._row_at(grave.segment_id, grave.frame_offset)
                if row is not None:
                    pages = np.arange(grave.first, grave.first + grave.pages)
                    pieces.append(pack(np.full(len(pages), row), pages))
            self._doomed_places = np.sort(np.concatenate(pieces))
        if not len(self._doomed_places):
            return np.zeros(len(places), np.bool_)
        at = np.searchsorted(self._doomed_places, places)
        at[at == len(self._doomed_places)] = 0
        found: Bools = self._doomed_places[at] == places
        return found

    def _lookup(self, namespace: bytes, column: int, keys: bytes) -> U64:
        prints = page_prints(keys)
        found = np.full(len(prints), MISSING)
        for salt, columns in self._families.get(namespace, {}).items():
            if column not in columns:
                continue
            places = self._entries.find(prints ^ np.uint64(salt))
            found = np.where(found == MISSING, places, found)
        return found

    def _stored(self, row: int, positions: Ints) -> StoredRun | None:
        segment, manifest, data = self._row(row)
        known = self._cache.get(row)
        if known is None:
            try:
                frame = decode_frame(data, 0)
                known = frame.time_ns, decode_run(frame.body)
            except FormatError:
                return None
            if self._cached >= _CACHE:
                self._cache.clear()
                self._cached = 0
            self._cache[row] = known
            self._cached += _RUN + len(known[1])
        return StoredRun(segment.name, manifest, known[0], known[1], positions)

    def _add_run(self, segment: Segment, offset: int, run: Run, data: bytes) -> None:
        segment.payload_end = max(
            segment.payload_end, *(block.offset + align(block.size) for block in run.blocks), 0
        )
        if offset < self._wipes.get((run.namespace, segment.ident), 0):
            return
        salt = self._family(run.namespace, tuple(sorted(b.column for b in run.blocks)))
        row = len(self._rows) + len(self._late_runs)
        number = self._numbers[segment.ident]
        self._late_runs.append(_LateRun(number, offset, data))
        self.late_bytes += len(data)
        self._late_places[number, offset] = row
        self._doomed_places = None  # its doom may have been read before it
        self._entries.add(page_prints(run.keys) ^ np.uint64(salt), row)
        for start, pages in self._graves.get((segment.ident, offset), ()):
            self._drop(row, start, pages)

    def _wipe(self, namespace: bytes, ident: bytes, end: int) -> None:
        place = (namespace, ident)
        self._wipes[place] = max(end, self._wipes.get(place, 0))
        number = self._numbers.get(ident)
        if number is None:
            return
        rows = np.flatnonzero(
            (self._rows.segment == np.uint64(number)) & (self._rows.manifest < np.uint64(end))
        ).tolist()
        base = len(self._rows)
        rows += [
            base + i
            for i, run in enumerate(self._late_runs)
            if run.segment == number and run.manifest < end
        ]
        for row in rows:
            self._drop(row, 0, MAX_RUN_PAGES, namespace)

    def _drop(self, row: int, first: int, pages: int, namespace: bytes | None = None) -> None:
        self._entries.drop(*self._copies(row, first, pages, namespace))

    def _copies(
        self, row: int, first: int, pages: int, namespace: bytes | None = None
    ) -> tuple[U64, int, int]:
        """(keys, row, position of the first) of pages of a run; no keys if its frame is damaged or
        it is of another namespace."""
        stored = self._stored(row, np.zeros(0, np.int64))
        if stored is None or namespace not in (None, stored.run.namespace):
            return np.zeros(0, np.uint64), row, first
        run = stored.run
        salt = family_salt(run.namespace, [block.column for block in run.blocks])
        return page_prints(run.keys)[first : first + pages] ^ np.uint64(salt), row, first

    def _family(self, namespace: bytes, columns: tuple[int, ...]) -> int:
        salt = family_salt(namespace, columns)
        self._families.setdefault(namespace, {})[salt] = columns
        return salt

    def _row_at(self, ident: bytes, offset: int) -> int | None:
        number = self._numbers.get(ident)
        if number is None:
            return None
        row = self._late_places.get((number, offset))
        if row is not None:
            return row
        if self._places is None:
            places = self._rows.segment << np.uint64(44) | self._rows.manifest
            order = np.argsort(places, kind="stable")
            self._places = places[order], order
        places, order = self._places
        wanted = np.uint64(number << 44 | offset)
        at = int(np.searchsorted(places, wanted))
        return int(order[at]) if at < len(places) and places[at] == wanted else None

    def _row(self, row: int) -> tuple[Segment, int, bytes | memoryview]:
        """(segment, offset in its manifest, frame bytes) of a run."""
        base = len(self._rows)
        if row >= base:
            run = self._late_runs[row - base]
            return self.segments[run.segment], run.manifest, run.frame
        start, end = int(self._rows.frame[row]), int(self._rows.frame[row + 1])
        segment = self.segments[int(self._rows.segment[row])]
        return segment, int(self._rows.manifest[row]), self._frames[start:end]

    def _newest_uses(self) -> list[tuple[tuple[bytes, bytes], int]]:
        return sorted(self.used.items(), key=lambda item: item[1], reverse=True)[:_USES]

    def _state(self, present: Sequence[Segment]) -> dict[str, Any]:
        """The rest of the catalog as a JSON document.

        Tombstones of frames already applied are left out: the snapshot shows their effect, and
        those of segments that are gone can meet no run any more.
        """
        applied = {segment.ident: segment.applied for segment in present}
        return {
            "store": self._store_id.hex(),
            "segments": [(s.name, s.applied, s.live, s.damaged, s.payload_end) for s in present],
            "families": [
                (namespace.hex(), columns)
                for namespace, families in self._families.items()
                for columns in families.values()
            ],
            "columns": {
                namespace.hex(): {str(ident): list(column) for ident, column in columns.items()}
                for namespace, columns in self.columns.items()
            },
            "newest_ns": self.newest_ns,
            "used": [
                (namespace.hex(), key.hex(), time_ns)
                for (namespace, key), time_ns in self._newest_uses()
            ],
            "graves": [
                (ident.hex(), offset, first, pages)
                for (ident, offset), ranges in self._graves.items()
                if offset >= applied.get(ident, 1 << 63)
                for first, pages in ranges
            ],
            "wipes": [
                (namespace.hex(), ident.hex(), end)
                for (namespace, ident), end in self._wipes.items()
                if end > applied.get(ident, 1 << 63)
            ],
            "doomed": [
                (by.hex(), [(g.segment_id.hex(), g.frame_offset, g.first, g.pages) for g in graves])
                for by, graves in self._doomed.items()
            ],
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        """ValueError, or another of a wrong document, if it is not of this store."""
        if state["store"] != self._store_id.hex():
            raise ValueError("a snapshot of another store")
        for name, applied, live, damaged, payload_end in state["segments"]:
            self.add_segment(name)
            segment = self.segments[-1]
            segment.applied = segment.seen = applied
            segment.live, segment.damaged, segment.payload_end = live, damaged, payload_end
        for namespace, columns in state["families"]:
            self._family(bytes.fromhex(namespace), tuple(columns))
        for namespace, named in state["columns"].items():
            self.columns[bytes.fromhex(namespace)] = {int(i): Column(*c) for i, c in named.items()}
        self.newest_ns = int(state["newest_ns"])
        for namespace, key, time_ns in state["used"]:
            self.used[bytes.fromhex(namespace), bytes.fromhex(key)] = time_ns
        for ident, offset, first, pages in state["graves"]:
            self._graves.setdefault((bytes.fromhex(ident), offset), []).append((first, pages))
        for namespace, ident, end in state["wipes"]:
            self._wipes[bytes.fromhex(namespace), bytes.fromhex(ident)] = end
        for by, graves in state["doomed"]:
            self._doom(bytes.fromhex(by), [Grave(bytes.fromhex(i), *rest) for i, *rest in graves])


def _groups(rows: Ints) -> list[slice]:
    """Slices of neighbours with the same row."""
    if not len(rows):
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(rows)) + 1, [len(rows)])).tolist()
    return [slice(start, end) for start, end in itertools.pairwise(starts)]
