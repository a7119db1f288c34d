"""The store as its users see it: open it, name what is served, put pages, look them up, get them.

No call here raises for a fault of the disk: a put is refused, a lookup or a get is a miss.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtier import telemetry
from kvtier.committer import Committer, Staged
from kvtier.config import Config
from kvtier.errors import UnreachableError
from kvtier.format import (
    FrameType,
    Grave,
    block_seed,
    checksum,
    column_id,
    encode_recency,
    encode_wipe,
    part_seed,
)
from kvtier.identity import Identity
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.memory import Ring, Slice, gather
from kvtier.pages import ROOT, Bools, Column, Link, PoolPages
from kvtier.place import default_root, store_path
from kvtier.reader import Reader
from kvtier.space import reclaim

logger = logging.getLogger("kvtier")

RUN_PAGES = 128
"""Pages of a run: as many as SGLang passes in one call of its KV pool (STORAGE_BATCH_SIZE), so
that the pools of a page family meet in the same run."""

_KEEPER_SECONDS = 1.0
"""The keeper looks for what other processes have committed at least this often."""

_CATCH_UP_SECONDS = 0.1
"""A lookup waits this long for the keeper to read what was just committed elsewhere."""

_RECENCY_SECONDS = 30.0


class Store:
    """An open store directory. Several processes may have the same one open."""

    def __init__(self, layout: Layout, config: Config) -> None:
        self.layout = layout
        self.config = config
        self.index = Index(layout)
        self._ring = Ring(config.staging_size)
        self._committer = Committer(layout, self.index, self._ring, config)
        self._reader = Reader(layout, self.index, config)
        self._putting = threading.Lock()
        self._used: dict[bytes, dict[bytes, int]] = {}
        self._keeper_wake = threading.Event()
        self._caught_up = threading.Condition()
        self._rounds = 0
        self._reclaim_at = math.inf
        self._closed = False
        self._keeper = threading.Thread(target=self._keep, name="kvtier-keeper", daemon=True)
        self._keeper.start()

    @classmethod
    def open(cls, config: Config) -> Store:
        """Open the store that `config.root` names (or the default place), creating it if absent.

        StoreError, with what to do, if that is not possible; nothing is changed then.
        """
        layout = Layout.open(store_path(config.root or default_root(os.environ)), create=True)
        try:
            return cls(layout, config)
        except OSError as error:
            raise UnreachableError(
                f"Cannot read the store at {layout.path} ({error.strerror or error}): "
                "check its permissions and the drive."
            ) from error

    @property
    def root(self) -> Path:
        """The store directory."""
        return self.layout.path

    @property
    def failures(self) -> int:
        """Batches that could not be made durable since the start."""
        return self._committer.failures

    def namespace(self, identity: Identity, anchor: Column | None = None) -> Namespace:
        """The pages of one identity; its document is written if it is new.

        `anchor`: the column this process stores for every page of a chain (its KV pool). A put
        whose parent it doesn't have is refused, since nobody could ever reach it. None if another
        process writes it.
        """
        path = self.layout.namespaces / f"{identity.id}.json"
        try:
            if not path.exists():
                self.layout.write_once(path, identity.to_json())
        except OSError as error:
            raise UnreachableError(
                f"Cannot write {path} ({error.strerror or error}): free space, or mend the "
                "permissions of the store."
            ) from error
        return Namespace(self, identity, anchor)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was put is durable and visible; False if that took longer."""
        return self._committer.flush(timeout)

    def close(self, timeout: float | None = 30.0) -> None:
        """Commit what was put, save the index, end the threads. A second call does nothing."""
        if self._closed:
            return
        self._log_recency()
        with self._putting:
            self._closed = True
        self._committer.close(timeout)
        self._keeper_wake.set()
        self._keeper.join(timeout)
        self._reader.close()
        self._save_index()

    def bury(self, graves: Sequence[Grave]) -> None:
        """Forget pages for good: their bytes were not what was stored."""
        for grave in graves:
            self.index.discard(grave)
        self._committer.bury(graves)

    def still_there(self, graves: Sequence[Grave]) -> list[Grave]:
        """The places that nobody has deleted meanwhile: only they should hold what was stored."""
        with contextlib.suppress(OSError):  # then nothing new is known, which is said elsewhere
            self.index.refresh()
        return [grave for grave in graves if self.index.holds(grave)]

    def reclaim_later(self) -> None:
        """Give space of deleted pages back once readers had time to notice."""
        self._reclaim_at = time.monotonic() + self.config.grace

    def catch_up(self) -> None:
        """See what other processes have committed; gives up soon if the drive is slow."""
        if not self.index.rung():
            return
        with self._caught_up:
            goal = self._rounds + 1
            self._keeper_wake.set()
            self._caught_up.wait_for(lambda: self._rounds >= goal, _CATCH_UP_SECONDS)

    def note_use(self, namespace: bytes, key: bytes) -> None:
        """A chain was restored or extended up to this page; logged from time to time."""
        now = time.time_ns()
        self.index.note_use(namespace, key, now)
        self._used.setdefault(namespace, {})[key] = now

    def _log_recency(self) -> None:
        for namespace in list(self._used):
            used = self._used.pop(namespace)
            body = encode_recency(namespace, list(used.items()))
            self._committer.record(FrameType.RECENCY, body)

    def _keep(self) -> None:
        logged = time.monotonic()
        while not self._closed:
            self._keeper_wake.wait(_KEEPER_SECONDS)
            self._keeper_wake.clear()
            try:
                self.index.refresh()
                if time.monotonic() >= self._reclaim_at:
                    self._reclaim_at = math.inf
                    reclaim(self.layout, self.index)
                if self.index.stale():
                    self.index.save()
            except OSError as error:
                logger.warning("kvtier: cannot read %s: %s", self.root, error)
                time.sleep(_KEEPER_SECONDS)
            with self._caught_up:
                self._rounds += 1
                self._caught_up.notify_all()
            if time.monotonic() - logged > _RECENCY_SECONDS:
                logged = time.monotonic()
                self._log_recency()

    def _save_index(self) -> None:
        try:
            self.index.save()
        except OSError as error:
            logger.warning("kvtier: cannot save the index (%s); the next start reads more", error)


class Namespace:
    """The pages of one identity in an open store."""

    def __init__(self, store: Store, identity: Identity, anchor: Column | None) -> None:
        self.id = identity.id
        self._key = identity.id_bytes
        self._store = store
        self._anchor = anchor

    def put(self, pages: PoolPages, link: Link) -> Bools:
        """Store pages; bool (n,): True where a page is stored, or will be with the next commit.

        The bytes are copied before this returns. What is already there is not written again. From
        the first page that is refused on, later new pages are refused as well.
        """
        keys = list(pages.keys)
        with self._store._putting:
            answer = self._known(pages.column, keys)
            if answer.any():
                self._store.note_use(self._key, keys[int(np.flatnonzero(answer)[-1])])
                telemetry.PUT_PAGES.labels("known").inc(int(answer.sum()))
            if answer.all() or self._store._closed:
                return answer
            if not answer[0] and not self._parent_known(pages, link):
                telemetry.PUT_PAGES.labels("no_parent").inc(int((~answer).sum()))
                return answer
            outcome = self._stage_missing(pages, link, answer)
            if outcome:
                telemetry.PUT_PAGES.labels(outcome).inc(int((~answer).sum()))
        return answer

    def contains(self, column: Column, keys: Sequence[bytes]) -> Bools:
        """Which pages are committed; bool (n,)."""
        return self.contains_each([column], keys)[0]

    def contains_each(self, columns: Sequence[Column], keys: Sequence[bytes]) -> list[Bools]:
        """Which pages of each column are committed; bool (n,) a column."""
        self._store.catch_up()
        names = [column_id(column) for column in columns]
        found = self._store.index.contains_each(self._key, names, b"".join(keys))
        hits = sum(int(np.count_nonzero(there)) for there in found)
        telemetry.LOOKED_UP_PAGES.labels("hit").inc(hits)
        telemetry.LOOKED_UP_PAGES.labels("miss").inc(len(columns) * len(keys) - hits)
        return found

    def get(self, requests: Sequence[PoolPages]) -> list[Bools]:
        """Read pages into their buffers; bool (n,) a request, True where the exact bytes are.

        For prefixes: after the first page of a request that is not there, or not as it was
        stored, its later pages are False, and nothing is written for them.
        """
        if self._store._closed:
            return [np.zeros(len(request.keys), np.bool_) for request in requests]
        answers, damaged = self._store._reader.get(self._key, requests)
        if damaged:
            damaged = self._store.still_there(damaged)
        if damaged:
            logger.error(
                "kvtier: %d places in %s hold other bytes than were stored: forgotten",
                len(damaged),
                self._store.root,
            )
            self._store.bury(damaged)
        for request, answer in zip(requests, answers, strict=True):
            if answer.any():
                last = request.keys[int(np.flatnonzero(answer)[-1])]
                self._store.note_use(self._key, last)
        return answers

    def clear(self) -> None:
        """Forget every page of this namespace; their space is freed after the grace time."""
        self._store.flush(self._store.config.put_deadline)
        with contextlib.suppress(OSError):  # an unreadable directory: what is known goes
            self._store.index.refresh()
        ends = [(segment.ident, segment.applied) for segment in self._store.index.segments()]
        self._store._committer.record(FrameType.WIPE, encode_wipe(self._key, ends))
        self._store.flush(self._store.config.put_deadline)
        self._store.reclaim_later()

    def _known(self, column: Column, keys: Sequence[bytes]) -> Bools:
        # In this order: what is committed in between is seen as waiting.
        waiting = self._store._committer.pending(self._key, column, keys)
        stored = self._store.index.contains(self._key, column_id(column), b"".join(keys))
        return stored | np.array(waiting, np.bool_)

    def _parent_known(self, pages: PoolPages, link: Link) -> bool:
        """Whether a chain leads to the first page. Trailing pools come before the pages they
        belong to, so for them it cannot be told yet."""
        parent = link.parent
        if parent is None or parent == ROOT or self._anchor is None or pages.trailing:
            return True
        columns = {self._anchor, pages.column}
        return any(self._known(column, [parent])[0] for column in columns)

    def _stage_missing(self, pages: PoolPages, link: Link, answer: Bools) -> str:
        """Stage what is not there; why it stopped early, empty if it did not."""
        size, largest = pages.buffers.part_bytes, self._store._ring.largest
        if size > largest:
            return "too_large"
        longest = min(RUN_PAGES, largest // size) if size else RUN_PAGES
        deadline = time.monotonic() + self._store.config.put_deadline
        missing = ~answer
        for start, end in _stretches(missing, longest):
            data = None
            if size:
                left = deadline - time.monotonic()
                data = self._store._ring.take(size * (end - start), left)
                if data is None:
                    return "no_room"
                gather(pages.buffers, np.arange(start, end), data.address)
            self._submit(pages, link, slice(start, end), data)
            answer[start:end] = True
        telemetry.PUT_PAGES.labels("stored").inc(int(missing.sum()))
        return ""

    def _submit(self, pages: PoolPages, link: Link, which: slice, data: Slice | None) -> None:
        """Checksum copied pages and queue them."""
        size, column = pages.buffers.part_bytes, column_id(pages.column)
        keys = tuple(pages.keys[which])
        whole, sums = 0, []
        if data is not None:
            view = data.view[: size * len(keys)]
            whole = checksum(view, block_seed(self._key, column, b"".join(keys)))
            for number, key in enumerate(keys):
                part = view[number * size : (number + 1) * size]
                sums.append(checksum(part, part_seed(self._key, column, key)))
        parent = pages.keys[which.start - 1] if which.start else link.parent
        self._store._committer.submit(
            Staged(
                self._key,
                pages.column,
                keys,
                Link(parent, link.ordinal + which.start),
                pages.trailing,
                size,
                data,
                whole,
                np.array(sums, np.uint64),
                self._anchor if pages.column == self._anchor else None,
            )
        )


def _stretches(missing: Bools, longest: int) -> list[tuple[int, int]]:
    """(start, end) of stretches of missing pages, cut at multiples of `longest`, so that pools put
    one after the other are cut alike."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], missing, [False])).astype(np.int8)))
    stretches: list[tuple[int, int]] = []
    for start, end in edges.reshape(-1, 2).tolist():
        cuts = [start, *range((start // longest + 1) * longest, end, longest), end]
        stretches += itertools.pairwise(cuts)
    return stretches
