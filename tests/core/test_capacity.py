"""Capacity as users have met it (docs/reports.md): caps over restarts and kills, dead middles,
families of many ranks, files, and bytes written."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from making import KV, contents, fresh_index, get, keys, opened, put, store_of

from kvtier import telemetry
from kvtier.backends.local import disk_usage
from kvtier.chains import chains
from kvtier.collection import collect
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.pages import ROOT, Column, Link
from kvtier.store import Namespace

HERE = Path(__file__).parent
MIB = 1 << 20
SIZE = 64 << 10
PATIENCE = 900


def _grow(namespace: Namespace, before: list[bytes], own: list[bytes], size: int = SIZE) -> int:
    """Put pages behind a chain, a few at a time; how many were taken."""
    taken = 0
    for start in range(0, len(own), 8):
        some = own[start : start + 8]
        chain = before + own[:start]
        link = Link(chain[-1] if chain else ROOT, len(chain))
        taken += int(put(namespace, some, contents(some, size), link=link).sum())
    return taken


def test_what_was_there_before_a_restart_counts_at_once(tmp_path: Path) -> None:
    """R037: filled to nine tenths, killed, filled on: never above the cap, and what was read last
    is still there."""
    cap, root = 40 * MIB, store_of(tmp_path)
    words = [tmp_path, "first", 96, SIZE, json.dumps({"grace": 0.1})]
    writer = subprocess.Popen(
        [sys.executable, str(HERE / "session_writer.py"), *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(HERE)},
    )
    with writer:
        deadline = time.monotonic() + PATIENCE
        while not root.exists() or disk_usage(root) < 0.9 * cap:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        writer.kill()
    # With the grace time that is usual: uses are logged within it.
    with opened(tmp_path, limit=cap, put_deadline=60.0) as (store, namespace):
        first = keys(("first", 0), 96)
        assert get(namespace, first, SIZE) == contents(first, SIZE)
        for number in range(2):
            _grow(namespace, [], keys(("second", number), 96))
            assert store.flush(PATIENCE)
            assert disk_usage(root) <= cap
        assert namespace.contains(KV, first).any(), "what was read last went first"


def test_a_container_killed_twenty_times_keeps_to_the_cap(tmp_path: Path) -> None:
    """R060, R065: nothing of the dead is forgotten, neither in the count nor on the drive."""
    cap, root = 24 * MIB, store_of(tmp_path)
    changes = {"limit": cap, "grace": 0.1, "commit_size": MIB, "staging_size": 4 * MIB}
    chance = random.Random(7)
    for number in range(20):
        words = [tmp_path, number, 40, SIZE, json.dumps(changes)]
        writer = subprocess.Popen(
            [sys.executable, str(HERE / "session_writer.py"), *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(HERE)},
        )
        with writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            for _ in range(chance.randrange(1, 12)):
                time.sleep(0.05)
                assert disk_usage(root) <= cap
            writer.kill()
    with opened(tmp_path, limit=cap, grace=0.1) as (store, _):
        collect(store.layout, store.index, cap // 2, grace=0.0)
        assert disk_usage(root) <= cap // 2
    assert {path.name for path in tmp_path.iterdir()} == {"kvtier"}
    for found in chains(fresh_index(root)):
        assert found.reachable.all()


def test_middles_that_a_client_replaced_go_first(tmp_path: Path) -> None:
    """R061: thirty times the head stays, the middle is replaced by a summary."""
    cap = 20 * MIB
    head = keys("head", 16)
    with opened(tmp_path, limit=cap, grace=0.1, put_deadline=60.0) as (store, namespace):
        assert _grow(namespace, [], head) == 16
        for number in range(30):
            middle = keys(("middle", number), 60)
            assert _grow(namespace, head, middle) == 60
            assert store.flush(PATIENCE)
            assert disk_usage(store.root) <= cap
        chain = head + middle
        assert get(namespace, chain, SIZE) == contents(chain, SIZE)
        assert not namespace.contains(KV, keys(("middle", 0), 60)).any()


def test_families_of_four_ranks_and_seven_pools(tmp_path: Path) -> None:
    """R068: parts arrive in any order; at 60 % of the bytes what is left is whole."""
    ranks, pools = range(4), [f"pool{n}" for n in range(7)]
    chance = random.Random(3)
    sessions = [keys(("session", number), 30) for number in range(10)]
    with opened(tmp_path, grace=0.0) as (store, namespace):
        offers = [
            (session, start, Column(pool, f"tp{rank}"))
            for session in sessions
            for start in range(0, 30, 10)
            for pool in pools
            for rank in ranks
        ]
        chance.shuffle(offers)
        for session, start, column in offers:
            some = session[start : start + 10]
            link = Link(session[start - 1] if start else ROOT, start)
            put(namespace, some, contents(some, 4096, column), column, link)
        assert store.flush(PATIENCE)
        index = Index(store.layout)
        [found] = chains(index)
        whole = int(found.bytes.sum())
        assert whole == 10 * 30 * 28 * 4096
        limit = disk_usage(store.root) - int(0.4 * whole)
        assert collect(store.layout, index, limit, grace=0.0).enough
        [left] = chains(fresh_index(store.root))
        assert int(left.bytes[~left.complete].sum()) < 0.01 * whole
        assert int(left.bytes[left.useful].sum()) >= 0.55 * whole
        assert left.reachable.all()


def test_a_long_session_is_written_once(tmp_path: Path) -> None:
    """R070: a hundred turns, each prompt offered again from its start."""

    def written() -> float:
        [metric] = telemetry.WRITTEN_BYTES.collect()
        return metric.samples[0].value

    before, session = written(), []
    with opened(tmp_path) as (store, namespace):
        for turn in range(100):
            session += keys(("turn", turn), 8)
            assert put(namespace, session, contents(session, 4096)).all()
            assert store.flush(PATIENCE)
        unique = len(session) * 4096
        assert written() - before == unique
        assert disk_usage(store.root) <= 1.15 * unique + 2 * MIB


def test_many_pages_are_few_files(tmp_path: Path) -> None:
    """R057: 20,000 pages in one store; the number of files follows the bytes."""
    with opened(tmp_path, segment_size=16 * MIB) as (store, namespace):
        for number in range(20):
            chain = keys(number, 1000)
            assert put(namespace, chain, contents(chain[:1], 512) * 1000).all()
        assert store.flush(PATIENCE)
        assert sum(1 for _ in store.root.rglob("*")) < 40
    index = Index(Layout.open(store_of(tmp_path), create=False), readonly=True)
    assert len(index) == 20_000
