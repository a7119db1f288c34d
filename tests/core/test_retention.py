"""Chains, sessions, and collections under a limit: on real stores, never a hole."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from making import KV, contents, fresh_index, get, get_each, keys, opened, put

from kvtier.backends.local import disk_usage
from kvtier.chains import Chains, chains
from kvtier.collection import collect
from kvtier.deletion import drop_ballast
from kvtier.index import Index
from kvtier.pages import Column, Link
from kvtier.space import reclaim
from kvtier.store import Namespace, Store

SIZE = 20_000
SWA = Column("swa", "tp0")


def _tree(store: Store, namespace: Namespace, sessions: int, pages: int) -> list[list[bytes]]:
    """Sessions of so many pages below a common head of ten pages; the oldest first."""
    drop_ballast(store.layout)  # as a collection to a small limit does
    head = keys("system prompt", 10)
    put(namespace, head, contents(head, SIZE))
    grown = []
    for number in range(sessions):
        own = keys(("session", number), pages)
        put(namespace, own, contents(own, SIZE), link=Link(head[-1], 10))
        assert store.flush(60)
        grown.append(head + own)
    return grown


def _only(index: Index) -> Chains:
    [found] = chains(index)
    return found


def _no_holes(index: Index) -> None:
    for found in chains(index):
        assert found.reachable.all()


def test_sessions_with_a_common_head(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace):
        grown = _tree(store, namespace, 3, 20)
        found = _only(store.index).sessions()
        # Last used first.
        assert [s.key for s in found] == [session[-1] for session in reversed(grown)]
        assert {(s.pages, s.restorable, s.tails) for s in found} == {(30, 30, 0)}
        assert {s.bytes for s in found} == {30 * SIZE}
        assert {s.own_bytes for s in found} == {20 * SIZE}


def test_a_session_ends_where_its_last_tail_is(tmp_path: Path) -> None:
    chain = keys("chain", 12)
    with opened(tmp_path) as (store, namespace):
        tails = [chain[3], chain[8]]
        for tail in tails:
            at = chain.index(tail)
            link = Link(chain[at - 1], at)
            put(namespace, [tail], contents([tail], 64, "swa"), SWA, link, window=1)
        put(namespace, chain, contents(chain, SIZE))
        assert store.flush(60)
        [session] = _only(store.index).sessions()
        assert (session.pages, session.restorable, session.tails) == (12, 9, 2)


def test_pages_behind_a_missing_family_are_not_restorable(tmp_path: Path) -> None:
    chain, indexer = keys("chain", 8), Column("indexer")
    with opened(tmp_path) as (store, namespace):
        there = chain[:5] + chain[6:]
        for start, part in ((0, chain[:5]), (6, chain[6:])):
            put(namespace, part, contents(part, 64, "i"), indexer, Link(None, start))
        put(namespace, chain, contents(chain, SIZE))
        assert store.flush(60)
        found = _only(store.index)
        assert int(found.complete.sum()) == len(there)
        assert int(found.reachable.sum()) == 5
        [session] = found.sessions()
        assert (session.pages, session.restorable) == (8, 5)


def test_the_ends_of_old_sessions_go_first(tmp_path: Path) -> None:
    with opened(tmp_path, grace=0.0) as (store, namespace):
        grown = _tree(store, namespace, 4, 60)
        limit = disk_usage(store.root) - 70 * SIZE
        done = collect(store.layout, store.index, limit, grace=0.0)
        assert done.enough and disk_usage(store.root) <= limit
        _no_holes(store.index)
        lengths = [sum(namespace.contains(KV, session)) for session in grown]
        assert lengths[2:] == [70, 70]
        assert lengths[0] == 10 and 10 < lengths[1] < 70
        for session, length in zip(grown, lengths, strict=True):
            assert get(namespace, session, SIZE)[:length] == contents(session, SIZE)[:length]


def test_a_restored_session_outlives_newer_ones(tmp_path: Path) -> None:
    with opened(tmp_path, grace=0.0) as (store, namespace):
        grown = _tree(store, namespace, 3, 40)
        get(namespace, grown[0], SIZE)
        limit = disk_usage(store.root) - 30 * SIZE
        collect(store.layout, store.index, limit, grace=0.0)
        lengths = [sum(namespace.contains(KV, session)) for session in grown]
        assert lengths[0] == 50 and lengths[2] == 50 and lengths[1] < 50


def test_recency_survives_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace):
        grown = _tree(store, namespace, 3, 40)
        get(namespace, grown[0], SIZE)
    store_path = tmp_path / "kvtier"
    index = fresh_index(store_path)
    assert _only(index).sessions()[0].key == grown[0][-1]


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace):
        _tree(store, namespace, 2, 30)
        before = disk_usage(store.root)
        done = collect(store.layout, store.index, before // 2, grace=0.0, dry_run=True)
        assert done.pages > 0 and done.before == before
        assert disk_usage(store.root) == before
        assert len(_only(store.index)) == 70


def test_a_limit_of_nothing_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace):
        _tree(store, namespace, 2, 30)
    with opened(tmp_path) as (store, _):
        collect(store.layout, store.index, 0, grace=0.0)
        assert chains(store.index) == []
        left = list((store.root / "segments").glob("*.kvs"))
        assert left == []


def test_the_space_of_a_cleared_namespace_is_given_back(tmp_path: Path) -> None:
    with opened(tmp_path, grace=0.0) as (store, namespace):
        _tree(store, namespace, 2, 30)
        other = store.namespace(namespace_identity := _identity("other"))
        assert namespace_identity.id != namespace.id
        kept = keys("kept", 20)
        put(other, kept, contents(kept, SIZE))
        assert store.flush(60)
        namespace.clear()
        collect(store.layout, store.index, 30 * SIZE, grace=0.0)
        assert get(other, kept, SIZE) == contents(kept, SIZE)
        assert disk_usage(store.root) <= 30 * SIZE


def _identity(model: str):  # type: ignore[no-untyped-def]
    from making import identity

    return identity(model)


@pytest.mark.parametrize("seed", range(6))
def test_any_tree_under_any_limit_has_no_hole(tmp_path: Path, seed: int) -> None:
    """Random trees, uses, collections and restarts: what is left is whole and exact."""
    source = random.Random(seed)
    grown: list[list[bytes]] = [[]]
    for round_ in range(4):
        with opened(tmp_path, grace=0.0) as (store, namespace):
            for number in range(6):
                base = source.choice(grown)
                length = sum(1 for _ in _present(namespace, base))
                base = base[: source.randint(0, length)]
                own = keys((seed, round_, number), source.randint(1, 25))
                link = Link(base[-1] if base else b"", len(base))
                put(namespace, own, contents(own, 5_000), link=link)
                assert store.flush(60)
                grown.append(base + own)
            limit = int(disk_usage(store.root) * source.uniform(0.3, 0.9))
            collect(store.layout, store.index, limit, grace=0.0)
            _no_holes(store.index)
            for chain in grown:
                length = sum(1 for _ in _present(namespace, chain))
                assert not any(namespace.contains(KV, chain)[length:]) if chain else True
                assert get(namespace, chain[:length], 5_000) == contents(chain[:length], 5_000)
        index = fresh_index(tmp_path / "kvtier")
        _no_holes(index)


def _present(namespace: Namespace, chain: list[bytes]):  # type: ignore[no-untyped-def]
    if chain:
        for there in namespace.contains(KV, chain):
            if not there:
                return
            yield there


def test_what_was_extended_since_it_was_chosen_is_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server builds on a page between the choice and the deletion."""
    from kvtier import collection

    with opened(tmp_path, grace=0.0) as (store, namespace):
        grown = _tree(store, namespace, 2, 30)
        late = keys("late", 3)
        choose = collection.plan

        def choose_then_extend(found, need, **policy):  # type: ignore[no-untyped-def]
            victims = choose(found, need, **policy)
            put(namespace, late, contents(late, SIZE), link=Link(grown[0][-1], 40))
            assert store.flush(60)
            monkeypatch.setattr(collection, "plan", choose)
            return victims

        monkeypatch.setattr(collection, "plan", choose_then_extend)
        monkeypatch.setattr(collection, "_ROUNDS", 1)
        collect(store.layout, store.index, disk_usage(store.root) // 2, grace=0.0)
        _no_holes(store.index)
        assert namespace.contains(KV, grown[0] + late).all()


def test_nobody_builds_on_a_page_that_was_deleted(tmp_path: Path) -> None:
    """Another process collects; this one's next page finds its parent gone, and is refused."""
    with opened(tmp_path) as (store, namespace):
        anchored = store.namespace(_identity("model"), KV)
        grown = _tree(store, namespace, 1, 30)
        other = Index(store.layout)
        collect(store.layout, other, 0, grace=0.0)
        late = keys("late", 2)
        put(anchored, late, contents(late, SIZE), link=Link(grown[0][-1], 40))
        assert store.flush(60)
        assert not anchored.contains(KV, late).any()
        assert not any(get_each(anchored, late, SIZE))
        assert chains(store.index) == []


def test_collections_beside_a_writing_server(tmp_path: Path) -> None:
    """A writer in another process under a collecting loop: nothing is ever behind a hole."""
    script = """
import sys
from pathlib import Path
from making import KV, contents, identity, keys, put, settings
from kvtier.pages import Link
from kvtier.store import Store
store = Store.open(settings(Path(sys.argv[1])))
namespace = store.namespace(identity(), KV)
print("ready", flush=True)
for number in range(40):
    chain = keys(("writer", number), 24)
    for start in range(0, 24, 4):
        part = chain[start : start + 4]
        link = Link(chain[start - 1] if start else b"", start)
        put(namespace, part, contents(part, 20_000), link=link)
    store.flush()
store.close()
"""
    folder = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": folder}
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        with opened(tmp_path) as (store, namespace):
            while writer.poll() is None:
                collect(store.layout, store.index, 4_000_000, grace=0.0)
            store.index.refresh()
            collect(store.layout, store.index, 4_000_000, grace=0.0)
            _no_holes(store.index)
            assert disk_usage(store.root) <= 4_000_000
            for number in range(40):
                chain = keys(("writer", number), 24)
                length = sum(1 for _ in _present(namespace, chain))
                assert get(namespace, chain[:length], SIZE) == contents(chain[:length], SIZE)
    finally:
        writer.kill()
        writer.wait()
    assert writer.returncode == 0


def test_what_crashes_leave_is_removed(tmp_path: Path) -> None:
    """Scratch files, and payload whose manifest is gone, count for nobody (R065)."""
    with opened(tmp_path) as (store, namespace):
        _tree(store, namespace, 1, 30)
    folder = tmp_path / "kvtier" / "segments"
    [orphan] = list(folder.glob("*.kvs"))[:1]
    shutil.copy(orphan, folder / ("ab" * 12 + "-0.kvs"))
    (folder / "notes.txt").write_text("mine")
    pins = tmp_path / "kvtier" / "pins"
    pins.mkdir()
    scratch = [folder / ("." + "cd" * 12 + "-0.kvm.tmp"), pins / ".pin.1.tmp"]
    for path in scratch:
        path.touch()
        os.utime(path, (1, 1))
    (tmp_path / "kvtier" / "index" / ".snapshot.x.tmp").touch()
    with opened(tmp_path) as (store, namespace):
        collect(store.layout, store.index, disk_usage(store.root) - 1, grace=0.0)
    assert not (folder / ("ab" * 12 + "-0.kvs")).exists()
    scratch.append(tmp_path / "kvtier" / "index" / ".snapshot.x.tmp")
    assert not any(path.exists() for path in scratch)
    assert (folder / "notes.txt").read_text() == "mine"


def test_pages_without_bytes_stay_when_space_is_given_back(tmp_path: Path) -> None:
    chain, fact = keys("chain", 5), Column("fact")
    with opened(tmp_path) as (store, namespace):
        put(namespace, chain, [b""] * 5, fact)
        assert store.flush(60)
    reclaim(store.layout, Index(store.layout))
    with opened(tmp_path) as (_, namespace):
        assert get(namespace, chain, 0, fact) == [b""] * 5
