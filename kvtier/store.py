"""The store as its users see it: open it, name what is served, put pages, look them up, get them.

No call here raises for a fault of the disk: a put is refused, a lookup or a get is a miss.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier import telemetry
from kvtier.breaker import Breaker
from kvtier.collector import Collector
from kvtier.committer import Committer
from kvtier.config import Config
from kvtier.deletion import keep_ballast
from kvtier.errors import UnreachableError
from kvtier.format import FrameType, Grave, column_id, encode_wipe, new_id
from kvtier.identity import Identity
from kvtier.index import Index
from kvtier.keeper import Keeper
from kvtier.layout import Layout
from kvtier.memory import Ring
from kvtier.pages import ROOT, Bools, Column, Link, PageBuffers, PoolPages
from kvtier.place import find_store
from kvtier.quota import Quota
from kvtier.reader import Reader
from kvtier.sizes import exact_size
from kvtier.stager import Offer, Stager
from kvtier.tails import grid_pages

logger = logging.getLogger("kvtier")

_CANARY_BYTES = 64 << 10


class Store:
    """An open store directory. Several processes may have the same one open."""

    def __init__(self, layout: Layout, config: Config) -> None:
        self.layout = layout
        self.config = config
        self.index = Index(layout)
        try:
            ring = Ring(config.staging_size)
        except OSError as error:
            raise UnreachableError(
                f"staging_size is {exact_size(config.staging_size)}, and the system does not give "
                f"this process so much memory ({error.strerror or error}): lower it."
            ) from error
        self.reads, self.writes = Breaker("reads"), Breaker("writes")
        self.quota = Quota(layout, config.limits)
        self._collector = Collector(layout, self.quota, config)
        self._committer = Committer(
            layout,
            self.index,
            ring,
            config,
            breaker=self.writes,
            quota=self.quota,
            collector=self._collector,
        )
        self._reader = Reader(layout, self.index, config, self.reads)
        self._page_tokens: dict[bytes, int] = {}
        self._keeper = Keeper(
            layout,
            self.index,
            self._committer,
            breakers=(self.reads, self.writes),
            collector=self._collector,
            quota=self.quota,
            page_tokens=lambda namespace: self._page_tokens.get(namespace, 0),
        )
        self._stager = Stager(
            index=self.index,
            ring=ring,
            committer=self._committer,
            keeper=self._keeper,
            breaker=self.writes,
            config=config,
        )
        self.closed = False

    @classmethod
    def open(cls, config: Config) -> Store:
        """Open the store that `config.root` names (or the default place), creating it if absent.

        StoreError, with what to do, if that is not possible; nothing is changed then.
        """
        layout = Layout.open(find_store(config.root), create=True)
        try:
            store = cls(layout, config)
            keep_ballast(layout, store.quota)
            return store
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
        self._page_tokens[identity.id_bytes] = identity.page_tokens
        return self._namespace(identity, anchor)

    def _namespace(self, identity: Identity, anchor: Column | None) -> Namespace:
        return Namespace(
            identity,
            anchor,
            store=self,
            stager=self._stager,
            reader=self._reader,
            keeper=self._keeper,
        )

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was put is durable and visible, or was given up and is counted in
        `failures`; False if that took longer."""
        return self._committer.flush(timeout)

    def close(self, timeout: float | None = 30.0) -> None:
        """Commit what was put, save the index, end the threads. A second call does nothing.

        Each of these is given up after `timeout` seconds, so that a drive that hangs ends nobody.
        """
        if self.closed:
            return
        self._keeper.log_recency()
        self._stager.close()
        self.closed = True
        self._committer.close(timeout)  # it may need a collection to find room
        self._collector.close()
        self._keeper.close(timeout)
        self._reader.close()
        # Another process whose drive hangs may hold the store's lock for ever.
        saving = threading.Thread(target=self._save_index, name="kvtier-save", daemon=True)
        saving.start()
        saving.join(timeout)
        self.index.close()
        self.quota.close()

    def canary(self) -> None:
        """Write, sync and read back one family the way pages go, then forget it.

        UnreachableError, with the reason, if its bytes do not come back in time. A full disk is no
        reason: what is stored can be restored.
        """
        key = new_id() + new_id()
        columns = (Column("canary"), Column("canary.tail"))
        sent = np.frombuffer(os.urandom(_CANARY_BYTES), np.uint8)
        got = np.zeros(2 * _CANARY_BYTES, np.uint8)
        identity = Identity.of({"canary": True})
        namespace = self._namespace(identity, None)
        for number, column in enumerate(columns):
            page = PoolPages(column, [key], _one_page(sent), window=number)
            namespace.put(page, Link(ROOT, 0))
        if not self.flush(self.config.put_deadline):
            raise UnreachableError(
                f"{self.root} did not take a test page within {self.config.put_deadline:g} s: "
                "check the drive."
            )
        if self._committer.full:
            logger.warning("kvtier: no room at %s: pages are restored, none is stored", self.root)
            return
        halves = np.split(got, 2)
        requests = [
            PoolPages(column, [key], _one_page(half))
            for column, half in zip(columns, halves, strict=True)
        ]
        answers = namespace.get(requests)
        if not all(a.all() for a in answers) or not all((h == sent).all() for h in halves):
            reason = self.writes.reason or self.reads.reason or self._committer.last_error
            raise UnreachableError(
                f"{self.root} did not give a test page back ({reason or 'no error was reported'}): "
                "check the drive and its free space."
            )
        places = [
            place
            for column in columns
            for place in self.index.locate(identity.id_bytes, column_id(column), key)
        ]
        self.bury([place.stored.grave(int(place.stored.positions[0]), 1) for place in places])

    def bury(self, graves: Sequence[Grave]) -> None:
        """Forget pages for good: their bytes were not what was stored."""
        for grave in graves:
            self.index.discard(grave)
        self._committer.bury(graves)

    def still_there(self, graves: Sequence[Grave]) -> list[Grave]:
        """The places that nobody has deleted meanwhile: only they should hold what was stored."""
        self._keeper.catch_up(self.config.read_deadline)
        return [grave for grave in graves if self.index.holds(grave)]

    def wipe(self, namespace: bytes) -> bool:
        """Forget every page of a namespace; their space is freed after the grace time, when
        readers have noticed. False if that could not be logged in time."""
        self.flush(self.config.put_deadline)
        self._keeper.catch_up(self.config.put_deadline)
        failures = self.failures

        def body() -> bytes:
            # Under the store's lock: what is moved to another segment meanwhile goes as well.
            ends = [(segment.ident, segment.applied) for segment in self.index.segments()]
            return encode_wipe(namespace, ends)

        self._committer.record(FrameType.WIPE, body)
        logged = self.flush(self.config.put_deadline) and self.failures == failures
        self._keeper.reclaim_at(time.monotonic() + self.config.grace)
        return logged

    def _save_index(self) -> None:
        try:
            self._keeper.save_index()
        except OSError as error:
            logger.warning("kvtier: cannot save the index (%s); the next start reads more", error)


def _one_page(memory: npt.NDArray[np.uint8]) -> PageBuffers:
    """One page that is this memory."""
    return PageBuffers(np.array([[memory.ctypes.data]], np.uint64), (len(memory),))


class Namespace:
    """The pages of one identity in an open store."""

    def __init__(
        self,
        identity: Identity,
        anchor: Column | None,
        *,
        store: Store,
        stager: Stager,
        reader: Reader,
        keeper: Keeper,
    ) -> None:
        self.id = identity.id
        self._key = identity.id_bytes
        self._store = store
        self._stager = stager
        self._reader = reader
        self._keeper = keeper
        self._anchor = anchor
        self._grid = grid_pages(identity.page_tokens)

    def put(self, pages: PoolPages, link: Link, *, all_tails: bool = False) -> Bools:
        """Store pages; bool (n,): True where a page is stored, or will be with the next commit,
        or is a tail that later ones of the same put make superfluous.

        The bytes are copied before this returns. What is already there is not written again. From
        the first page that is refused on, later new pages are refused as well. `all_tails`: leave
        none out.
        """
        grid = 0 if all_tails else self._grid
        return self._stager.put(Offer(self._key, pages, link, self._anchor, grid))

    def contains(self, column: Column, keys: Sequence[bytes]) -> Bools:
        """Which pages are committed; bool (n,)."""
        return self.contains_each([column], keys)[0]

    def contains_each(self, columns: Sequence[Column], keys: Sequence[bytes]) -> list[Bools]:
        """Which pages of each column are committed; bool (n,) a column."""
        if not self._store.reads.ready():
            return [np.zeros(len(keys), np.bool_) for _ in columns]
        if self._store.index.rung():
            self._keeper.catch_up()
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
        if self._store.closed:
            telemetry.GET_PAGES.labels("stopped").inc(sum(len(r.keys) for r in requests))
            return [np.zeros(len(request.keys), np.bool_) for request in requests]
        answers, damaged = self._reader.get(self._key, requests)
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
                self._keeper.note_use(self._key, last)
        return answers

    def clear(self) -> bool:
        """Forget every page of this namespace; their space is freed after the grace time. False if
        the drive did not take that."""
        return self._store.wipe(self._key)
