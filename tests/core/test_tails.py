"""Which tails of a chain are kept: the bound on what a cut costs, and that nothing is missed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.entries import Ints
from kvtier.tails import (
    DENSITY,
    GRID_TOKENS,
    TAILS_PER_CHAIN,
    density,
    grid_pages,
    kept,
    written,
)

GRID = 8
PAGE_BYTES, TAIL_BYTES = 417_920, 6_439_680


def _offered(pages: int) -> Ints:
    """Boundaries as HiCache offers them: the last two pages of each chunk, and the end."""
    ends = np.arange(GRID, pages + 1, GRID)
    return np.unique(np.concatenate((ends, ends - 1, [pages - 1, pages])))


def _loss(kept_at: Ints, cut: Ints) -> Ints:
    """Pages between each cut and the last boundary that is kept before it."""
    place = np.searchsorted(kept_at, cut, side="right")
    return cut - np.concatenate(([0], kept_at))[place]


@pytest.mark.parametrize(
    ("tokens", "most", "share"),
    [(20_000, 11, 2.2), (100_000, 20, 0.80), (339_000, 29, 0.34), (777_000, 36, 0.19)],
)
def test_bytes_and_loss_of_long_sessions(tokens: int, most: int, share: float) -> None:
    """The figures of docs/retention.md for the geometry of DeepSeek-V4.1-Flash."""
    pages = tokens // 256
    at = _offered(pages)
    kept_at = at[kept(at, pages, GRID, TAILS_PER_CHAIN)]
    assert len(kept_at) == most and kept_at[-1] == pages
    assert len(kept_at) * TAIL_BYTES / (pages * PAGE_BYTES) <= share
    cut = np.arange(1, pages + 1)
    assert (_loss(kept_at, cut) <= np.maximum(GRID, (pages - cut) / 4)).all()


@given(st.integers(1, 20_000), st.integers(1, 60), st.sampled_from([2, GRID]))
def test_a_cut_loses_no_more_than_the_density_says(pages: int, per_chain: int, step: int) -> None:
    """However many boundaries are offered: at each other page, or where HiCache does."""
    at = _offered(pages) if step == GRID else np.unique([*range(1, pages, step), pages])
    at = at[at > 0]
    kept_at = at[kept(at, pages, GRID, per_chain)]
    if share := density(pages / GRID, per_chain):
        cut = np.arange(1, pages + 1)
        assert (_loss(kept_at, cut) <= np.maximum(GRID, (pages - cut) / share)).all()


def test_the_default_has_the_full_density_for_a_million_tokens() -> None:
    assert density((1 << 20) / GRID_TOKENS, TAILS_PER_CHAIN) == DENSITY


@given(
    st.integers(1, 40),
    st.integers(1, 64),
    st.lists(st.integers(1, 40), min_size=1, max_size=60),
)
def test_what_is_dropped_is_never_missed_later(per_chain: int, grid: int, turns: list[int]) -> None:
    """A chain that grows turn by turn, its tails thinned at each, keeps what it would keep if all
    were still there."""
    held = everything = np.zeros(0, np.int64)
    for end in np.cumsum(turns).tolist():
        held, everything = np.append(held, end), np.append(everything, end)
        held = held[kept(held, end, grid, per_chain)]
        at_once = everything[kept(everything, end, grid, per_chain)]
        assert held[-1] == end and len(held) <= per_chain
        if len(at_once) < per_chain:
            assert held.tolist() == at_once.tolist()


@given(st.integers(1, 100_000), st.integers(1, 200))
def test_the_end_is_always_kept_and_the_setting_is_a_bound(pages: int, per_chain: int) -> None:
    at = _offered(pages)
    at = at[at > 0]
    chosen = kept(at, pages, GRID, per_chain)
    assert chosen[-1] and chosen.sum() <= per_chain


def test_one_put_writes_one_of_its_two_tails() -> None:
    # A chunk of 2,048 tokens ends at page 80; SGLang offers the windows at pages 79 and 80.
    assert written(78, 2, 1, GRID, 40).tolist() == [False, True]
    # Pages in two cells are both worth it.
    assert written(79, 2, 1, GRID, 40).tolist() == [True, True]


def test_a_window_of_several_pages_is_written_whole() -> None:
    answer = written(72, 8, 3, GRID, 40)
    assert answer.tolist() == [False] * 5 + [True] * 3


def test_without_the_size_of_a_page_everything_is_kept() -> None:
    assert grid_pages(0) == 0 and grid_pages(256) == 8 and grid_pages(4096) == 1
    assert written(70, 10, 3, 0, 40).all()
