"""Opening a store: created once and privately, refused with one sentence, never damaged."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from making import contents, files, get, keys, opened, put, settings, store_of

from kvtier.backends.local import disk_usage
from kvtier.errors import StoreError, UnreachableError
from kvtier.format import FORMAT_VERSION
from kvtier.layout import Layout, segment_id, segment_name, segment_name_of
from kvtier.pins import pin, pinned
from kvtier.report import foreign_files
from kvtier.store import Store

NOBODY = 65534
FORK = multiprocessing.get_context("fork")


@contextmanager
def _without_rights(folder: Path) -> Iterator[None]:
    """As a user who may look into `folder` but not write there."""
    if os.geteuid() != 0:
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(0o755)
        return
    above = [parent for parent in folder.parents if parent.stat().st_uid == 0]
    modes = {parent: stat.S_IMODE(parent.stat().st_mode) for parent in above}
    for parent, mode in modes.items():
        parent.chmod(mode | 0o111)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        for parent, mode in modes.items():
            parent.chmod(mode)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store that holds a few pages, closed."""
    with opened(tmp_path) as (_, namespace):
        put(namespace, keys("a", 4), contents(keys("a", 4), 1000))
    return store_of(tmp_path)


def _refused(root: Path) -> str:
    with pytest.raises(StoreError) as caught:
        Store.open(settings(root))
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def _superblock(store: Path, **changes: object) -> None:
    document = json.loads((store / "kvtier.json").read_text()) | changes
    (store / "kvtier.json").write_text(json.dumps(document))


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_can_read_a_store_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with opened(tmp_path / "a" / "b") as (_, namespace):
            put(namespace, keys("a", 4), contents(keys("a", 4), 1000), window=1)
            put(namespace, keys("b", 4), contents(keys("b", 4), 0))
    finally:
        os.umask(before)
    store = store_of(tmp_path / "a" / "b")
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    found = files(store)
    assert len(found) > 8
    for name, (mode, _) in found.items():
        assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), name
    for parent in (tmp_path / "a", tmp_path / "a" / "b"):
        assert not stat.S_IMODE(parent.stat().st_mode) & 0o022


def test_root_is_the_store_or_what_holds_it(tmp_path: Path, store: Path) -> None:
    with opened(tmp_path) as (by_mount, _):
        assert by_mount.root == store
    with opened(store) as (by_itself, namespace):
        assert by_itself.root == store
        assert get(namespace, keys("a", 4), 1000) == contents(keys("a", 4), 1000)


def test_no_store_is_said_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No store at"):
        Layout.open(tmp_path / "none", create=False)
    with pytest.raises(StoreError, match="is not a kvtier store"):
        Layout.open(tmp_path, create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 10**30])
def test_a_newer_format_is_refused_and_untouched(store: Path, version: int) -> None:
    _superblock(store, format=version)
    (store / "index" / "snapshot").unlink()
    (store / "segments" / "strange.new").write_bytes(b"from the future")
    before = files(store)
    message = _refused(store)
    assert f"format {version}" in message
    assert "upgrade kvtier" in message
    with pytest.raises(StoreError, match="upgrade kvtier"):
        Layout.open(store, create=False)
    assert files(store) == before


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        b'{"format": 1}',
        b'{"format": "1", "store": "00000000000000000000000000000000"}',
        b'{"format": 1, "store": "0000"}',
        b'{"format": 1, "store": "zz"}',
        b'{"format": 1, "store": 5}',
    ],
)
def test_a_damaged_superblock_is_said_and_nothing_changes(store: Path, text: bytes) -> None:
    (store / "kvtier.json").write_bytes(text)
    before = files(store)
    message = _refused(store)
    assert "kvtier.json is damaged" in message
    assert files(store) == before


def test_a_lost_superblock_is_not_replaced_over_stored_pages(store: Path) -> None:
    saved = (store / "kvtier.json").read_bytes()
    (store / "kvtier.json").unlink()
    before = files(store)
    assert "restore that file from a copy" in _refused(store)
    assert files(store) == before
    (store / "kvtier.json").write_bytes(saved)
    with opened(store) as (_, namespace):
        assert get(namespace, keys("a", 4), 1000) == contents(keys("a", 4), 1000)


def test_a_directory_with_other_files_is_not_made_a_store(tmp_path: Path) -> None:
    folder = store_of(tmp_path)
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    before = files(tmp_path)
    assert "thesis.tex" in _refused(tmp_path)
    assert files(tmp_path) == before


def test_the_root_of_a_file_system_may_be_the_store(tmp_path: Path) -> None:
    (store_of(tmp_path) / "lost+found").mkdir(parents=True)
    with opened(tmp_path) as (store, _):
        assert store.root == store_of(tmp_path)


def test_a_file_in_place_of_the_store_or_of_the_mount(tmp_path: Path) -> None:
    store_of(tmp_path).write_text("a file")
    assert str(store_of(tmp_path)) in _refused(tmp_path)
    assert str(store_of(tmp_path)) in _refused(store_of(tmp_path) / "below")
    assert store_of(tmp_path).read_text() == "a file"


@pytest.mark.parametrize("name", ["segments", "namespaces", "index"])
def test_a_file_in_place_of_a_part_of_the_store(store: Path, name: str) -> None:
    (store / name).rename(store.parent / name)
    (store / name).write_text("a file")
    assert str(store) in _refused(store)


def test_symbolic_links_are_not_followed_out_of_the_store(tmp_path: Path, store: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "kvtier").symlink_to(elsewhere)
    assert "symbolic link" in _refused(tmp_path / "link")
    (store / "segments").rename(tmp_path / "moved")
    (store / "segments").symlink_to(tmp_path / "moved")
    assert "symbolic link" in _refused(store)
    assert list(elsewhere.iterdir()) == []


def test_a_root_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "mount"
    folder.mkdir(mode=0o755)
    with _without_rights(folder):
        assert "Permission denied" in _refused(folder)
    assert list(folder.iterdir()) == []


def test_somebody_elses_store_is_said_and_untouched(store: Path) -> None:
    if os.geteuid() != 0:
        store.chmod(0o000)
    with _without_rights(store):
        assert "Permission denied" in _refused(store)
        assert "Permission denied" in _refused(store.parent)
    store.chmod(0o700)
    with opened(store) as (_, namespace):
        assert get(namespace, keys("a", 4), 1000) == contents(keys("a", 4), 1000)


def test_many_processes_may_create_a_store_at_once(tmp_path: Path) -> None:
    count = 6
    barrier = FORK.Barrier(count)
    answers = FORK.SimpleQueue()

    def create(rounds: int) -> None:
        for number in range(rounds):
            barrier.wait(60)
            try:
                found = Layout.open(tmp_path / str(number) / "kvtier", create=True).store_id
                answers.put((number, found))
            except StoreError as error:
                answers.put((number, str(error)))

    workers = [FORK.Process(target=create, args=(10,)) for _ in range(count)]
    for worker in workers:
        worker.start()
    seen: dict[int, set[object]] = {}
    for _ in range(10 * count):
        number, found = answers.get()
        seen.setdefault(number, set()).add(found)
    for worker in workers:
        worker.join(60)
    for found in seen.values():
        assert len(found) == 1
        assert isinstance(found.pop(), bytes)


def _dies_at(step: int, root: Path) -> bool:
    """Create a store in a process that is killed before its `step`-th change; whether it was."""

    def create() -> None:
        left = step

        def counted(call: Callable[..., object]) -> Callable[..., object]:
            def counting(*args: object, **kwargs: object) -> object:
                nonlocal left
                left -= 1
                if left < 0:
                    os._exit(9)
                return call(*args, **kwargs)

            return counting

        for name in ("mkdir", "chmod", "unlink", "replace"):
            setattr(Path, name, counted(getattr(Path, name)))
        for name in ("link", "fsync"):
            setattr(os, name, counted(getattr(os, name)))
        Layout.open(root / "kvtier", create=True)

    process = FORK.Process(target=create)
    process.start()
    process.join(60)
    assert process.exitcode in (0, 9)
    return process.exitcode == 9


def test_a_creation_killed_at_any_point_can_be_repeated(tmp_path: Path) -> None:
    for step in range(100):
        root = tmp_path / str(step) / "mount"
        killed = _dies_at(step, root)
        with opened(root) as (_, namespace):
            assert put(namespace, keys("a", 1), contents(keys("a", 1), 10)).all()
        if not killed:
            assert step > 8
            return
    raise AssertionError("a creation takes fewer steps")


def test_segment_names_are_ids_and_back() -> None:
    for number in (0, 1, 10**6, 999_999_999):
        name = segment_name(bytes(range(12)), number)
        ident = segment_id(name)
        assert ident is not None
        assert len(ident) == 16
        assert segment_name_of(ident) == name
    for name in ("", "x", "000102030405060708090a0b", "000102030405060708090a0b-", "../../etc-1"):
        assert segment_id(name) is None
    assert segment_id("000102030405060708090A0B-1") is None
    assert segment_id("000102030405060708090a0b-1\n") is None


def test_what_goes_while_somebody_looks_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection, a compaction or a person removes files beside inspect, gc and fsck."""
    layout = Layout.open(tmp_path / "store", create=True)
    pin(layout, bytes(16), bytes(32))
    (layout.path / "folder").mkdir()
    (layout.segments / f"{'ab' * 12}-0.kvs").touch()
    going = {*layout.pins.iterdir(), *layout.segments.iterdir(), layout.path / "folder"}
    assert len(going) == 3 and len(pinned(layout)) == 1 and foreign_files(layout) == []
    lstat, gone = Path.lstat, set()

    def goes(path: Path) -> os.stat_result:
        if path in going - gone:
            gone.add(path)
            path.rmdir() if path.is_dir() else path.unlink()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", goes)
    assert disk_usage(layout.path) > 0
    assert foreign_files(layout) == [] and pinned(layout) == {}
    assert gone == going


def test_folders_of_strangers_may_be_nested_deeply(tmp_path: Path) -> None:
    deepest = tmp_path
    for _ in range(1100):  # more than Python recurses
        deepest /= "d"
        deepest.mkdir()
    (deepest / "file").write_bytes(bytes(1 << 20))
    assert disk_usage(tmp_path) >= 1 << 20
    (deepest / "file").unlink()
    while deepest != tmp_path:
        deepest.rmdir()
        deepest = deepest.parent


def _without_hard_links(*_: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_file_system_without_hard_links_takes_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", _without_hard_links)
    made = Layout.open(tmp_path / "kvtier", create=True)
    before = (made.path / "kvtier.json").read_bytes()
    assert Layout.open(made.path, create=True) == made
    assert (made.path / "kvtier.json").read_bytes() == before
    assert foreign_files(made) == [] and not list(made.path.glob(".*.tmp"))


def test_two_that_make_a_store_without_hard_links_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second finds no superblock when it looks, and one when its turn comes."""
    monkeypatch.setattr(os, "link", _without_hard_links)
    first = json.dumps({"format": FORMAT_VERSION, "store": "ab" * 16})
    lock = fcntl.flock

    def late(fd: int, kind: int) -> None:
        lock(fd, kind)
        (tmp_path / "kvtier" / "kvtier.json").write_text(first)

    monkeypatch.setattr(fcntl, "flock", late)
    assert Layout.open(tmp_path / "kvtier", create=True).store_id == b"\xab" * 16


def test_staging_that_memory_does_not_hold_is_named(tmp_path: Path) -> None:
    """In a process of its own, which may have 4 GiB of addresses."""
    config = settings(tmp_path, staging_size=64 << 30)

    def opening(answers: multiprocessing.Queue[str]) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        try:
            Store.open(config)
        except UnreachableError as error:
            answers.put(str(error))

    answers: multiprocessing.Queue[str] = FORK.Queue()
    process = FORK.Process(target=opening, args=(answers,))
    process.start()
    said = answers.get(timeout=60)
    process.join(60)
    assert said.startswith("staging_size is 64GiB, and the system does not give")
    assert said.endswith("(Cannot allocate memory): lower it.")
