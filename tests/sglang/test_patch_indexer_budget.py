"""The indexer's score budget, on SGLang's own tiling of prefill scores."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pools  # noqa: F401 - loads the plugins, before anything of SGLang is imported
import pytest
import torch
from sglang.kernels.ops.attention.dsv4 import index_logits
from sglang.srt.layers.attention.dsv4.v41_indexer import scoring

from kvtier.errors import ConfigError
from kvtier.integration.patches import code

HEADS, CONTEXT, ROWS = 64, 8192, 300
MIB_PER_ROW = HEADS * CONTEXT * 2 // 2**20
NAMES = ("_DEEP_GEMM_SCORE_BUDGET_BYTES", "_TORCH_SCORE_BUDGET_BYTES")


@pytest.fixture
def install(monkeypatch):
    for name in NAMES:
        monkeypatch.setattr(scoring, name, getattr(scoring, name))  # put back afterwards
    return code("indexer_budget").install


def _torch_chunks() -> list[scoring.ChunkScores]:
    """The chunks in which ROWS query rows are scored with torch against CONTEXT positions."""
    position = torch.arange(CONTEXT)
    request = scoring.RequestScores(
        lc=CONTEXT,
        k=1,
        columns=position,
        tok=torch.arange(ROWS),
        lens=torch.arange(ROWS) + CONTEXT - ROWS,
        slots=position,
    )
    chunks = scoring._score_chunks(
        indexer=SimpleNamespace(scores=lambda q, k, weights: q[:, 0] + k[:, 0]),
        q=torch.arange(ROWS, dtype=torch.float32)[:, None, None].expand(ROWS, HEADS, 1),
        weights=torch.ones(ROWS, HEADS),
        index_k=torch.arange(CONTEXT, dtype=torch.float32)[:, None],
        request=request,
    )
    return list(chunks)


def _deep_gemm_rows(monkeypatch) -> list[int]:
    """The rows of each call of DeepGEMM for ROWS query rows, which here computes nothing."""
    rows = []
    module = ModuleType("deep_gemm")
    module.fp8_fp4_mqa_logits = lambda q, *args, **kwargs: rows.append(len(q[0]))
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setattr(index_logits, "index_weights_dtype", lambda: torch.float32)
    monkeypatch.setattr(index_logits, "index_logits_dtype", lambda: torch.float32)
    data = SimpleNamespace(
        q_fp4=torch.zeros(ROWS, HEADS, 1),
        q_sf=torch.zeros(ROWS, HEADS),
        weights=torch.zeros(ROWS, HEADS),
        request_starts=torch.zeros(ROWS, dtype=torch.int32),
        compress_lens=torch.zeros(ROWS, dtype=torch.int32),
        lens_per_request=[2**20],
    )
    list(scoring.score_tiles(data, (torch.empty(0), torch.empty(0))))
    return rows


def test_without_the_patch_one_tile_may_take_gigabytes(monkeypatch) -> None:
    assert [getattr(scoring, name) for name in NAMES] == [2 << 30, 1 << 30]
    assert len(_torch_chunks()) == 1
    assert _deep_gemm_rows(monkeypatch) == [ROWS]  # 1.2 GiB of scores for 2**20 positions


def test_torch_scores_stay_within_the_budget_and_are_the_same(install) -> None:
    [before] = _torch_chunks()
    install("64")
    chunks = _torch_chunks()
    assert {len(chunk.scores) for chunk in chunks[:-1]} == {64 // MIB_PER_ROW}
    assert torch.equal(torch.cat([chunk.scores for chunk in chunks]), before.scores)


def test_deep_gemm_s_tiles_stay_within_the_budget(install, monkeypatch) -> None:
    install("256")
    rows = _deep_gemm_rows(monkeypatch)
    assert sum(rows) == ROWS
    assert max(rows) * 2**20 * 4 <= 256 << 20  # float32 scores of 2**20 positions


@pytest.mark.parametrize("value", ["63", "16385", "1.5", "", "256MiB"])
def test_a_budget_that_makes_no_sense_is_refused(install, value) -> None:
    with pytest.raises(ConfigError, match="whole number of MiB from 64 to 16384"):
        install(value)
