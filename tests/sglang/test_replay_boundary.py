"""The same prompt again after a restart, where SGLang computes the window's tokens again."""

from __future__ import annotations

from unittest import mock

import pytest
from pools import STACKS, Engine, engines

from kvtier.collection import collect
from kvtier.index import Index
from kvtier.layout import Layout

STACK = STACKS["deepseek-v4.1"]
PAGE = STACK.config.page_size
WINDOW = STACK.config.sliding_window_size


@pytest.fixture
def start(tmp_path):
    with engines(tmp_path / "store") as start:
        yield start


def matched_after_restart(start, beyond: int, patched: bool = True) -> int:
    """Tokens that a prompt of whole pages and `beyond` more need not compute, after superseded
    tails were dropped."""
    before = start(STACK)
    pages = before.prompt()
    before.compute(pages)
    before.store(pages)
    before.close()
    layout = Layout.open(before.root / "kvtier", create=False)
    collect(layout, Index(layout), 1 << 40, grace=0)

    after: Engine = start(STACK)
    after.cache.decoder_swa_bounded_replay = True
    tokens = [*pages, *range(900_000, 900_000 + beyond)]
    tail = after.cache.swa_reprefill_tail_tokens() if patched else 0
    with mock.patch.object(after.cache, "swa_reprefill_tail_tokens", return_value=tail):
        after.prefetch(tokens[:-1])  # as Scheduler._prefetch_kvcache
    return after.matched(tokens[:-WINDOW])  # as mem_cache.common._req_radix_key


@pytest.mark.parametrize(("beyond", "pages"), [(1, -1), (WINDOW - 1, -1), (WINDOW, 0), (200, 0)])
def test_the_prompt_matches_up_to_its_last_usable_page(start, beyond, pages):
    assert matched_after_restart(start, beyond) == (STACK.pages + pages) * PAGE


@pytest.mark.parametrize("beyond", [1, WINDOW - 1])
def test_without_the_patch_it_matches_nothing(start, beyond):
    """Once this fails, SGLang has mended it and the patch can go."""
    assert matched_after_restart(start, beyond, patched=False) == 0
