"""Lookups show what is synced, not what is only written: a power cut may take the latter back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from lab import TOOLS
from powercut.workload import IDENTITY, KV, put, settings

from kvtier.deletion import bury
from kvtier.format import column_id
from kvtier.index import Index
from kvtier.pages import ROOT, Link
from kvtier.store import Store

KEYS = [bytes([number]) * 32 for number in range(3)]
COLUMN = KV.column(0)


class SlowSync:
    """Stands for os.fdatasync: syncs of manifests wait until they may go on, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting, self.go_on = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self._sync = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self)

    def __call__(self, fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().suffix == ".kvm":
            self.waiting.set()
            self.go_on.wait(60)
            if self.error is not None:
                error, self.error = self.error, None
                raise error
        self._sync(fd)


def test_a_manifest_that_is_being_synced_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowSync(monkeypatch)
    with_pages, other = (Store.open(settings(tmp_path)) for _ in range(2))
    pages, seen_by_other = (store.namespace(IDENTITY, COLUMN) for store in (with_pages, other))
    assert put(pages, 0, KV, KEYS, Link(ROOT, 0))
    assert slow.waiting.wait(60)
    for store, namespace in ((with_pages, pages), (other, seen_by_other)):
        store.index.refresh()
        assert not namespace.contains(COLUMN, KEYS).any()
    slow.go_on.set()
    assert with_pages.flush(60)
    other.index.refresh()
    assert pages.contains(COLUMN, KEYS).all()
    assert seen_by_other.contains(COLUMN, KEYS).all()
    with_pages.close()
    other.close()


def test_a_sync_that_fails_was_never_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowSync(monkeypatch)
    store, other = (Store.open(settings(tmp_path)) for _ in range(2))
    pages, seen_by_other = (one.namespace(IDENTITY, COLUMN) for one in (store, other))
    slow.error = OSError(5, "Input/output error")
    put(pages, 0, KV, KEYS, Link(ROOT, 0))
    assert slow.waiting.wait(60)
    other.index.refresh()
    slow.go_on.set()
    store.flush(60)
    for one, namespace in ((store, pages), (other, seen_by_other)):
        one.index.refresh()
        assert not namespace.contains(COLUMN, KEYS).any()
    assert put(pages, 0, KV, KEYS, Link(ROOT, 0))
    store.flush(60)
    assert pages.contains(COLUMN, KEYS).all()
    store.close()
    other.close()


def test_who_has_the_lock_alone_sees_what_a_dying_writer_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed while it logs may lose the store's lock before its manifest's."""
    slow = SlowSync(monkeypatch)
    store = Store.open(settings(tmp_path))
    pages = store.namespace(IDENTITY, COLUMN)
    slow.go_on.set()
    put(pages, 0, KV, KEYS, Link(ROOT, 0))
    assert store.flush(60)
    collection = Index(store.layout, readonly=True)
    slow.waiting.clear()
    slow.go_on.clear()
    put(pages, 0, KV, [bytes([9]) * 32], Link(KEYS[-1], 3))
    assert slow.waiting.wait(60)
    collection.refresh()
    assert len(collection) == len(KEYS)
    mark = collection.mark()
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)  # not the collection's own sync
    collection.refresh(alone=True)
    assert collection.parents_since(mark) == {KEYS[-1]}
    slow.go_on.set()
    store.close()


def test_deletions_are_seen_before_they_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(settings(tmp_path))
    pages = store.namespace(IDENTITY, COLUMN)
    put(pages, 0, KV, KEYS, Link(ROOT, 0))
    assert store.flush(60) and pages.contains(COLUMN, KEYS).all()
    slow = SlowSync(monkeypatch)
    place = store.index.locate(IDENTITY.id_bytes, column_id(COLUMN), KEYS[-1])[0].stored
    grave = place.grave(int(place.positions[0]), 1)
    deletion = threading.Thread(target=bury, args=(store.layout, [grave]))
    deletion.start()
    assert slow.waiting.wait(60)
    store.index.refresh()
    assert pages.contains(COLUMN, KEYS).tolist() == [True, True, False]
    slow.go_on.set()
    deletion.join(60)
    store.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from powercut.workload import IDENTITY, KV, put, settings
from kvtier.pages import ROOT, Link
from kvtier.store import Store

sync = os.fdatasync
def killed(fd):
    if os.readlink(f"/proc/self/fd/{fd}").endswith(".kvm"):
        os.kill(os.getpid(), signal.SIGKILL)
    sync(fd)
os.fdatasync = killed
store = Store.open(settings(Path(sys.argv[1])))
pages = store.namespace(IDENTITY, KV.column(0))
put(pages, 0, KV, [bytes([number]) * 32 for number in range(3)], Link(ROOT, 0))
store.flush(60)
"""


def test_what_a_killed_writer_did_not_sync_is_synced_by_who_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=TOOLS, check=False)
    assert done.returncode == -signal.SIGKILL
    synced: list[str] = []
    sync = os.fdatasync

    def noted(fd: int) -> None:
        sync(fd)
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))

    monkeypatch.setattr(os, "fdatasync", noted)
    store = Store.open(settings(tmp_path))
    assert store.namespace(IDENTITY, COLUMN).contains(COLUMN, KEYS).all()
    [manifest] = (tmp_path / "kvtier" / "segments").glob("*.kvm")
    assert str(manifest) in synced
    store.close()
