"""Clocks that were wrong: what was used last stays, whatever the system's clock said."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from making import KV, contents, get, keys, opened, put

from kvtier.backends.local import disk_usage
from kvtier.clock import Clock
from kvtier.collection import collect
from kvtier.deletion import drop_ballast
from kvtier.store import Store

HOUR = 3600 * 10**9
SIZE, PAGES = 64 << 10, 16


class System:
    """The system's clock, set wrong by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0
        right = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: right() + self.ahead)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


def _store(root: Path, *names: str) -> None:
    with opened(root) as (store, namespace):
        for name in names:
            chain = keys(name, PAGES)
            assert put(namespace, chain, contents(chain, SIZE)).all()
            assert store.flush(120)


def _collect(store: Store, sessions: float) -> None:
    """Make room until so many sessions are left."""
    drop_ballast(store.layout)
    store.index.refresh()
    others = disk_usage(store.root) - len(store.index) * SIZE
    done = collect(store.layout, store.index, others + int(sessions * PAGES * SIZE), grace=0.0)
    assert done.enough


@pytest.mark.parametrize("saved", [True, False], ids=["snapshot", "manifests"])
def test_sessions_of_the_future_go_before_those_that_are_used(
    tmp_path: Path, system: System, saved: bool
) -> None:
    system.ahead = 8 * HOUR
    idle = [f"idle {number}" for number in range(5)]
    _store(tmp_path, *idle)
    system.ahead = 0
    if not saved:
        (tmp_path / "kvtier" / "index" / "snapshot").unlink()
    _store(tmp_path, "live 0")
    with opened(tmp_path) as (store, namespace):
        chain = keys(idle[1], PAGES)
        assert get(namespace, chain, SIZE) == contents(chain, SIZE)
        store._keeper.log_recency()
        assert store.flush(120)
    _store(tmp_path, "live 1")
    with opened(tmp_path) as (store, namespace):
        _collect(store, 3.5)
        for name in ("live 0", "live 1", idle[1]):
            assert namespace.contains(KV, keys(name, PAGES)).all(), name
        left = sum(int(namespace.contains(KV, keys(name, PAGES)).sum()) for name in idle)
        assert left < 2 * PAGES


def test_the_newest_stays_when_the_clock_goes_back(tmp_path: Path, system: System) -> None:
    _store(tmp_path, "first", "second")
    system.ahead = -HOUR
    with opened(tmp_path) as (store, namespace):
        chain = keys("newest", PAGES)
        assert put(namespace, chain, contents(chain, SIZE)).all()
        assert store.flush(120)
        _collect(store, 1.5)
        assert namespace.contains(KV, chain).all()
        assert not namespace.contains(KV, keys("first", PAGES)).any()


def test_another_process_orders_by_what_it_has_read(tmp_path: Path, system: System) -> None:
    with opened(tmp_path) as (one, namespace), opened(tmp_path) as (other, _):
        system.ahead = 8 * HOUR
        future = one.index.stamp()
        chain = keys("future", PAGES)
        put(namespace, chain, contents(chain, SIZE))
        assert one.flush(120)
        system.ahead = 0
        other.index.refresh()
        assert other.index.stamp() > future


def test_a_clock_only_goes_forward(system: System) -> None:
    clock, stamps = Clock(), []
    for ahead in (0, HOUR, 0, -HOUR, 2 * HOUR, 0):
        system.ahead = ahead
        stamps += [clock.now(), clock.now()]
    clock.saw(stamps[-1] + 5 * HOUR)
    stamps.append(clock.now())
    assert stamps == sorted(set(stamps)) and stamps[-1] > stamps[-2] + 4 * HOUR
    clock.saw(1 << 63)
    assert clock.now() < stamps[-1] + HOUR
