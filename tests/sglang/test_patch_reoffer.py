"""Sessions that go on after the store has lost their beginning."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patching import applied
from pools import Engine, assert_same_pages, engines
from sglang.test.kits.unified_radix_cache import fixtures

from kvtier.integration.patches import reoffer

RANKS = Path(__file__).with_name("reoffer_rank.py")
TURNS = (2, 3, 5)
"""Pages of a session after each turn."""


@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(reoffer, "EVERY", 8)
    with applied("reoffer"):
        yield


@pytest.fixture
def start(tmp_path):
    with engines(tmp_path / "store") as start:
        yield start


def turn(engine: Engine, pages: int) -> list[int]:
    """Compute a session up to `pages`; what is new goes to host memory and from there to storage,
    as SGLang itself does it."""
    tokens = engine.prompt(pages)
    engine.compute(tokens)
    leaf = fixtures.match_prefix(engine.cache, tokens).last_device_node
    engine._backup_node(engine.cache, leaf)
    engine.settle()
    assert engine.storage.flush(60)
    return tokens


def stored(engine: Engine, tokens: list[int]) -> int:
    return engine.storage.batch_exists(engine.page_keys(tokens))


def rounds(engine: Engine, count: int = 2 * 8) -> None:
    """As the scheduler's loop."""
    for _ in range(count):
        engine.cache.check_hicache_events()


def clear(engine: Engine) -> None:
    assert engine.cache.clear_storage_backend()


def wipe(engine: Engine) -> None:
    """The store loses everything without SGLang's knowing; it finds out by a refused put."""
    assert engine.storage.clear()
    turn(engine, TURNS[1])
    rounds(engine)


def attach_late(engine: Engine) -> None:
    extra = json.dumps({"root": str(engine.root), "prefetch_threshold": 1})
    assert engine.cache.detach_storage_backend()[0]
    shutil.rmtree(engine.root / "kvtier")
    assert engine.cache.attach_storage_backend("kvtier", extra)[0]


LOSSES = pytest.mark.parametrize("lose", [clear, wipe, attach_late])
KINDS = pytest.mark.parametrize("name", ["full", "swa", "mamba", "deepseek-v4.1"])


@LOSSES
@KINDS
def test_a_session_that_goes_on_is_stored_from_its_start(start, patched, name, lose) -> None:
    before = start(name)
    turn(before, TURNS[0])
    lose(before)
    tokens = turn(before, TURNS[2])
    assert stored(before, tokens) == TURNS[2]
    computed = before.device_pages(tokens)
    before.close()

    after = start(name)
    assert after.prefetch(tokens) == len(tokens)
    assert after.load_back(tokens) == len(tokens)
    assert_same_pages(after.device_pages(tokens), computed, after.needed(TURNS[2]))


@LOSSES
def test_without_the_patch_it_is_never_stored_again(start, lose) -> None:
    """Once this fails, SGLang has mended it and the patch can go."""
    engine = start("full")
    turn(engine, TURNS[0])
    lose(engine)
    assert stored(engine, turn(engine, TURNS[2])) == 0


def _offered(engine: Engine) -> list[list[str]]:
    """The page keys of each storage operation from here on."""
    operations: list[list[str]] = []
    write = engine.controller.write_storage

    def note(host_indices, token_ids, hash_value, *args, **kwargs):
        operations.append(list(hash_value))
        return write(host_indices, token_ids, hash_value, *args, **kwargs)

    engine.controller.write_storage = note
    return operations


def test_nothing_is_offered_twice_while_nothing_is_lost(start, patched) -> None:
    engine = start("full")
    offered = _offered(engine)
    for pages in TURNS:
        tokens = turn(engine, pages)
        rounds(engine)
    assert list(itertools.chain(*offered)) == engine.page_keys(tokens)


def test_after_a_clear_each_page_is_offered_once_more(start, patched) -> None:
    engine = start("full")
    turn(engine, TURNS[0])
    clear(engine)
    offered = _offered(engine)
    turn(engine, TURNS[1])
    tokens = turn(engine, TURNS[2])
    rounds(engine)
    assert list(itertools.chain(*offered)) == engine.page_keys(tokens)


def test_a_store_that_goes_on_refusing_is_asked_ever_less_often(start, patched) -> None:
    engine = start("full")
    turn(engine, TURNS[0])
    engine.storage.batch_set_v1 = lambda keys, *args: [False] * len(keys)
    pauses = []
    for pages in range(3, 8):
        turn(engine, pages)
        rounds(engine, engine.cache.kvtier_offers.pause)
        pauses.append(engine.cache.kvtier_offers.pause)
    assert pauses == [16, 32, 64, 128, 256]
    del engine.storage.batch_set_v1
    tokens = turn(engine, 8)
    assert stored(engine, tokens) == 8
    rounds(engine, 2 * 256)
    assert engine.cache.kvtier_offers.pause == reoffer.EVERY


def test_two_ranks_offer_the_same_though_only_one_store_has_lost_pages(tmp_path) -> None:
    """Two processes with SGLang's collectives between them, each with a store of its own. If each
    decided for itself, they would wait for each other for ever."""
    ranks = [
        subprocess.Popen(
            [sys.executable, RANKS, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=400)
            assert process.returncode == 0, err[-2000:]
            answers.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
    whole, lost = answers
    assert whole["offered"] == lost["offered"]
    assert lost["refused"]
    assert not whole["refused"]
    assert whole["stored"] == lost["stored"] == 5
