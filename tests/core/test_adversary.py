"""What an enemy would try: faults in unusual places, calls that race, files that vanish."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from making import KV, contents, copies, get, keys, opened, put, settings

from kvtier import index as indexes
from kvtier import keeper as keepers
from kvtier import reader
from kvtier import snapshot as snapshots
from kvtier.backends import local
from kvtier.entries import Entries
from kvtier.errors import ConfigError
from kvtier.format import column_id
from kvtier.layout import Layout
from kvtier.pages import ROOT, U64, Link
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


def _mapped(path: Path) -> list[bool]:
    """Of each of this process's mappings of a file, whether all of it is held in memory."""
    held, mine, size = [], False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            mine = line.endswith(str(path))
        elif mine and name == "Size:":
            size = rest[0]
        elif mine and name == "Rss:":
            held.append(rest[0] == size)
        elif mine and name == "VmFlags:":
            held[-1] = held[-1] and "lo" in rest
    return held


@pytest.mark.parametrize("allowed", [True, False])
def test_no_lookup_reads_a_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    """A mapped page that the kernel took back and can't read again would end the process."""
    chain = keys("chain", 2000)
    with opened(tmp_path) as (store, namespace):
        put(namespace, chain, contents(chain, 10))
        assert store.flush(60)
    if not allowed:  # RLIMIT_MEMLOCK does not bind root
        for module in (indexes, snapshots):
            monkeypatch.setattr(module, "keep_resident", lambda mapped: False)
    with opened(tmp_path) as (store, namespace), opened(tmp_path) as (other, theirs):
        for name in (indexes.SNAPSHOT, indexes.DOORBELL):
            held = _mapped(store.layout.index / name)
            assert all(held) and len(held) >= 2 * allowed
        assert namespace.contains(KV, chain).all()
        more = keys("more", 3)
        put(namespace, more, contents(more, 10), link=Link())
        assert store.flush(60)
        for _ in range(2):
            other._keeper.catch_up(PATIENCE)
        assert theirs.contains(KV, [*chain, *more]).all()
        namespace.clear()
        assert not namespace.contains(KV, chain).any(), "the held table can be changed"


def test_a_doorbell_that_cannot_be_rung_fails_no_commit(tmp_path: Path) -> None:
    chain = keys("chain", 3)
    with opened(tmp_path) as (store, namespace), opened(tmp_path) as (other, theirs):
        bell = store.layout.index / indexes.DOORBELL
        bell.unlink()
        bell.mkdir()
        assert put(namespace, chain, contents(chain, SIZE)).all()
        assert store.flush(60)
        assert get(namespace, chain, SIZE) == contents(chain, SIZE)
        for _ in range(2):
            other._keeper.catch_up(PATIENCE)
        assert theirs.contains(KV, chain).all()


@pytest.mark.parametrize("saved", [False, True])
def test_a_copy_that_takes_anothers_place_is_never_overlooked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """Overlooked for a moment, its space would be freed, or the saved index lack it for good."""
    chain = keys("twice", 1)
    with opened(tmp_path, commit_interval=60.0) as (one, first):
        with opened(tmp_path, commit_interval=60.0) as (_, second):
            put(first, chain, contents(chain, SIZE))
            put(second, chain, contents(chain, SIZE))
        assert one.flush(60)
        before = copies(one.index)
        [places] = before.values()
        assert len(places) == 2
        [located] = one.index.locate(first._key, column_id(KV), chain[0])
        unreadable = located.stored.grave(0, 1)
        real = Entries.standing
        hiding = threading.Thread(target=one.index.discard, args=(unreadable,))

        def meanwhile(entries: Entries) -> tuple[U64, U64]:
            found = real(entries)
            if not hiding.ident:
                hiding.start()
                hiding.join(0.5)
            return found

        monkeypatch.setattr(Entries, "standing", meanwhile)
        if saved:
            one.index.save()
        found = copies(one.index)
        hiding.join(PATIENCE)
        assert found == copies(one.index) == before


def test_runs_that_are_gone_again_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is kept small has few pages at any time, however many come and go."""
    monkeypatch.setattr(indexes, "LATE_PAGES", 20)
    monkeypatch.setattr(keepers, "ROUND_SECONDS", 3600.0)
    with opened(tmp_path) as (store, namespace):
        for number in range(30):
            chain = keys(number, 2)
            put(namespace, chain, contents(chain, 100))
            namespace.clear()
            assert store.index._catalog.late_runs <= 21, "the keeper makes a snapshot in time"
        assert len(store.index) == 0


def test_later_pages_do_not_land_before_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report R024 where the end of a chain lies before its start on the drive."""
    monkeypatch.setattr(reader, "GAP_BYTES", 0)
    monkeypatch.setattr(reader, "EXTENT_BYTES", 2 * SIZE)
    with opened(tmp_path) as (store, namespace):
        chain = keys("chain", 6)
        for some in (chain[4:], chain[2:4], chain[:2]):
            put(namespace, some, contents(some, SIZE), link=Link())
            assert store.flush(60)
        parts = contents(chain, SIZE)
        assert get(namespace, chain, SIZE) == parts
        real = local.read_extent
        [middle] = store.index.locate(namespace._key, column_id(KV), chain[3])
        offset = middle.stored.run.blocks[0].offset

        def bad(path: Path, start: int, buffer: memoryview, *, direct: bool) -> int:
            if start == offset:
                raise OSError(errno.EIO, "Input/output error")
            return real(path, start, buffer, direct=direct)

        monkeypatch.setattr(reader, "read_extent", bad)
        assert get(namespace, chain, SIZE) == [*parts[:2], *[None] * 4]


def _as_root_in_somebody_elses(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Path, int, int]]:
    """(file, user, group) of what is given away."""
    real: Callable[..., os.stat_result] = os.stat
    given: list[tuple[Path, int, int]] = []

    def owned(path: Any, **more: Any) -> os.stat_result:
        found = real(path, **more)
        values = list(found)
        values[4:6] = 1234, 1235
        return os.stat_result(values) if str(path) == str(folder) else found

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, *owner, **more: given.append((path, *owner)))
    monkeypatch.setattr(os, "stat", owned)
    return given


@pytest.mark.parametrize("name", ["limits.json", "index/snapshot"])
def test_a_file_is_its_owners_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A server that looked in between would find a file that it cannot read, and keep to what it
    knows. A power cut in between would leave it so."""
    layout = Layout.open(tmp_path / "kvtier", create=True)
    path = layout.path / name
    given = _as_root_in_somebody_elses(path.parent, monkeypatch)
    rename = Path.replace

    def seen(scratch: Path, target: Path) -> Path:
        assert given == [(scratch, 1234, 1235)]
        return rename(scratch, target)

    monkeypatch.setattr(Path, "replace", seen)
    layout.write_once(path, "{}")
    assert given and path.read_text() == "{}"


def test_the_lock_belongs_to_the_stores_owner_and_is_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root shell that makes it must not lock the server out, nor be led elsewhere."""
    layout = Layout.open(tmp_path / "kvtier", create=True)
    given = _as_root_in_somebody_elses(layout.path, monkeypatch)
    with layout.lock():
        assert given == [(layout.path / name, 1234, 1235) for name in ("gate", "lock")]
    monkeypatch.undo()
    for name in ("gate", "lock"):
        (layout.path / name).unlink()
        (layout.path / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError), layout.lock():
            pass
        assert not (tmp_path / "elsewhere").exists()
        (layout.path / name).unlink()


def test_staging_is_never_full_before_a_commit_is_due(tmp_path: Path) -> None:
    """Or puts would wait for nothing, and the drive be blamed."""
    with pytest.raises(ConfigError, match="raise staging_size to twice that"):
        settings(tmp_path, commit_size=1 << 20, staging_size=(2 << 20) - 4096)
    sizes = {"commit_size": 1 << 20, "staging_size": 2 << 20}
    with opened(tmp_path, commit_interval=60.0, **sizes) as (store, namespace):
        chain = keys("chain", 120)
        for start in range(0, 120, 5):
            some = chain[start : start + 5]
            link = Link(chain[start - 1], start) if start else Link(ROOT, 0)
            assert put(namespace, some, contents(some, SIZE), link=link).all()
        assert not store.writes.open


def test_a_restart_on_a_full_disk_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chain = keys("chain", 3)
    with opened(tmp_path) as (_, namespace):
        put(namespace, chain, contents(chain, SIZE))

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(tmp_path) as (store, namespace), monkeypatch.context() as patch:
        patch.setattr(local.os, "pwrite", full)
        store.canary()
        assert "no room at" in caplog.text
        assert get(namespace, chain, SIZE) == contents(chain, SIZE)
