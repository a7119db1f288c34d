"""One pool's bytes come late, long after the others': the prefix ends where they are not needed."""

from __future__ import annotations

import contextlib
import threading

import pytest
from pools import Engine, assert_same_pages, engines, host_bytes

from kvtier import reader

DEADLINE = 1.0
LATE_POOLS = [("swa", "swa"), ("swa-mamba", "mamba"), ("deepseek-v4.1", "swa")]


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_READ_DEADLINE", str(DEADLINE))
    with engines(tmp_path / "store") as start:
        yield start


class HangingReads:
    """Reads of some segments hang until `gate` is opened."""

    def __init__(self, segments: set[str]) -> None:
        self.gate, self.began, self.ended = (threading.Event() for _ in range(3))
        self._segments = segments
        self._read = reader.read_extent

    def __call__(self, path, begin, buffer, *, direct):
        hangs = path.stem in self._segments and not self.gate.is_set()
        if hangs:
            self.began.set()
            assert self.gate.wait(600)
        got = self._read(path, begin, buffer, direct=direct)
        if hangs:
            self.ended.set()
        return got


@pytest.fixture
def hang(monkeypatch):
    """Lets reads of some segments hang, until the end of the test at the latest."""
    with contextlib.ExitStack() as stack:

        def hang(segments: set[str]) -> HangingReads:
            hanging = HangingReads(segments)
            monkeypatch.setattr(reader, "read_extent", hanging)
            stack.callback(hanging.gate.set)
            return hanging

        yield hang


@pytest.mark.parametrize("policy", ["wait_complete", "timeout"])
@pytest.mark.parametrize(("name", "pool"), LATE_POOLS, ids=[f"{n}-{p}" for n, p in LATE_POOLS])
def test_a_pool_that_does_not_come_costs_the_hit(start, hang, name, pool, policy):
    before = start(name)
    tokens, other = before.prompt(), before.prompt(start=5001)
    for prompt in (tokens, other):
        before.compute(prompt)
        before.store(prompt)
    computed = {tuple(prompt): before.device_pages(prompt) for prompt in (tokens, other)}
    before.close()

    after = start(name)
    after.cache.prefetch_stop_policy = policy
    hanging = hang(segments_of(after, pool))
    # No boundary is without its tail, and all tails of this prompt hang. SGLang's own clock does
    # not end this wait once KV is there: only kvtier's does.
    assert after.prefetch(tokens) == 0
    assert hanging.began.is_set() and not hanging.gate.is_set()
    assert after.prefetch(other) == 0, "nothing is promised meanwhile, and nobody waits again"

    memory = host_memory(after)
    hanging.gate.set()
    assert hanging.ended.wait(60)
    reader_of(after)._threads.submit(int).result(60)
    assert host_memory(after) == memory, "a late read landed in memory that was given back"

    after.storage._store.reads._next_trial = 0.0
    for prompt in (tokens, other):
        assert after.prefetch(prompt) == len(prompt)
        assert after.load_back(prompt) == len(prompt)
        pages = after.device_pages(prompt)
        assert_same_pages(pages, computed[tuple(prompt)], after.needed(after.stack.pages))


def reader_of(engine: Engine) -> reader.Reader:
    return engine.storage._store._reader


def segments_of(engine: Engine, pool: str) -> set[str]:
    """Segments that hold bytes of a pool; none of them may hold KV."""
    held: dict[str, set[str]] = {}
    index = engine.storage._store.index
    for stored in index.runs():
        columns = index.columns(stored.run.namespace)
        for block in stored.run.blocks:
            held.setdefault(columns[block.column].pool, set()).add(stored.segment)
    assert held[pool] and not held[pool] & held["kv"]
    return held[pool]


def host_memory(engine: Engine) -> dict[str, list[bytes]]:
    """Every page of every host pool."""
    return {
        name: [
            host_bytes(entry, [slot])
            for slot in range(0, entry.host_pool.size, entry.host_pool.page_size)
        ]
        for name, entry in engine.entries.items()
        if entry.host_pool.size
    }
