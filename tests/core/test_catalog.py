"""The catalog is the sum of the frames, in whatever order the files are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import key, keys

from kvtier import catalog as catalogs
from kvtier import format as f
from kvtier.catalog import Catalog
from kvtier.layout import segment_id, segment_name
from kvtier.pages import ROOT, Column
from kvtier.snapshot import Snapshot

STORE = bytes(range(16))
NAMESPACES = (b"n" * 16, b"m" * 16)
COLUMNS = [f.column_id(Column("kv", "tp0")), f.column_id(Column("swa"))]
PAGES = keys("page", 8)

Live = set[tuple[bytes, int, bytes, str, int, int]]
"""(namespace, column, key, segment, offset of the frame, position)"""


@dataclass
class File:
    """A manifest in the making."""

    name: str
    frames: list[tuple[int, bytes]] = field(default_factory=list)
    size: int = 0

    def add(self, kind: f.FrameType, body: bytes) -> int:
        frame = f.encode_frame(
            kind, body, sequence=len(self.frames), time_ns=1, segment_id=self.ident, store_id=STORE
        )
        offset = self.size
        self.frames.append((offset, frame))
        self.size += len(frame)
        return offset

    @property
    def ident(self) -> bytes:
        ident = segment_id(self.name)
        assert ident is not None
        return ident


def _run(namespace: bytes, page_keys: list[bytes], columns: list[int]) -> bytes:
    sums = np.arange(len(page_keys), dtype=np.uint64)
    blocks = [f.Block(column, 0, 10, 0, sums) for column in columns]
    return f.encode_run(f.Run(namespace, ROOT, 0, 0, b"".join(page_keys), blocks))


@st.composite
def stores(draw: st.DrawFn) -> tuple[list[File], Live]:
    """Manifests as a few processes write them, in one order of time, and what lives at the end."""
    files = [File(segment_name(bytes(11) + bytes([number]), 0)) for number in range(3)]
    live: Live = set()
    placed: list[tuple[File, int, int]] = []
    for _ in range(draw(st.integers(0, 14))):
        file = draw(st.sampled_from(files))
        what = draw(st.sampled_from(("run", "run", "run", "bury", "wipe")))
        namespace = draw(st.sampled_from(NAMESPACES))
        if what == "run":
            page_keys = draw(st.lists(st.sampled_from(PAGES), min_size=1, max_size=5, unique=True))
            columns = draw(st.sampled_from((COLUMNS[:1], COLUMNS[1:], COLUMNS)))
            offset = file.add(f.FrameType.RUN, _run(namespace, page_keys, columns))
            placed.append((file, offset, len(page_keys)))
            live |= {
                (namespace, column, page, file.name, offset, position)
                for position, page in enumerate(page_keys)
                for column in columns
            }
        elif what == "bury" and placed:
            target, offset, pages = draw(st.sampled_from(placed))
            first = draw(st.integers(0, pages - 1))
            count = draw(st.integers(1, pages - first))
            grave = f.Grave(target.ident, offset, first, count)
            file.add(f.FrameType.TOMBSTONE, f.encode_tombstone([grave]))
            live = {
                part
                for part in live
                if not (part[3:5] == (target.name, offset) and first <= part[5] < first + count)
            }
        elif what == "wipe":
            ends = [(other.ident, other.size) for other in files]
            live = {
                part
                for part in live
                if part[0] != namespace
                or not any(o.name == part[3] and part[4] < o.size for o in files)
            }
            file.add(f.FrameType.WIPE, f.encode_wipe(namespace, ends))
    return files, live


def _live(catalog: Catalog) -> Live:
    return {
        (
            bytes(stored.run.namespace),
            block.column,
            stored.run.key(position),
            stored.segment,
            stored.manifest_offset,
            position,
        )
        for stored in catalog.runs()
        for position in stored.positions.tolist()
        for block in stored.run.blocks
    }


def _apply(catalog: Catalog, file: File, number: int) -> None:
    offset, data = file.frames[number]
    [segment] = [s for s in catalog.segments if s.name == file.name]
    assert catalog.apply(segment, offset, f.decode_frame(data, 0), data)
    segment.applied = offset + len(data)


def _reloaded(catalog: Catalog, folder: Path) -> Catalog:
    catalog.compacted(catalog.segments).save(folder / "snapshot")
    return Catalog(STORE, Snapshot.load(folder / "snapshot"))


def _agree(catalog: Catalog, live: Live) -> None:
    assert _live(catalog) == live
    for namespace in NAMESPACES:
        for column in COLUMNS:
            there = [any(p[:3] == (namespace, column, page) for p in live) for page in PAGES]
            joined = b"".join(PAGES)
            assert catalog.contains(namespace, column, joined).tolist() == there
            found = {
                (int(page), located.stored.segment, located.stored.manifest_offset, int(position))
                for located in catalog.locate(namespace, column, joined)
                for page, position in zip(located.wanted, located.stored.positions, strict=True)
            }
            assert {page for page, *_ in found} == set(np.flatnonzero(there).tolist())
            for page, segment, offset, position in found:
                assert (namespace, column, PAGES[page], segment, offset, position) in live


@settings(max_examples=100)
@given(store=stores(), data=st.data())
def test_any_order_of_files_with_snapshots_between(
    store: tuple[list[File], Live], data: st.DataObject, tmp_path: Path
) -> None:
    files, live = store
    catalog = Catalog(STORE)
    for file in data.draw(st.permutations(files)):
        catalog.add_segment(file.name)
    done = {file.name: 0 for file in files}
    while waiting := [file for file in files if done[file.name] < len(file.frames)]:
        file = data.draw(st.sampled_from(waiting))
        for _ in range(data.draw(st.integers(1, 4))):
            if done[file.name] < len(file.frames):
                _apply(catalog, file, done[file.name])
                done[file.name] += 1
        if data.draw(st.integers(0, 5)) == 0:
            catalog = _reloaded(catalog, tmp_path)
    _agree(catalog, live)
    catalog = _reloaded(catalog, tmp_path)
    _agree(catalog, live)
    gone = data.draw(st.sampled_from(files))
    catalog.forget_segments([s for s in catalog.segments if s.name == gone.name])
    rest = {part for part in live if part[3] != gone.name}
    _agree(catalog, rest)
    kept = [s for s in catalog.segments if s.name != gone.name]
    catalog.compacted(kept).save(tmp_path / "snapshot")
    _agree(Catalog(STORE, Snapshot.load(tmp_path / "snapshot")), rest)


def test_pages_hidden_for_now_are_in_the_snapshot_and_can_be_buried(tmp_path: Path) -> None:
    catalog, file = _one_file()
    file.add(f.FrameType.RUN, _run(NAMESPACES[0], PAGES, COLUMNS[:1]))
    _apply(catalog, file, 0)
    for each in (catalog, _reloaded(catalog, tmp_path)):
        live = _live(each)
        hidden, gone = f.Grave(file.ident, 0, 2, 3), f.Grave(file.ident, 0, 4, 2)
        for _ in range(2):
            each.discard(hidden)
        there = each.contains(NAMESPACES[0], COLUMNS[0], b"".join(PAGES)).tolist()
        assert there == [True, True, False, False, False, True, True, True]
        _agree(_reloaded(each, tmp_path), live)
        each.bury(gone)
        _agree(_reloaded(each, tmp_path), {part for part in live if part[5] not in (4, 5)})
        # Stored again, the new copy stands; both are there after a reload.
        again = File(segment_name(bytes(11) + b"\7", 0))
        again.add(f.FrameType.RUN, _run(NAMESPACES[0], PAGES[2:4], COLUMNS[:1]))
        each.add_segment(again.name)
        _apply(each, again, 0)
        assert each.contains(NAMESPACES[0], COLUMNS[0], b"".join(PAGES[2:4])).all()
        each.forget_segments([s for s in each.segments if s.name == again.name])
        assert not each.contains(NAMESPACES[0], COLUMNS[0], b"".join(PAGES[2:4])).any()


def _one_file() -> tuple[Catalog, File]:
    catalog, file = Catalog(STORE), File(segment_name(bytes(12), 0))
    catalog.add_segment(file.name)
    return catalog, file


def test_frames_of_another_store_or_segment_are_not_taken_in() -> None:
    catalog, file = _one_file()
    body = _run(NAMESPACES[0], PAGES, COLUMNS)
    for segment, store in ((bytes(16), bytes(16)), (bytes(15) + b"\1", STORE)):
        data = f.encode_frame(
            f.FrameType.RUN, body, sequence=0, time_ns=0, segment_id=segment, store_id=store
        )
        assert not catalog.apply(catalog.segments[0], 0, f.decode_frame(data, 0), data)
    assert _live(catalog) == set()
    file.add(f.FrameType.RUN, body)
    _apply(catalog, file, 0)
    assert len(_live(catalog)) == len(PAGES) * len(COLUMNS)


def test_a_body_that_does_not_add_up_is_damage_and_a_kind_from_later_is_not() -> None:
    catalog, file = _one_file()
    for kind in (
        f.FrameType.RUN,
        f.FrameType.TOMBSTONE,
        f.FrameType.WIPE,
        f.FrameType.RECENCY,
        f.FrameType.COLUMNS,
    ):
        file.add(kind, b"\xff" * 40)
        offset, data = file.frames[-1]
        assert not catalog.apply(catalog.segments[0], offset, f.decode_frame(data, 0), data)
    file.add(99, b"\xff" * 40)  # type: ignore[arg-type]
    _apply(catalog, file, len(file.frames) - 1)


def test_keys_that_share_their_first_bytes_are_told_apart_by_get() -> None:
    # The table holds eight bytes of a key; whoever reads compares all 32.
    catalog, file = _one_file()
    twin = PAGES[0][:8] + key("twin")[8:]
    file.add(f.FrameType.RUN, _run(NAMESPACES[0], [PAGES[0]], COLUMNS))
    _apply(catalog, file, 0)
    [located] = catalog.locate(NAMESPACES[0], COLUMNS[0], twin)
    assert located.stored.run.key(int(located.stored.positions[0])) == PAGES[0] != twin


def test_namespaces_and_columns_are_separate() -> None:
    catalog, file = _one_file()
    file.add(f.FrameType.RUN, _run(NAMESPACES[0], PAGES[:4], COLUMNS[:1]))
    _apply(catalog, file, 0)
    joined = b"".join(PAGES)
    assert catalog.contains(NAMESPACES[0], COLUMNS[0], joined).tolist() == [True] * 4 + [False] * 4
    assert not catalog.contains(NAMESPACES[0], COLUMNS[1], joined).any()
    assert not catalog.contains(NAMESPACES[1], COLUMNS[0], joined).any()


def test_uses_and_column_names_live_on_in_a_snapshot(tmp_path: Path) -> None:
    catalog, file = _one_file()
    columns = [Column("kv", "tp0"), Column("swa")]
    file.add(f.FrameType.COLUMNS, f.encode_columns(NAMESPACES[0], columns))
    file.add(f.FrameType.RECENCY, f.encode_recency(NAMESPACES[0], [(PAGES[0], 9), (PAGES[1], 4)]))
    file.add(f.FrameType.RECENCY, f.encode_recency(NAMESPACES[0], [(PAGES[0], 7)]))
    for number in range(3):
        _apply(catalog, file, number)
    for each in (catalog, _reloaded(catalog, tmp_path)):
        assert each.columns == {NAMESPACES[0]: {f.column_id(c): c for c in columns}}
        assert each.used == {(NAMESPACES[0], PAGES[0]): 9, (NAMESPACES[0], PAGES[1]): 4}


def test_a_copy_that_took_another_s_place_goes_with_its_segment(tmp_path: Path) -> None:
    catalog = Catalog(STORE)
    files = [File(segment_name(bytes(12), number)) for number in range(2)]
    for file in files:
        catalog.add_segment(file.name)
        file.add(f.FrameType.RUN, _run(NAMESPACES[0], PAGES, COLUMNS))
        _apply(catalog, file, 0)
    catalog = _reloaded(catalog, tmp_path)
    older, newer = catalog.segments
    catalog.bury(f.Grave(newer.ident, 0, 0, len(PAGES)))
    assert {part[3] for part in _live(catalog)} == {older.name}
    catalog.forget_segments([older])
    assert _live(catalog) == set()


def test_uses_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that restores for months keeps the newest uses only."""
    monkeypatch.setattr(catalogs, "_USES", 10)
    catalog = Catalog(bytes(16))
    for number in range(100):
        catalog.note_use(bytes(16), number.to_bytes(32, "big"), number)
        assert len(catalog.used) <= 20
    assert max(catalog.used.values()) == 99
