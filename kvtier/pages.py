"""Words of the data path: columns, page keys, and where pages lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32
"""A page key is the 32-byte chained SHA-256 of all tokens up to the end of that page."""

ROOT = b""
"""Parent of a chain's first page."""

U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


class Column(NamedTuple):
    """One pool of one shard: what a rank stores for a page under one name.

    `shard` names the rank coordinates of a rank-sharded pool ("tp1", "tp0.pp1"); a pool that is
    the same on every rank has the empty shard.
    """

    pool: str
    shard: str = ""


@dataclass(frozen=True)
class PageBuffers:
    """Where the bytes of n pages lie in this process's memory.

    `pointers`: uint64 array of shape (n, k), the addresses of each page's k pieces in order.
    `sizes`: the k piece sizes in bytes, the same for every page. k = 0 is a page without bytes
    (SGLang's anchor pool of DeepSeek V4), which is stored as a fact.
    """

    pointers: U64
    sizes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.pointers)

    @property
    def part_bytes(self) -> int:
        """Bytes of one page."""
        return sum(self.sizes)


@dataclass(frozen=True)
class PoolPages:
    """n pages of one column: their keys and where their bytes are (put) or go (get)."""

    column: Column
    keys: Sequence[bytes]
    buffers: PageBuffers
    window: int = 0
    """Pages of a trailing pool (SWA, recurrent state) that a boundary needs before it; 0 for a
    pool that is needed at every page."""


@dataclass(frozen=True)
class Link:
    """Where the first key of a put hangs in its chain.

    `parent`: the key before it, `ROOT` at the start of a sequence, None if the caller does not
    know. `ordinal`: how many pages come before it; 0 if unknown.
    """

    parent: bytes | None = None
    ordinal: int = 0
