"""Which stored copy stands for a page: 64-bit keys to places, some keys with more than one.

The bulk comes from a snapshot as a table in flat arrays, what came since is in a dict. A place is
the row of a run and a position in that run, packed into 64 bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvtier.format import MAX_RUN_PAGES
from kvtier.pages import U64
from kvtier.table import MISSING, Table

_POSITION_BITS = (MAX_RUN_PAGES - 1).bit_length()
_POSITION_MASK = np.uint64(MAX_RUN_PAGES - 1)

Ints = npt.NDArray[np.int64]


def pack(rows: Ints, positions: Ints) -> U64:
    """Places from rows and positions; all of shape (n,)."""
    return (rows << _POSITION_BITS | positions).astype(np.uint64)


def unpack(places: U64) -> tuple[Ints, Ints]:
    """Rows and positions of places that are there; all of shape (n,)."""
    rows = (places >> np.uint64(_POSITION_BITS)).astype(np.int64)
    return rows, (places & _POSITION_MASK).astype(np.int64)


class Entries:
    """The live copies of pages, of which the newest known one stands for its key.

    Further copies, which several processes made at once, are kept as spares, or it would depend on
    the order in which files are read whether a page survives its copy's deletion.
    """

    def __init__(self, table: Table | None = None, spares: Iterable[tuple[int, int]] = ()) -> None:
        """`spares`: keys and places of the further copies beside those of `table`."""
        none = np.zeros(0, np.uint64)
        self._table = table or Table.build(none, none)
        self._late: dict[int, int] = {}
        self._spares: dict[int, list[int]] = {}
        self._hidden: set[tuple[int, int]] = set()
        """Copies that are there but stand for nothing now."""
        for key, place in spares:
            self._spares.setdefault(key, []).append(place)
        for key in list(self._spares):
            if self._standing(key) == MISSING:
                self._promote(key)

    @property
    def late(self) -> int:
        """Keys in the dict."""
        return len(self._late)

    def find(self, keys: U64) -> U64:
        """Places that stand for the keys, MISSING where there is none; shape (n,)."""
        places = self._table.lookup(keys)
        if self._late:
            late = map(self._late.get, keys.tolist(), itertools.repeat(-1))
            newer = np.array(list(late), np.int64)
            places = np.where(newer >= 0, newer.astype(np.uint64), places)
        return places

    def holds(self, key: int, row: int, position: int) -> bool:
        """Whether this copy is live and stands for its key, or is a spare that was set aside."""
        place = row << _POSITION_BITS | position
        return self._standing(key) == place or place in self._spares.get(key, ())

    def standing(self) -> tuple[U64, U64]:
        """All keys, and the places that stand for them; shape (n,)."""
        keys, places = self._table.entries()
        if self._late:
            newer, fresh = np.array(list(self._late.items()), np.uint64).reshape(-1, 2).T
            old = ~np.isin(keys, newer)
            keys = np.concatenate((keys[old], newer))
            places = np.concatenate((places[old], fresh))
        return keys, places

    def spares(self) -> tuple[U64, U64]:
        """Keys and places of further copies, shape (n,): those set aside or hidden, and those of
        the table that a newer entry stands before."""
        spares = [(key, place) for key, places in self._spares.items() for place in places]
        spares += self._hidden
        shadowed = np.array(list(self._late), np.uint64)
        behind = self._table.lookup(shadowed)
        there = behind != MISSING
        spares += zip(shadowed[there].tolist(), behind[there].tolist(), strict=True)
        keys, copies = np.array(spares, np.uint64).reshape(-1, 2).T
        return keys, copies

    def add(self, keys: U64, row: int) -> None:
        """Newest copies of pages: key i at position i of the row."""
        fresh, first = keys.tolist(), row << _POSITION_BITS
        if not self._late.keys().isdisjoint(fresh):
            for key in dict.fromkeys(fresh):
                if key in self._late:
                    self._spares.setdefault(key, []).append(self._late[key])
        self._late.update(zip(fresh, range(first, first + len(fresh)), strict=True))

    def drop(self, keys: U64, row: int, first: int) -> list[tuple[int, int]]:
        """Remove copies: key i at position `first` + i of the row. Others are left alone.

        Keys and places of those that were there.
        """
        positions = np.arange(first, first + len(keys), dtype=np.int64)
        places = pack(np.full(len(keys), row, np.int64), positions)
        removed = self._table.remove(keys, places)
        triples = zip(keys.tolist(), places.tolist(), removed.tolist(), strict=True)
        dropped = []
        for key, place, was_in_table in triples:
            if (key, place) in self._hidden:
                self._hidden.remove((key, place))
            elif self._late.get(key) == place:
                del self._late[key]
                self._promote(key)
            elif place in self._spares.get(key, ()):
                self._forget_spare(key, place)
            elif not was_in_table:
                continue
            elif key not in self._late:
                self._promote(key)
            dropped.append((key, place))
        return dropped

    def hide(self, keys: U64, row: int, first: int) -> None:
        """Let copies stand for nothing until these entries are made anew."""
        self._hidden.update(self.drop(keys, row, first))

    def drop_rows(self, rows: Iterable[int]) -> None:
        """Remove all copies in these rows."""
        lost = set(rows)
        places = self._table.values
        gone = np.isin(unpack(places)[0], np.array(sorted(lost), np.int64))
        places[gone & (places != MISSING)] = MISSING
        for key in [k for k, place in self._late.items() if place >> _POSITION_BITS in lost]:
            del self._late[key]
        self._hidden = {(k, p) for k, p in self._hidden if p >> _POSITION_BITS not in lost}
        for key in list(self._spares):
            for place in [p for p in self._spares[key] if p >> _POSITION_BITS in lost]:
                self._forget_spare(key, place)
            if self._standing(key) == MISSING:
                self._promote(key)

    def _standing(self, key: int) -> int:
        return int(self.find(np.array([key], np.uint64))[0])

    def _promote(self, key: int) -> None:
        """Let another copy stand for a page that has lost the one it had, if there is one."""
        if key in self._spares:
            place = self._spares[key][-1]
            self._forget_spare(key, place)
            self._late[key] = place

    def _forget_spare(self, key: int, place: int) -> None:
        self._spares[key].remove(place)
        if not self._spares[key]:
            del self._spares[key]
