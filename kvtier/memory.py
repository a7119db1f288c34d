"""Aligned staging memory that kvtier owns, and copies between it and pages given by address."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.format import align
from kvtier.pages import PageBuffers

_GIL_COPY_BYTES = 1 << 16
"""Copies below this size keep the GIL: giving it away costs a busy engine more than the copy."""

_ON_FAULT = 1
_POPULATE_READ = 22
"""MLOCK_ONFAULT and MADV_POPULATE_READ of Linux: pages that are read stay shared, and a read that
fails is an error."""

_libc = ctypes.CDLL(None)
_copy_released = ctypes.CDLL(None).memmove
_copy_held = ctypes.PyDLL(None).memmove
for _function in (_copy_released, _copy_held):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = ctypes.c_void_p


def copy(target: int, source: int, size: int) -> None:
    """Copy `size` bytes between two addresses."""
    (_copy_released if size >= _GIL_COPY_BYTES else _copy_held)(target, source, size)


def keep_resident(mapped: mmap.mmap) -> bool:
    """Read a mapped file in and hold it in memory, or else a drive that fails would end the process
    (SIGBUS), and one that hangs would stop all its threads, at an access long after.

    False if this process may not lock so much memory, or not all of it could be read.
    """
    lock = getattr(_libc, "mlock2", None)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    if lock is None or lock(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), _ON_FAULT):
        return False
    try:
        mapped.madvise(_POPULATE_READ)
    except OSError:  # not read, or a kernel before 5.14
        return False
    return True


class Arena:
    """Anonymous memory aligned to the page size, with its address and a byte view."""

    def __init__(self, size: int) -> None:
        self.size = align(size)
        self._map = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages: only slower
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address: int = self.bytes.ctypes.data
        self.view = memoryview(self._map)


@dataclass(frozen=True)
class Slice:
    """`size` bytes at `start` of an arena."""

    arena: Arena
    start: int
    size: int

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.arena.address + self.start

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return self.arena.view[self.start : self.start + self.size]


class Ring:
    """Staging for writes: slices are taken in order and given back in order."""

    def __init__(self, size: int) -> None:
        self._arena = Arena(size)
        self._head = 0
        self._used = 0
        self._taken: deque[tuple[int, int]] = deque()
        self._room = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes taken, padding included."""
        return self._used

    @property
    def size(self) -> int:
        """Bytes of the largest slice there can be; it needs all of the ring."""
        return self._arena.size

    @property
    def usual(self) -> int:
        """Bytes of the largest slice worth asking for: four fit at a time."""
        return self._arena.size // 4

    def take(self, size: int, timeout: float) -> Slice | None:
        """An aligned slice; None if there is no room within `timeout` seconds."""
        size = align(size)
        with self._room:
            if not self._room.wait_for(lambda: self._cost(size) is not None, timeout):
                return None
            cost = self._cost(size)
            assert cost is not None
            start = self._head if self._head + size <= self._arena.size else 0
            self._head = start + size
            self._used += cost
            self._taken.append((start, cost))
            return Slice(self._arena, start, size)

    def give_back(self, count: int) -> None:
        """The oldest `count` slices are free again."""
        with self._room:
            for _ in range(count):
                _, cost = self._taken.popleft()
                self._used -= cost
            if not self._taken:
                self._head = self._used = 0
            self._room.notify_all()

    def take_back(self, newest: Slice) -> None:
        """The slice that was given last is free again: it was not used."""
        with self._room:
            start, cost = self._taken.pop()
            self._used -= cost
            # What was skipped at the end of the arena is free as well.
            self._head = start if cost == newest.size else self._arena.size - (cost - newest.size)
            if not self._taken:
                self._head = self._used = 0
            self._room.notify_all()

    def _cost(self, size: int) -> int | None:
        """Bytes that taking `size` would use: more than `size` if the end of the arena is
        skipped; None if it doesn't fit now."""
        free = self._arena.size - self._used
        to_end = self._arena.size - self._head
        cost = size if size <= to_end else size + to_end
        return cost if cost <= free else None


class BufferPool:
    """Staging for reads: buffers in powers of two, kept for reuse up to a bound."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept = 0
        self._free: dict[int, list[Arena]] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> Arena:
        """A buffer of at least `size` bytes."""
        size = 1 << max(size - 1, (1 << 20) - 1).bit_length()
        with self._lock:
            free = self._free.get(size)
            if free:
                self._kept -= size
                return free.pop()
        return Arena(size)

    def give_back(self, arena: Arena) -> None:
        """A buffer nobody reads into any more."""
        with self._lock:
            if self._kept + arena.size <= self._keep:
                self._kept += arena.size
                self._free.setdefault(arena.size, []).append(arena)


def gather(buffers: PageBuffers, pages: npt.NDArray[np.intp], target: int) -> None:
    """Copy the chosen pages one after the other to address `target`."""
    for source, size, offset in _pieces(buffers, pages):
        copy(target + offset, source, size)


def scatter(buffers: PageBuffers, pages: npt.NDArray[np.intp], source: int) -> None:
    """Copy consecutive pages from address `source` to where the chosen pages lie."""
    for target, size, offset in _pieces(buffers, pages):
        copy(target, source + offset, size)


def _pieces(buffers: PageBuffers, pages: npt.NDArray[np.intp]) -> list[tuple[int, int, int]]:
    """(address, bytes, offset in the packed block), neighbours merged into one piece."""
    sizes = np.asarray(buffers.sizes, np.int64)
    if not len(sizes) or not len(pages):
        return []
    addresses = buffers.pointers[pages].astype(np.int64).ravel()
    lengths = np.tile(sizes, len(pages))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    starts = np.flatnonzero(
        np.concatenate(([True], addresses[1:] != addresses[:-1] + lengths[:-1]))
    )
    ends = np.append(starts[1:], len(addresses))
    return list(
        zip(
            addresses[starts].tolist(),
            (offsets[ends] - offsets[starts]).tolist(),
            offsets[starts].tolist(),
            strict=True,
        )
    )
