"""The other write policy, and SGLang's way to load a backend without kvtier's plugin."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvtier_test_platform import PLATFORM
from kvtier_test_platform.committed import committed_pages, kv_pages, wait_for_kv_pages
from kvtier_test_platform.server import PAGE_SIZE, Answer, cacheable_tokens, prompt_tokens
from servers import (
    BRANCH,
    DISTINCT_PAGES,
    MODELS,
    PROMPT,
    PROMPTS,
    assert_all_from_storage,
    kvtier_server,
)

FILLERS = [prompt_tokens(seed, 3000) for seed in (11, 12)]
"""Each is most of the 4,096 tokens the device has room for: what was there before must go."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("write_back")


@pytest.fixture(scope="module")
def evicted(directory) -> list[Answer]:
    """First answers to PROMPTS of a server that stored them only because it needed the room."""
    with kvtier_server(MODELS / "llama", directory, write_policy="write_back") as server:
        answers = [server.generate(prompt) for prompt in PROMPTS]
        assert kv_pages(committed_pages(directory)) == 0
        for filler in FILLERS:
            server.generate(filler)
        # A conversation that branches is three nodes of the tree, the last ones evicted first.
        wait_for_kv_pages(directory, DISTINCT_PAGES)
        server.kill9()
    return answers


def test_dynamic_backend_restores_what_eviction_stored(directory, evicted):
    dynamic = {
        "root": str(directory),
        "backend_name": "kvtier",
        "module_path": "kvtier.integration.storage",
        "class_name": "KvtierStorage",
        "interface_v1": 1,
    }
    server = kvtier_server(
        MODELS / "llama",
        directory,
        storage_backend="dynamic",
        extra_config=dynamic,
        environment={"SGLANG_PLUGINS": PLATFORM},  # and not kvtier's own
    )
    with server:
        restored = [server.generate(prompt) for prompt in PROMPTS]
        assert_all_from_storage(restored[0], PROMPT)
        assert restored[1].cached_tokens == cacheable_tokens(len(BRANCH))
        assert restored[1].device + restored[1].storage == restored[1].cached_tokens
        assert [a.output_ids for a in restored] == [a.output_ids for a in evicted]

        before = kv_pages(committed_pages(directory))
        new = prompt_tokens(5, 2600)
        cold = server.generate(new)
        wait_for_kv_pages(directory, before + len(new) // PAGE_SIZE)
        server.flush_cache()
        warm = server.generate(new)
        assert_all_from_storage(warm, new)
        assert warm.output_ids == cold.output_ids
