"""A drive that fails, hangs or is full: breakers, the canary, and what a process says of itself."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from making import KV, contents, get, keys, opened, put

from kvtier import breaker as breakers
from kvtier import reader
from kvtier.backends import local
from kvtier.breaker import FAILURES, Breaker
from kvtier.chains import chains
from kvtier.errors import UnreachableError
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.status import statuses

SIZE = 5_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The breaker's clock, to be turned by hand."""
    now = [1000.0]
    monkeypatch.setattr(breakers.time, "monotonic", lambda: now[0])
    return now


def test_a_breaker_opens_after_failures_in_a_row(clock: list[float]) -> None:
    breaker = Breaker("reads")
    for _ in range(FAILURES - 1):
        breaker.failed("EIO")
        assert breaker.allows()
    breaker.passed()
    for _ in range(FAILURES - 1):
        breaker.failed("EIO")
    assert not breaker.open
    breaker.failed("EIO")
    assert breaker.open and breaker.reason == "EIO"
    assert not breaker.allows() and not breaker.ready()


def test_one_trial_after_each_pause_decides(clock: list[float]) -> None:
    breaker = Breaker("reads")
    breaker.failed("late", at_once=True)
    clock[0] += breakers.FIRST_PAUSE
    assert breaker.ready() and breaker.allows()
    assert not breaker.allows(), "one trial at a time"
    breaker.failed("late", at_once=True)
    clock[0] += breakers.FIRST_PAUSE
    assert not breaker.allows(), "the pause has doubled"
    clock[0] += breakers.FIRST_PAUSE
    assert breaker.allows()
    breaker.passed()
    assert not breaker.open and breaker.allows() and breaker.allows()


def test_pauses_have_a_bound(clock: list[float]) -> None:
    breaker = Breaker("writes")
    breaker.failed("full", at_once=True)
    for _ in range(20):
        clock[0] += breakers.LONGEST_PAUSE
        assert breaker.allows()
        breaker.failed("full")
    clock[0] += breakers.LONGEST_PAUSE
    assert breaker.allows()


def test_reads_stop_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """EIO for all reads: soon nothing is asked of the drive; when it works again, all is back."""
    with opened(tmp_path) as (store, namespace):
        chain = keys("chain", 40)
        put(namespace, chain, contents(chain, SIZE))
        assert store.flush(60)
        asked = []

        def broken(*words: object, **more: object) -> int:
            asked.append(words)
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(reader, "read_extent", broken)
        monkeypatch.setattr(breakers, "FIRST_PAUSE", 3600.0)
        for start in range(10):
            assert get(namespace, [chain[start]], SIZE) == [None]
        assert len(asked) == FAILURES
        assert store.reads.open and not store.writes.open
        assert not namespace.contains(KV, chain).any(), "nothing is promised of a broken drive"
        late = keys("late", 2)
        assert put(namespace, late, contents(late, SIZE)).all(), "writes go on"
        assert "no more reads for now" in caplog.text

        monkeypatch.setattr(reader, "read_extent", local.read_extent)
        store.reads._next_trial = 0.0
        rest = chain[FAILURES:]
        assert get(namespace, rest, SIZE) == contents(rest, SIZE)
        assert not store.reads.open
        store._keeper.catch_up(60)
        store._keeper.catch_up(60)
        assert get(namespace, chain, SIZE) == contents(chain, SIZE)


def test_one_bad_place_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page 5 is unreadable for ever (R028): it is a miss, then not promised any more."""
    with opened(tmp_path) as (store, namespace):
        chain = keys("chain", 40)
        for number, page in enumerate(chain):
            put(namespace, [page], contents([page], 70_000))
            assert store.flush(60), number
        real, asked = local.read_extent, []
        bad = store.index.locate(namespace._key, _column(), chain[5])[0].stored
        offset = bad.run.blocks[0].offset

        def sometimes(path: Path, start: int, buffer: memoryview, *, direct: bool) -> int:
            if start <= offset < start + len(buffer):
                asked.append(start)
                raise OSError(errno.EIO, "Input/output error")
            return real(path, start, buffer, direct=direct)

        monkeypatch.setattr(reader, "read_extent", sometimes)
        monkeypatch.setattr(reader, "GAP_BYTES", 0)
        monkeypatch.setattr(reader, "EXTENT_BYTES", 70_000)
        found = get(namespace, chain, 70_000)
        assert found[:5] == contents(chain[:5], 70_000) and found[5:] == [None] * 35
        assert len(asked) == 1
        assert namespace.contains(KV, chain).tolist() == [True] * 5 + [False] + [True] * 34
        assert get(namespace, chain, 70_000)[:6] == [*contents(chain[:5], 70_000), None]
        assert len(asked) == 1, "no second attempt"
        assert not store.reads.open


def _column() -> int:
    from kvtier.format import column_id

    return column_id(KV)


def test_a_hanging_drive_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, read_deadline=0.3) as (store, namespace):
        chain = keys("chain", 4)
        put(namespace, chain, contents(chain, SIZE))
        assert store.flush(60)
        monkeypatch.setattr(breakers, "FIRST_PAUSE", 3600.0)
        gate, asked, real = threading.Event(), [], local.read_extent
        begun = threading.Event()

        def hanging(path: Path, start: int, buffer: memoryview, *, direct: bool) -> int:
            asked.append(start)
            begun.set()
            gate.wait(120)
            return real(path, start, buffer, direct=direct)

        monkeypatch.setattr(reader, "read_extent", hanging)
        while not begun.wait(1):  # a thread that was late to begin is not waited for either
            store.reads._next_trial = 0.0
            assert get(namespace, chain, SIZE) == [None] * 4
        assert store.reads.open
        for _ in range(5):
            assert get(namespace, chain, SIZE) == [None] * 4
        assert len(asked) == 1
        gate.set()
        store._reader._config = replace(store.config, read_deadline=60.0)
        store.reads._next_trial = 0.0
        assert get(namespace, chain, SIZE) == contents(chain, SIZE), "late is not lost"


def test_a_late_read_touches_nobodys_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page was given to somebody else while the drive hung: it stays as that one filled it."""
    from making import Memory, cut

    from kvtier.pages import PoolPages

    with opened(tmp_path, read_deadline=0.2) as (store, namespace):
        chain = keys("chain", 6)
        put(namespace, chain, contents(chain, SIZE))
        assert store.flush(60)
        gate, ended, real = threading.Event(), threading.Event(), local.read_extent
        begun = threading.Event()

        def hanging(path: Path, start: int, buffer: memoryview, *, direct: bool) -> int:
            begun.set()
            gate.wait(120)
            got = real(path, start, buffer, direct=direct)
            ended.set()
            return got

        monkeypatch.setattr(reader, "read_extent", hanging)
        memory = Memory(6, cut(SIZE))
        while not begun.wait(1):
            store.reads._next_trial = 0.0
            [answer] = namespace.get([PoolPages(KV, chain, memory.buffers())])
            assert not answer.any()
        others = contents(keys("other", 6), SIZE)
        memory.fill(others)
        gate.set()
        assert ended.wait(60)
        store._reader._threads.submit(int).result(60)
        assert memory.read() == others and memory.guards_hold()


def test_writes_stop_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as (store, namespace):
        chain = keys("chain", 3)
        put(namespace, chain, contents(chain, SIZE))
        assert store.flush(60)
        real = os.pwrite

        def full(fd: int, data: bytes, offset: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(local.os, "pwrite", full)
        monkeypatch.setattr(breakers, "FIRST_PAUSE", 3600.0)
        for number in range(FAILURES):
            more = keys(("more", number), 2)
            put(namespace, more, contents(more, SIZE))
            assert store.flush(60)
            assert not namespace.contains(KV, more).any()
        assert store.writes.open and "No space left" in store.writes.reason
        refused = keys("refused", 2)
        assert not put(namespace, refused, contents(refused, SIZE)).any()
        assert get(namespace, chain, SIZE) == contents(chain, SIZE), "reads go on"
        assert put(namespace, chain, contents(chain, SIZE)).all(), "what is there is there"
        monkeypatch.setattr(local.os, "pwrite", real)
        store.writes._next_trial = 0.0
        assert put(namespace, refused, contents(refused, SIZE)).all()
        assert store.flush(60)
        assert not store.writes.open
        assert get(namespace, refused, SIZE) == contents(refused, SIZE)
        assert caplog.text.count("cannot write to") == 1, "one line, not one a batch"


def test_the_canary_comes_back_and_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, _):
        store.canary()
        assert store.flush(60)
        assert chains(store.index) == []
    index = Index(Layout.open(tmp_path / "kvtier", create=False), readonly=True)
    index.rebuild()
    assert chains(index) == []


@pytest.mark.parametrize("fault", ["write", "sync", "read", "lie"])
def test_the_canary_finds_a_bad_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def broken(*words: object, **more: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def lie(path: Path, start: int, buffer: memoryview, *, direct: bool) -> int:
        buffer[:] = bytes(len(buffer))
        return len(buffer)

    with opened(tmp_path) as (store, _):
        if fault == "write":
            monkeypatch.setattr(local.os, "pwrite", broken)
        elif fault == "sync":
            monkeypatch.setattr(local.os, "fdatasync", broken)
        else:
            monkeypatch.setattr(reader, "read_extent", broken if fault == "read" else lie)
        with pytest.raises(UnreachableError, match="did not give a test page back"):
            store.canary()
        monkeypatch.undo()


def test_a_process_says_how_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as (store, namespace):
        gate, real = threading.Event(), local.os.pwrite

        def slow(fd: int, data: bytes, offset: int) -> int:
            gate.wait(120)
            return real(fd, data, offset)

        monkeypatch.setattr(local.os, "pwrite", slow)
        chain = keys("chain", 3)
        put(namespace, chain, contents(chain, SIZE))
        store.reads.failed("no answer within 10 s", at_once=True)
        pages, waited = store._committer.window()
        assert list(pages.values()) == [3] and waited >= 0
        monkeypatch.setattr(local.os, "pwrite", real)
        gate.set()
        assert store.flush(60)
        store._keeper._tell()
        [status] = statuses(store.layout)
        assert status.pid == os.getpid() and status.uncommitted_tokens == 0
        assert status.reads_stopped == "no answer within 10 s"
        shown = subprocess.run(
            [sys.executable, "-c", "from kvtier.cli import main; main()", "inspect", str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "200"},
        ).stdout
        assert f"process {os.getpid()}: no reads for now: no answer within 10 s" in shown
    assert statuses(Layout.open(tmp_path / "kvtier", create=False)) == []


def test_a_dead_process_is_not_believed(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, _):
        left = store.layout.index / "status-0.json"
        left.write_text(json.dumps({"pid": 1}))
        assert all(status.pid == os.getpid() for status in statuses(store.layout))


def test_a_clear_that_the_drive_refuses_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as (store, namespace):
        chain = keys("chain", 5)
        put(namespace, chain, contents(chain, SIZE))
        assert store.flush(60)

        def broken(fd: int, data: bytes, offset: int) -> int:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(local.os, "pwrite", broken)
            assert not namespace.clear()
        assert get(namespace, chain, SIZE) == contents(chain, SIZE)
        assert namespace.clear()
        assert not namespace.contains(KV, chain).any()
