"""Stores on the file systems people have (report R088), and files that vanish under them (R031)."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import KV, contents, get, get_each, keys, opened, put

from kvtier.backends.local import disk_usage
from kvtier.chains import chains
from kvtier.collection import collect
from kvtier.deletion import drop_ballast
from kvtier.pages import Column, Link
from kvtier.retention import choose

MOUNTS = {
    "ext4": "truncate -s 128M {disk}.img && mkfs.ext4 -q {disk}.img && "
    "mount -o loop {disk}.img {disk}",
    "xfs": "truncate -s 400M {disk}.img && mkfs.xfs -q {disk}.img && "
    "mount -o loop {disk}.img {disk}",
    "tmpfs": "mount -t tmpfs -o size=128m none {disk}",
    "overlayfs": "mkdir {disk}.l && mount -t tmpfs -o size=128m none {disk}.l && "
    "mkdir {disk}.l/a {disk}.l/b {disk}.l/c && mount -t overlay -o "
    "lowerdir={disk}.l/a,upperdir={disk}.l/b,workdir={disk}.l/c none {disk}",
}


def life_of_a_store(root: Path) -> dict[str, object]:
    """Store, read back past the page cache, collect, and start again; what was seen."""
    chain = keys("chain", 60)
    with opened(root, grace=0.0) as (store, namespace):
        store.canary()
        for start in range(0, 60, 10):
            some = chain[start : start + 10]
            link = Link(chain[start - 1] if start else b"", start)
            put(namespace, some, contents(some, 40_000), link=link)
            assert store.flush(120)
        exact = get(namespace, chain, 40_000) == contents(chain, 40_000)
    with opened(root, grace=0.0) as (store, namespace):
        restarted = get(namespace, chain, 40_000) == contents(chain, 40_000)
        drop_ballast(store.layout)  # as a collection to a small limit does
        before = disk_usage(store.root)
        done = collect(store.layout, store.index, before - 600_000, grace=0.0)
        there = namespace.contains(KV, chain)
        left = int(there.sum())
        whole = bool(there[:left].all())
        kept = get(namespace, chain[:left], 40_000) == contents(chain[:left], 40_000)
        return {
            "exact": exact,
            "restarted": restarted,
            "collected": done.enough and disk_usage(store.root) <= before - 600_000,
            "left": 0 < left < 60 and whole and kept,
            "reads open": store.reads.open,
        }


ROOT_ONLY = {"ext4", "xfs"}
"""Loop devices are for root; the others can be mounted by anybody in a namespace of his own."""

KINDS = sorted(MOUNTS if os.geteuid() == 0 else MOUNTS.keys() - ROOT_ONLY)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_lives_on(tmp_path: Path, kind: str) -> None:
    """In a mount namespace of its own, so that nothing stays mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    rights = [] if os.geteuid() == 0 else ["--map-root-user"]
    script = MOUNTS[kind].format(disk=disk) + ' && exec "$@"'
    python = (
        "import json, pathlib, sys, test_file_systems as t;"
        "print(json.dumps(t.life_of_a_store(pathlib.Path(sys.argv[1]))))"
    )
    command = ["unshare", "--mount", *rights, "sh", "-c", script, "sh"]
    done = subprocess.run(
        [*command, sys.executable, "-c", python, str(disk)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "exact": True,
        "restarted": True,
        "collected": True,
        "left": True,
        "reads open": False,
    }


@pytest.mark.parametrize("seed", range(3))
def test_files_that_vanish_cost_their_pages_and_nothing_else(tmp_path: Path, seed: int) -> None:
    """A third of the data files is removed while the store is used (R031)."""
    source = random.Random(seed)
    with opened(tmp_path, segment_size=1 << 20) as (store, namespace):
        chains_put = [keys((seed, number), 20) for number in range(30)]
        for chain in chains_put:
            put(namespace, chain, contents(chain, 10_000))
            assert store.flush(60)
        files = sorted((store.root / "segments").glob("*.kvs"))
        assert len(files) >= 5
        for path in source.sample(files, len(files) // 3):
            path.unlink()
        exact = missing = 0
        for chain in chains_put:
            for page, part in zip(chain, get_each(namespace, chain, 10_000), strict=True):
                assert part in (None, *contents([page], 10_000))
                exact += part is not None
                missing += part is None
        assert exact > 0 and missing > 0
        for chain in chains_put:
            put(namespace, chain, contents(chain, 10_000))
        assert store.flush(60)
        for chain in chains_put:
            assert get(namespace, chain, 10_000) == contents(chain, 10_000), "stored anew"
    shutil.rmtree(tmp_path / "kvtier" / "segments")
    with opened(tmp_path) as (store, namespace):
        assert not namespace.contains(KV, chains_put[0]).any()
        assert put(namespace, chains_put[0], contents(chains_put[0], 10_000)).all()
        assert store.flush(60)
        assert get(namespace, chains_put[0], 10_000) == contents(chains_put[0], 10_000)


def test_a_rank_that_loses_puts(tmp_path: Path) -> None:
    """Rank 1 loses every 7th put (R035): the common length counts, orphan halves go first."""
    ranks = [Column("kv", f"tp{rank}") for rank in range(4)]
    with opened(tmp_path, grace=0.0) as (store, namespace):
        chain = keys("chain", 42)
        for number, page in enumerate(chain):
            for rank, column in enumerate(ranks):
                if rank == 1 and number % 7 == 6:
                    continue
                link = Link(chain[number - 1] if number else b"", number)
                put(namespace, [page], contents([page], 20_000, rank), column, link)
        assert store.flush(60)
        runs = [namespace.contains(column, chain).tolist() for column in ranks]
        assert [([*run, False]).index(False) for run in runs] == [42, 6, 42, 42]
        [found] = chains(store.index)
        assert int(found.reachable.sum()) == 6
        assert int((~found.complete).sum()) == 6
        found.used_ns[:] -= 3_600_000_000_000  # they are not still arriving
        held = {found.namespace: np.zeros(0, np.int64)}
        [victims] = choose([found], 30 * 80_000, held).values()
        assert len(victims) and not found.reachable[victims].any()


@pytest.mark.parametrize(
    ("asked", "refused"),
    [(True, False), (True, True), (False, False)],
    ids=["direct", "refused", "switched off"],
)
def test_what_reads_leave_in_the_page_cache(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: bool,
    refused: bool,
) -> None:
    """Nothing where `direct_io` is on, also on a file system that refuses O_DIRECT, which is said
    once; what was read where it is off."""
    opens = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opens(path, flags, *rest, **named)

    if refused:
        monkeypatch.setattr(os, "open", refusing)
    chain = keys("cached", 8)
    with opened(tmp_path, direct_io=asked) as (store, namespace):
        for some in (chain[:4], chain[4:]):
            put(namespace, some, contents(some, 64 << 10))
            assert store.flush(120)
        assert get(namespace, chain, 64 << 10) == contents(chain, 64 << 10)
        [payload] = store.layout.segments.glob("*.kvs")
        cached = [_cached(payload, at << 16) for at in range(8)]
    assert cached == [not asked] * 8
    assert caplog.text.count("refuses O_DIRECT") == int(refused)


def _cached(path: Path, offset: int) -> bool:
    """Whether the page cache has this block of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(4096)], offset, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
