"""Hostile interleavings of commits, collections and deletions, each with real stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from making import KV, contents, fresh_index, get_each, keys, put, settings, store_of

from kvtier.chains import Chains, chains
from kvtier.collection import collect
from kvtier.identity import Identity
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.pages import ROOT, Column, Link
from kvtier.store import Store

MIB = 1 << 20
SIZE = 64 << 10
SWA = Column("swa", "tp0")
IDENTITY = Identity.of({"model": "model", "page_tokens": 256})


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
        if size != 16 * SIZE or len(refused) == 3:
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
