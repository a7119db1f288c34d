"""Takes pages in: what is new is copied to staging, checksummed there, and queued."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier import telemetry
from kvtier.breaker import Breaker
from kvtier.committer import Committer, Staged
from kvtier.complaints import Complaints
from kvtier.config import Config
from kvtier.format import align, block_seed, checksum, column_id, part_seed, running_checksum
from kvtier.index import Index
from kvtier.keeper import Keeper
from kvtier.memory import Ring, Slice, gather
from kvtier.pages import ROOT, Bools, Column, Link, PoolPages
from kvtier.sizes import exact_size, format_size
from kvtier.tails import written

_CACHED_BYTES = 4 << 20
"""Copied and checksummed at a time: well below a last-level cache."""

RUN_PAGES = 128
"""Pages of a run: as many as SGLang passes in one call of its KV pool (STORAGE_BATCH_SIZE), so
that the pools of a page family meet in the same run."""


@dataclass(frozen=True)
class Offer:
    """What one put offers: pages of a namespace, and where they hang."""

    namespace: bytes
    pages: PoolPages
    link: Link
    anchor: Column | None
    """Column this process stores for every page of a chain; None if another process does."""
    grid: int
    """Pages below which boundaries of one put are not kept apart; 0 keeps all."""


class Stager:
    """The puts of a process, one at a time. A fault of the drive refuses pages, it never raises."""

    def __init__(
        self,
        *,
        index: Index,
        ring: Ring,
        committer: Committer,
        keeper: Keeper,
        breaker: Breaker,
        config: Config,
    ) -> None:
        """`breaker`: of writes."""
        self._index = index
        self._ring = ring
        self._committer = committer
        self._keeper = keeper
        self._breaker = breaker
        self._config = config
        self._putting = threading.Lock()
        self._complaints = Complaints()
        self._closed = False

    def close(self) -> None:
        """Refuse new pages from now on; a put that is under way ends first."""
        with self._putting:
            self._closed = True

    def put(self, offer: Offer) -> Bools:
        """Which pages are stored, or will be with the next commit; bool (n,).

        The bytes are copied before this returns. From the first page that is refused on, later new
        pages are refused as well.
        """
        keys = list(offer.pages.keys)
        if self._index.rung():
            # What others have deleted or stored meanwhile should count here.
            self._keeper.catch_up()
        with self._putting:
            answer = self._known(offer.namespace, offer.pages.column, keys)
            if answer.any():
                self._keeper.note_use(offer.namespace, keys[int(np.flatnonzero(answer)[-1])])
                telemetry.PUT_PAGES.labels("known").inc(int(answer.sum()))
            answer |= self._superseded(offer)
            if answer.all() or self._closed:
                return answer
            if not answer[0] and not self._parent_known(offer):
                outcome = "no_parent"
            elif not self._breaker.allows():
                outcome = "stopped"
            else:
                outcome = self._stage_missing(offer, answer)
            telemetry.PUT_PAGES.labels(outcome).inc(int((~answer).sum()))
        return answer

    def _superseded(self, offer: Offer) -> Bools:
        """Tails that nobody needs beside others of the same put: left out, and answered for."""
        pages, window = offer.pages, offer.pages.window
        if not window or offer.link.parent is None:
            return np.zeros(len(pages.keys), np.bool_)
        first, count = offer.link.ordinal, len(pages.keys)
        per_chain = self._config.tails_per_chain
        left_out = ~written(first, count, window, offer.grid, per_chain)
        telemetry.PUT_PAGES.labels("superseded").inc(int(left_out.sum()))
        return left_out

    def _known(
        self, namespace: bytes, column: Column, keys: Sequence[bytes], *, doomed: bool = False
    ) -> Bools:
        # In this order: what is committed in between is seen as waiting.
        waiting = self._committer.pending(namespace, column, keys)
        ident = column_id(column)
        stored = self._index.contains(namespace, ident, b"".join(keys), doomed=doomed)
        return stored | np.array(waiting, np.bool_)

    def _parent_known(self, offer: Offer) -> bool:
        """Whether a chain leads to the first page. Trailing pools come before the pages they
        belong to, so for them it cannot be told yet."""
        parent = offer.link.parent
        if parent is None or parent == ROOT or offer.anchor is None or offer.pages.window:
            return True
        columns = {offer.anchor, offer.pages.column}
        return any(
            self._known(offer.namespace, column, [parent], doomed=True)[0] for column in columns
        )

    def _stage_missing(self, offer: Offer, answer: Bools) -> str:
        """Stage what is not there, and answer for it; what became of pages left over."""
        size = offer.pages.buffers.part_bytes
        if size > self._ring.size:
            self._complaints.add(
                "too large",
                f"a page of the pool {offer.pages.column.pool} has {format_size(size)}, more than "
                f"staging_size ({format_size(self._ring.size)}), and is not stored: set "
                f"staging_size to {exact_size(align(4 * size))} or more",
            )
            return "too_large"
        longest = min(RUN_PAGES, max(1, self._ring.usual // size)) if size else RUN_PAGES
        deadline = time.monotonic() + self._config.put_deadline
        for start, end in _stretches(~answer, longest):
            data = None
            if size:
                data = self._ring.take(size * (end - start), deadline - time.monotonic())
                if data is None:
                    reason = f"nothing could be written for {self._config.put_deadline:g} s"
                    self._breaker.failed(reason, at_once=True)
                    return "no_room"
            try:
                staged = self._staged(offer, slice(start, end), data)
            except BaseException as error:  # whatever it is, the slice would be lost for good
                if data is not None:
                    self._ring.take_back(data)
                if not isinstance(error, OSError | MemoryError):
                    raise
                self._complaints.add("copy", f"pages cannot be copied to staging ({error})")
                return "failed"
            self._committer.submit(staged)
            answer[start:end] = True
            telemetry.PUT_PAGES.labels("stored").inc(end - start)
        return "stored"

    def _staged(self, offer: Offer, which: slice, data: Slice | None) -> Staged:
        """Copy pages to `data` (None if they have no bytes) and checksum them.

        A few pages at a time: what was just copied is checksummed out of the processor's cache.
        """
        pages, namespace = offer.pages, offer.namespace
        size, column = pages.buffers.part_bytes, column_id(pages.column)
        keys = tuple(pages.keys[which])
        whole, sums = 0, []
        if data is not None:
            block = running_checksum(block_seed(namespace, column, b"".join(keys)))
            step = max(1, _CACHED_BYTES // size)
            for first in range(0, len(keys), step):
                chosen = np.arange(first, min(first + step, len(keys)))
                gather(pages.buffers, which.start + chosen, data.address + first * size)
                block.update(data.view[first * size : (first + len(chosen)) * size])
                for number in chosen.tolist():
                    part = data.view[number * size : (number + 1) * size]
                    sums.append(checksum(part, part_seed(namespace, column, keys[number])))
            whole = block.intdigest()
        parent = pages.keys[which.start - 1] if which.start else offer.link.parent
        return Staged(
            namespace=namespace,
            column=pages.column,
            keys=keys,
            link=Link(parent, offer.link.ordinal + which.start),
            window=pages.window,
            part_bytes=size,
            data=data,
            checksum=whole,
            part_checksums=np.array(sums, np.uint64),
            anchor=offer.anchor if pages.column == offer.anchor else None,
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
