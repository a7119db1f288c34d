"""What an enemy would try: faults in unusual places, calls that race, files that vanish."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
from making import KV, contents, get, keys, opened, put, settings

from kvtier import index as indexes
from kvtier import reader
from kvtier.backends import local
from kvtier.snapshot import Snapshot
from kvtier.store import Store

SIZE = 70_000
PATIENCE = 120.0


def test_a_get_beside_close_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that wait for a thread are called off, and nobody sees an exception."""
    monkeypatch.setattr(reader, "GAP_BYTES", 0)
    monkeypatch.setattr(reader, "EXTENT_BYTES", SIZE)
    with opened(tmp_path, read_threads=1) as (store, namespace):
        chain = keys("chain", 6)
        put(namespace, chain, contents(chain, SIZE))
        assert store.flush(60)
        gate, begun, real = threading.Event(), threading.Event(), local.read_extent

        def slow(path: Path, start: int, buffer: memoryview, *, direct: bool) -> int:
            begun.set()
            gate.wait(PATIENCE)
            return real(path, start, buffer, direct=direct)

        monkeypatch.setattr(reader, "read_extent", slow)
        found: list[list[bytes | None]] = []
        getting = threading.Thread(target=lambda: found.append(get(namespace, chain, SIZE)))
        getting.start()
        assert begun.wait(PATIENCE)
        store._reader.close()
        gate.set()
        getting.join(PATIENCE)
        assert found == [[*contents(chain[:1], SIZE), *[None] * 5]]
        assert get(namespace, chain, SIZE) == [None] * 6
        assert not store.reads.open, "the drive did nothing wrong"


def test_close_ends_although_another_process_hangs(tmp_path: Path) -> None:
    store = Store.open(settings(tmp_path))
    with store.layout.lock():  # as a process would that waits for a drive for ever
        closing = threading.Thread(target=store.close, args=(0.2,), daemon=True)
        closing.start()
        closing.join(PATIENCE)
        assert not closing.is_alive()
    for thread in threading.enumerate():
        if thread.name == "kvtier-save":
            thread.join(PATIENCE)


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "full"), RuntimeError("unexpected")])
def test_the_keeper_outlives_a_snapshot_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    """And on a full disk it does not write one every second, under the lock that commits need."""
    tried = []

    def failing(self: Snapshot, path: Path) -> None:
        tried.append(path)
        raise fault

    with opened(tmp_path) as (store, namespace), opened(tmp_path) as (other, theirs):
        with monkeypatch.context() as patch:
            patch.setattr(Snapshot, "save", failing)
            patch.setattr(indexes, "LATE_PAGES", 2)
            chain = keys("chain", 6)
            put(namespace, chain[:3], contents(chain[:3], SIZE))
            assert store.flush(60)
            while not tried:
                other._keeper.catch_up(PATIENCE)
            for _ in range(2):
                store._keeper.catch_up(PATIENCE)
                other._keeper.catch_up(PATIENCE)
        assert len(tried) <= 2, "one attempt of each store"
        put(namespace, chain, contents(chain, SIZE))
        assert store.flush(60)
        for _ in range(2):
            other._keeper.catch_up(PATIENCE)
        assert theirs.contains(KV, chain).all()
