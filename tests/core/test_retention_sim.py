"""The simulation behind docs/retention.md, in its short form."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from retention_sim import engine, traffic
from retention_sim.geometry import KV_BYTES, PAGE_TOKENS, POOLS, TAIL_BYTES, TAIL_POOL
from retention_sim.lengths import CUTS, LENGTHS, kept_of
from retention_sim.plot import bars
from retention_sim.stores import Contents, PageLru, SegmentLru, offered, restored
from retention_sim.tiered import Kvtier
from retention_sim.tiers import Ints
from retention_sim.traffic import Request, Restart, Trace, generate

POOL_NAMES = [*POOLS, TAIL_POOL]
SIZES = [*POOLS.values(), TAIL_BYTES]


@pytest.fixture(scope="module")
def half_a_day() -> Trace:
    return generate(1, 0.5)


def _requests(trace: Trace) -> list[Request]:
    return [event for event in trace.events if isinstance(event, Request)]


def test_the_seed_decides(half_a_day: Trace) -> None:
    again, other = generate(1, 0.5), generate(2, 0.5)
    assert [r.pages.tolist() for r in _requests(again)] == [
        r.pages.tolist() for r in _requests(half_a_day)
    ]
    assert len(other.parent) != len(again.parent)


def test_requests_are_chains_of_pages(half_a_day: Trace) -> None:
    parent = half_a_day.parent
    assert (parent < np.arange(len(parent))).all()
    seen: set[int] = set()
    for request in _requests(half_a_day):
        assert parent[request.pages].tolist() == [-1, *request.pages[:-1].tolist()]
        assert request.held <= request.matchable <= request.prompt <= len(request.pages)
        assert set(request.pages[: request.held].tolist()) <= seen
        seen.update(request.pages.tolist())
    assert len(seen) == len(parent)


def test_a_restart_empties_the_memory_above_the_store(half_a_day: Trace) -> None:
    restarts = [i for i, event in enumerate(half_a_day.events) if isinstance(event, Restart)]
    assert restarts
    for at in restarts:
        event = half_a_day.events[at + 1]
        assert isinstance(event, Request) and event.held == 0


def _working_set(trace: Trace) -> int:
    return int(np.mean(trace.live_pages)) * KV_BYTES + 6 * TAIL_BYTES


class _Watched(Kvtier):
    """Looks at the cap after every offer."""

    most = 0

    def offer(self, pages: Ints, first: int, tails: int, time: float) -> None:
        super().offer(pages, first, tails, time)
        self.most = max(self.most, self.contents.stored)


def test_kvtier_keeps_what_can_be_restored_and_beats_both_lrus(half_a_day: Trace) -> None:
    pages, cap = len(half_a_day.parent), _working_set(half_a_day)
    kvtier = _Watched(pages, cap)
    ours = engine.replay(half_a_day, kvtier)
    assert kvtier.most <= cap
    assert ours.restorable[-1] > 0.99
    for store in (PageLru(pages, cap), SegmentLru(pages, cap)):
        theirs = engine.replay(half_a_day, store)
        assert 0 < max(theirs.stored) <= cap
        assert ours.restored_tokens > 2 * theirs.restored_tokens
        assert ours.restorable_tokens > 2 * theirs.restorable_tokens
        assert ours.written < theirs.written


def test_a_store_that_forgets_nothing_restores_most(half_a_day: Trace) -> None:
    pages = len(half_a_day.parent)
    all_kept = PageLru(pages, sys.maxsize)
    ideal = engine.replay(half_a_day, all_kept, look=False)
    assert all_kept.contents.families().all()
    assert engine.restorable(half_a_day.parent, all_kept.contents)[0] == pages
    full = engine.replay(half_a_day, PageLru(pages, _working_set(half_a_day)), look=False)
    assert ideal.restored_tokens > full.restored_tokens


def test_what_a_store_has_lost_is_refused_or_offered_again(half_a_day: Trace) -> None:
    pages, cap = len(half_a_day.parent), _working_set(half_a_day) // 2
    plain, patched = Kvtier(pages, cap), Kvtier(pages, cap, reoffer=True)
    for kvtier in (plain, patched):
        engine.replay(half_a_day, kvtier, look=False)
    assert plain.refused > 0
    assert patched.refused == 0


def test_restorable_is_what_a_walk_from_every_tail_finds() -> None:
    chance = np.random.default_rng(1)
    for _ in range(200):
        parent = np.array([chance.integers(-1, page) if page else -1 for page in range(40)])
        contents = Contents(40)
        for page in range(40):
            for pool in range(len(SIZES)):
                if chance.random() < (0.3 if pool == len(POOLS) else 0.97):
                    contents.add(page, pool)
        whole, tails = contents.families(), contents.tails()
        useful, ends = set(), 0
        for page in range(40):
            path = [page]
            while parent[path[-1]] >= 0:
                path.append(int(parent[path[-1]]))
            if tails[page] and whole[path].all():
                useful.update(path)
                ends += 1
        assert engine.restorable(parent, contents) == (len(useful), ends)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_session_cut_back_loses_a_quarter_of_the_cut_at_most(tokens: int) -> None:
    kept = kept_of(tokens)
    for cut, loss in zip((*CUTS, tokens), kept.losses, strict=True):
        assert loss <= max(2048, cut / 4) + PAGE_TOKENS
    assert kept.tails < kept.offered
    assert kept.multiple == pytest.approx(kept.bytes / (tokens // PAGE_TOKENS * KV_BYTES))


def test_the_plot_is_svg() -> None:
    text = bars(
        ["small", "large"], {"a": [[0.5, 0.7], [1.0]], "b": [[0.1], [0.2]], "c": [[0], [0]]}
    )
    svg = ElementTree.fromstring(text)
    heights = [float(shape.get("height", 0)) for shape in svg.iter() if shape.get("width") == "46"]
    assert heights[0] == pytest.approx(0.6 * 260) and len(heights) == 6


class _RealFiles:
    """A store of real files under SGLang's own evictor, driven as HiCacheFile drives it."""

    def __init__(self, folder: Path, pages: int, cap: int) -> None:
        self.contents = Contents(pages)
        self._folder, self._cap = folder, cap
        self._clock = 1_000_000_000
        self.restart()

    def restart(self) -> None:
        from sglang.srt.mem_cache.storage.file.lru_file_evictor import LRUFileEvictor

        config = {"max_size": self._cap, "min_free_space": 0, "eviction_ratio": 0.9}
        self._evictor = LRUFileEvictor(
            str(self._folder),
            owned_suffixes=("_model",),
            tp_rank=0,
            extra_config=config,
            on_evict=self._evicted,
        )

    def _evicted(self, stem: str) -> None:
        page, pool = stem.removesuffix("_model").split(".")
        self.contents.drop(int(page), POOL_NAMES.index(pool))

    def _file(self, page: int, pool: int) -> tuple[str, Path]:
        stem = f"{page}.{POOL_NAMES[pool]}_model"
        return stem, self._folder / f"{stem}.bin"

    def offer(self, pages: Ints, first: int, tails: int, time: float) -> None:
        for page, pool in offered(pages[first:], tails):
            stem, path = self._file(page, pool)
            if path.exists():
                self._evictor.touch(stem, str(path))
            elif self._evictor.reserve(stem, SIZES[pool]):
                with path.open("wb") as file:
                    file.truncate(SIZES[pool])
                self._clock += 1  # the clock of a file system may stand still between two files
                os.utime(path, (self._clock, self._clock))
                self._evictor.commit(stem)
                self.contents.add(page, pool)

    def read(self, pages: Ints, first: int, time: float) -> None:
        for page, pool in restored(pages[first:]):
            stem, path = self._file(page, pool)
            assert path.stat().st_size == SIZES[pool]
            self._evictor.touch(stem, str(path))


def test_page_lru_does_what_sglangs_evictor_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang.srt.mem_cache.storage.file.lru_file_evictor")
    monkeypatch.setattr(traffic, "START_TOKENS", (25_000, 30_000, 35_000, 40_000, 45_000, 50_000))
    monkeypatch.setattr(traffic, "RESTART_HOURS", (1, 3))
    trace = generate(4, 0.3)
    assert sum(isinstance(event, Restart) for event in trace.events) > 1
    pages, cap = len(trace.parent), 600_000_000
    real, model = _RealFiles(tmp_path, pages, cap), PageLru(pages, cap)
    expected, found = engine.replay(trace, real), engine.replay(trace, model)
    assert expected.written > 5 * cap and expected.restored_tokens > 0
    assert found == expected
    assert (real.contents.families() == model.contents.families()).all()
    assert (real.contents.tails() == model.contents.tails()).all()
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert on_disk == model.contents.stored
