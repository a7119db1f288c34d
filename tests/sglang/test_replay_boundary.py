"""The same prompt again after a restart, where SGLang computes the window's tokens again."""

from __future__ import annotations

import inspect
from array import array

import pytest
from pools import STACKS, Engine, assert_same_pages, engines
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams

from kvtier.collection import collect
from kvtier.index import Index
from kvtier.layout import Layout

STACK = STACKS["deepseek-v4.1"]
PAGE = STACK.config.page_size
WINDOW = STACK.config.sliding_window_size
PROMPT = STACK.pages * PAGE


@pytest.fixture
def start(tmp_path):
    with engines(tmp_path / "store") as start:
        yield start


def matched_after_restart(
    start, beyond: int, patched: bool = True, scored_from: int | None = None
) -> int:
    """Tokens that a prompt of whole pages and `beyond` more need not compute, after superseded
    tails were dropped; their bytes are those that were stored. `scored_from`: where the log
    probabilities that it asks for begin."""
    before = start(STACK)
    pages = before.prompt()
    before.compute(pages)
    before.store(pages)
    stored = before.host_pages(pages)
    before.close()
    layout = Layout.open(before.root / "kvtier", create=False)
    collect(layout, Index(layout), 1 << 40, grace=0)

    after: Engine = start(STACK)
    after.cache.decoder_swa_bounded_replay = True
    tokens = array("q", [*pages, *range(900_000, 900_000 + beyond)])
    req = Req("r", "", tokens, SamplingParams(), return_logprob=scored_from is not None)
    if scored_from is not None:
        req.logprob_start_len = scored_from
    prefetch = Scheduler._prefetch_kvcache
    after.prefetch_as(prefetch if patched else inspect.unwrap(prefetch), req)
    req.init_next_round_input(after.cache)
    matched = int(req.prefix_len + req.host_hit_length)
    if matched:
        needed = after.needed(matched // PAGE)
        assert_same_pages(after.host_pages(pages[:matched]), stored, needed)
    return matched


@pytest.mark.parametrize(("beyond", "pages"), [(1, -1), (WINDOW - 1, -1), (WINDOW, 0), (200, 0)])
def test_the_prompt_matches_up_to_its_last_usable_page(start, beyond, pages):
    assert matched_after_restart(start, beyond) == PROMPT + pages * PAGE


@pytest.mark.parametrize("beyond", [1, WINDOW - 1])
def test_without_the_patch_it_matches_nothing(start, beyond):
    """Once this fails, SGLang has mended it and the patch can go."""
    assert matched_after_restart(start, beyond, patched=False) == 0


def test_a_request_for_log_probabilities_matches_up_to_where_they_begin(start):
    assert matched_after_restart(start, 200, scored_from=PROMPT) == PROMPT
