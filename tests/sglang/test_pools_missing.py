"""A page that lacks one of its pools is no page: the answer stops at a boundary before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pools import STACKS, Engine, Pages, assert_same_pages, engines, host_bytes
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolTransfer

# One V4.1 is enough here; it has another byte layout with fp4, not other pools.
KINDS = [stack for stack in STACKS.values() if stack.name != "deepseek-v4.1-fp4"]
HOLES = [
    pytest.param(stack, pool, page, id=f"{stack.name}-{pool}-{page}")
    for stack in KINDS
    for pool in sorted(stack.pools - {"kv"})
    for page in range(stack.pages)
]
PARTS = [
    pytest.param(stack, pool, id=f"{stack.name}-{pool}")
    for stack in KINDS
    for pool in sorted(stack.pools)
    if not (pool == "kv" and stack.name.startswith("deepseek"))  # no bytes to damage
]


@pytest.fixture
def start(tmp_path):
    with engines(tmp_path / "store") as start:
        yield start


@pytest.mark.parametrize(("stack", "pool", "page"), HOLES)
def test_a_pool_that_was_never_stored_ends_the_answer(start, stack, pool, page):
    before = start(stack)
    tokens = before.prompt()
    _leave_out(before, pool, page)
    computed, stored = _store(before, tokens)
    key = before.page_keys(tokens)[page]
    before.close()
    stored[pool].pop(page, None)

    after = start(stack)
    _assert_no_bytes(after, pool, key)
    boundary = _last_boundary(after, stored)
    assert after.prefetch(tokens) == boundary * after.cfg.page_size
    _assert_loads(after, tokens, boundary, computed)


@pytest.mark.parametrize("damage", ["flipped bit", "bytes of another page"])
@pytest.mark.parametrize(("stack", "pool"), PARTS)
def test_damaged_bytes_are_a_miss(start, tmp_path, stack, pool, damage):
    """Also the control of the comparisons: bytes that changed in the store are noticed."""
    before = start(stack)
    tokens = before.prompt()
    computed, stored = _store(before, tokens)
    before.close()
    part = stored[pool].pop(stack.pages - 1)
    flipped = bytes([part[0] ^ 1]) + part[1:]
    other = stored[pool][min(stored[pool])]
    _overwrite(tmp_path / "store", part, flipped if damage == "flipped bit" else other)

    after = start(stack)
    boundary = _last_boundary(after, stored)
    # SGLang throws a hybrid prefetch away for one failed part; asked again, it must be told of
    # the boundary before that part.
    assert after.prefetch(tokens) in (0, boundary * after.cfg.page_size)
    assert after.prefetch(tokens) == boundary * after.cfg.page_size
    _assert_loads(after, tokens, boundary, computed)


def _store(engine: Engine, tokens: list[int]) -> tuple[Pages, Pages]:
    """Two turns computed and stored: every pool's bytes on the device, and as they were stored."""
    for prompt in (tokens[: -2 * engine.cfg.page_size], tokens):
        engine.compute(prompt)
        engine.store(prompt)
    return engine.device_pages(tokens), engine.host_pages(tokens)


def _leave_out(engine: Engine, pool: str, page: int) -> None:
    """Keep one page of one pool from the storage backend, which is told nothing of it."""
    store = engine.storage.batch_set_v2

    def without(transfers, extra_info=None):
        answers = {}
        for transfer in transfers:
            if transfer.name != pool:
                answers |= store([transfer], extra_info)
                continue
            slots = transfer.host_indices.split(len(transfer.host_indices) // len(transfer.keys))
            before = list((extra_info and extra_info.prefix_keys) or ())
            for index, (key, page_slots) in enumerate(zip(transfer.keys, slots, strict=True)):
                chain = before + transfer.keys[:index]
                if len(chain) != page:
                    one = replace(transfer, keys=[key], host_indices=page_slots)
                    store([one], HiCacheStorageExtraInfo(prefix_keys=chain))
            answers[transfer.name] = [True] * len(transfer.keys)
        return answers

    engine.storage.batch_set_v2 = without


def _assert_no_bytes(engine: Engine, pool: str, key: str) -> None:
    """Asked for that page outright, the storage backend gives nothing and touches no host page."""
    entry = engine.entries[pool]
    slots = torch.arange(entry.host_pool.page_size)
    before = host_bytes(entry, slots)
    asked = PoolTransfer(entry.name, host_indices=slots, keys=[key])
    assert engine.storage.batch_get_v2([asked]) == {entry.name: [False]}
    assert host_bytes(entry, slots) == before


def _last_boundary(engine: Engine, stored: Pages) -> int:
    """The longest prefix, in pages, of which every pool has what it needs."""
    return max(
        pages
        for pages in range(engine.stack.pages + 1)
        if all(needed <= stored[pool].keys() for pool, needed in engine.needed(pages).items())
    )


def _assert_loads(engine: Engine, tokens: list[int], boundary: int, computed: Pages) -> None:
    if boundary:
        prefix = tokens[: boundary * engine.cfg.page_size]
        assert engine.load_back(prefix) == len(prefix)
        assert_same_pages(engine.device_pages(prefix), computed, engine.needed(boundary))


def _overwrite(store: Path, old: bytes, new: bytes) -> None:
    """Change the stored bytes `old`, wherever in the store they are."""
    assert len(old) == len(new)
    found = 0
    for file in store.rglob("*"):
        if file.is_file() and (at := file.read_bytes().find(old)) >= 0:
            with file.open("r+b") as opened:
                opened.seek(at)
                opened.write(new)
            found += 1
    assert found == 1
