"""What a store does on its own from time to time: see what others committed, save the index, give
space back, log what was used, say how it is. One thread."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable

from kvtier import telemetry
from kvtier.breaker import Breaker
from kvtier.collector import Collector
from kvtier.committer import Committer
from kvtier.complaints import Complaints
from kvtier.format import FrameType, encode_recency
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.quota import Quota
from kvtier.space import reclaim
from kvtier.status import StatusFile

ROUND_SECONDS = 1.0
"""It looks for what other processes have committed at least this often."""

CATCH_UP_SECONDS = 0.1
"""A lookup waits this long for a round that reads what was just committed elsewhere."""

RECENCY_SECONDS = 2.0
"""Deletions spare what was used; they wait a grace time for what is logged here."""

SAVE_PAUSE_SECONDS = 60.0
"""A snapshot that could not be saved is tried again after this time: on a full disk every attempt
takes what room there is, and holds up all commits."""


class Keeper:
    """The thread, and what it is asked to do."""

    def __init__(
        self,
        layout: Layout,
        index: Index,
        committer: Committer,
        *,
        breakers: tuple[Breaker, Breaker],
        collector: Collector,
        quota: Quota,
        page_tokens: Callable[[bytes], int],
    ) -> None:
        """`breakers`: of reads and of writes. `page_tokens`: tokens of a page of a namespace."""
        self._collector = collector
        self._quota = quota
        self._layout = layout
        self._index = index
        self._committer = committer
        self._reads, self._writes = breakers
        self._page_tokens = page_tokens
        self._status = StatusFile(layout, committer.name)
        self._used: dict[bytes, dict[bytes, int]] = {}
        self._reclaim_at = math.inf
        self._save_at = 0.0
        self._complaints = Complaints()
        self._recoveries = 0
        self._begun = self._rounds = 0
        self._round_done = threading.Condition()
        self._wake = collector.wake
        self._closing = False
        self._thread = threading.Thread(target=self._keep, name="kvtier-keeper", daemon=True)
        self._thread.start()

    def close(self, timeout: float | None) -> None:
        """End the thread."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout)
        if not self._thread.is_alive():  # it may still write, and the number be another file's
            self._status.close()

    def catch_up(self, timeout: float = CATCH_UP_SECONDS) -> None:
        """See what other processes have committed; gives up if the drive is slow."""
        with self._round_done:
            goal = self._begun + 1  # a round that is under way may have looked before
            self._wake.set()
            self._round_done.wait_for(lambda: self._rounds >= goal, timeout)

    def note_use(self, namespace: bytes, key: bytes) -> None:
        """A chain was restored or extended up to this page."""
        now = self._index.stamp()
        self._index.note_use(namespace, key, now)
        self._used.setdefault(namespace, {})[key] = now

    def log_recency(self) -> None:
        """Queue what was used since the last call for the manifests."""
        for namespace in list(self._used):
            used = self._used.pop(namespace)
            body = encode_recency(namespace, list(used.items()))
            self._committer.record(FrameType.RECENCY, body)

    def save_index(self) -> bool:
        """Save a snapshot, if there is room for it beside the old one. OSError if it cannot be
        written."""
        size = self._index.snapshot_bytes()
        if not self._quota.reserve(size):
            return False
        try:
            self._index.save()
        finally:
            self._quota.spend(size)
        return True

    def reclaim_at(self, when: float) -> None:
        """Give space of deleted pages back at this monotonic time."""
        self._reclaim_at = when

    def _keep(self) -> None:
        logged = time.monotonic()
        self._tell()
        while not self._closing:
            self._wake.wait(ROUND_SECONDS)
            self._wake.clear()
            with self._round_done:
                self._begun += 1
            there = True
            try:
                there = self._still_there()
                if there:
                    self._round()
            except OSError as error:
                text = f"cannot read or save the index of {self._layout.path}: {error}"
                self._complaints.add("index", text)
                time.sleep(ROUND_SECONDS)
            except Exception as error:  # the thread must outlive any fault: lookups wait for it
                self._complaints.add("upkeep", "upkeep failed in an unexpected way", error)
                time.sleep(ROUND_SECONDS)
            with self._round_done:
                self._rounds = self._begun
                self._round_done.notify_all()
            if there:
                self._tell()
            if time.monotonic() - logged > RECENCY_SECONDS:
                logged = time.monotonic()
                self.log_recency()

    def _still_there(self) -> bool:
        """Whether the path still names this store; while it does not, nothing is promised and
        nothing taken: what was open before is nowhere that a restart would find it."""
        try:
            self._layout.verify()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            for breaker in (self._reads, self._writes):
                breaker.failed(f"{self._layout.path}: {error.strerror}", at_once=True)
            return False
        return True

    def _round(self) -> None:
        self._index.refresh()
        if self._reads.recoveries != self._recoveries:
            # Pages that could not be read while the drive failed are known again.
            self._recoveries = self._reads.recoveries
            self._index.reload()
        if time.monotonic() >= self._reclaim_at:
            self._reclaim_at = math.inf
            reclaim(self._layout, self._index)
            self._quota.measure()
        if self._index.stale() and time.monotonic() >= self._save_at:
            self._save_at = time.monotonic() + SAVE_PAUSE_SECONDS
            if self.save_index():
                self._save_at = 0.0
        if self._collector.due():
            self.log_recency()  # a collection has an index of its own
            self._collector.start()

    def _tell(self) -> None:
        pages, waited = self._committer.window()
        tokens = sum(count * self._page_tokens(namespace) for namespace, count in pages.items())
        standing = self._quota.standing()
        telemetry.STORE_BYTES.set(standing.used)
        telemetry.LIMIT_BYTES.set(standing.cap)
        telemetry.UNCOMMITTED_TOKENS.set(tokens)
        telemetry.UNCOMMITTED_SECONDS.set(waited)
        self._status.write(
            uncommitted_bytes=self._committer.staged_bytes,
            uncommitted_tokens=tokens,
            uncommitted_seconds=round(waited, 3),
            failures=self._committer.failures,
            reads_stopped=self._reads.reason,
            writes_stopped=self._writes.reason,
            cap_bytes=standing.cap,
            cap_by=standing.limit,
        )
