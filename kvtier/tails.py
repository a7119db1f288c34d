"""Which boundaries of a chain keep their tails: all near its end, fewer further back.

A trailing pool (SWA, recurrent state) is needed at one boundary only when a chain is restored, but
SGLang offers it at every boundary there ever was. What is kept is a pure function of where the
boundaries and the end of the chain are, so that everybody comes to the same answer.
"""

from __future__ import annotations

import math

import numpy as np

from kvtier.entries import Ints
from kvtier.pages import Bools

GRID_TOKENS = 2048
"""Boundaries are never kept closer together than this, but for the last one: SGLang's usual
prefill chunk of long-context servers."""


TAILS_PER_CHAIN = 40
"""Default of the setting: enough for a density of 4 up to 2^20 tokens."""

DENSITY = 4
"""A history that is cut back loses at most one part in so many of its distance to the end."""


def grid_pages(page_tokens: int) -> int:
    """`GRID_TOKENS` in pages, at least 1; 0 if the tokens of a page are not known: then every tail
    is kept."""
    return max(1, GRID_TOKENS // page_tokens) if page_tokens > 0 else 0


def kept(boundaries: Ints, end: int, grid: int, per_chain: int) -> Bools:
    """Which boundaries keep their tails; bool (n,).

    `boundaries`: lengths in pages, ascending, (n,); none is beyond `end`, the chain's length.
    `grid`: pages of the smallest cell.

    `per_chain`: no more than so many are kept, at least 1.

    The newest two are kept: where SGLang computes the end of a prompt again, the same prompt ends
    one page earlier (integration/patches/replay_boundary.py). Before them the chain is cut into
    cells of the grid times a power of two, each at most 1/`DENSITY` as long as its distance to the
    end, and the last boundary of each cell is kept. As the chain grows,
    cells only ever merge, so what is dropped is never missed later. A history that is cut back by
    d pages ends at most max(grid, d / DENSITY) pages behind a kept boundary, as far as there was
    one at every end of a cell of the grid. A `per_chain` that is too small for the chain's length
    lowers the density first.
    """
    chosen = _last_of_cells(boundaries, end, grid, per_chain)
    chosen[-2:] = True
    return _newest(chosen, per_chain)


def _last_of_cells(boundaries: Ints, end: int, grid: int, per_chain: int) -> Bools:
    share = density(end / grid, per_chain)
    cell = (boundaries - 1) // grid
    level = np.zeros(len(cell), np.int64)
    for k in range(1, max(1, end // grid).bit_length()):
        cell_end = ((cell >> k) + 1 << k) * grid
        level[end - cell_end >= max(1, share << k) * grid] = k
    number = cell >> level
    last: Bools = np.ones(len(cell), np.bool_)
    last[:-1] = (np.diff(number) != 0) | (np.diff(level) != 0)
    return _newest(last, per_chain)


def _newest(chosen: Bools, most: int) -> Bools:
    chosen[np.flatnonzero(chosen)[:-most]] = False
    return chosen


def density(cells: float, per_chain: int) -> int:
    """Of a chain of so many cells of the grid: one part in how many of its distance to the end a
    cut loses at most; 0 if `per_chain` bounds nothing. One more is kept per doubling of the
    distance, since cells begin at multiples of their size."""
    for share in range(DENSITY, 0, -1):
        doublings = math.log2(max(1.0, cells / (2 * share)))
        if (share + 1) * (2 + doublings) <= per_chain:
            return share
    return 0


def written(first: int, pages: int, window: int, grid: int, per_chain: int) -> Bools:
    """Which pages of one put of a trailing pool are worth writing; bool (pages,).

    `first`: pages of the chain before them. Boundaries in the midst of the put that its later ones
    supersede are left out.
    """
    if not grid:
        return np.ones(pages, np.bool_)
    boundaries = np.arange(first + 1, first + pages + 1)
    chosen = _last_of_cells(boundaries, first + pages, grid, per_chain)
    needed = np.zeros(pages, np.bool_)
    for position in np.flatnonzero(chosen).tolist():
        needed[max(0, position + 1 - window) : position + 1] = True
    return needed
