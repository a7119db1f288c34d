"""Several processes on one store, and what is left when some are killed with SIGKILL."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from making import contents, copies, fresh_index, get, get_each, keys, opened, saved_index, store_of
from writer import STEP

from kvtier.format import column_id
from kvtier.pages import Column

SIZE = 3000
PAGES = 100
CHAIN = keys("chain", PAGES)
PATIENCE = 120.0


@contextlib.contextmanager
def _writer(
    root: Path, shards: str = "tp0", then: str = "", name: str = "chain"
) -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).with_name("writer.py")
    arguments = [str(root), name, str(PAGES), str(SIZE), shards, then]
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _lines(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def _wait_for(process: subprocess.Popen[str], word: str) -> None:
    """Read what the writer says up to a word."""
    for line in _lines(process):
        if line.split()[0] == word:
            return
    raise AssertionError(f"the writer ended without {word}: status {process.wait(PATIENCE)}")


def _column(shard: str) -> Column:
    return Column("kv", shard)


def _parts(shard: str) -> list[bytes]:
    return contents(CHAIN, SIZE, _column(shard))


def _locks(store: Path) -> list[str]:
    """Files of the store that somebody holds a lock on."""
    held = []
    for path in [*store.glob("lock"), *(store / "segments").glob("*.kvm")]:
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.append(path.name)
        finally:
            os.close(fd)
    return held


@pytest.mark.parametrize("shards", [["tp0", "tp1"], ["tp0", "tp1", "tp2", "tp3"]])
def test_ranks_with_the_same_keys_keep_their_own_bytes(tmp_path: Path, shards: list[str]) -> None:
    # Reports R011 and R022: ranks that shared file names overwrote each other.
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(_writer(tmp_path, shard)) for shard in shards]
            for writer in writers:
                _wait_for(writer, "done")
                assert writer.wait(PATIENCE) == 0
    with opened(tmp_path) as (_, namespace):
        for shard in shards:
            assert get(namespace, CHAIN, SIZE, _column(shard)) == _parts(shard)
    assert copies(saved_index(store_of(tmp_path))) == copies(fresh_index(store_of(tmp_path)))


def test_two_servers_put_the_same_pages(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(_writer(tmp_path, "tp0,tp1", "wait")) for _ in range(2)]
        for writer in writers:
            _wait_for(writer, "done")
        with opened(tmp_path) as (_, namespace):
            for shard in ("tp0", "tp1"):
                assert get(namespace, CHAIN, SIZE, _column(shard)) == _parts(shard)
        # One that found everything stored has no segment of its own.
        assert fresh_index(store_of(tmp_path)).health().live_writers in (1, 2)
    found = copies(fresh_index(store_of(tmp_path)))
    assert len(found) == 2 * PAGES
    assert max(len(places) for places in found.values()) <= 2
    assert _locks(store_of(tmp_path)) == []


def test_a_reader_sees_what_another_process_commits(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace), _writer(tmp_path) as writer:
        _wait_for(writer, "ready")
        assert not namespace.contains(_column("tp1"), CHAIN).any()
        _wait_for(writer, "safe")
        first = CHAIN[: STEP * 4]
        deadline = time.monotonic() + PATIENCE
        while not namespace.contains(_column("tp0"), first).all():
            assert time.monotonic() < deadline, "never seen"
        assert get(namespace, first, SIZE, _column("tp0")) == _parts("tp0")[: len(first)]
        _wait_for(writer, "done")
        assert writer.wait(PATIENCE) == 0
        # Nobody asks the index to look: its keeper does.
        while not store.index.contains(
            bytes.fromhex(namespace.id), column_id(_column("tp0")), b"".join(CHAIN)
        ).all():
            assert time.monotonic() < deadline, "never seen"
            time.sleep(0.01)


def test_what_was_flushed_survives_kill_9(tmp_path: Path) -> None:
    chance = random.Random(9)
    for number in range(8):
        root = tmp_path / str(number)
        safe = 0
        with _writer(root, "tp0,tp1") as writer:
            _wait_for(writer, "ready")
            enough = chance.randrange(4) * STEP * 4
            for line in _lines(writer) if enough else ():
                if line.startswith("safe"):
                    safe = int(line.split()[1])
                if safe >= enough:
                    break
            time.sleep(chance.random() * 0.03)
            writer.kill()
            for line in _lines(writer):
                if line.startswith("safe"):
                    safe = int(line.split()[1])
            writer.wait(PATIENCE)
        assert _locks(store_of(root)) == []
        with opened(root) as (_, namespace):
            for shard in ("tp0", "tp1"):
                got = get_each(namespace, CHAIN, SIZE, _column(shard))
                assert got[:safe] == _parts(shard)[:safe]
                for part, right in zip(got, _parts(shard), strict=True):
                    assert part in (None, right)
                there = namespace.contains(_column(shard), CHAIN).tolist()
                assert there == [part is not None for part in got]
        # The next one works, and keeps what is there.
        before = copies(fresh_index(store_of(root)))
        with _writer(root, "tp0,tp1") as writer:
            _wait_for(writer, "done")
            assert writer.wait(PATIENCE) == 0
        after = copies(fresh_index(store_of(root)))
        assert {part: after[part] for part in before} == before
        assert len(after) == 2 * PAGES
        with opened(root) as (_, namespace):
            for shard in ("tp0", "tp1"):
                assert get(namespace, CHAIN, SIZE, _column(shard)) == _parts(shard)


def test_a_killed_writer_does_not_disturb_the_others(tmp_path: Path) -> None:
    with _writer(tmp_path, "tp1", "wait") as survivor:
        for _ in range(3):
            with _writer(tmp_path, "tp0") as victim:
                _wait_for(victim, "safe")
                victim.kill()
        _wait_for(survivor, "done")
        with opened(tmp_path) as (_, namespace):
            assert get(namespace, CHAIN, SIZE, _column("tp1")) == _parts("tp1")
        assert fresh_index(store_of(tmp_path)).health().live_writers == 1
    assert fresh_index(store_of(tmp_path)).health().live_writers == 0
