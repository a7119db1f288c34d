"""Every pool of every attention kind, through SGLang's own tree, controller and host pools.

device -> host -> kvtier -> (restart) -> host -> device, with the bytes compared at both ends.
"""

from __future__ import annotations

import pytest
from pools import LONG_STACKS, STACKS, assert_same_pages, engines

EVERY_LAYOUT = [
    pytest.param(stack, layout, io, id=f"{stack.name}-{layout}-{io}")
    for stack in STACKS.values()
    for layout, io in stack.layouts
]


@pytest.fixture
def start(tmp_path):
    with engines(tmp_path / "store") as start:
        yield start


@pytest.mark.parametrize(("stack", "layout", "io"), EVERY_LAYOUT)
def test_restart_restores_every_byte(start, stack, layout, io):
    before = start(stack, layout=layout, io=io)
    _, tokens = _two_turns(before)
    computed, backed_up = before.device_pages(tokens), before.host_pages(tokens)
    assert _sizes(computed) == _sizes(backed_up)  # no pool is read in part
    before.close()

    after = start(stack, layout=layout, io=io)
    assert after.prefetch(tokens) == len(tokens)
    needed = after.needed(stack.pages)
    assert_same_pages(after.host_pages(tokens), backed_up, needed)
    assert after.load_back(tokens) == len(tokens)
    assert_same_pages(after.device_pages(tokens), computed, needed)


def _two_turns(engine):
    """A conversation, computed and stored: its first turn and both, as two linked nodes."""
    turn, tokens = engine.prompt(engine.stack.pages - 2), engine.prompt()
    for prompt in (turn, tokens):
        engine.compute(prompt)
        engine.store(prompt)
    return turn, tokens


def _sizes(pages):
    return {
        pool: {ordinal: len(data) for ordinal, data in of.items()} for pool, of in pages.items()
    }


@pytest.mark.parametrize("stack", LONG_STACKS.values(), ids=list(LONG_STACKS))
def test_prompts_of_many_calls(start, stack):
    test_restart_restores_every_byte(start, stack, "page_first", "kernel")


@pytest.mark.parametrize("stack", STACKS)
def test_another_question_on_the_same_context_takes_the_common_turn(start, stack):
    before = start(stack)
    turn = before.prompt(before.stack.pages - 2)
    tokens = before.prompt()
    for prompt in (turn, tokens):
        before.compute(prompt)
        before.store(prompt)
    computed = before.device_pages(turn)
    before.close()

    after = start(stack)
    other = turn + after.prompt(2, start=10_000)
    assert after.prefetch(other) == len(turn)
    assert after.load_back(turn) == len(turn)
    assert_same_pages(after.device_pages(turn), computed, after.needed(before.stack.pages - 2))


@pytest.mark.parametrize("stack", STACKS)
def test_the_rest_of_a_prompt_comes_from_the_store(start, stack):
    """The first turn is computed again; only the second is read."""
    before = start(stack)
    turn, tokens = _two_turns(before)
    backed_up = before.host_pages(tokens)
    before.close()

    after = start(stack)
    after.compute(turn)
    after.store(turn)
    assert after.prefetch(tokens) == len(tokens)
    read = range(after.stack.pages - 2, after.stack.pages)
    got = {
        pool: {ordinal: data for ordinal, data in pages.items() if ordinal in read}
        for pool, pages in after.host_pages(tokens).items()
    }
    needed = {
        pool: ordinals & set(read) for pool, ordinals in after.needed(after.stack.pages).items()
    }
    assert_same_pages(got, backed_up, needed)


@pytest.mark.parametrize("stack", STACKS)
def test_what_left_gpu_and_host_memory_comes_back_without_a_restart(start, stack):
    engine = start(stack)
    _, tokens = _two_turns(engine)
    backed_up = engine.host_pages(tokens)
    engine.wait_until_seen(engine.page_keys(tokens))
    engine.evict()
    for component in engine.cfg.components:
        engine.cache.evict_host(engine.cfg.kv_size, component)
    assert engine.matched(tokens) == 0

    assert engine.prefetch(tokens) == len(tokens)
    assert_same_pages(engine.host_pages(tokens), backed_up, engine.needed(engine.stack.pages))


def test_host_memory_without_room_for_a_prompt_is_said(start, caplog):
    before = start("full")
    tokens = before.prompt()
    before.compute(tokens)
    before.store(tokens)
    before.close()

    after = start("full")
    host, room = after.controller.mem_pool_host, 2 * after.cfg.page_size
    taken = host.alloc(host.available_size() - room)
    assert after.prefetch(tokens) == room
    assert f"room for {room:,} of {len(tokens):,} stored tokens" in caplog.text
    host.free(taken)


@pytest.mark.parametrize("stack", STACKS)
def test_write_back(start, stack):
    """A write_back server backs up on eviction, leaves before their parents."""
    before = start(stack, write_policy="write_back")
    turn, tokens = before.prompt(before.stack.pages - 2), before.prompt()
    for prompt in (turn, tokens):
        before.compute(prompt)
    computed = before.device_pages(tokens)
    before.evict()
    before.close()

    after = start(stack, write_policy="write_back")
    assert after.prefetch(tokens) == len(tokens)
    assert after.load_back(tokens) == len(tokens)
    assert_same_pages(after.device_pages(tokens), computed, after.needed(after.stack.pages))


@pytest.mark.parametrize("stack", STACKS)
def test_host_memory_as_a_buffer(start, stack):
    """SGLang then hands host pages back at once, keeps its own account of what is stored, and
    reads staged pages straight to the device."""
    before = start(stack, host_memory="buffer_only")
    _, tokens = _two_turns(before)
    computed = before.device_pages(tokens)
    before.close()

    after = start(stack, host_memory="buffer_only")
    assert after.prefetch(tokens) == len(tokens)
    assert_same_pages(after.device_pages(tokens), computed, after.needed(after.stack.pages))


@pytest.mark.parametrize("stack", STACKS)
def test_two_servers_on_one_store(start, stack):
    """Pages are there for a server that was up before another one stored them."""
    reader, writer = start(stack), start(stack)
    tokens = writer.prompt()
    assert reader.prefetch(tokens) == 0
    writer.compute(tokens)
    writer.store(tokens)
    computed = writer.device_pages(tokens)
    reader.wait_until_seen(writer.page_keys(tokens))

    assert reader.prefetch(tokens) == len(tokens)
    assert reader.load_back(tokens) == len(tokens)
    assert_same_pages(reader.device_pages(tokens), computed, reader.needed(reader.stack.pages))


@pytest.mark.parametrize("stack", STACKS)
def test_a_faulty_storage_never_gives_wrong_bytes(start, monkeypatch, stack):
    """SGLang's own injector lets calls of the storage backend fail, and come late."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.005")
    before = start(stack)
    _, tokens = _two_turns(before)
    computed = before.device_pages(tokens)
    before.close()

    for _ in range(3):
        after = start(stack)
        prefix = tokens[: after.prefetch(tokens)]
        if prefix:
            assert after.load_back(prefix) == len(prefix)
            needed = after.needed(len(prefix) // after.cfg.page_size)
            assert_same_pages(after.device_pages(prefix), computed, needed)
        after.close()


@pytest.mark.parametrize("stack", STACKS)
def test_a_cleared_store_has_nothing(start, stack):
    before = start(stack)
    tokens = before.prompt()
    before.compute(tokens)
    before.store(tokens)
    assert before.cache.clear_storage_backend()
    assert before.storage.batch_exists(before.page_keys(tokens)) == 0
    before.close()

    after = start(stack)
    assert after.prefetch(tokens) == 0
    after.compute(tokens)
    after.store(tokens)
    computed = after.device_pages(tokens)
    after.close()

    again = start(stack)
    assert again.prefetch(tokens) == len(tokens)
    assert again.load_back(tokens) == len(tokens)
    assert_same_pages(again.device_pages(tokens), computed, again.needed(again.stack.pages))
