"""Staging memory: slices never overlap or leave the arena, and copies take exactly the pages."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import GUARD, Memory, contents, cut, keys

from kvtier.format import ALIGNMENT
from kvtier.memory import Arena, BufferPool, Ring, Slice, gather, scatter


@given(
    st.lists(st.one_of(st.integers(1, 5 * ALIGNMENT), st.integers(-3, -1)), max_size=60),
    st.integers(4, 12),
)
def test_slices_of_the_ring_stay_inside_and_apart(steps: list[int], blocks: int) -> None:
    ring = Ring(blocks * ALIGNMENT)
    whole = ring.take(ALIGNMENT, 0)
    assert whole is not None
    ring.give_back(1)
    held: list[Slice] = []
    for step in steps:
        if step < 0:
            count = min(-step, len(held))
            ring.give_back(count)
            held = held[count:]
            continue
        taken = ring.take(step, 0)
        if taken is None:
            continue
        assert taken.start >= 0
        assert taken.start + taken.size <= taken.arena.size
        assert taken.start % ALIGNMENT == taken.size % ALIGNMENT == 0
        assert taken.size >= step
        for other in held:
            assert (
                taken.start >= other.start + other.size or other.start >= taken.start + taken.size
            )
        held.append(taken)
    ring.give_back(len(held))
    assert ring.used == 0
    assert ring.take(blocks * ALIGNMENT, 0) is not None


def test_the_newest_slice_can_be_taken_back() -> None:
    ring = Ring(8 * ALIGNMENT)
    for _ in range(2):
        assert ring.take(3 * ALIGNMENT, 0) is not None
    ring.give_back(1)
    wrapped = ring.take(3 * ALIGNMENT, 0)
    assert wrapped is not None and wrapped.start == 0
    assert ring.used == 8 * ALIGNMENT  # with the end of the arena, which was skipped
    ring.take_back(wrapped)
    assert ring.used == 3 * ALIGNMENT
    end = ring.take(2 * ALIGNMENT, 0)
    assert end is not None and end.start == 6 * ALIGNMENT
    ring.take_back(end)
    ring.give_back(1)
    assert ring.used == 0
    only = ring.take(8 * ALIGNMENT, 0)
    assert only is not None
    ring.take_back(only)
    assert ring.used == 0 and ring.take(8 * ALIGNMENT, 0) is not None


def test_a_full_ring_goes_on_at_its_start() -> None:
    ring = Ring(4 * ALIGNMENT)
    for _ in range(4):
        assert ring.take(ALIGNMENT, 0) is not None
    assert ring.take(ALIGNMENT, 0) is None
    ring.give_back(2)
    again = ring.take(ALIGNMENT, 0)
    assert again is not None
    assert again.start == 0
    assert len(again.view) == ALIGNMENT


def test_who_waits_for_room_gets_it() -> None:
    ring = Ring(2 * ALIGNMENT)
    assert ring.take(2 * ALIGNMENT, 0) is not None
    later = threading.Timer(0.05, ring.give_back, (1,))
    later.start()
    assert ring.take(ALIGNMENT, 60) is not None
    later.join()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 100, 4096, 5000])
def test_gather_and_scatter_move_exactly_the_chosen_pages(size: int) -> None:
    parts = contents(keys("memory", 6), size)
    source = Memory(6, cut(size))
    source.fill(parts)
    chosen = np.array([4, 1, 2, 5])
    packed = np.full(size * 4 + 16, GUARD, np.uint8)
    gather(source.buffers(), chosen, packed.ctypes.data)
    assert packed[: size * 4].tobytes() == b"".join(parts[page] for page in chosen)
    assert (packed[size * 4 :] == GUARD).all()
    target = Memory(6, cut(size))
    scatter(target.buffers(), chosen, packed.ctypes.data)
    assert target.guards_hold()
    for page, part in enumerate(target.read()):
        assert part == (parts[page] if page in chosen else bytes([GUARD]) * size)


def test_pages_without_gaps_are_moved_too() -> None:
    parts = contents(keys("packed", 5), 300)
    source = Memory(5, (300,), gap=0)
    source.fill(parts)
    packed = np.zeros(1500, np.uint8)
    gather(source.buffers(), np.arange(5), packed.ctypes.data)
    assert packed.tobytes() == b"".join(parts)


def test_arenas_are_aligned_and_buffers_are_used_again() -> None:
    assert Arena(1).address % ALIGNMENT == 0
    pool = BufferPool(4 << 20)
    first = pool.take(1)
    assert first.size >= 1 << 20
    pool.give_back(first)
    assert pool.take(1000) is first
    large = pool.take(3 << 20)
    assert large.size >= 3 << 20
    pool.give_back(first)
    pool.give_back(large)
    assert pool.take(3 << 20) is not large, "more was kept than the bound"
    assert pool.take(1) is first
