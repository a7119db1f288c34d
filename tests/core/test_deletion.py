"""Deleting beside those who read and write: doomed, spared if somebody builds on it, then gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from making import KV, contents, fresh_index, get, identity, keys, opened, put

from kvtier.chains import chains
from kvtier.collection import collect
from kvtier.deletion import delete, drop_ballast
from kvtier.format import column_id
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.pages import Link
from kvtier.retention import Victims
from kvtier.store import Store

SIZE = 20_000
CHAIN = keys("chain", 20)


def _delete(store: Store, pages: slice, wait: Callable[[], None]) -> list[Victims]:
    """As another process would: with an index of its own. `pages`: of the chain, by depth."""
    index = Index(store.layout)
    since = index.mark(), time.time_ns()
    [found] = chains(index)
    order = np.argsort(found.depth)
    victims = Victims(found, order[pages], np.zeros(0, np.int64))
    return delete(store.layout, index, [victims], since=since, wait=wait)


def test_doomed_pages_can_be_read_and_nobody_starts_to_count_on_them(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace):
        put(namespace, CHAIN, contents(CHAIN, SIZE))
        assert store.flush(60)

        def meanwhile() -> None:
            store.index.refresh()
            assert namespace.contains(KV, CHAIN).tolist() == [True] * 12 + [False] * 8
            assert get(namespace, CHAIN[:14], SIZE) == contents(CHAIN[:14], SIZE)
            # The read is no news to the deletion before it is logged.

        [gone] = _delete(store, slice(12, 20), meanwhile)
        assert len(gone.pages) == 8
        store.index.refresh()
        assert namespace.contains(KV, CHAIN).tolist() == [True] * 12 + [False] * 8
        assert get(namespace, CHAIN, SIZE)[12:] == [None] * 8


def test_who_builds_on_a_doomed_page_keeps_it(tmp_path: Path) -> None:
    late = keys("late", 3)
    with opened(tmp_path) as (store, namespace):
        anchored = store.namespace(identity(), KV)
        put(namespace, CHAIN, contents(CHAIN, SIZE))
        assert store.flush(60)

        def meanwhile() -> None:
            store.index.refresh()
            assert put(anchored, late, contents(late, SIZE), link=Link(CHAIN[15], 16)).all()
            assert store.flush(60)

        [gone] = _delete(store, slice(12, 20), meanwhile)
        assert len(gone.pages) == 4  # those behind the page that was built on
        store.index.refresh()
        assert namespace.contains(KV, CHAIN[:16] + late).all()
        assert get(namespace, CHAIN[:16] + late, SIZE) == contents(CHAIN[:16] + late, SIZE)
        assert not namespace.contains(KV, CHAIN[16:]).any()


def test_who_restores_from_doomed_pages_keeps_them(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace):
        put(namespace, CHAIN, contents(CHAIN, SIZE))
        assert store.flush(60)

        def meanwhile() -> None:
            store.index.refresh()
            assert get(namespace, CHAIN[:17], SIZE) == contents(CHAIN[:17], SIZE)
            deadline = time.monotonic() + 60
            while CHAIN[16] not in fresh_index(store.root).uses(bytes.fromhex(namespace.id)):
                assert time.monotonic() < deadline, "the use was never logged"
                time.sleep(0.2)

        [gone] = _delete(store, slice(12, 20), meanwhile)
        assert len(gone.pages) == 3
        assert get(namespace, CHAIN[:17], SIZE) == contents(CHAIN[:17], SIZE)


def test_what_was_restored_before_the_choice_and_is_logged_after_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as (store, namespace):
        log_recency = store._keeper.log_recency
        monkeypatch.setattr(store._keeper, "log_recency", lambda: None)
        put(namespace, CHAIN, contents(CHAIN, SIZE))
        assert store.flush(60)
        assert get(namespace, CHAIN[:16], SIZE) == contents(CHAIN[:16], SIZE)

        def meanwhile() -> None:
            log_recency()
            assert store.flush(60)

        [gone] = _delete(store, slice(12, 20), meanwhile)
        assert len(gone.pages) == 4
        [gone] = _delete(store, slice(12, 16), lambda: None)
        assert len(gone.pages) == 4, "it is no news to the next"


def test_a_page_put_again_while_it_is_doomed_is_written_again(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace):
        put(namespace, CHAIN, contents(CHAIN, SIZE))
        assert store.flush(60)

        def meanwhile() -> None:
            store.index.refresh()
            put(namespace, CHAIN, contents(CHAIN, SIZE))
            assert store.flush(60)

        _delete(store, slice(12, 20), meanwhile)
        store.index.refresh()
        assert namespace.contains(KV, CHAIN).all()
        assert get(namespace, CHAIN, SIZE) == contents(CHAIN, SIZE)
        for index in (store.index, fresh_index(store.root)):
            [found] = chains(index)
            assert found.reachable.all() and len(found) == len(CHAIN)


KILLED = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import test_deletion as t
from kvtier.layout import Layout

class Store:
    layout = Layout.open(Path(sys.argv[1]), create=False)

def wait():
    print("doomed", flush=True)
    time.sleep(600)

t._delete(Store, slice(12, 20), wait)
"""


def test_what_a_killed_collection_doomed_is_as_it_was(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace):
        put(namespace, CHAIN, contents(CHAIN, SIZE))
        assert store.flush(60)
        here = str(Path(__file__).parent)
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(store.root), here], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        with child, child.stdout:
            assert child.stdout.readline() == b"doomed\n"
            store.index.refresh()
            assert namespace.contains(KV, CHAIN).sum() == 12
            child.send_signal(signal.SIGKILL)
            child.wait(60)
        store.index.refresh()
        assert namespace.contains(KV, CHAIN).all()
        assert get(namespace, CHAIN, SIZE) == contents(CHAIN, SIZE)


def test_doomed_pages_stay_so_over_a_snapshot(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace):
        put(namespace, CHAIN, contents(CHAIN, SIZE))
        assert store.flush(60)

        def meanwhile() -> None:
            store.index.save()
            assert namespace.contains(KV, CHAIN).sum() == 12
            opened_now = Index(store.layout)
            found = opened_now.contains(bytes.fromhex(namespace.id), column_id(KV), b"".join(CHAIN))
            assert found.sum() == 12

        _delete(store, slice(12, 20), meanwhile)


FULL_DISK = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import test_deletion as t
print(t.life_on_a_full_disk(Path(sys.argv[1]), ballast=sys.argv[3] == "yes"))
"""


def life_on_a_full_disk(root: Path, *, ballast: bool) -> str:
    """What a collection says on a file system without a free byte."""
    with opened(root, grace=0.0) as (store, namespace):
        put(namespace, CHAIN, contents(CHAIN, SIZE))
        assert store.flush(60)
    layout = Layout.open(root / "kvtier", create=False)
    if not ballast:
        drop_ballast(layout)
    for size in (1 << 20, 1 << 12):
        try:
            with (root / f"foreign{size}").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(size))
        except OSError:
            continue
    before = os.statvfs(root).f_bavail
    try:
        index = Index(layout)
        since = index.mark(), time.time_ns()
        [found] = chains(index)
        all_pages = Victims(found, np.arange(len(found)), np.zeros(0, np.int64))
        delete(layout, index, [all_pages], since=since, wait=lambda: None)
        collect(layout, index, 0, grace=0.0)
    except OSError as error:
        return f"{before} {error.strerror}"
    return f"{before} {len(Index(layout))} left"


@pytest.mark.parametrize(("ballast", "says"), [("yes", "0 0 left"), ("no", "0 No space left")])
def test_a_full_disk_can_still_delete(tmp_path: Path, ballast: str, says: str) -> None:
    disk, here = tmp_path / "disk", str(Path(__file__).parent)
    disk.mkdir()
    rights = [] if os.geteuid() == 0 else ["--map-root-user"]
    script = f'mount -t tmpfs -o size=16m none {disk} && exec "$@"'
    words = [sys.executable, "-c", FULL_DISK, str(disk), here, ballast]
    done = subprocess.run(
        ["unshare", "--mount", *rights, "sh", "-c", script, "sh", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(says)


def test_a_collection_gets_its_turn_beside_busy_writers(tmp_path: Path) -> None:
    """Writers that follow each other without a pause do not keep the lock from who wants it
    alone."""
    layout = Layout.open(tmp_path / "kvtier", create=True)
    script = (
        "import sys, time; from pathlib import Path; from kvtier.layout import Layout\n"
        "layout = Layout.open(Path(sys.argv[1]), create=False)\n"
        "print('go', flush=True)\n"
        "while True:\n"
        "    with layout.lock(shared=True): time.sleep(0.02)\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(layout.path)], stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == b"go\n"
        for _ in range(20):
            with layout.lock():
                pass
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
