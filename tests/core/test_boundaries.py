"""Boundaries are the intersection over the pools, never the smallest of their longest prefixes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.boundaries import BoundaryAnswer, restorable
from kvtier.pages import Bools


def _pages(count: int, stored: set[int]) -> Bools:
    """Pages 1 to `count`, those of `stored` present."""
    return np.array([page in stored for page in range(1, count + 1)])


@pytest.mark.parametrize(
    ("swa", "state", "longest"),
    [({3}, {3}, 3), ({3}, {2}, 0), ({1, 3}, {1, 2}, 1)],
)
def test_two_trailing_pools_need_a_common_boundary(
    swa: set[int], state: set[int], longest: int
) -> None:
    kv = _pages(3, {1, 2, 3})
    pools = [(_pages(3, swa), 1), (_pages(3, state), 1)]
    for order in itertools.permutations(pools):
        assert restorable(kv, [], order).longest == longest


def test_each_all_pages_pool_stops_the_prefix_where_its_first_page_is_missing() -> None:
    kv = _pages(8, set(range(1, 9)))
    for missing in range(1, 9):
        holed = _pages(8, set(range(1, 9)) - {missing})
        answer = restorable(kv, [kv, holed], [])
        assert answer.longest == missing - 1
        assert answer.kv_run == 8
        assert answer.all_pages == (8, missing - 1)


def test_a_long_session_is_whole_with_only_its_last_window_of_swa() -> None:
    # 110,000 tokens in pages of 256, of which only the last carries a tail.
    kv = np.ones(430, dtype=bool)
    swa = np.zeros(430, dtype=bool)
    swa[-1] = True
    assert restorable(kv, [kv], [(swa, 1)]).restorable == (430,)


def test_the_window_of_a_short_prefix_is_the_prefix() -> None:
    kv = _pages(5, {1, 2, 3, 4, 5})
    answer = restorable(kv, [], [(_pages(5, {1, 2, 4, 5}), 2)])
    assert answer.restorable == (1, 2, 5)
    assert answer.trailing == (5,)


def test_an_empty_chain_and_a_missing_first_page_have_no_boundary() -> None:
    nothing = np.zeros(0, dtype=bool)
    assert restorable(nothing, [nothing], [(nothing, 3)]) == BoundaryAnswer(0, (0,), (0,), ())
    assert restorable(_pages(3, {2, 3})).longest == 0


def test_a_window_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        restorable(_pages(2, {1, 2}), [], [(_pages(2, {1, 2}), 0)])


@st.composite
def _chains(draw: st.DrawFn) -> tuple[Bools, list[Bools], list[tuple[Bools, int]]]:
    count = draw(st.integers(0, 24))
    present = st.lists(st.booleans() | st.just(True), min_size=count, max_size=count)
    column = present.map(lambda bits: np.array(bits, dtype=np.bool_))
    tails = st.lists(st.tuples(column, st.integers(1, 30)), max_size=3)
    return draw(column), draw(st.lists(column, max_size=3)), draw(tails)


@given(_chains())
def test_boundaries_are_those_of_the_rule_spelled_out(
    chain: tuple[Bools, list[Bools], list[tuple[Bools, int]]],
) -> None:
    kv, all_pages, trailing = chain

    def legal_all(pool: Bools, prefix: int) -> bool:
        return all(pool[page] for page in range(prefix))

    def legal_trailing(pool: Bools, window: int, prefix: int) -> bool:
        return all(pool[page] for page in range(max(0, prefix - window), prefix))

    prefixes = range(1, len(kv) + 1)
    with_kv = [p for p in prefixes if legal_all(kv, p)]
    answer = restorable(kv, all_pages, trailing)
    assert answer.kv_run == max(with_kv, default=0)
    assert answer.all_pages == tuple(
        max((p for p in with_kv if legal_all(pool, p)), default=0) for pool in all_pages
    )
    assert answer.trailing == tuple(
        max((p for p in with_kv if legal_trailing(pool, window, p)), default=0)
        for pool, window in trailing
    )
    assert answer.restorable == tuple(
        p
        for p in with_kv
        if all(legal_all(pool, p) for pool in all_pages)
        and all(legal_trailing(pool, window, p) for pool, window in trailing)
    )
