"""What a store does when it is full: the contract, and the two kinds of LRU that others use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from retention_sim.geometry import POOLS, TAIL_BYTES
from retention_sim.tiers import Ints

BATCH = 128
"""Pages of one call of SGLang's storage controllers (hicache_storage.py: STORAGE_BATCH_SIZE)."""

_SIZES = (*POOLS.values(), TAIL_BYTES)
_ANCHOR = list(POOLS).index("kv")
_SIDECARS = tuple(number for number in range(len(POOLS)) if number != _ANCHOR)
_TAIL = len(POOLS)
_FAMILY = (1 << len(POOLS)) - 1


class Contents:
    """Which parts of which pages a store has: a bit for each pool."""

    def __init__(self, pages: int) -> None:
        self._bits = bytearray(pages)
        self._seen = np.frombuffer(self._bits, np.uint8)
        self.stored = 0
        """Bytes that are there."""
        self.written = 0
        """Bytes that were ever written."""

    def has(self, page: int, pool: int) -> bool:
        """Whether the part is there."""
        return bool(self._bits[page] >> pool & 1)

    def add(self, page: int, pool: int) -> None:
        """Take a part in that is not there."""
        self._bits[page] |= 1 << pool
        self.stored += _SIZES[pool]
        self.written += _SIZES[pool]

    def drop(self, page: int, pool: int) -> None:
        """Forget a part that is there."""
        self._bits[page] &= ~(1 << pool)
        self.stored -= _SIZES[pool]

    def families(self, pages: Ints | None = None) -> np.ndarray:
        """Which pages have all pools but the tail's; bool, shape of `pages`, or of all pages."""
        seen = self._seen if pages is None else self._seen[pages]
        return (seen & _FAMILY) == _FAMILY

    def tails(self, pages: Ints | None = None) -> np.ndarray:
        """Which pages have a tail; bool, shape of `pages`, or of all pages."""
        seen = self._seen if pages is None else self._seen[pages]
        return (seen >> _TAIL & 1).astype(np.bool_)


class Store(Protocol):
    """A store under a cap, as SGLang's controllers use it."""

    contents: Contents

    def offer(self, pages: Ints, first: int, tails: int, time: float) -> None:
        """Pages `first` on of a chain were computed; the last `tails` of them have a tail."""

    def read(self, pages: Ints, first: int, time: float) -> None:
        """Pages `first` on of a chain are restored, with the tail of the last."""

    def restart(self) -> None:
        """The engine, and the store in it, starts anew."""


def offered(pages: Ints, tails: int) -> Iterable[tuple[int, int]]:
    """Parts in the order in which SGLang writes them: (page, pool number).

    The sidecar pools first, each with all pages, then the anchor
    (hybrid_cache_controller.py: _page_backup_with_stable_layout).
    """
    for pool in _SIDECARS:
        for page in pages.tolist():
            yield page, pool
    for page in pages[len(pages) - tails :].tolist():
        yield page, _TAIL
    for page in pages.tolist():
        yield page, _ANCHOR


def restored(pages: Ints) -> Iterable[tuple[int, int]]:
    """Parts in the order in which SGLang reads them: (page, pool number).

    In batches, in each the anchor first, then the sidecar pools; the tail at the very end
    (cache_controller.py: _page_transfer_kv_batch; hybrid_cache_controller.py:
    _page_transfer_sidecar).
    """
    for start in range(0, len(pages), BATCH):
        batch = pages[start : start + BATCH].tolist()
        for pool in (_ANCHOR, *_SIDECARS):
            for page in batch:
                yield page, pool
    yield int(pages[-1]), _TAIL


class PageLru:
    """HiCacheFile of SGLang 0.5.23: a file a part, and one LRU over all files.

    What `storage/file/lru_file_evictor.py` does: over the cap, the files that were used least
    recently go until 90 % of the cap are left; reading a file, or writing it again, makes it
    recent, looking it up doesn't; after a restart files are as recent as they were written, since
    a use doesn't change their mtime.
    """

    EVICTION_RATIO = 0.9

    def __init__(self, pages: int, cap: int) -> None:
        self.contents = Contents(pages)
        self._cap = cap
        self._lru: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._writes = 0

    def offer(self, pages: Ints, first: int, tails: int, time: float) -> None:
        """See `Store`."""
        for page, pool in offered(pages[first:], tails):
            if self.contents.has(page, pool):
                self._lru.move_to_end((page, pool))
            else:
                self._evict(_SIZES[pool])
                self._writes += 1
                self._lru[page, pool] = self._writes
                self.contents.add(page, pool)

    def read(self, pages: Ints, first: int, time: float) -> None:
        """See `Store`."""
        for part in restored(pages[first:]):
            self._lru.move_to_end(part)

    def restart(self) -> None:
        """See `Store`."""
        self._lru = OrderedDict(sorted(self._lru.items(), key=lambda item: item[1]))

    def _evict(self, size: int) -> None:
        if self.contents.stored + size <= self._cap:
            return
        target = int(self._cap * self.EVICTION_RATIO) - size
        while self._lru and self.contents.stored > target:
            part, _ = self._lru.popitem(last=False)
            self.contents.drop(*part)


class SegmentLru:
    """Parts in append-only segments, of which the one used least recently goes as a whole.

    As Mooncake's bucket backend does with the LRU policy, at its default bucket size (256 MiB; its
    default policy is FIFO). Reading a part, or writing it again, makes its segment recent.
    """

    SEGMENT_BYTES = 256 << 20

    def __init__(self, pages: int, cap: int) -> None:
        self.contents = Contents(pages)
        self._cap = cap
        self._segments: OrderedDict[int, list[tuple[int, int]]] = OrderedDict()
        """Least recently used first; the open one is the one with the highest number."""
        self._place: dict[tuple[int, int], int] = {}
        self._open = -1
        self._filled = self.SEGMENT_BYTES

    def offer(self, pages: Ints, first: int, tails: int, time: float) -> None:
        """See `Store`."""
        for page, pool in offered(pages[first:], tails):
            if self.contents.has(page, pool):
                self._segments.move_to_end(self._place[page, pool])
                continue
            size = _SIZES[pool]
            if self._filled + size > self.SEGMENT_BYTES:
                self._open += 1
                self._filled = 0
                self._segments[self._open] = []
                self._evict()
            self._segments.move_to_end(self._open)
            self._segments[self._open].append((page, pool))
            self._place[page, pool] = self._open
            self._filled += size
            self.contents.add(page, pool)

    def read(self, pages: Ints, first: int, time: float) -> None:
        """See `Store`."""
        for part in restored(pages[first:]):
            self._segments.move_to_end(self._place[part])

    def restart(self) -> None:
        """The order outlives a restart, which is more than can be counted on."""

    def _evict(self) -> None:
        """Make room for the open segment."""
        while self.contents.stored + self.SEGMENT_BYTES > self._cap and len(self._segments) > 1:
            oldest = next(iter(self._segments))
            for part in self._segments.pop(oldest):
                self.contents.drop(*part)
                del self._place[part]


TAIL_NUMBER = _TAIL
