"""Moving what is left in sparse segments, and merging manifests: on real stores, beside those who
read, write and delete, and killed at any step."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
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

from kvtier import compaction
from kvtier.backends.local import disk_usage
from kvtier.breaker import Breaker
from kvtier.chains import chains
from kvtier.check import check
from kvtier.collection import Collected, collect
from kvtier.compaction import LEAST_BUDGET, MOST_SEGMENTS, Mover, compact
from kvtier.deletion import bury, forget
from kvtier.format import column_id
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.limits import Amount, Limits
from kvtier.manifests import MOST_MANIFESTS, merge_manifests
from kvtier.pages import Column, Link, PoolPages
from kvtier.quota import Quota
from kvtier.reader import Reader
from kvtier.retention import Victims
from kvtier.space import live_extents, reclaim
from kvtier.store import Namespace, Store

INDEXER, FACT, SWA = Column("indexer"), Column("fact"), Column("swa", "tp0")
SIZES = {KV: 5000, INDEXER: 700, FACT: 0, SWA: 900}
PAGES = 24
"""Of a session: one commit, that fills a segment."""

SEGMENT = 1 << 17
SMALL = {
    "segment_size": SEGMENT,
    "commit_size": SEGMENT,
    "staging_size": 1 << 20,
    "commit_interval": 60.0,
}
AMPLE = Limits(Amount(1 << 40), Amount(0))
PLENTY = 1 << 40


def _session(name: object) -> list[bytes]:
    return keys(("session", name), PAGES)


def _put_session(store: Store, namespace: Namespace, name: object) -> list[bytes]:
    """A chain with all kinds of columns, in one commit; a tail at its second page."""
    chain = _session(name)
    tail = contents(chain[1:2], SIZES[SWA], SWA)
    assert put(namespace, chain[1:2], tail, SWA, Link(chain[0], 1), window=1).all()
    for column in (INDEXER, FACT, KV):
        assert put(namespace, chain, contents(chain, SIZES[column], column), column).all()
    assert store.flush(60)
    return chain


def _exact(namespace: Namespace, chain: Sequence[bytes]) -> None:
    """These pages are there, byte for byte."""
    for column in (KV, INDEXER, FACT):
        assert get(namespace, chain, SIZES[column], column) == contents(
            chain, SIZES[column], column
        )
    tails = list(chain[1:2])
    assert get(namespace, tails, SIZES[SWA], SWA) == contents(tails, SIZES[SWA], SWA)


def _thin_out(layout: Layout, keep: dict[bytes, int]) -> None:
    """Delete all but the first pages of each chain: leaf to the number of pages kept."""

    def choose(found: list) -> list[Victims]:  # type: ignore[type-arg]
        [c] = found
        places = {key.tobytes(): at for at, key in enumerate(c.keys)}
        gone = [at for leaf, kept in keep.items() for at in _path(c, places[leaf])[kept:]]
        return [Victims(c, np.array(gone, np.int64), np.zeros(0, np.int64))]

    forget(layout, Index(layout), choose)


def _path(c, leaf: int) -> list[int]:  # type: ignore[no-untyped-def]
    path = []
    while leaf < len(c):
        path.append(leaf)
        leaf = int(c.parent[leaf])
    return path[::-1]


def _copy(root: Path, target: Path) -> Path:
    """With its holes."""
    subprocess.run(["cp", "-a", "--sparse=always", root, target], check=True)
    return target


SESSIONS = 200
LEFT = [_session(number)[:2] for number in range(SESSIONS)]
"""What is left in the sparse store, oldest first."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a store of many segments, two pages left in each."""
    root = tmp_path_factory.mktemp("made")
    with opened(root, **SMALL) as (store, namespace):
        sessions = [_put_session(store, namespace, number) for number in range(SESSIONS)]
        _thin_out(store.layout, {chain[-1]: 2 for chain in sessions})
    layout = _layout(root)
    reclaim(layout, Index(layout))
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return _copy(made, tmp_path / "root")


def _layout(root: Path) -> Layout:
    return Layout.open(root / "kvtier", create=False)


def _used(index: Index) -> set[str]:
    return {stored.segment for stored in index.runs()}


def _bound(index: Index) -> int:
    live = sum(int((e[:, 1] - e[:, 0]).sum()) for e in live_extents(index).values())
    return MOST_SEGMENTS + 2 * live // SEGMENT


def _collect(layout: Layout, **words: object) -> Collected:
    index = Index(layout)
    settings = {"grace": 0.0, "limits": AMPLE, "segment_size": SEGMENT} | words
    return collect(layout, index, PLENTY, **settings)  # type: ignore[arg-type]


def _state(index: Index) -> list[object]:
    """Everything about the live pages but where they are."""
    found: list[object] = []
    for c in chains(index):
        keys_ = [key.tobytes() for key in c.keys]
        parents = [keys_[at] if at < len(c) else at - len(c) for at in c.parent.tolist()]
        rows = zip(keys_, parents, c.depth.tolist(), c.used_ns.tolist(), strict=True)
        found += [c.namespace, c.window, c.reachable.all(), sorted(rows, key=repr)]
        found.append(sorted(set(copies(index))))
        found.append([session.key for session in c.sessions()])
    return found


def test_what_is_left_of_sparse_segments_moves_to_few(root: Path) -> None:
    layout = _layout(root)
    before = fresh_index(layout.path)
    state, segments = _state(before), len(_used(before))
    assert segments > _bound(before) + 50
    with opened(root, **SMALL) as (store, namespace):
        begun = time.monotonic()
        done = _collect(layout)
        took = time.monotonic() - begun
        index = fresh_index(layout.path)
        print(f"{segments} -> {len(_used(index))} segments, {done.moved} bytes in {took:.2f} s")
        assert len(_used(index)) <= _bound(index)
        assert 0 < done.moved <= LEAST_BUDGET
        # Old copies are gone: each page is in one place, and its space is given back.
        assert all(len(places) == 1 for places in copies(index).values())
        assert len(list(layout.segments.glob("*.kvs"))) <= _bound(index) + 2
        assert disk_usage(layout.path) <= done.before
        assert _state(index) == state
        # The process that was there all along, and one that reads it all.
        for chain in LEFT:
            _exact(namespace, chain)
        store.index.refresh()
        assert copies(store.index) == copies(index)
    with opened(root, **SMALL) as (_, namespace):
        for chain in LEFT:
            _exact(namespace, chain)
    # Nothing more is to be done.
    assert _collect(layout).moved == 0


def test_no_more_is_written_than_the_budget_allows(root: Path) -> None:
    layout, budget = _layout(root), 300 << 10
    state = _state(fresh_index(layout.path))
    for _ in range(20):
        old = {path.name for path in layout.segments.glob("*.kvs")}
        index = Index(layout)
        used = _used(index)
        moved = compact(layout, index, AMPLE, segment_size=SEGMENT, budget=budget)
        new = [path for path in layout.segments.glob("*.kvs") if path.name not in old]
        assert moved.bytes <= budget and sum(path.stat().st_size for path in new) <= budget
        if not moved.bytes:
            break
        assert len(_used(fresh_index(layout.path))) < len(used)
        reclaim(layout, Index(layout))
    index = fresh_index(layout.path)
    assert len(_used(index)) <= _bound(index)
    assert _state(index) == state


def test_nothing_is_moved_that_the_limit_has_no_room_for(root: Path) -> None:
    layout = _layout(root)
    before = copies(fresh_index(layout.path))
    assert not _collect(layout, limits=Limits(Amount(disk_usage(layout.path)), Amount(0))).moved
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
        chain = _put_session(store, namespace, "one")
        before = {
            (stored.run.namespace, stored.run.trailing): stored for stored in store.index.runs()
        }
        runs = [stored for stored in store.index.runs() if not stored.run.trailing]
        bury(store.layout, [stored.grave(at, 1) for at in gone for stored in runs])
    layout = _layout(tmp_path)
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
    layout = _layout(root)
    before = fresh_index(layout.path)
    damaged = {}
    for number, column in ((20, KV), (50, INDEXER), (80, SWA)):
        page = LEFT[number][1]
        [place] = before.locate(identity().id_bytes, column_id(column), page)
        block = place.stored.run.block(column_id(column))
        assert block is not None
        at = block.offset + int(place.stored.positions[0]) * block.part_bytes
        flip(layout.payload(place.stored.segment), at + 600)
        damaged[page, column] = place.stored.segment
    lost = _layout(root).payload(
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
    assert _used(index) & {path.stem for path in layout.segments.glob("*.kvs")} == _used(index) - {
        lost.stem
    }
    with opened(root, **SMALL) as (_, namespace):
        for number, chain in enumerate(LEFT):
            if number in (20, 50):
                assert namespace.contains_each([KV, INDEXER, SWA], chain)[0].tolist() == [
                    True,
                    False,
                ]
                _exact(namespace, chain[:1])
            elif number == 80:
                assert not namespace.contains(SWA, chain).any()
                assert get(namespace, chain, SIZES[KV]) == contents(chain, SIZES[KV], KV)
            elif number != 110:
                _exact(namespace, chain)


def test_what_is_deleted_while_it_moves_does_not_come_back(root: Path) -> None:
    layout = _layout(root)
    late = keys("late", 3)
    with opened(root, **SMALL) as (store, namespace):
        anchored = store.namespace(identity(), KV)
        index = Index(layout)
        with _mover(layout, index) as mover:
            for stored in list(index.runs()):
                mover.copy(stored)
            # Others delete, and build on what is being moved.
            _thin_out(layout, {chain[-1]: 1 for chain in LEFT[:30]})
            _thin_out(layout, {chain[-1]: 0 for chain in LEFT[30:60]})
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
        assert get(namespace, late, SIZES[KV]) == contents(late, SIZES[KV], KV)
        for chain in LEFT[60:]:
            _exact(namespace, chain)
        # What was left where it was, since a neighbour was deleted, moves the next time.
        _move_all(layout)
        reclaim(layout, Index(layout))
        index = fresh_index(layout.path)
        assert all(len(places) == 1 for places in copies(index).values())
        for chain in LEFT[:30]:
            assert get(namespace, chain[:1], SIZES[KV]) == contents(chain[:1], SIZES[KV], KV)


def test_segments_of_a_living_writer_stay(root: Path) -> None:
    layout = _layout(root)
    with opened(root, **(SMALL | {"segment_size": PLENTY})) as (store, namespace):
        chain = _put_session(store, namespace, "alive")
        index = Index(layout)
        mine = {segment.name for segment in index.segments() if segment.live}
        assert len(mine) == 2
        moved = compact(layout, index, AMPLE, segment_size=1 << 39, budget=1 << 38)
        assert moved.segments > 100
        reclaim(layout, Index(layout))
        assert mine < _used(fresh_index(layout.path))
        _exact(namespace, chain)
        _exact(namespace, _put_session(store, namespace, "later"))


def test_who_looked_before_the_move_and_reads_after_it(root: Path) -> None:
    """A miss at worst; then the new place, as soon as the manifests are read."""
    layout = _layout(root)
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
            _exact(namespace, chain)


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
            _exact(namespace, chain)
    print(*counts, flush=True)


@pytest.mark.parametrize("grace", [0.0, 2.0])
def test_a_reader_beside_moves_gets_exact_bytes_or_misses(
    root: Path, tmp_path: Path, grace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "MOST_SEGMENTS", 0)
    layout, stop = _layout(root), tmp_path / "stop"
    here = str(Path(__file__).parent)
    words = [sys.executable, "-c", READER, str(root), here, str(stop)]
    reader = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    try:
        assert reader.stdout.readline() == "ready\n"
        # No segment is large enough, so all move.
        size = _collect(layout, grace=grace, segment_size=PLENTY).moved
        for _ in range(5):
            size += _move_all(layout)
            time.sleep(grace)
            reclaim(layout, Index(layout))
        stop.touch()
        output, _ = reader.communicate(timeout=120)
    finally:
        reader.kill()
        reader.communicate()
    right, absent, wrong = map(int, output.split())
    print(f"{size} bytes moved beside {right} right, {absent} absent, {wrong} wrong parts")
    assert reader.returncode == 0 and size > 6 * SESSIONS * 2 * SIZES[KV]
    assert right > 100 and wrong == 0
    assert not absent or grace < 1.5  # the reader's keeper looks once in a second


CALLS = ("open", "pwrite", "fdatasync", "fsync", "rename", "unlink", "close")


def _killed(act: Callable[[], object], at: int) -> int:
    """Do it in a process that kills itself after so many operations on files; how many it made."""
    done, said = os.pipe()
    child = os.fork()
    if not child:
        count = 0

        def counted(real: Callable[..., object]) -> Callable[..., object]:
            def call(*words: object, **named: object) -> object:
                nonlocal count
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*words, **named)

            return call

        try:
            write = os.write
            for name in CALLS:
                setattr(os, name, counted(getattr(os, name)))
            act()
            write(said, count.to_bytes(4, "little"))
        finally:
            os._exit(0)
    os.close(said)
    with os.fdopen(done, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return int.from_bytes(answer, "little")


def test_a_kill_in_the_middle_of_a_move_loses_nothing(made: Path, tmp_path: Path) -> None:
    state = _state(fresh_index(_layout(made).path))
    total = _killed(lambda: _collect(_layout(_copy(made, tmp_path / "whole"))), 0)
    assert total > 500
    source, twice = random.Random(7), 0
    for number in range(20):
        root = _copy(made, tmp_path / str(number))
        layout = _layout(root)
        assert not _killed(partial(_collect, layout), source.randrange(1, total))
        index = fresh_index(layout.path)
        assert _state(index) == state
        twice += sum(len(places) - 1 for places in copies(index).values())
        assert not check(layout, index, payload=True).damaged
        _collect(layout)
        index = fresh_index(layout.path)
        assert _state(index) == state
        assert len(_used(index)) <= _bound(index)
        assert not check(layout, index, payload=True).damaged
        with opened(root, **SMALL) as (_, namespace):
            for chain in source.sample(LEFT, 20):
                _exact(namespace, chain)
        shutil.rmtree(root)
    print(f"{total} operations; {twice} parts in two places after 20 kills")


def _bare(layout: Layout) -> list[str]:
    """Manifests without payload."""
    names = {path.stem for path in layout.segments.glob("*.kvm")}
    return sorted(names - {path.stem for path in layout.segments.glob("*.kvs")})


def _known(index: Index) -> list[object]:
    """All that manifests say of live pages."""
    there = {key for _, _, key in copies(index)}
    uses = [
        sorted((key, when) for key, when in index.uses(name).items() if key in there)
        for name in sorted(index.namespaces())
        if name != identity("other").id_bytes
    ]
    return [copies(index), uses, _state(index)]


def _deleted_from(root: Path) -> None:
    """Delete in many small steps, so that many manifests say so; one wipes, and one of which all
    pages are gone tells of others."""
    layout = _layout(root)
    with opened(root, "other", **SMALL) as (store, other):
        mine = store.namespace(identity())
        assert put(other, LEFT[0], contents(LEFT[0], SIZES[KV], KV)).all()
        doomed = _put_session(store, mine, "doomed")
        _exact(mine, LEFT[3])  # recency
        [place] = store.index.locate(identity().id_bytes, column_id(KV), LEFT[1][1])
        store.bury([place.stored.grave(1, 1)])
        assert other.clear()
    _thin_out(layout, {doomed[-1]: 0})
    for chain in LEFT[4:84]:
        _thin_out(layout, {chain[-1]: 1})
    reclaim(layout, Index(layout))


@pytest.fixture(scope="module")
def deleted(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a store of many manifests without payload."""
    root = _copy(made, tmp_path_factory.mktemp("deleted") / "root")
    _deleted_from(root)
    return root


def test_merged_manifests_say_the_same(deleted: Path, tmp_path: Path) -> None:
    root = _copy(deleted, tmp_path / "root")
    layout = _layout(root)
    before, bare = _known(fresh_index(layout.path)), _bare(layout)
    assert len(bare) > MOST_MANIFESTS
    with opened(root, **SMALL) as (store, namespace):
        assert merge_manifests(layout, Index(layout)) == len(bare)
        assert len(_bare(layout)) == 1
        assert not set(_bare(layout)) & set(bare)
        for index in (fresh_index(layout.path), saved_index(layout.path)):
            assert _known(index) == before
        store.index.refresh()
        assert copies(store.index) == before[0]
        for chain in LEFT[84:]:
            _exact(namespace, chain)
        assert not namespace.contains(KV, [chain[1] for chain in LEFT[4:84]]).any()
    # The one that is left goes with the last segment that it names.
    print(f"{len(bare)} -> {len(_bare(layout))} manifests without payload")
    assert merge_manifests(layout, Index(layout)) == 0
    collect(layout, Index(layout), 0, grace=0.0)
    assert len(list(layout.segments.glob("*.kvm"))) == 0


def test_a_kill_in_the_middle_of_a_merge_changes_nothing(deleted: Path, tmp_path: Path) -> None:
    before = _known(fresh_index(_layout(deleted).path))

    def merge(root: Path) -> None:
        merge_manifests(_layout(root), Index(_layout(root)))

    total = _killed(lambda: merge(_copy(deleted, tmp_path / "whole")), 0)
    assert total > 2 * MOST_MANIFESTS
    source, left = random.Random(8), set()
    for number in range(20):
        root = _copy(deleted, tmp_path / str(number))
        layout = _layout(root)
        assert not _killed(partial(merge, root), source.randrange(total - 200, total))
        assert _known(fresh_index(layout.path)) == before
        assert _known(saved_index(layout.path)) == before
        left.add(len(_bare(layout)))
        merge(root)
        assert _known(fresh_index(layout.path)) == before
        assert len(_bare(layout)) <= MOST_MANIFESTS + 2
        shutil.rmtree(root)
    print(f"{total} operations; manifests left by kills: {sorted(left)}")
    assert len(left) > 5
