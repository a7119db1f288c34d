"""The comparison of device pages with stored ones (tools/gpu/probe) can tell."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pools import STACKS, Engine, engines
from sglang.test.kits.unified_radix_cache import fixtures

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "gpu" / "probe"))
from kvtier_gpu_probe import pages

Found = dict[str, dict[str, int]]


class Changed:
    """The store of an engine, whose answers a test spoils."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.pools = storage.pools

    def flush(self, timeout: float) -> bool:
        return self.storage.flush(timeout)

    def batch_get_v2(self, transfers: list[Any]) -> dict[Any, list[bool]]:
        return self.storage.batch_get_v2(transfers)


class WritesNothing(Changed):
    def batch_get_v2(self, transfers: list[Any]) -> dict[Any, list[bool]]:
        return {transfer.name: [True] * len(transfer.keys) for transfer in transfers}


class HasNothing(Changed):
    def batch_get_v2(self, transfers: list[Any]) -> dict[Any, list[bool]]:
        return {transfer.name: [False] * len(transfer.keys) for transfer in transfers}


class OneByte(Changed):
    """Of every pool, in the first page that is asked for."""

    def __init__(self, storage: Any) -> None:
        super().__init__(storage)
        self.intact = {name for name, pages in storage.pools.items() if pages.sizes}

    def batch_get_v2(self, transfers: list[Any]) -> dict[Any, list[bool]]:
        answers = super().batch_get_v2(transfers)
        for transfer in transfers:
            if str(transfer.name) in self.intact:
                self.intact.remove(str(transfer.name))
                pool = self.pools[str(transfer.name)].pool
                pointers, _ = pool.get_page_buffer_meta(transfer.host_indices)
                ctypes.c_ubyte.from_address(int(pointers[0])).value ^= 1
        return answers


@pytest.fixture(params=["full", "swa", "deepseek-v4.1"])
def engine(request, tmp_path: Path) -> Iterator[Engine]:
    """With a prompt of three pages computed and stored, which the probe was told of."""
    with engines(tmp_path / "store") as start:
        engine = start(STACKS[request.param])
        prompt = engine.prompt(3)
        engine.compute(prompt)
        engine.store(prompt)
        leaf = fixtures.match_prefix(engine.cache, prompt).last_device_node
        pages._nodes = {"computed": {leaf}, "loaded": set()}
        yield engine


def compared(engine: Engine, store: Any) -> Found:
    found: Found = pages.compare(engine.cache, store)["computed"]
    return found


def free(engine: Engine) -> dict[str, int]:
    return {str(name): entry.host_pool.available_size() for name, entry in engine.entries.items()}


def test_what_was_stored_is_equal_in_every_pool(engine: Engine) -> None:
    room = free(engine)
    found = compared(engine, engine.storage)
    with_bytes = {name for name, pages in engine.storage.pools.items() if pages.sizes}
    assert set(found) == with_bytes
    for counts in found.values():
        assert counts["pages"] > 0 == counts["different"]
    assert free(engine) == room


def test_a_read_that_writes_nothing_is_found_however_often(engine: Engine) -> None:
    """Host memory comes round, and with it what an earlier comparison left there."""
    for _ in range(6):
        for counts in compared(engine, WritesNothing(engine.storage)).values():
            assert counts["different"] == counts["pages"] > 0


def test_one_byte_is_found(engine: Engine) -> None:
    for counts in compared(engine, OneByte(engine.storage)).values():
        assert counts["different"] == 1


def test_what_the_store_does_not_have_is_not_counted(engine: Engine) -> None:
    for counts in compared(engine, HasNothing(engine.storage)).values():
        assert counts["on_device"] > 0 == counts["pages"]


def test_a_load_that_was_refused_loaded_nothing(engine: Engine) -> None:
    (leaf,) = pages._nodes["computed"]
    pages.note_load(False, engine.cache, node_id=leaf)
    assert list(pages.compare(engine.cache, engine.storage)) == ["computed"]
    pages.note_load(True, engine.cache, node_id=leaf)
    assert list(pages.compare(engine.cache, engine.storage)) == ["loaded"]
