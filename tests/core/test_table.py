"""The table is a dict from 64-bit keys to 64-bit values, whatever the keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.pages import U64
from kvtier.table import MISSING, PIECE, Table

# Keys that crowd at the ends of the range, or share their leading bits, are the worst that sorted
# probing can meet: real keys are uniform.
KEYS = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 40),
    st.integers(2**64 - 40, 2**64 - 1),
    st.integers(0, 40).map(lambda low: 0xABCDEF << 40 | low),
)
VALUES = st.integers(0, 2**64 - 2)


def _removed(table: Table, key: int, value: int) -> bool:
    return bool(table.remove(np.array([key], np.uint64), np.array([value], np.uint64))[0])


def _stored(key: int) -> int:
    return max(key, 1)


def _u64(values: list[int]) -> U64:
    return np.array(values, np.uint64)


@given(st.lists(st.tuples(KEYS, VALUES), max_size=300), st.lists(KEYS, max_size=50), st.data())
def test_like_a_dict(pairs: list[tuple[int, int]], others: list[int], data: st.DataObject) -> None:
    model = {_stored(key): value for key, value in pairs}
    table = Table.build(_u64([k for k, _ in pairs]), _u64([v for _, v in pairs]))
    asked = [key for key, _ in pairs] + others

    def agree() -> None:
        want = [model.get(_stored(key), int(MISSING)) for key in asked]
        assert table.lookup(_u64(asked)).tolist() == want
        keys, values = table.entries()
        assert dict(zip(keys.tolist(), values.tolist(), strict=True)) == model

    agree()
    for key in data.draw(st.lists(st.sampled_from(asked), max_size=20) if asked else st.just([])):
        value = model.get(_stored(key), 7)
        assert not _removed(table, key, value ^ 1)
        assert _removed(table, key, value) == (_stored(key) in model)
        model.pop(_stored(key), None)
        assert not _removed(table, key, value)
    agree()


def test_more_keys_than_are_probed_at_once() -> None:
    generator = np.random.default_rng(7)
    keys = generator.integers(1, 2**64 - 1, 20 * PIECE, np.uint64)
    table = Table.build(keys, np.arange(len(keys), dtype=np.uint64))
    assert (table.lookup(keys) == np.arange(len(keys))).all()
    strangers = generator.integers(1, 2**64 - 1, 20 * PIECE, np.uint64)
    assert (table.lookup(strangers) == MISSING).all()


def test_an_empty_table_has_nothing() -> None:
    table = Table.build(_u64([]), _u64([]))
    assert table.lookup(_u64([0, 1, 2**64 - 1])).tolist() == [int(MISSING)] * 3
    assert table.lookup(_u64([])).tolist() == []
    assert not _removed(table, 1, 1)
