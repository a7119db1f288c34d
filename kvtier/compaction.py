"""Keeps the number of segments bounded: the live pages of sparse ones move together.

Whoever calls this has the right to collect (`kvtier.collector.alone`). Readers and writers go on.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvtier.backends.local import WRITE_BYTES, SegmentWriter, read_extent
from kvtier.catalog import StoredRun
from kvtier.entries import Ints
from kvtier.format import (
    ALIGNMENT,
    Block,
    FrameType,
    Grave,
    Run,
    align,
    block_seed,
    checksum,
    encode_columns,
    encode_run,
    new_id,
    part_seed,
    running_checksum,
)
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.limits import Limits
from kvtier.manifests import tombstones
from kvtier.memory import Arena, Slice
from kvtier.pages import KEY_BYTES, ROOT
from kvtier.quota import Quota

MOST_SEGMENTS = 64
"""So many segments may have live pages, and twice as many as those pages would fill."""

LEAST_BUDGET = 64 << 20
FREED_PER_MOVED = 8
"""A collection may write one byte in so many that it freed, and `LEAST_BUDGET` in any case."""

_BATCH_BYTES = 64 << 20
_BATCH_PAGES = 1 << 13
"""Moved with one hold of the store's lock: whether a page is still there is asked for each."""


@dataclass
class Moved:
    """What was moved."""

    segments: int = 0
    """Segments that were chosen."""
    pages: int = 0
    bytes: int = 0
    """Written, in blocks of the file system."""
    damaged: int = 0
    """Pages whose bytes were not what was stored: forgotten."""


def write_budget(freed: int) -> int:
    """Bytes that a collection which freed so many may write to move pages."""
    return max(LEAST_BUDGET, freed // FREED_PER_MOVED)


def compact(
    layout: Layout, index: Index, limits: Limits, *, segment_size: int, budget: int
) -> Moved:
    """Move the live pages of the sparsest segments to new ones until no more than
    `MOST_SEGMENTS` and twice the least number of segments have live pages, or `budget` is spent.

    The old copies are logged as gone and can be read until their space is freed, which is for the
    caller, a grace time later. Of a segment all pages move, or none for want of budget or of room
    under `limits`. OSError if the store cannot be written; every page is then where it was, or
    moved, or in both places.
    """
    index.refresh()
    sizes = _live_bytes(index)
    total = sum(sum(size.values()) for size in sizes.values())
    excess = len(sizes) - MOST_SEGMENTS - 2 * total // segment_size
    if excess <= 0:
        return Moved()
    closed = {
        segment.name
        for segment in index.segments()
        if not (segment.live or segment.unreadable) and layout.payload(segment.name).exists()
    }
    quota = Quota(layout, limits)
    try:
        budget = min(budget, quota.headroom())
        movable = {name: size for name, size in sizes.items() if name in closed}
        chosen = _sparsest(movable, excess, budget, segment_size)
        room = sum(sum(sizes[name].values()) for name in chosen)
        if not chosen or not quota.reserve(room):
            return Moved()
        order = {name: place for place, name in enumerate(chosen)}
        runs = [stored for stored in index.runs() if stored.segment in order]
        runs.sort(key=lambda stored: (order[stored.segment], stored.manifest_offset))
        mover = Mover(layout, index, quota, room=room, segment_size=segment_size)
        with contextlib.closing(mover):
            for stored in runs:
                mover.copy(stored)
            mover.commit()
        index.refresh()  # so that it does not count the mover among those who write
        mover.moved.segments = len(chosen)
        return mover.moved
    finally:
        quota.close()


def _live_bytes(index: Index) -> dict[str, dict[bool, int]]:
    """For each segment with live pages, what they would take elsewhere: of trailing pools (True)
    and of others."""
    sizes: dict[str, dict[bool, int]] = defaultdict(lambda: defaultdict(int))
    for stored in index.runs():
        size = sum(_size(stored.run, end - first) for first, end in _stretches(stored.positions))
        sizes[stored.segment][stored.run.trailing] += size
    return sizes


def _sparsest(
    sizes: dict[str, dict[bool, int]], excess: int, budget: int, segment_size: int
) -> list[str]:
    """Segments to move so that there are `excess` fewer, or as near to that as `budget` allows."""
    chosen: list[str] = []
    fresh: dict[bool, int] = defaultdict(int)
    gain = best = 0
    for name in sorted(sizes, key=lambda name: sum(sizes[name].values())):
        for trailing, size in sizes[name].items():
            fresh[trailing] += size
        if gain >= excess or sum(fresh.values()) > budget:
            break
        chosen.append(name)
        gain = len(chosen) - sum(max(1, -(-size // segment_size)) for size in fresh.values())
        if gain > 0:
            best = len(chosen)
    return chosen[:best]


def _size(run: Run, pages: int) -> int:
    """Bytes that so many pages of a run take in a segment."""
    return sum(align(block.part_bytes * pages) for block in run.blocks)


def _stretches(positions: Ints) -> list[tuple[int, int]]:
    """(first, end) of stretches of neighbours in ascending positions."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    spans = np.split(positions, breaks) if len(positions) else []
    return [(int(span[0]), int(span[-1]) + 1) for span in spans]


class _Unreadable(Exception):
    """The drive did not give what a segment holds."""


class _Stream:
    """A new segment that is filled from its start, in large writes."""

    def __init__(self, writer: SegmentWriter) -> None:
        self.writer = writer
        self.copies: list[_Copy] = []
        """What is written and not logged."""
        self._buffer = Slice(Arena(WRITE_BYTES), 0, WRITE_BYTES)
        self._start = self._fill = 0

    def begin(self, size: int) -> int:
        """Offset of the next block, which has `size` bytes."""
        offset = self.writer.reserve(size)
        padded = align(self._fill)
        self._buffer.view[self._fill : padded] = bytes(padded - self._fill)
        self._fill = padded
        if offset != self._start + padded or padded == WRITE_BYTES:
            self.flush()
            self._start = offset
        return offset

    def append(self, data: memoryview) -> None:
        """More bytes of the block. OSError if they cannot be written."""
        while len(data):
            count = min(len(data), WRITE_BYTES - self._fill)
            self._buffer.view[self._fill : self._fill + count] = data[:count]
            self._fill += count
            data = data[count:]
            if self._fill == WRITE_BYTES:
                self.flush()

    def flush(self) -> None:
        """Write what is there, to the end of its last block. OSError if that failed."""
        size = align(self._fill)
        self._buffer.view[self._fill : size] = bytes(size - self._fill)
        if size:
            part = Slice(self._buffer.arena, 0, size)
            self.writer.write([(self._start, part)])
        self._start += size
        self._fill = 0


@dataclass(frozen=True)
class _Copy:
    """Neighbouring pages of a run that were written anew."""

    run: Run
    """With the new places."""
    old: StoredRun
    first: int
    """Position of the first page in the old run."""

    def grave(self) -> Grave:
        """The old place."""
        return self.old.grave(self.first, len(self.run))

    @property
    def positions(self) -> range:
        """Of the pages in the old run."""
        return range(self.first, self.first + len(self.run))


class Mover:
    """Copies runs to segments of its own and lets the copies take the place of the old ones."""

    def __init__(
        self, layout: Layout, index: Index, quota: Quota, *, room: int, segment_size: int
    ) -> None:
        """`room`: bytes that were reserved with `quota`; no more are written."""
        self.moved = Moved()
        self._layout = layout
        self._index = index
        self._quota = quota
        self._room = room
        self._segment_size = segment_size
        self._writer = new_id()[:12]
        self._numbers = itertools.count()
        self._streams: dict[bool, _Stream] = {}
        self._named: set[tuple[bytes, bytes, int]] = set()
        self._arena = Arena(WRITE_BYTES + 2 * ALIGNMENT)
        self._damaged: list[Grave] = []
        self._bytes = self._pages = 0
        """Written and not logged."""

    def copy(self, stored: StoredRun) -> None:
        """Write the live pages of a run anew. What cannot be read now, or finds no room, is left
        where it is; what is damaged will be forgotten. OSError if the store cannot be written."""
        waiting = _stretches(stored.positions)
        while waiting:
            first, end = waiting.pop(0)
            size = _size(stored.run, end - first)
            if size > self._room:
                return
            self._room -= size
            self._bytes += size
            self._pages += end - first
            try:
                damaged = self._copy(stored, first, end)
            except _Unreadable:
                continue
            self._damaged += [stored.grave(position, 1) for position in damaged]
            if damaged:
                waiting += _stretches(np.setdiff1d(np.arange(first, end), damaged))
            full = any(s.writer.size >= self._segment_size for s in self._streams.values())
            if full or self._bytes >= _BATCH_BYTES or self._pages >= _BATCH_PAGES:
                self.commit()

    def _copy(self, stored: StoredRun, first: int, end: int) -> list[int]:
        """Copy neighbouring pages; if some are damaged, say which, and the copy does not count."""
        run, stream = stored.run, self._stream(stored.run.trailing)
        keys = bytes(run.keys[first * KEY_BYTES : end * KEY_BYTES])
        blocks, damaged = [], set()
        for block in run.blocks:
            offset = stream.begin(block.part_bytes * (end - first))
            sums, whole = block.part_checksums[first:end], block.checksum
            if block.part_bytes:
                hasher = running_checksum(block_seed(run.namespace, block.column, keys))
                for position, part in self._parts(stored, block, first, end):
                    if part is None:
                        damaged.add(position)
                    elif not damaged:
                        hasher.update(part)
                        stream.append(part)
                whole = hasher.intdigest()
            blocks.append(Block(block.column, offset, block.part_bytes, whole, sums))
        if not damaged:
            known = run.parent == ROOT or run.ordinal > 0
            parent = run.key(first - 1) if first else run.parent
            ordinal = run.ordinal + first if known else 0
            new = Run(run.namespace, parent, ordinal, run.window, keys, blocks)
            stream.copies.append(_Copy(new, stored, first))
        return sorted(damaged)

    def _parts(
        self, stored: StoredRun, block: Block, first: int, end: int
    ) -> Iterator[tuple[int, memoryview | None]]:
        """Position and bytes of each part, None if they are not what was stored. Bytes are good
        until the next."""
        namespace, size = stored.run.namespace, block.part_bytes
        step = max(1, WRITE_BYTES // size)
        for start in range(first, end, step):
            stop = min(end, start + step)
            begin = (block.offset + start * size) // ALIGNMENT * ALIGNMENT
            length = align(block.offset + stop * size) - begin
            if length > self._arena.size:
                self._arena = Arena(length)
            buffer = self._arena.view[:length]
            try:
                got = read_extent(self._layout.payload(stored.segment), begin, buffer, direct=True)
            except OSError as error:
                raise _Unreadable from error
            for position in range(start, stop):
                at = block.offset + position * size - begin
                part = buffer[at : at + size]
                seed = part_seed(namespace, block.column, stored.run.key(position))
                right = at + size <= got and (
                    checksum(part, seed) == int(block.part_checksums[position])
                )
                yield position, part if right else None

    def commit(self) -> None:
        """Make the copies durable, then visible, then the old ones gone. A run of which a page was
        deleted meanwhile stays where it is. OSError if the store cannot be written."""
        for stream in self._streams.values():
            stream.flush()
            stream.writer.sync()
        self._quota.spend(self._bytes)
        self.moved.bytes += self._bytes
        self._bytes = self._pages = 0
        if self._damaged or any(stream.copies for stream in self._streams.values()):
            with self._layout.lock():
                self._index.refresh(alone=True)
                for stream in self._streams.values():
                    self._log(stream)
            self._index.refresh()
            self._index.ring()
        for trailing, stream in list(self._streams.items()):
            if stream.writer.size >= self._segment_size:
                _close(self._streams.pop(trailing).writer)

    def _log(self, stream: _Stream) -> None:
        copies, stream.copies = self._still_there(stream.copies), []
        now = self._index.stamp()
        frames = [(body, now) for body in self._columns(stream.writer, copies)]
        for copy in copies:
            # Pages nobody has used since rank by when they were stored.
            frames.append(((FrameType.RUN, encode_run(copy.run)), copy.old.time_ns))
        graves = [copy.grave() for copy in copies] + self._damaged
        self.moved.pages += sum(len(copy.run) for copy in copies)
        self.moved.damaged += len(self._damaged)
        self._damaged = []
        if frames:
            bodies, times = zip(*frames, strict=True)
            stream.writer.log(bodies, times)
        # Synced before: a power cut may leave any part of what is not.
        if graves:
            stream.writer.log(tombstones(graves), now)

    def _still_there(self, copies: list[_Copy]) -> list[_Copy]:
        """Those of which the old places of all pages are live."""

        def held(copy: _Copy) -> bool:
            run, old = copy.run, copy.old
            found = self._index.locate(run.namespace, run.blocks[0].column, bytes(run.keys))
            return [
                (f.stored.segment, f.stored.manifest_offset, f.stored.positions.tolist())
                for f in found
            ] == [(old.segment, old.manifest_offset, list(copy.positions))]

        if all(map(held, copies)):
            return copies
        # Something was deleted, or another copy stands for a page: a kill may leave two.
        names = {copy.old.segment for copy in copies}
        live = {
            (stored.segment, stored.manifest_offset): set(stored.positions.tolist())
            for stored in self._index.runs()
            if stored.segment in names
        }
        return [
            copy
            for copy in copies
            if live.get((copy.old.segment, copy.old.manifest_offset), set()).issuperset(
                copy.positions
            )
        ]

    def _columns(
        self, writer: SegmentWriter, copies: Iterable[_Copy]
    ) -> list[tuple[FrameType, bytes]]:
        """Names for the column ids that this manifest has not explained yet."""
        fresh: dict[bytes, set[int]] = defaultdict(set)
        for copy in copies:
            namespace = copy.run.namespace
            for block in copy.run.blocks:
                if (writer.ident, namespace, block.column) not in self._named:
                    self._named.add((writer.ident, namespace, block.column))
                    fresh[namespace].add(block.column)
        bodies = []
        for namespace, idents in fresh.items():
            known = self._index.columns(namespace)
            columns = sorted(known[ident] for ident in idents if ident in known)
            bodies.append((FrameType.COLUMNS, encode_columns(namespace, columns)))
        return bodies

    def _stream(self, trailing: bool) -> _Stream:
        if trailing not in self._streams:
            number = next(self._numbers)
            writer = SegmentWriter(self._layout, self._writer, number, direct=True)
            self._streams[trailing] = _Stream(writer)
        return self._streams[trailing]

    def close(self) -> None:
        """Give back what was not written. What was not committed is left where it was."""
        for stream in self._streams.values():
            _close(stream.writer)
        self._streams = {}
        self._quota.spend(self._bytes)
        self._quota.give_back(self._room)


def _close(writer: SegmentWriter) -> None:
    """End a segment; one of which nothing was logged goes."""
    if writer.manifest_size:
        writer.close()
    else:
        writer.abandon()
