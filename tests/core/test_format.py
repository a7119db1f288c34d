"""Frames: what is encoded is decoded, and no other bytes are believed or do harm."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import content, key, keys

from kvtier import format as f
from kvtier.pages import ROOT, Column

IDS = st.binary(min_size=16, max_size=16)
U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
KEYS = st.binary(min_size=32, max_size=32).filter(any)
NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789._", max_size=40)
WHERE: dict[str, Any] = {
    "sequence": 3,
    "time_ns": 5,
    "segment_id": bytes(range(16)),
    "store_id": bytes(range(16, 32)),
}


@st.composite
def runs(draw: st.DrawFn) -> f.Run:
    page_keys = draw(st.lists(KEYS, min_size=1, max_size=9))
    blocks = []
    for column in draw(st.lists(U64, max_size=4, unique=True)):
        size = draw(U64)
        sums = np.array([draw(U64) for _ in page_keys] if size else [], np.uint64)
        blocks.append(f.Block(column, draw(U64), size, draw(U64), sums))
    parent = draw(st.one_of(st.none(), st.just(ROOT), KEYS))
    joined = b"".join(page_keys)
    return f.Run(draw(IDS), parent, draw(U32), draw(U32), joined, blocks)


@given(runs())
def test_runs_round_trip(run: f.Run) -> None:
    found = f.decode_run(f.encode_run(run))
    assert (found.namespace, found.parent, found.ordinal, found.window, bytes(found.keys)) == (
        run.namespace,
        run.parent,
        run.ordinal,
        run.window,
        run.keys,
    )
    for got, want in zip(found.blocks, run.blocks, strict=True):
        assert (got.column, got.offset, got.part_bytes, got.checksum) == (
            want.column,
            want.offset,
            want.part_bytes,
            want.checksum,
        )
        assert got.part_checksums.tolist() == want.part_checksums.tolist()
        assert found.block(want.column) is got
    assert [found.key(number) for number in range(len(found))] == [
        run.key(number) for number in range(len(run))
    ]


@given(
    IDS,
    st.lists(st.builds(f.Grave, IDS, U64, U32, U32), max_size=9),
    st.lists(st.tuples(IDS, U64), max_size=9),
    st.lists(st.tuples(KEYS, U64), max_size=9),
    st.lists(st.builds(Column, NAMES, NAMES), max_size=5, unique=True),
)
def test_other_bodies_round_trip(
    namespace: bytes,
    graves: list[f.Grave],
    ends: list[tuple[bytes, int]],
    used: list[tuple[bytes, int]],
    columns: list[Column],
) -> None:
    assert f.decode_tombstone(f.encode_tombstone(graves)) == graves
    assert f.decode_wipe(f.encode_wipe(namespace, ends)) == (namespace, ends)
    assert f.decode_recency(f.encode_recency(namespace, used)) == (namespace, used)
    named = {f.column_id(column): column for column in columns}
    assert f.decode_columns(f.encode_columns(namespace, columns)) == (namespace, named)


@given(st.binary(max_size=200), U64, U64, IDS, IDS)
def test_frames_round_trip(
    body: bytes, sequence: int, time_ns: int, segment: bytes, store: bytes
) -> None:
    data = f.encode_frame(
        f.FrameType.RUN,
        body,
        sequence=sequence,
        time_ns=time_ns,
        segment_id=segment,
        store_id=store,
    )
    assert len(data) % f.FRAME_ALIGNMENT == 0
    frame = f.decode_frame(b"before.." + data + b"after", 8)
    assert frame == f.Frame(f.FrameType.RUN, sequence, time_ns, segment, store, body, len(data))


def _frame(name: object, size: int, kind: f.FrameType = f.FrameType.RUN) -> bytes:
    return f.encode_frame(kind, content(size, name), **WHERE)


@given(
    st.lists(
        st.one_of(
            st.integers(0, 300).map(lambda size: (True, size)),
            st.integers(1, 40).map(lambda steps: (False, steps * f.FRAME_ALIGNMENT)),
        ),
        max_size=12,
    ),
    st.integers(0, 7),
)
def test_frames_are_found_between_garbage(parts: list[tuple[bool, int]], torn: int) -> None:
    data, good, bad = b"", [], 0
    for number, (is_frame, size) in enumerate(parts):
        if is_frame:
            frame = _frame(number, size)
            good.append((len(data), frame))
            data += frame
        else:
            garbage = content(size, number).replace(f.FRAME_MAGIC, b"____")
            data += garbage
            bad += size
    data += content(torn, "torn")
    bad += torn
    seen = list(f.scan_frames(data))
    assert [(offset, data[offset : offset + n]) for offset, x, n in seen if x] == good
    assert sum(n for _, x, n in seen if x is None) == bad
    assert sum(n for _, _, n in seen) == len(data), "every byte is accounted for once"


def test_a_frame_inside_a_torn_frame_is_found() -> None:
    inner = _frame("inner", 100)
    outer = f.encode_frame(f.FrameType.RUN, inner + bytes(64), **WHERE)
    assert [x is not None for _, x, _ in f.scan_frames(outer)] == [True]
    damaged = bytearray(outer)
    damaged[20] ^= 1
    found = [(offset, x is not None) for offset, x, _ in f.scan_frames(bytes(damaged))]
    assert found[:2] == [(0, False), (f.FRAME_HEADER.size, True)]


def test_every_single_bit_of_a_frame_counts() -> None:
    data = _frame("bits", 61)
    end = f.FRAME_HEADER.size + 61
    for bit in range(end * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(f.FormatError):
            f.decode_frame(bytes(damaged), 0)


def test_frames_of_a_later_version_are_not_read() -> None:
    fields = (f.FRAME_MAGIC, f.FrameType.RUN, f.FORMAT_VERSION + 1, 0, 0, 0, 0, 0)
    blank = f.FRAME_HEADER.pack(*fields, bytes(16), bytes(16), 0)
    frame = f.FRAME_HEADER.pack(*fields, bytes(16), bytes(16), f.checksum(blank))
    with pytest.raises(f.FormatError, match="not a frame of this format"):
        f.decode_frame(frame, 0)


def test_a_body_nobody_would_read_is_not_written() -> None:
    with pytest.raises(ValueError, match="larger"):
        f.encode_frame(f.FrameType.RECENCY, bytes(f.MAX_BODY_BYTES + 1), **WHERE)


def test_seeds_tie_bytes_to_namespace_column_and_key() -> None:
    one, two = key("one"), key("two")
    seeds = {
        f.part_seed(namespace, column, page)
        for namespace in (bytes(16), bytes(15) + b"\1")
        for column in (f.column_id(Column("kv", "tp0")), f.column_id(Column("kv", "tp1")))
        for page in (one, two)
    }
    assert len(seeds) == 8
    # The separator keeps pool and shard apart.
    assert f.column_id(Column("kv", "tp1")) != f.column_id(Column("kvt", "p1"))


def _bodies() -> list[tuple[bytes, Callable[[bytes], Any]]]:
    """A body of each kind with its decoder; entries are read to the last."""
    sums = np.arange(5, dtype=np.uint64)
    blocks = [f.Block(1, 0, 100, 7, sums), f.Block(2, 4096, 0, 0, sums[:0])]
    run = f.Run(bytes(16), key("p"), 4, 0, b"".join(keys("k", 5)), blocks)
    graves = [f.Grave(bytes(16), n, 0, 1) for n in range(3)]
    columns = [Column("kv", "tp0.pp1"), Column("swa")]
    return [
        (f.encode_run(run), f.decode_run),
        (f.encode_tombstone(graves), lambda body: list(f.decode_tombstone(body))),
        (f.encode_wipe(bytes(16), [(bytes(16), 5)] * 3), f.decode_wipe),
        (f.encode_recency(bytes(16), [(key(1), 5)] * 3), f.decode_recency),
        (f.encode_columns(bytes(16), columns), f.decode_columns),
    ]


def _mutated(data: bytes, chance: random.Random) -> bytes:
    """Bytes after a few flips, cuts, fills with extremes, repeats and insertions."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(5)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            size = chance.choice((1, 2, 4, 8))
            changed[at : at + size] = chance.choice((b"\0", b"\xff", b"\x7f")) * size
        elif kind == 3:
            changed[at:at] = changed[at : at + chance.randrange(40)]
        else:
            changed[at:at] = chance.randbytes(chance.randrange(9))
    return bytes(changed)


def test_no_bytes_make_a_decoder_do_more_than_refuse() -> None:
    chance = random.Random(20_000)
    bodies = _bodies()
    kinds = [kind for kind in f.FrameType if kind != f.FrameType.DOOM]  # as a tombstone
    stream = b"".join(
        f.encode_frame(kind, body, **WHERE) for kind, (body, _) in zip(kinds, bodies, strict=True)
    )
    accepted = 0
    tracemalloc.start()
    try:
        for number in range(20_000):
            body, decode = bodies[number % len(bodies)]
            body = _mutated(body, chance)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                decode(body)
                accepted += 1
            except f.FormatError:
                pass
            if number % 10 == 0:
                damaged = _mutated(stream, chance)
                assert sum(n for _, _, n in f.scan_frames(damaged)) == len(damaged)
            # Small objects weigh more than the bytes they stand for; counts that lie weigh GBs.
            assert tracemalloc.get_traced_memory()[1] - before < 200_000
    finally:
        tracemalloc.stop()
    assert 0 < accepted < 20_000
