"""Makes staged pages durable, then visible: data, sync, manifest, sync, index. One thread."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtier import telemetry
from kvtier.backends.local import WRITE_BYTES, SegmentWriter
from kvtier.breaker import Breaker
from kvtier.collector import Collector
from kvtier.complaints import Complaints
from kvtier.config import Config
from kvtier.format import (
    ALIGNMENT,
    Block,
    FrameType,
    Grave,
    Run,
    align,
    column_id,
    encode_columns,
    encode_run,
    encode_tombstone,
    new_id,
)
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.memory import Ring, Slice
from kvtier.pages import ROOT, U64, Column, Link
from kvtier.quota import Quota

logger = logging.getLogger("kvtier")

_SPACE_SHARE = 0.8
"""Of `put_deadline`, for a collection to free space: puts that wait should not give up first."""

_LOOK_SECONDS = 0.25
"""While pages wait for room, what else was queued is looked for so often."""

_Pages = set[bytes]
_Record = tuple[FrameType, bytes | Callable[[], bytes]]


@dataclass(frozen=True)
class Staged:
    """Neighbouring new pages of one column, copied and checksummed, waiting to be written."""

    namespace: bytes
    column: Column
    keys: tuple[bytes, ...]
    link: Link
    window: int
    part_bytes: int
    data: Slice | None
    """None if parts have no bytes."""
    checksum: int
    part_checksums: U64
    anchor: Column | None
    """Column in which the parent must be, None if that cannot be told here."""


class _Batch:
    """Pages that become durable together, as far as they have been taken from the queue."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        """The committer's failures when it began."""
        self.began = 0.0
        self.pieces: list[Staged] = []
        self.size = 0
        self.reserved = 0
        """Bytes on disk that the store's limits grant it."""
        self.writers: dict[bool, SegmentWriter] = {}
        """The segment for tails (True) and for all else, once something was written there."""
        self.at: defaultdict[bool, list[tuple[Staged, int]]] = defaultdict(list)
        """Pieces with their offsets in these segments."""


class Committer:
    """A queue of staged pages and the thread that commits them in batches."""

    def __init__(
        self,
        layout: Layout,
        index: Index,
        ring: Ring,
        config: Config,
        *,
        breaker: Breaker,
        quota: Quota,
        collector: Collector,
    ) -> None:
        """`breaker`: of writes."""
        self._layout = layout
        self._index = index
        self._ring = ring
        self._config = config
        self._breaker = breaker
        self._quota = quota
        self._collector = collector
        self._writer = new_id()[:12]
        self._next_number = 0
        self._open: dict[bool, SegmentWriter] = {}
        self._named: dict[bytes, set[tuple[bytes, Column]]] = defaultdict(set)
        self._changed = threading.Condition()
        self._queue: list[Staged] = []
        self._records: list[_Record] = []
        self._pending: dict[tuple[bytes, Column], _Pages] = defaultdict(set)
        self._first_queued = 0.0
        self._oldest = 0.0
        """When the oldest page that is not durable was queued."""
        self._hurry = False
        self._busy = False
        self._closing = False
        self._complaints = Complaints()
        self.failures = 0
        """Batches, or parts of them, that could not be made durable."""
        self.last_error = ""
        self.full = False
        """The last failure was for want of room."""
        self._thread = threading.Thread(target=self._work, name="kvtier-commit", daemon=True)
        self._thread.start()

    # What callers do

    def pending(self, namespace: bytes, column: Column, keys: Iterable[bytes]) -> list[bool]:
        """Which of the keys wait to be committed."""
        waiting = self._pending.get((namespace, column), ())
        return [key in waiting for key in keys]

    @property
    def name(self) -> str:
        """What this process's segments are called."""
        return self._writer.hex()

    @property
    def staged_bytes(self) -> int:
        """Payload that is accepted and not yet durable."""
        return self._ring.used

    def window(self) -> tuple[dict[bytes, int], float]:
        """({namespace: pages that are not durable yet}, seconds the oldest has waited)."""
        with self._changed:
            pages: dict[bytes, int] = {}
            for (namespace, _), waiting in self._pending.items():
                pages[namespace] = max(pages.get(namespace, 0), len(waiting))
            waited = time.monotonic() - self._oldest if any(pages.values()) else 0.0
        return pages, waited

    def submit(self, staged: Staged) -> None:
        """Queue pages. Slices must come in the order in which the ring gave them."""
        with self._changed:
            if not self._queue and not self._records:
                self._first_queued = time.monotonic()
            if not (self._queue or self._busy):
                self._oldest = time.monotonic()
            self._queue.append(staged)
            self._pending[staged.namespace, staged.column].update(staged.keys)
            self._changed.notify_all()
        telemetry.UNCOMMITTED_BYTES.inc(staged.data.size if staged.data else 0)

    def record(self, kind: FrameType, body: bytes | Callable[[], bytes]) -> None:
        """Queue a frame that has no payload. A function is asked for the body while the store's
        lock is held and all that was committed before is read."""
        with self._changed:
            if not self._queue and not self._records:
                self._first_queued = time.monotonic()
            self._records.append((kind, body))
            self._changed.notify_all()

    def bury(self, graves: Sequence[Grave]) -> None:
        """Log that pages are gone."""
        self.record(FrameType.TOMBSTONE, encode_tombstone(graves))

    def flush(self, timeout: float | None) -> bool:
        """Wait until everything queued so far is durable or has failed."""
        with self._changed:
            self._hurry = bool(self._queue or self._records or self._busy)
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not (self._queue or self._records or self._busy), timeout
            )

    def close(self, timeout: float | None) -> None:
        """Commit what is queued and end the thread."""
        self.flush(timeout)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            for writer in self._open.values():
                writer.close()
            self._open.clear()

    # The thread

    def _work(self) -> None:
        batch = _Batch(self.failures)
        while True:
            with self._changed:
                taken = self._next(batch)
                if taken is None:
                    return
                pieces, records, due = taken
                self._busy = True
            try:
                self._write(batch, pieces)
                if due:
                    self._commit(batch, records)
                    if self.failures == batch.failures:
                        self._breaker.passed()
            except OSError as error:
                due = True
                self._complain(error, sum(len(piece.keys) for piece in batch.pieces))
            except Exception:  # the thread must outlive any fault: without it nothing is stored
                due = True
                logger.exception("kvtier: a commit failed in an unexpected way; it was given up")
                self.failures += 1
            if due:
                self._quota.spend(batch.reserved)
                self._settle(batch.pieces)
                batch = _Batch(self.failures)

    def _next(self, batch: _Batch) -> tuple[list[Staged], list[_Record], bool] | None:
        """Wait for (pages to write, records, whether the batch is due); None at the end.

        Pages are written ahead of their commit as soon as they fill a large write.
        """
        while not (self._queue or self._records or batch.pieces):
            if self._closing:
                return None
            self._changed.wait()
        while True:
            left = self._first_queued + self._config.commit_interval - time.monotonic()
            size = batch.size + sum(piece.data.size for piece in self._queue if piece.data)
            due = left <= 0 or size >= self._config.commit_size or self._hurry or self._closing
            if due or size - batch.size >= WRITE_BYTES:
                break
            self._changed.wait(left)
        pieces = self._take(batch)
        if not due:
            return pieces, [], False
        records, self._records = self._records, []
        self._first_queued = time.monotonic()
        return pieces, records, True

    def _take(self, batch: _Batch) -> list[Staged]:
        """Move pages from the queue to the batch, as far as it has room."""
        count = 0
        for piece in self._queue:
            if batch.size >= self._config.commit_size:
                break
            batch.size += piece.data.size if piece.data else 0
            count += 1
        pieces, self._queue = self._queue[:count], self._queue[count:]
        batch.pieces += pieces
        return pieces

    def _settle(self, batch: list[Staged]) -> None:
        self._ring.give_back(sum(piece.data is not None for piece in batch))
        telemetry.UNCOMMITTED_BYTES.dec(sum(p.data.size for p in batch if p.data))
        with self._changed:
            for piece in batch:
                self._pending[piece.namespace, piece.column].difference_update(piece.keys)
            self._busy = False
            self._hurry = self._hurry and bool(self._queue or self._records)
            self._oldest = self._first_queued
            self._changed.notify_all()

    def _write(self, batch: _Batch, pieces: Sequence[Staged]) -> None:
        """Write payload of a batch; tails go to a segment of their own."""
        batch.began = batch.began or time.monotonic()
        for trailing in (False, True):
            mine = [piece for piece in pieces if bool(piece.window) == trailing]
            if mine:
                self._append(batch, trailing, mine)

    def _append(self, batch: _Batch, trailing: bool, pieces: Sequence[Staged]) -> None:
        if not self._reserve(batch, pieces):
            return
        at = batch.at[trailing]
        start = len(at)
        try:
            writer = batch.writers.get(trailing) or self._segment(trailing)
            batch.writers[trailing] = writer
            for piece in pieces:
                at.append((piece, writer.reserve(len(piece.keys) * piece.part_bytes)))
            writer.write([(offset, piece.data) for piece, offset in at[start:] if piece.data])
        except OSError as error:
            at[start:] = [(piece, 0) for piece in pieces]
            self._give_up(batch, trailing, error)

    def _reserve(self, batch: _Batch, pieces: Sequence[Staged]) -> bool:
        """Take room for these pages of what the store may hold; False, and the pages are given
        up, if it does not become free in time."""
        size = sum(align(len(piece.keys) * piece.part_bytes) for piece in pieces)
        size += ALIGNMENT if size else 0  # another block of the manifest
        give_up = time.monotonic() + _SPACE_SHARE * self._config.put_deadline
        while size and not self._quota.reserve(size):
            late = time.monotonic() > give_up
            too_large = self._quota.headroom() < size
            self._commit_records(batch)
            if late or not (too_large and self._collector.wait_for_space(size, _LOOK_SECONDS)):
                reason = OSError(errno.EDQUOT, self._quota.reason)
                self._complain(reason, sum(len(piece.keys) for piece in pieces))
                return False
        batch.reserved += size
        return True

    def _commit_records(self, batch: _Batch) -> None:
        """Log what was used while pages wait for room: the collection that makes it should know.
        What the batch has written is committed with it, since a segment is closed once it is full.
        """
        with self._changed:
            records, self._records = self._records, []
        if records:
            self._commit(batch, records)
            batch.writers.clear()
            batch.at.clear()

    def _commit(self, batch: _Batch, records: list[_Record]) -> None:
        if records:
            self._append(batch, False, [])
        for trailing, writer in list(batch.writers.items()):
            try:
                writer.sync()
            except OSError as error:
                self._give_up(batch, trailing, error)
        if records and not batch.writers:
            # Deletions are not lost with payload that found no room.
            self._append(batch, False, [])
        with self._layout.lock(shared=True):
            self._index.refresh()
            frames = [(kind, body if isinstance(body, bytes) else body()) for kind, body in records]
            arrived: dict[tuple[bytes, Column], _Pages] = defaultdict(set)
            for trailing in sorted(batch.writers):
                self._log(batch, trailing, arrived, frames)
                frames = []
        self._index.refresh()
        self._index.ring()
        telemetry.COMMITS.inc()
        telemetry.COMMIT_SECONDS.observe(time.monotonic() - batch.began)

    def _log(
        self,
        batch: _Batch,
        trailing: bool,
        arrived: dict[tuple[bytes, Column], _Pages],
        records: list[tuple[FrameType, bytes]],
    ) -> None:
        writer, reachable = batch.writers[trailing], []
        for piece, offset in batch.at[trailing]:
            if self._reachable(piece, arrived):
                arrived[piece.namespace, piece.column].update(piece.keys)
                reachable.append((piece, offset))
            else:
                # Its parent failed, or was deleted meanwhile: nobody could ever find it.
                telemetry.PUT_PAGES.labels("no_parent").inc(len(piece.keys))
        frames = self._column_frames(writer, reachable)
        frames += [(FrameType.RUN, encode_run(run)) for run in _runs(reachable)]
        frames += records
        if not frames:
            return
        try:
            writer.log(frames, self._index.stamp())
        except OSError as error:
            self._give_up(batch, trailing, error)
            return
        written = sum(p.part_bytes * len(p.keys) for p, _ in reachable)
        telemetry.WRITTEN_BYTES.inc(written)
        if trailing:
            self._collector.wrote_tails(written)

    def _reachable(self, piece: Staged, arrived: dict[tuple[bytes, Column], _Pages]) -> bool:
        parent, anchor = piece.link.parent, piece.anchor
        if parent is None or parent == ROOT or anchor is None:
            return True
        if parent in arrived[piece.namespace, anchor]:
            return True
        return bool(
            self._index.contains(piece.namespace, column_id(anchor), parent, doomed=True)[0]
        )

    def _segment(self, trailing: bool) -> SegmentWriter:
        writer = self._open.get(trailing)
        if writer is not None and writer.size < self._config.segment_size:
            return writer
        if writer is not None:
            self._open.pop(trailing).close()
        writer = SegmentWriter(
            self._layout, self._writer, self._next_number, direct=self._config.direct_io
        )
        self._next_number += 1
        self._open[trailing] = writer
        return writer

    def _column_frames(
        self, writer: SegmentWriter, pieces: list[tuple[Staged, int]]
    ) -> list[tuple[FrameType, bytes]]:
        """Names for the column ids this manifest has not explained yet."""
        named = self._named[writer.ident]
        fresh: dict[bytes, set[Column]] = defaultdict(set)
        for piece, _ in pieces:
            if (piece.namespace, piece.column) not in named:
                named.add((piece.namespace, piece.column))
                fresh[piece.namespace].add(piece.column)
        return [
            (FrameType.COLUMNS, encode_columns(namespace, sorted(columns)))
            for namespace, columns in fresh.items()
        ]

    def _give_up(self, batch: _Batch, trailing: bool, error: OSError) -> None:
        """Forget what of a batch could not be made durable, and the file it went to: after a
        failed sync the kernel may have dropped its pages, so nothing more is appended there."""
        batch.writers.pop(trailing, None)
        lost = batch.at.pop(trailing, [])
        writer = self._open.pop(trailing, None)
        if writer is not None:
            writer.abandon()
        self._complain(error, sum(len(piece.keys) for piece, _ in lost))

    def _complain(self, error: OSError, pages: int) -> None:
        self.failures += 1
        self.last_error = error.strerror or str(error)
        self.full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        self._breaker.failed(self.last_error)
        telemetry.PUT_PAGES.labels("failed").inc(pages)
        self._complaints.add(
            "write",
            f"cannot write to {self._layout.path} ({self.last_error}): {pages} pages were not "
            "stored; what was stored before is untouched",
        )


def _runs(pieces: Sequence[tuple[Staged, int]]) -> list[Run]:
    """Pieces with the same pages become the blocks of one run."""
    together: dict[tuple[bytes, tuple[bytes, ...], int], list[tuple[Staged, int]]] = {}
    for piece, offset in pieces:
        place = (piece.namespace, piece.keys, piece.window)
        together.setdefault(place, []).append((piece, offset))
    runs = []
    for (namespace, keys, window), parts in together.items():
        link = next((p.link for p, _ in parts if p.link.parent is not None), parts[0][0].link)
        blocks = [
            Block(column_id(p.column), offset, p.part_bytes, p.checksum, p.part_checksums)
            for p, offset in parts
        ]
        runs.append(Run(namespace, link.parent, link.ordinal, window, b"".join(keys), blocks))
    return runs
