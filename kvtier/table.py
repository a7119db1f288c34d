"""A read-mostly hash table in flat arrays: 64-bit keys to 64-bit values, shared through mmap.

The keys are already uniform (taken from SHA-256), so a sorted array in which every key stands at
or shortly behind the place its leading bits name is a hash table with linear probing, and it is
built with a sort instead of a loop.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.pages import U64, Bools

MISSING = np.uint64(2**64 - 1)
"""Value of a key that is not there, or was removed."""

PIECE = 400
"""Keys probed at once. NumPy gives the GIL away from 500 elements on, and beside a busy engine
thread getting it back takes 40 ms."""

_EMPTY = np.uint64(0)


class Table:
    """The arrays of a built table; `values` may be changed in place, `keys` never."""

    def __init__(self, keys: U64, values: U64, bits: int) -> None:
        self.keys = keys
        self.values = values
        self.bits = bits

    @classmethod
    def build(cls, keys: U64, values: U64) -> Table:
        """A table of these pairs; of equal keys the last one stays. Key 0 is stored as 1."""
        keys = np.maximum(keys, np.uint64(1))
        order = np.argsort(keys, kind="stable")
        keys, values = keys[order], values[order]
        last = np.ones(len(keys), np.bool_)
        last[:-1] = keys[1:] != keys[:-1]
        keys, values = keys[last], values[last]
        bits = max(4, int(len(keys) * 1.7).bit_length())
        home = (keys >> np.uint64(64 - bits)).astype(np.int64)
        steps = np.arange(len(keys))
        places = np.maximum.accumulate(home - steps) + steps
        size = (1 << bits) if not len(keys) else max(1 << bits, int(places[-1]) + 1)
        table = cls(np.zeros(size + 1, np.uint64), np.full(size + 1, MISSING), bits)
        table.keys[places] = keys
        table.values[places] = values
        return table

    def find(self, keys: U64) -> npt.NDArray[np.int64]:
        """Places of the keys, -1 where there is none; shape (n,)."""
        found = np.full(len(keys), -1, np.int64)
        for start in range(0, len(keys), PIECE):
            wanted = np.maximum(keys[start : start + PIECE], np.uint64(1))
            places = (wanted >> np.uint64(64 - self.bits)).astype(np.int64)
            piece = found[start : start + PIECE]
            open_ = np.arange(len(wanted))
            while len(open_):
                seen = self.keys[places]
                hit = seen == wanted
                piece[open_[hit]] = places[hit]
                # Keys are sorted: past a greater one there is nothing to find.
                more = (seen != _EMPTY) & (seen < wanted)
                open_, wanted, places = open_[more], wanted[more], places[more] + 1
        return found

    def lookup(self, keys: U64) -> U64:
        """Values of the keys, MISSING where there is none; shape (n,)."""
        places = self.find(keys)
        return np.where(places >= 0, self.values[places], MISSING)

    def remove(self, keys: U64, values: U64) -> Bools:
        """Remove each key that still has its value; bool (n,) says which had."""
        places = self.find(keys)
        had = places >= 0
        had[had] = self.values[places[had]] == values[had]
        self.values[places[had]] = MISSING
        return had

    def entries(self) -> tuple[U64, U64]:
        """Keys and values that are there."""
        there = self.values != MISSING
        return self.keys[there], self.values[there]
