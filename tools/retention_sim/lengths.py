"""What kvtier keeps of one session that grew in prefill chunks, by its length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.tails import TAILS_PER_CHAIN, grid_pages, kept
from retention_sim.geometry import CHUNK_PAGES, KV_BYTES, OFFERED_TAILS, PAGE_TOKENS, TAIL_BYTES

LENGTHS = (20_000, 100_000, 339_000, 777_000, 988_000)
"""In tokens."""

CUTS = (10_000, 100_000)
"""Tokens by which a history is cut back, at most."""


@dataclass(frozen=True)
class Kept:
    """What is kept of a session of one length."""

    tokens: int
    offered: int
    """Tails that SGLang offers."""
    tails: int
    """Tails that are kept."""
    offered_bytes: int
    bytes: int
    """On disk, tails included."""
    multiple: float
    """`bytes` over the bytes without tails."""
    losses: tuple[int, ...]
    """Most tokens computed again if the session is cut back by at most so many tokens: one for
    each of `CUTS`, and one for any cut at all."""


def kept_of(tokens: int) -> Kept:
    """What is kept of a session of so many tokens, whose boundaries are the ends of its chunks."""
    pages = tokens // PAGE_TOKENS
    ends = np.append(np.arange(CHUNK_PAGES, pages, CHUNK_PAGES), pages)
    boundaries = np.unique(np.concatenate([ends - back for back in range(OFFERED_TAILS)]))
    left = boundaries[kept(boundaries, pages, grid_pages(PAGE_TOKENS), TAILS_PER_CHAIN)]
    cuts = np.arange(1, pages)
    before = np.concatenate(([0], left))
    losses = cuts - before[np.searchsorted(before, cuts, side="right") - 1]
    deepest = (*(pages - cut // PAGE_TOKENS for cut in CUTS), 0)
    size = pages * KV_BYTES
    return Kept(
        tokens=tokens,
        offered=len(boundaries),
        tails=len(left),
        offered_bytes=size + len(boundaries) * TAIL_BYTES,
        bytes=size + len(left) * TAIL_BYTES,
        multiple=1 + len(left) * TAIL_BYTES / size,
        losses=tuple(int(losses[cuts >= least].max(initial=0)) * PAGE_TOKENS for least in deepest),
    )
