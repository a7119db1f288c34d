"""Moving what is left in sparse segments: on real stores, beside those who read, write and delete,
and killed at any step."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from making import (
    KV,
    Memory,
    contents,
    copies,
    cut,
    flip,
    fresh_index,
    get,
    identity,
    keys,
    opened,
    put,
    saved_index,
)
from sparse import (
    FACT,
    INDEXER,
    SEGMENT,
    SIZES,
    SMALL,
    SWA,
    copy_of,
    exact,
    killed,
    layout_of,
    most_segments,
    put_session,
    session,
    state_of,
    thin_out,
    used_segments,
)

from kvtier import compaction
from kvtier.backends.local import disk_usage
from kvtier.breaker import Breaker
from kvtier.chains import chains
from kvtier.check import check
from kvtier.collection import Collected, collect
from kvtier.compaction import LEAST_BUDGET, Mover, compact
from kvtier.deletion import bury
from kvtier.format import FrameType, column_id
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.limits import Amount, Limits
from kvtier.pages import Link, PoolPages
from kvtier.quota import Quota
from kvtier.reader import Reader
from kvtier.space import reclaim
from kvtier.status import statuses

AMPLE = Limits(Amount(1 << 40), Amount(0))
PLENTY = 1 << 40

SESSIONS = 140
LEFT = [session(number)[:2] for number in range(SESSIONS)]
"""What is left in the sparse store, oldest first."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a store of many segments, two pages left in each."""
    root = tmp_path_factory.mktemp("made")
    with opened(root, **SMALL) as (store, namespace):
        sessions = [put_session(store, namespace, number) for number in range(SESSIONS)]
        thin_out(store.layout, {chain[-1]: 2 for chain in sessions})
    layout = layout_of(root)
    reclaim(layout, Index(layout))
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return copy_of(made, tmp_path / "root")


def _collect(layout: Layout, **words: object) -> Collected:
    index = Index(layout)
    settings = {"grace": 0.0, "limits": AMPLE, "segment_size": SEGMENT} | words
    return collect(layout, index, PLENTY, **settings)  # type: ignore[arg-type]


def test_what_is_left_of_sparse_segments_moves_to_few(root: Path) -> None:
    layout = layout_of(root)
    before = fresh_index(layout.path)
    state, segments = state_of(before), len(used_segments(before))
    assert segments > most_segments(before) + 25
    with opened(root, **SMALL) as (store, namespace):
        done = _collect(layout)
        index = fresh_index(layout.path)
        assert len(used_segments(index)) <= most_segments(index)
        assert 0 < done.moved <= LEAST_BUDGET
        # Old copies are gone: each page is in one place, and its space is given back.
        assert all(len(places) == 1 for places in copies(index).values())
        assert len(list(layout.segments.glob("*.kvs"))) <= most_segments(index) + 2
        assert disk_usage(layout.path) <= done.before
        assert state_of(index) == state
        # The process that was there all along, once it has noticed, and one that reads it all.
        store.index.refresh()
        for chain in LEFT:
            exact(namespace, chain)
        assert copies(store.index) == copies(index)
    with opened(root, **SMALL) as (_, namespace):
        for chain in LEFT:
            exact(namespace, chain)
    # Nothing more is to be done.
    assert _collect(layout).moved == 0


def test_no_more_is_written_than_the_budget_allows(root: Path) -> None:
    layout, budget = layout_of(root), 300 << 10
    state = state_of(fresh_index(layout.path))
    for _ in range(20):
        old = {path.name for path in layout.segments.glob("*.kvs")}
        index = Index(layout)
        before = len(used_segments(index))
        moved = compact(layout, index, AMPLE, segment_size=SEGMENT, budget=budget)
        new = [path for path in layout.segments.glob("*.kvs") if path.name not in old]
        assert moved.bytes <= budget and sum(path.stat().st_size for path in new) <= budget
        if not moved.bytes:
            break
        assert len(used_segments(fresh_index(layout.path))) < before
        reclaim(layout, Index(layout))
    index = fresh_index(layout.path)
    assert len(used_segments(index)) <= most_segments(index)
    assert state_of(index) == state


def test_nothing_is_moved_that_the_limit_has_no_room_for(root: Path) -> None:
    layout = layout_of(root)
    before = copies(fresh_index(layout.path))
    assert not _collect(layout, limits=Limits(Amount(disk_usage(layout.path)), Amount(0))).moved
    assert not _collect(layout, limits=Limits(Amount(PLENTY), Amount(0), 100 << 10)).moved
    assert copies(fresh_index(layout.path)) == before
    room = 600 << 10
    limit = disk_usage(layout.path) + room
    limits, index = Limits(Amount(limit), Amount(0)), Index(layout)
    assert 0 < compact(layout, index, limits, segment_size=SEGMENT, budget=PLENTY).bytes <= room
    assert disk_usage(layout.path) <= limit


@contextlib.contextmanager
def _mover(layout: Layout, index: Index) -> Iterator[Mover]:
    room = 1 << 30
    quota = Quota(layout, AMPLE)
    assert quota.reserve(room)
    mover = Mover(layout, index, quota, room=room, segment_size=PLENTY)
    with contextlib.closing(quota), contextlib.closing(mover):
        yield mover


def _move_all(layout: Layout) -> int:
    """Move every page; bytes written."""
    index = Index(layout)
    with _mover(layout, index) as mover:
        for stored in list(index.runs()):
            mover.copy(stored)
        mover.commit()
    return mover.moved.bytes


def test_pages_between_deleted_ones_keep_their_links_and_times(tmp_path: Path) -> None:
    gone = [0, 3, 7, 8, 9, 23]
    with opened(tmp_path, **SMALL) as (store, namespace):
        chain = put_session(store, namespace, "one")
        before = {
            (stored.run.namespace, stored.run.trailing): stored for stored in store.index.runs()
        }
        runs = [stored for stored in store.index.runs() if not stored.run.trailing]
        bury(store.layout, [stored.grave(at, 1) for at in gone for stored in runs])
    layout = layout_of(tmp_path)
    _move_all(layout)
    reclaim(layout, Index(layout))
    found = list(fresh_index(layout.path).runs())
    assert [len(s.run) for s in found if not s.run.trailing] == [2, 3, 13]
    for stored in found:
        run, old = stored.run, before[stored.run.namespace, stored.run.trailing]
        at = chain.index(run.key(0))
        assert (run.parent, run.ordinal) == (chain[at - 1], at)
        assert (run.window, stored.time_ns) == (old.run.window, old.time_ns)
        assert len({s.segment for s in found if s.run.trailing == run.trailing}) == 1
    assert len({stored.segment for stored in found}) == 2
    with opened(tmp_path, **SMALL) as (_, namespace):
        for first, end in ((1, 3), (4, 7), (10, 23)):
            some = chain[first:end]
            for column in (KV, INDEXER, FACT):
                size = SIZES[column]
                assert get(namespace, some, size, column) == contents(some, size, column)
        assert not namespace.contains(KV, [chain[at] for at in gone]).any()
        named = fresh_index(layout.path).columns(bytes.fromhex(namespace.id))
        assert set(named.values()) == {KV, INDEXER, FACT, SWA}


def test_what_is_damaged_is_not_carried_over(root: Path) -> None:
    layout = layout_of(root)
    before = fresh_index(layout.path)
    for number, column in ((20, KV), (50, INDEXER), (80, SWA)):
        page = LEFT[number][1]
        [place] = before.locate(identity().id_bytes, column_id(column), page)
        block = place.stored.run.block(column_id(column))
        assert block is not None
        at = block.offset + int(place.stored.positions[0]) * block.part_bytes
        flip(layout.payload(place.stored.segment), at + 600)
    lost = layout_of(root).payload(
        before.locate(identity().id_bytes, column_id(KV), LEFT[110][0])[0].stored.segment
    )
    lost.unlink()
    with _mover(layout, index := Index(layout)) as mover:
        for stored in list(index.runs()):
            mover.copy(stored)
        mover.commit()
        assert mover.moved.damaged == 3
    reclaim(layout, Index(layout))
    index = fresh_index(layout.path)
    found = check(layout, index, payload=True)
    assert not found.damaged and found.truncated == [lost.stem]
    there = {path.stem for path in layout.segments.glob("*.kvs")}
    assert used_segments(index) - there == {lost.stem} and len(there) == 2
    with opened(root, **SMALL) as (_, namespace):
        for number, chain in enumerate(LEFT):
            if number in (20, 50):
                assert namespace.contains_each([KV, INDEXER, SWA], chain)[0].tolist() == [
                    True,
                    False,
                ]
                exact(namespace, chain[:1])
            elif number == 80:
                assert not namespace.contains(SWA, chain).any()
                assert get(namespace, chain, SIZES[KV]) == contents(chain, SIZES[KV], KV)
            elif number != 110:
                exact(namespace, chain)


def test_what_is_deleted_while_it_moves_does_not_come_back(root: Path) -> None:
    layout = layout_of(root)
    late = keys("late", 3)
    with opened(root, **SMALL) as (store, namespace):
        anchored = store.namespace(identity(), KV)
        index = Index(layout)
        with _mover(layout, index) as mover:
            for stored in list(index.runs()):
                mover.copy(stored)
            # Others delete, and build on what is being moved.
            thin_out(layout, {chain[-1]: 1 for chain in LEFT[:30]})
            thin_out(layout, {chain[-1]: 0 for chain in LEFT[30:60]})
            for column in (INDEXER, FACT, KV):
                parts = contents(late, SIZES[column], column)
                assert put(anchored, late, parts, column, Link(LEFT[70][1], 2)).all()
            assert store.flush(60)
            mover.commit()
        reclaim(layout, Index(layout))
        for found in (fresh_index(layout.path), saved_index(layout.path)):
            kv = found.contains(identity().id_bytes, column_id(KV), b"".join(map(b"".join, LEFT)))
            assert kv.reshape(-1, 2).tolist() == [
                [number >= 60 or number < 30, number >= 60] for number in range(SESSIONS)
            ]
        index = fresh_index(layout.path)
        assert not check(layout, index, payload=True).damaged
        [c] = [c for c in chains(index) if c.namespace == identity().id_bytes]
        places = c.pages_of(late)
        assert len(places) == 3 and c.reachable[places].all()
        for chain in LEFT[60:]:
            exact(namespace, chain)
        assert get(namespace, late, SIZES[KV]) == contents(late, SIZES[KV], KV)
        # What was left where it was, since a neighbour was deleted, moves the next time.
        _move_all(layout)
        reclaim(layout, Index(layout))
        index = fresh_index(layout.path)
        assert all(len(places) == 1 for places in copies(index).values())
        store.index.refresh()
        for chain in LEFT[:30]:
            assert get(namespace, chain[:1], SIZES[KV]) == contents(chain[:1], SIZES[KV], KV)


def test_what_is_wiped_while_it_moves_does_not_come_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(root)
    with opened(root, **SMALL) as (store, namespace):
        record = store._committer.record

        def move_first(kind: FrameType, body: Any) -> None:
            if kind == FrameType.WIPE:
                _move_all(layout)
            record(kind, body)

        monkeypatch.setattr(store._committer, "record", move_first)
        assert namespace.clear()
        assert copies(fresh_index(layout.path)) == {}


def test_segments_of_a_living_writer_stay(root: Path) -> None:
    layout = layout_of(root)
    with opened(root, **(SMALL | {"segment_size": PLENTY})) as (store, namespace):
        chain = put_session(store, namespace, "alive")
        index = Index(layout)
        mine = {segment.name for segment in index.segments() if segment.live}
        assert len(mine) == 2
        moved = compact(layout, index, AMPLE, segment_size=1 << 39, budget=1 << 38)
        assert moved.segments > 50
        reclaim(layout, Index(layout))
        assert mine < used_segments(fresh_index(layout.path))
        exact(namespace, chain)
        exact(namespace, put_session(store, namespace, "later"))


def test_who_looked_before_the_move_and_reads_after_it(root: Path) -> None:
    """A miss at worst; then the new place, as soon as the manifests are read."""
    layout = layout_of(root)
    with opened(root, **SMALL) as (store, namespace):
        old = Index(layout)
        reader = Reader(layout, old, store.config, Breaker("reads"))
        index = Index(layout)
        with _mover(layout, index) as mover:
            runs = [stored for stored in index.runs() if stored.run.key(0) != LEFT[5][0]]
            tails = [stored for stored in runs if stored.run.trailing]
            kept = tails[::2]  # so that some files stay, with holes
            for stored in runs:
                if not any(stored is tail for tail in kept):
                    mover.copy(stored)
            mover.commit()
        reclaim(layout, Index(layout))
        outcomes = {"exact": 0, "gone": 0, "hole": 0}
        requests = [
            (chain[at : at + 1], column) for chain in LEFT for at, column in ((0, KV), (1, SWA))
        ]
        for page, column in requests:
            memory = Memory(1, cut(SIZES[column]))
            answers, damaged = reader.get(
                identity().id_bytes, [PoolPages(column, page, memory.buffers())]
            )
            if answers[0].all():
                assert memory.read() == contents(page, SIZES[column], column)
                outcomes["exact"] += 1
            else:
                assert memory.untouched() == [True]
                outcomes["hole" if damaged else "gone"] += 1
                # Nobody takes that for damage of the drive.
                assert store.still_there(damaged) == []
        assert min(outcomes.values()) > 0, outcomes
        old.refresh()
        for page, column in requests:
            memory = Memory(1, cut(SIZES[column]))
            request = PoolPages(column, page, memory.buffers())
            answers, damaged = reader.get(identity().id_bytes, [request])
            assert answers[0].all() and not damaged
            assert memory.read() == contents(page, SIZES[column], column)
        reader.close()
        for chain in LEFT:
            exact(namespace, chain)


WAITING = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import test_compaction as t
t._collect(t.layout_of(Path(sys.argv[1])), grace=600.0)
"""


def test_readers_have_a_grace_time_before_old_places_go(root: Path) -> None:
    layout, here = layout_of(root), str(Path(__file__).parent)
    with opened(root, **SMALL) as (store, _):
        old = Index(layout)
        before = copies(old)
        payload = {path: path.stat().st_blocks for path in layout.segments.glob("*.kvs")}
        collection = subprocess.Popen([sys.executable, "-c", WAITING, str(root), here])
        try:
            deadline = time.monotonic() + 120
            while len(used_segments(index := fresh_index(layout.path))) > most_segments(index):
                assert time.monotonic() < deadline and collection.poll() is None
                time.sleep(0.1)
            time.sleep(2.0)  # for what should not happen
            assert {path: path.stat().st_blocks for path in payload} == payload
            assert copies(old) == before
            reader = Reader(layout, old, store.config, Breaker("reads"))
            for chain in LEFT:
                memory = Memory(2, cut(SIZES[KV]))
                request = PoolPages(KV, chain, memory.buffers())
                assert reader.get(identity().id_bytes, [request])[0][0].all()
                assert memory.read() == contents(chain, SIZES[KV], KV)
            reader.close()
            assert collection.poll() is None
        finally:
            collection.kill()
            collection.wait(60)


READER = """
import random, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import test_compaction as t
t.read_again_and_again(Path(sys.argv[1]), Path(sys.argv[3]))
"""


def read_again_and_again(root: Path, stop: Path) -> None:
    """Get random pages until a file appears; say how many were right, absent and wrong."""
    source, counts = random.Random(1), [0, 0, 0]
    with opened(root, **SMALL) as (_, namespace):
        print("ready", flush=True)
        while not stop.exists():
            chain = source.choice(LEFT)
            for column in (KV, INDEXER):
                found = get(namespace, chain, SIZES[column], column)
                expected = contents(chain, SIZES[column], column)
                for part, right in zip(found, expected, strict=True):
                    counts[0 if part == right else 1 if part is None else 2] += 1
        deadline = time.monotonic() + 60
        while any(None in get(namespace, chain, SIZES[KV]) for chain in LEFT):
            assert time.monotonic() < deadline, "never found again"
        for chain in LEFT:
            exact(namespace, chain)
    print(*counts, flush=True)


@pytest.mark.parametrize("grace", [False, True])
def test_a_reader_beside_moves_gets_exact_bytes_or_misses(
    root: Path, tmp_path: Path, grace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a grace time, and with one in which its keeper looks at what was moved."""
    monkeypatch.setattr(compaction, "MOST_SEGMENTS", 0)
    layout, stop = layout_of(root), tmp_path / "stop"

    def let_it_look(seconds: float = 0.0) -> None:
        looks: set[int] = set()
        while grace and len(looks) < 3:  # the second may have begun before
            assert reader.poll() is None
            looks |= {status.updated_ns for status in statuses(layout)}
            time.sleep(0.05)

    clock = SimpleNamespace(sleep=let_it_look, time_ns=time.time_ns)
    monkeypatch.setattr("kvtier.collection.time", clock)
    here = str(Path(__file__).parent)
    words = [sys.executable, "-c", READER, str(root), here, str(stop)]
    reader = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    try:
        assert reader.stdout.readline() == "ready\n"
        # No segment is large enough, so all move.
        size = _collect(layout, segment_size=PLENTY).moved
        for _ in range(5):
            size += _move_all(layout)
            let_it_look()
            reclaim(layout, Index(layout))
        stop.touch()
        output, _ = reader.communicate(timeout=120)
    finally:
        reader.kill()
        reader.communicate()
    right, absent, wrong = map(int, output.split())
    assert reader.returncode == 0 and size > 6 * SESSIONS * 2 * SIZES[KV]
    assert right > 100 and wrong == 0
    assert not absent or not grace


def test_a_kill_in_the_middle_of_a_move_loses_nothing(made: Path, tmp_path: Path) -> None:
    state = state_of(fresh_index(layout_of(made).path))
    total = killed(lambda: _collect(layout_of(copy_of(made, tmp_path / "whole"))), 0)
    source, twice = random.Random(7), 0
    for number in source.sample(range(1, total), 20):
        root = copy_of(made, tmp_path / str(number))
        layout = layout_of(root)
        assert not killed(partial(_collect, layout), number)
        index = fresh_index(layout.path)
        assert state_of(index) == state
        twice += sum(len(places) - 1 for places in copies(index).values())
        assert not check(layout, index, payload=True).damaged
        _collect(layout)
        index = fresh_index(layout.path)
        assert state_of(index) == state
        assert len(used_segments(index)) <= most_segments(index)
        assert not check(layout, index, payload=True).damaged
        with opened(root, **SMALL) as (_, namespace):
            for chain in source.sample(LEFT, 20):
                exact(namespace, chain)
        shutil.rmtree(root)
    assert twice  # some were killed between a copy and the end of what was copied
