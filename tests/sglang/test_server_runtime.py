"""What is done to a server while it runs: attach, detach, flush, clear; and a failing storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtier_test_platform.committed import committed_pages, kv_pages, wait_for_kv_pages
from kvtier_test_platform.server import PAGE_SIZE, Server, ServerError, prompt_tokens
from servers import MODELS, PROMPT, assert_all_from_storage, kvtier_server

PAGES = len(PROMPT) // PAGE_SIZE

SERIES = [prompt_tokens(seed, 700)[:length] for seed in range(20, 24) for length in (350, 700)]
"""Conversations of two turns."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runtime")


@pytest.fixture(scope="module")
def running(directory) -> Iterator[tuple[Server, list[list[int]]]]:
    """A server that got its storage at run time, and its outputs for SERIES before that."""
    with kvtier_server(MODELS / "llama", directory, storage_backend=None) as server:
        outputs = [server.generate(prompt).output_ids for prompt in SERIES]
        server.flush_cache()
        server.attach_storage("kvtier", {"root": str(directory)})
        yield server, outputs


@pytest.fixture
def server(running, directory) -> Server:
    """That server, with PROMPT in its store and nowhere else."""
    server, _ = running
    server.flush_cache()
    server.generate(PROMPT)
    wait_for_kv_pages(directory, PAGES)
    server.flush_cache()
    return server


def test_a_flushed_cache_comes_back_from_the_store(server):
    assert_all_from_storage(server.generate(PROMPT), PROMPT)


def test_detached_it_computes_and_attached_again_it_restores(server, directory):
    stored = committed_pages(directory)
    server.detach_storage()
    computed = server.generate(PROMPT)
    assert computed.cached_tokens == 0
    assert committed_pages(directory) == stored

    server.flush_cache()
    server.attach_storage("kvtier", {"root": str(directory)})
    restored = server.generate(PROMPT)
    assert_all_from_storage(restored, PROMPT)
    assert restored.output_ids == computed.output_ids


def test_attach_reports_a_wrong_setting_and_the_server_goes_on(server, directory):
    server.detach_storage()
    with pytest.raises(ServerError, match="did you mean root"):
        server.attach_storage("kvtier", {"rot": str(directory)})
    assert server.generate(PROMPT).cached_tokens == 0
    server.flush_cache()
    server.attach_storage("kvtier", {"root": str(directory)})


def test_what_is_cleared_is_gone_and_can_be_stored_again(server, directory):
    server.clear_storage()
    assert kv_pages(committed_pages(directory)) == 0
    computed = server.generate(PROMPT)
    assert computed.cached_tokens == 0

    wait_for_kv_pages(directory, PAGES)
    server.flush_cache()
    restored = server.generate(PROMPT)
    assert_all_from_storage(restored, PROMPT)
    assert restored.output_ids == computed.output_ids


def test_a_storage_that_fails_and_stalls_changes_no_output(running, directory):
    """SGLang's failure injector: 30 % of all calls fail, each takes up to 0.2 s."""
    _, outputs = running
    flaky = kvtier_server(
        MODELS / "llama",
        directory / "flaky",
        environment={
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.2",
        },
    )
    with flaky as server:
        assert "storage test injector enabled" in server.log.read_text()
        restored = [restored_tokens(server, outputs) for _ in range(3)]
        while not any(restored) and len(restored) < 20:  # all can fail by chance
            restored.append(restored_tokens(server, outputs))
        assert any(restored)


def restored_tokens(server: Server, outputs: list[list[int]]) -> int:
    """Send SERIES to empty caches; how many tokens came from the store."""
    answers = [server.generate(prompt) for prompt in SERIES]
    assert [answer.output_ids for answer in answers] == outputs
    server.flush_cache()
    return sum(answer.storage for answer in answers)
