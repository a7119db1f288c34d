"""A real server is killed with -9, started again, and goes on from its store."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kvtier_test_platform.committed import committed_pages, kv_pages, wait_for_kv_pages
from kvtier_test_platform.server import Answer, cacheable_tokens
from safetensors.torch import load_file, save_file
from servers import (
    BRANCH,
    DISTINCT_PAGES,
    MODELS,
    PROMPT,
    PROMPTS,
    assert_all_from_storage,
    kvtier_server,
)

SERVED_NAME = ("--served-model-name", "the-same-name")


@dataclass(frozen=True)
class Case:
    """A model, its tensor parallel size, how many ranks store KV of their own, and how much of
    BRANCH a server that just computed PROMPT need not compute."""

    model: str
    tp: int = 1
    kv_shards: int = 1
    common: int = cacheable_tokens(600)

    def __str__(self) -> str:
        return f"{self.model}-tp{self.tp}"


CASES = [
    Case("llama"),
    Case("llama", tp=2, kv_shards=2),
    # With sliding windows SGLang goes on only from where a chunk of the prefill ended.
    Case("swa", common=512),
    Case("mla"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """One store for all models and parallel sizes: their pages must not meet."""
    return tmp_path_factory.mktemp("restart")


def serve_cold_and_kill(directory: Path, case: Case) -> list[Answer]:
    """First answers of a server that is killed once the store has committed its pages."""
    before = kv_pages(committed_pages(directory))
    server = kvtier_server(MODELS / case.model, directory, tp=case.tp, arguments=SERVED_NAME)
    with server:
        cold = [server.generate(prompt) for prompt in PROMPTS]
        wait_for_kv_pages(directory, before + DISTINCT_PAGES * case.kv_shards)
        server.kill9()
    return cold


@pytest.fixture(scope="module")
def killed(directory) -> list[Answer]:
    """Llama's first answers; its server is dead and its store stays."""
    return serve_cold_and_kill(directory, CASES[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_cacheable_token_comes_from_the_store(directory, case, request):
    first = case == CASES[0]
    cold = request.getfixturevalue("killed") if first else serve_cold_and_kill(directory, case)
    # Nothing of other models or parallel sizes in the same store, only the prompts' common start.
    assert [answer.storage for answer in cold] == [0, 0]
    assert [answer.cached_tokens for answer in cold] == [0, case.common]

    server = kvtier_server(MODELS / case.model, directory, tp=case.tp, arguments=SERVED_NAME)
    with server:
        warm = server.generate(PROMPT)
        assert_all_from_storage(warm, PROMPT)
        branch = server.generate(BRANCH)
        # What both have in common came with PROMPT, the rest from the store.
        assert branch.device + branch.host == cacheable_tokens(600)
        assert branch.cached_tokens == cacheable_tokens(len(BRANCH))
        assert branch.storage == branch.cached_tokens - cacheable_tokens(600)
    assert [warm.output_ids, branch.output_ids] == [answer.output_ids for answer in cold]


def test_a_copy_of_the_weights_elsewhere_hits(directory, killed, tmp_path):
    copy = shutil.copytree(MODELS / "llama", tmp_path / "moved")
    with kvtier_server(copy, directory, arguments=SERVED_NAME) as server:
        warm = server.generate(PROMPT)
    assert_all_from_storage(warm, PROMPT)
    assert warm.output_ids == killed[0].output_ids


def test_other_weights_under_the_same_name_miss(directory, killed, tmp_path):
    other = shutil.copytree(MODELS / "llama", tmp_path / "finetuned")
    weights = load_file(other / "model.safetensors")
    row = weights["model.layers.1.mlp.down_proj.weight"][7]
    row.copy_(torch.roll(row, 1))
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with kvtier_server(other, directory, arguments=SERVED_NAME) as server:
        assert server.generate(PROMPT).cached_tokens == 0
