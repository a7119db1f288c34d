"""Hostile interleavings of commits, collections and deletions, each with real stores."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from making import (
    KV,
    PATIENCE,
    contents,
    fresh_index,
    get_each,
    keys,
    put,
    settings,
    store_of,
    until,
)

from kvtier.backends.local import disk_usage
from kvtier.chains import Chains, chains
from kvtier.collection import collect
from kvtier.format import ALIGNMENT
from kvtier.identity import Identity
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.pages import ROOT, Column, Link
from kvtier.store import Namespace, Store

MIB = 1 << 20
SIZE = 64 << 10
SWA = Column("swa", "tp0")
IDENTITY = Identity.of({"model": "model", "page_tokens": 256})


CAP = 6 * MIB


def _fill(store: Store, pages: Namespace, name: str) -> None:
    """Put and commit sessions until the store is at its cap, or refuses them."""
    for number in range(2 * CAP // (8 * SIZE)):
        session = keys((name, number), 8)
        put(pages, session, contents(session, SIZE))
        assert store.flush(PATIENCE)


def _chains(store: Path) -> Chains:
    [found] = chains(fresh_index(store))
    return found


def test_records_that_are_logged_while_pages_wait_cost_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that has filled a segment waits for room for its tails; what was used is logged
    meanwhile, which begins the next segment."""
    sizes = {"commit_size": 4 * MIB, "segment_size": 5 * MIB, "staging_size": 16 * MIB}
    store = Store.open(settings(tmp_path, commit_interval=0.5, **sizes))
    pages = store.namespace(IDENTITY, KV)
    granted, refused = store.quota.reserve, []

    def reserve(size: int) -> bool:
        if size != 16 * SIZE + ALIGNMENT or len(refused) == 3:
            return granted(size)
        refused.append(size)
        store._keeper.log_recency()
        return False

    monkeypatch.setattr(store.quota, "reserve", reserve)
    monkeypatch.setattr(store.quota, "headroom", lambda: -1)
    sessions = [keys(number, 16) for number in range(6)]
    for session in sessions:
        put(pages, session, contents(session, 2 * SIZE))
        put(pages, session[:1], contents(session[:1], 2 * SIZE))
        put(pages, session, contents(session, SIZE, "tail"), SWA, window=16)
        refused.clear()
        assert store.flush(60) and len(refused) == 3
    assert not store.failures
    for session in sessions:
        assert get_each(pages, session, 2 * SIZE) == contents(session, 2 * SIZE)
        assert get_each(pages, session, SIZE, SWA) == contents(session, SIZE, "tail")
    store.close()
    assert not fresh_index(store_of(tmp_path)).health().damaged


def test_a_rank_whose_tails_come_late_loses_no_boundary(tmp_path: Path) -> None:
    """A collection sees the newest boundary's tails of one rank, and not yet those of the other."""
    ranks = [Store.open(settings(tmp_path)) for _ in range(2)]
    session = keys("session", 32)

    def store(rank: int, pool: str, first: int, end: int) -> None:
        column, some = Column(pool, f"tp{rank}"), session[first:end]
        pages = ranks[rank].namespace(IDENTITY, Column("kv", f"tp{rank}"))
        link = Link(session[first - 1] if first else ROOT, first)
        window = int(pool == "swa")
        assert put(pages, some, contents(some, 4096, column), column, link, window=window).all()
        assert ranks[rank].flush(60)

    for first in (0, 16):
        for rank in range(2):
            store(rank, "kv", first, first + 16)
    for rank in range(2):
        store(rank, "swa", 0, 16)
    store(0, "swa", 16, 32)
    layout = Layout.open(store_of(tmp_path), create=False)
    collect(layout, Index(layout), 1 << 40, grace=0)
    store(1, "swa", 16, 32)
    found = _chains(layout.path)
    assert found.depth[found.restorable].max() == 32
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize(
    "answer",
    ["", "[]", "null", "{}", '{"freed": 1, "enough": true}', '{"freed": null, "enough": true}'],
)
def test_what_a_collection_prints_ends_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """The interpreter is replaced by one that answers nonsense, then by the real one."""
    monkeypatch.setattr("kvtier.collector._FRUITLESS_SECONDS", 0.1)
    other = tmp_path / "python"
    other.write_text(f"#!/bin/sh\necho '{answer}'\n")
    other.chmod(0o755)
    changes = {"limit": CAP, "grace": 0.0, "commit_size": MIB, "put_deadline": 8}
    store = Store.open(settings(tmp_path / "root", **changes))
    pages = store.namespace(IDENTITY, KV)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(other))
        _fill(store, pages, "first")
        assert store.failures
    last = keys("last", 8)

    def stored() -> bool:
        put(pages, last, contents(last, SIZE))
        return store.flush(PATIENCE) and bool(pages.contains(KV, last).all())

    until(stored, "no collection made room")
    assert disk_usage(store.root) <= CAP
    store.close()


def test_many_that_start_at_once_keep_to_a_small_cap(tmp_path: Path) -> None:
    """Each writes to two segments of its own at first, and these have files beside their pages."""
    stores = [Store.open(settings(tmp_path, limit=MIB, put_deadline=0.1)) for _ in range(16)]
    used = []
    for turn in range(10):
        for number, store in enumerate(stores):
            pages, session = store.namespace(IDENTITY, KV), keys((number, turn), 1)
            put(pages, session, contents(session, 900, "tail"), SWA, window=1)
            put(pages, session, contents(session, 900))
            assert store.flush(PATIENCE)
            used.append(disk_usage(store.root))
    assert MIB // 2 < max(used) <= MIB
    for store in stores:
        store.close()


@pytest.mark.parametrize("interpreter", ["", None, "/no/such/interpreter"])
def test_without_an_interpreter_pages_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: str | None
) -> None:
    """Nobody waits for a collection that cannot start: put_deadline is longer than the test."""
    monkeypatch.setattr(sys, "executable", interpreter)
    monkeypatch.setenv("PATH", str(tmp_path))
    changes = {"limit": CAP, "grace": 0.0, "commit_size": MIB, "put_deadline": 3600}
    store = Store.open(settings(tmp_path / "root", **changes))
    _fill(store, store.namespace(IDENTITY, KV), "any")
    assert store.failures and disk_usage(store.root) <= CAP
    store.close()


def test_a_stopped_collection_ends_with_the_store(tmp_path: Path) -> None:
    store = Store.open(settings(tmp_path, limit=CAP, grace=3600.0, commit_size=MIB, put_deadline=8))
    pages, collector, number = store.namespace(IDENTITY, KV), store._collector, 0
    while collector._process is None:
        session = keys(number := number + 1, 8)
        put(pages, session, contents(session, SIZE))
        assert store.flush(PATIENCE)
    process = collector._process
    os.kill(process.pid, signal.SIGSTOP)
    store.close()
    until(lambda: process.poll() is not None, "the collection outlives the store")


def test_a_collection_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    changes = {"limit": CAP, "grace": 0.0, "commit_size": MIB, "put_deadline": PATIENCE}
    store = Store.open(settings(tmp_path / "root", **changes))
    _fill(store, store.namespace(IDENTITY, KV), "any")
    assert not store.failures
    store.close()
