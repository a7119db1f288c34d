"""Drives that refuse, cut short or are full: a refusal or a miss, never wrong bytes, never a raise.

Breakers, drives that hang and the canary are in test_drive.py.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
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
    fresh_index,
    get,
    get_each,
    identity,
    keys,
    opened,
    put,
    saved_index,
    settings,
    store_of,
    until,
)

from kvtier import layout, reader, stager, telemetry
from kvtier.collector import Collector
from kvtier.errors import StoreError
from kvtier.memory import Arena, BufferPool
from kvtier.pages import Column, Link, PoolPages
from kvtier.store import Namespace, Store

SIZE = 5000
BEFORE, DURING, AFTER = keys("before", 8), keys("during", 8), keys("after", 8)
TAIL = Column("swa", "tp0")

Call = Callable[..., Any]


def _path(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


class Drive:
    """Lets the n-th of the chosen system calls on files of a store's segments fail, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.struck = 0
        self.fault: Callable[[Call, tuple[Any, ...]], Any] = lambda call, args: None
        self.calls: set[str] = set()
        for name in ("pwrite", "fdatasync", "open", "ftruncate", "rename", "fsync"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def fail(
        self, number: int, calls: set[str], fault: Callable[[Call, tuple[Any, ...]], Any]
    ) -> None:
        """Let call number `number` from now end in `fault`."""
        self.left, self.calls, self.fault, self.struck = number, calls, fault, 0

    def heal(self) -> None:
        self.left = -1

    def _watched(self, name: str, call: Call) -> Call:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if name in self.calls and self.left >= 0 and self._concerns(args[0]):
                self.left -= 1
                if self.left < 0:
                    self.struck += 1
                    return self.fault(call, args)
            return call(*args, **kwargs)

        return watched

    def _concerns(self, where: int | str | Path) -> bool:
        return "/segments" in (_path(where) if isinstance(where, int) else str(where))


def _refuse(number: int) -> Callable[[Call, tuple[Any, ...]], Any]:
    def fault(call: Call, args: tuple[Any, ...]) -> Any:
        raise OSError(number, os.strerror(number))

    return fault


def _short(call: Call, args: tuple[Any, ...]) -> Any:
    """Takes a part of the bytes, no multiple of anything."""
    fd, data, offset = args
    buffered = os.open(_path(fd), os.O_WRONLY)  # past O_DIRECT, which takes no odd sizes
    try:
        return call(buffered, data[: max(1, len(data) // 3)], offset)
    finally:
        os.close(buffered)


def _lost(call: Call, args: tuple[Any, ...]) -> Any:
    """Writes some of it and says nothing but that it failed."""
    _short(call, args)
    raise OSError(errno.EIO, os.strerror(errno.EIO))


FAULTS: dict[str, tuple[set[str], Callable[[Call, tuple[Any, ...]], Any]]] = {
    "write EIO": ({"pwrite"}, _refuse(errno.EIO)),
    "write ENOSPC": ({"pwrite"}, _refuse(errno.ENOSPC)),
    "write short": ({"pwrite"}, _short),
    "write lost": ({"pwrite"}, _lost),
    "sync EIO": ({"fdatasync", "fsync"}, _refuse(errno.EIO)),
    "open EMFILE": ({"open"}, _refuse(errno.EMFILE)),
    "rename EROFS": ({"rename"}, _refuse(errno.EROFS)),
}


def _put_all(store: Store, namespace: Namespace, chain: list[bytes]) -> None:
    """Offer the pages of two pools; whether they are taken is not for here."""
    put(namespace, chain[-1:], contents(chain[-1:], SIZE, "tail"), TAIL, window=1)
    put(namespace, chain, contents(chain, SIZE))
    assert store.flush(120)


def _honest(namespace: Namespace, *, complete: tuple[list[bytes], ...] = ()) -> None:
    """Every page is exact or a miss, and a lookup says which."""
    for chain in (BEFORE, DURING, AFTER):
        for column, page_keys, parts in (
            (KV, chain, contents(chain, SIZE)),
            (TAIL, chain[-1:], contents(chain[-1:], SIZE, "tail")),
        ):
            there = namespace.contains(column, page_keys).tolist()
            got = get_each(namespace, page_keys, SIZE, column)
            assert [part is not None for part in got] == there
            for part, right in zip(got, parts, strict=True):
                assert part in (None, right)
            if chain in complete:
                assert got == parts


@pytest.mark.parametrize("name", list(FAULTS))
def test_whichever_call_fails_what_is_stored_stays_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # Report R009: what could not be stored stayed visible, and was garbage.
    calls, fault = FAULTS[name]
    drive = Drive(monkeypatch)
    for number in range(40):
        root = tmp_path / str(number)
        with opened(root) as (store, namespace):
            _put_all(store, namespace, BEFORE)
            # A segment that is full is given up, so that opening one is among the calls.
            writers = store._committer._open
            for trailing in list(writers):
                writers.pop(trailing).close()
            drive.fail(number, calls, fault)
            _put_all(store, namespace, DURING)
            _put_all(store, namespace, AFTER)
            drive.heal()
            _honest(namespace, complete=(BEFORE,))
            if not drive.struck:
                _honest(namespace, complete=(BEFORE, DURING, AFTER))
            elif name in ("write EIO", "write ENOSPC", "write lost", "sync EIO"):
                assert store.failures == 1
            _put_all(store, namespace, DURING)
            _put_all(store, namespace, AFTER)
            _honest(namespace, complete=(BEFORE, DURING, AFTER))
        with opened(root) as (_, namespace):
            _honest(namespace, complete=(BEFORE, DURING, AFTER))
        assert copies(saved_index(store_of(root))) == copies(fresh_index(store_of(root)))
        if not drive.struck:
            assert number > 1, "too few calls were tried"
            return
    raise AssertionError("a few puts make fewer calls")


def test_a_refusing_drive_is_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drive = Drive(monkeypatch)
    with caplog.at_level(logging.WARNING, "kvtier"), opened(tmp_path) as (store, namespace):
        drive.fail(0, {"pwrite"}, _refuse(errno.ENOSPC))
        _put_all(store, namespace, BEFORE)
        lines = [record for record in caplog.records if record.name == "kvtier"]
        assert len(lines) == 1
        text = lines[0].getMessage()
        assert str(store_of(tmp_path)) in text
        assert os.strerror(errno.ENOSPC) in text
        assert "\n" not in text
        assert lines[0].exc_info is None


@pytest.mark.parametrize("end", ["short", "empty", "refused"])
def test_a_read_that_fails_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    with opened(tmp_path) as (store, namespace):
        _put_all(store, namespace, BEFORE)
        call = os.preadv

        def preadv(fd: int, buffers: list[memoryview], *args: Any) -> int:
            if end == "refused":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            got = call(fd, buffers, *args)
            return got // 2 + 1 if end == "short" else 0

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", preadv)
            memory = Memory(8, cut(SIZE))
            answer = namespace.get([PoolPages(KV, BEFORE, memory.buffers())])[0]
            assert not answer.all()
            good = answer.tolist().index(False)
            assert not answer[good:].any()
            assert memory.read()[:good] == contents(BEFORE[:good], SIZE)
            assert all(memory.untouched()[good:])
            assert memory.guards_hold()
        assert not namespace.contains(KV, BEFORE).all(), "it would be asked for again, for ever"
        assert store.flush(60)
    # Bytes that are not there may be forgotten; what a drive refuses may be refused only now.
    kept = copies(fresh_index(store_of(tmp_path)))
    assert len(kept) == 9 or end != "refused"
    assert copies(saved_index(store_of(tmp_path))) == kept
    with opened(tmp_path) as (store, namespace):
        _honest(namespace, complete=(BEFORE,) if end == "refused" else ())
        _put_all(store, namespace, BEFORE)
        _honest(namespace, complete=(BEFORE,))
    with opened(tmp_path) as (_, namespace):
        _honest(namespace, complete=(BEFORE,))


@pytest.mark.parametrize(
    "number",
    [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EINTR, errno.EAGAIN],
    ids=lambda number: errno.errorcode[number],
)
def test_what_cannot_be_read_for_a_moment_is_a_hit_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with opened(tmp_path) as (store, namespace):
        _put_all(store, namespace, BEFORE)
        with monkeypatch.context() as patch:
            patch.setattr(reader, "read_extent", lambda *_, **__: _refuse(number)(os.open, ()))
            for _ in range(10):
                assert get(namespace, BEFORE, SIZE) == [None] * len(BEFORE)
        assert namespace.contains(KV, BEFORE).all()
        assert get(namespace, BEFORE, SIZE) == contents(BEFORE, SIZE)


def test_a_buffer_that_cannot_be_had_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pool: BufferPool, size: int) -> Arena:
        raise MemoryError

    with opened(tmp_path) as (store, namespace):
        _put_all(store, namespace, BEFORE)
        with monkeypatch.context() as patch:
            patch.setattr(BufferPool, "take", refuse)
            assert get(namespace, BEFORE, SIZE) == [None] * len(BEFORE)
        assert get(namespace, BEFORE, SIZE) == contents(BEFORE, SIZE)


def _outcomes() -> dict[str, float]:
    return {
        sample.labels["outcome"]: sample.value
        for metric in telemetry.GET_PAGES.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.value
    }


@pytest.mark.parametrize(
    ("fault", "became"),
    [
        ("none", {"read": 64}),
        ("damaged", {"read": 20, "damaged": 1, "after_miss": 43}),
        ("absent", {"read": 64, "absent": 10}),
        ("absent first", {"absent": 1, "after_miss": 64}),
        ("refused", {"failed": 64}),
    ],
)
def test_each_page_asked_for_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, became: dict[str, int]
) -> None:
    chain = keys("counted", 64)
    with opened(tmp_path) as (store, namespace):
        put(namespace, chain, contents(chain, SIZE))
        assert store.flush(120)
        asked = chain
        if fault == "damaged":
            [payload] = store.layout.segments.glob("*.kvs")
            with payload.open("r+b") as file:
                file.seek(20 * SIZE + 7)
                file.write(b"damaged")
        if fault == "absent":
            asked = chain + keys("missing", 10)
        if fault == "absent first":
            asked = keys("missing", 1) + chain
        if fault == "refused":
            refuse = _refuse(errno.EIO)
            monkeypatch.setattr(reader, "read_extent", lambda *_, **__: refuse(os.open, ()))
        before = _outcomes()
        get(namespace, asked, SIZE)
        counts = {name: now - before.get(name, 0) for name, now in _outcomes().items()}
    assert {name: count for name, count in counts.items() if count} == became
    assert sum(became.values()) == len(asked)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no memory"), None])
def test_a_put_that_fails_between_staging_and_queue_keeps_no_staging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Staging has room for four such puts. None: a fault of the caller's, which may raise."""

    def fail(*_: object) -> None:
        raise error or TypeError("no buffers")

    large = contents(BEFORE, 128 << 10)
    with opened(tmp_path) as (store, namespace):
        with monkeypatch.context() as patch:
            patch.setattr(stager, "gather", fail)
            for _ in range(10):
                with nullcontext() if error else pytest.raises(TypeError):
                    assert not put(namespace, BEFORE, large).any()
        assert store._committer.staged_bytes == 0
        assert put(namespace, BEFORE, large).all()
        assert store.flush(120)
        assert get(namespace, BEFORE, 128 << 10) == large


def test_a_drive_that_is_slow_is_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read takes three of the eight seconds of `read_deadline`, on a clock of its own."""
    now = [1000.0]
    read = reader.read_extent

    def slow(*words: Any, **named: Any) -> int:
        got = read(*words, **named)
        now[0] += 3.0
        return got

    with opened(tmp_path, read_deadline=8.0, read_threads=1) as (store, namespace):
        _put_all(store, namespace, BEFORE)
        monkeypatch.setattr(reader, "EXTENT_BYTES", 1)
        monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: now[0]))
        monkeypatch.setattr(reader, "read_extent", slow)
        for _ in range(3):
            got = get(namespace, BEFORE, SIZE)
            there = got.index(None)
            assert there >= 3
            assert got == [*contents(BEFORE[:there], SIZE), *[None] * (len(BEFORE) - there)]
            assert not store.reads.open
            assert namespace.contains(KV, BEFORE).all()


def test_a_store_that_is_moved_away_and_back(tmp_path: Path) -> None:
    away = tmp_path / "away"
    with opened(tmp_path) as (store, namespace):
        _put_all(store, namespace, BEFORE)
        store_of(tmp_path).rename(away)
        put(namespace, DURING, contents(DURING, SIZE))
        assert store.flush(120)
        for part, right in zip(
            get_each(namespace, BEFORE, SIZE), contents(BEFORE, SIZE), strict=True
        ):
            assert part in (None, right)
        away.rename(store_of(tmp_path))
        _put_all(store, namespace, AFTER)
    with opened(tmp_path) as (_, namespace):
        _honest(namespace, complete=(BEFORE, AFTER))


def test_an_index_that_cannot_be_saved_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as (store, namespace):
        _put_all(store, namespace, BEFORE)
    old = (store_of(tmp_path) / "index" / "snapshot").read_bytes()
    with caplog.at_level(logging.WARNING, "kvtier"):
        store = Store.open(settings(tmp_path))
        _put_all(store, store.namespace(identity()), DURING)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd: _refuse(errno.ENOSPC)(os.fsync, (fd,)))
            store.close()
    assert "cannot save the index" in caplog.text
    assert (store_of(tmp_path) / "index" / "snapshot").read_bytes() == old
    assert list((store_of(tmp_path) / "index").glob(".*.tmp")) == []
    with opened(tmp_path) as (_, namespace):
        _honest(namespace, complete=(BEFORE, DURING))


# A real file system that is full. Run in a process with mounts of its own.

CHAIN = keys("full", 400)


def on_a_small_disk(root: Path) -> dict[str, Any]:
    """Fill a small file system, make room, go on; what was seen. No collection makes room."""
    Collector.due = lambda collector: False  # type: ignore[method-assign]
    Collector.wait_for_space = lambda *_: False  # type: ignore[method-assign]
    filler = root / "filler"
    filler.write_bytes(os.urandom(2 << 20))
    seen: dict[str, Any] = {}
    wrong = 0

    def offer(namespace: Namespace, store: Store) -> None:
        for start in range(0, 400, 10):
            some = CHAIN[start : start + 10]
            put(namespace, some, contents(some, 40_000), link=Link())
            assert store.flush(120)

    with opened(root, commit_size=1 << 18) as (store, namespace):
        offer(namespace, store)
        first = namespace.contains(KV, CHAIN)
        for part, right in zip(
            get_each(namespace, CHAIN, 40_000), contents(CHAIN, 40_000), strict=True
        ):
            wrong += part not in (None, right)
        seen["stored when full"] = int(first.sum())
        seen["failures"] = store.failures
        for _ in range(3):
            offer(namespace, store)
        seen["files when full"] = len(list((store_of(root) / "segments").iterdir()))
        seen["still there"] = bool(namespace.contains(KV, CHAIN)[first].all())
    try:
        with opened(root, "a model nobody has served before") as (_, namespace):
            seen["opened"] = "yes"
    except StoreError as error:
        seen["opened"] = str(error)
    filler.unlink()
    with opened(root, commit_size=1 << 18) as (store, namespace):
        seen["after a restart"] = bool(namespace.contains(KV, CHAIN)[first].all())
        offer(namespace, store)
        seen["stored with room"] = int(namespace.contains(KV, CHAIN).sum())
        got = get_each(namespace, CHAIN, 40_000)
        for part, right in zip(got, contents(CHAIN, 40_000), strict=True):
            wrong += part not in (None, right)
        seen["read with room"] = sum(part is not None for part in got)
    seen["wrong"] = wrong
    return seen


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[list[str]]:
    """Start of a command that runs with 8 MiB of its own file system at tmp_path."""
    (tmp_path / "disk").mkdir()
    rights = [] if os.geteuid() == 0 else ["--map-root-user"]
    mount = f'mount -t tmpfs -o size=8m none {tmp_path}/disk && exec "$@"'
    yield ["unshare", "--mount", *rights, "sh", "-c", mount, "sh"]


def test_a_full_file_system(tmp_path: Path, small_disk: list[str]) -> None:
    script = (
        "import json, pathlib, sys, test_store_faults as t;"
        "print(json.dumps(t.on_a_small_disk(pathlib.Path(sys.argv[1]))))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [*small_disk, sys.executable, "-c", script, str(tmp_path / "disk")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    seen = json.loads(done.stdout)
    assert seen["wrong"] == 0
    assert 50 < seen["stored when full"] < 200
    assert seen["failures"] > 0
    assert seen["still there"]
    assert seen["files when full"] < 20, "every attempt leaves files"
    assert seen["opened"] == "yes" or "No space left" in seen["opened"]
    assert seen["after a restart"]
    assert seen["stored with room"] > seen["stored when full"]
    assert seen["read with room"] == seen["stored with room"]


def test_a_superblock_that_cannot_be_read_for_a_moment_is_no_other_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def refuse(path: Path) -> bytes:
        tried.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with opened(tmp_path) as (store, namespace):
        _put_all(store, namespace, BEFORE)
        with monkeypatch.context() as patch:
            patch.setattr(layout, "_read_superblock", refuse)
            assert tried.wait(120)  # the keeper looks every second
            store._keeper.catch_up(120)
            assert not (store.reads.open or store.writes.open)
            assert get(namespace, BEFORE, SIZE) == contents(BEFORE, SIZE)
        _put_all(store, namespace, AFTER)
        _honest(namespace, complete=(BEFORE, AFTER))


def test_another_store_under_the_same_path_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A drive with a store is mounted over one that was made while it was missing."""
    with opened(tmp_path) as (_, namespace):
        chain = keys("of the drive", 30)
        assert put(namespace, chain, contents(chain, SIZE)).all()
    drive, root_disk = tmp_path / "drive", tmp_path / "root disk"
    store_of(tmp_path).rename(drive)
    files = sorted(path for path in drive.rglob("*") if path.is_file())
    before = {path.relative_to(drive): path.read_bytes() for path in files}
    store = Store.open(settings(tmp_path))
    namespace = store.namespace(identity())
    _put_all(store, namespace, BEFORE)
    store_of(tmp_path).rename(root_disk)
    drive.rename(store_of(tmp_path))
    until(lambda: store.reads.open and store.writes.open, "the swap is noticed")
    assert not put(namespace, DURING, contents(DURING, SIZE)).any()
    assert not namespace.contains(KV, BEFORE).any()
    store._collector.start()
    until(lambda: store._collector._process is None, "the collection ended")
    store.close()
    assert "another store, or none, is there now" in caplog.text
    after = {name: (store_of(tmp_path) / name).read_bytes() for name in before}
    assert after == before
    with opened(tmp_path) as (_, namespace):
        assert get(namespace, chain, SIZE) == contents(chain, SIZE)
    # What a store saved is no index of another, even if it comes to lie there.
    with opened(root_disk) as _:
        pass
    saved = (root_disk / "index" / "snapshot").read_bytes()
    (store_of(tmp_path) / "index" / "snapshot").write_bytes(saved)
    with opened(tmp_path) as (_, namespace):
        assert get(namespace, chain, SIZE) == contents(chain, SIZE)
