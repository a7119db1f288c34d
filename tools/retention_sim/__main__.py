"""`python -m retention_sim`: agent traffic over stores of several sizes; what kvtier, page LRU and
segment LRU restore and keep. docs/retention.md explains the figures."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvtier.sizes import format_size
from retention_sim.engine import replay
from retention_sim.geometry import KV_BYTES, PAGE_TOKENS, TAIL_BYTES
from retention_sim.lengths import CUTS, LENGTHS, Kept, kept_of
from retention_sim.plot import bars
from retention_sim.stores import PageLru, SegmentLru
from retention_sim.tiered import Kvtier
from retention_sim.traffic import START_TOKENS, Request, Trace, generate

STORES = ("kvtier", "page LRU", "segment LRU")

CAPS = (0.5, 1.0, 1.5)
"""In working sets: bytes of the six histories, on average over time, and of one tail for each."""


@dataclass(frozen=True)
class Traffic:
    """What the traffic of one seed is like."""

    seed: int
    requests: int
    restarts: int
    live_tokens: int
    """Tokens of the six histories, on average over time."""
    working_set: int
    """Bytes of those, and of one tail for each history."""
    computed_tokens: int
    """Tokens of all pages that are different."""
    offered_bytes: int
    """What a store that forgets nothing writes."""
    ideal_tokens: int
    """What such a store restores."""


@dataclass(frozen=True)
class Result:
    """One store under one cap over the traffic of one seed."""

    seed: int
    store: str
    cap: float
    """In working sets."""
    hit_rate: float
    """Tokens restored, as a share of `Traffic.ideal_tokens`."""
    restorable: float
    """Share of the bytes that some restore can use, at the end."""
    least_restorable: float
    """The least of it from when the store had first been full."""
    restorable_tokens: int
    """At the end."""
    written: float
    """Bytes written over bytes of all pages that are different, tails not counted."""
    refused_tokens: int
    """Computed, but not stored, since the store had lost what comes before them."""


traces: dict[int, Trace] = {}
"""By seed. Set before the processes that replay them are forked, which so have them too."""


def main() -> int:
    """Run what the command line says."""
    options = _options()
    quiet = Console(stderr=True)
    for seed in track(options.seeds, "Making traffic", console=quiet):
        traces[seed] = generate(seed, options.days)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        traffic = list(pool.map(_describe, options.seeds))
        jobs = [(t, name, cap, options.reoffer) for t in traffic for cap in CAPS for name in STORES]
        replayed = pool.map(_replay, *zip(*jobs, strict=True))
        results = list(track(replayed, "Replaying", len(jobs), console=quiet))
    console = Console(width=130)
    lengths = [kept_of(tokens) for tokens in LENGTHS]
    console.print(_length_table(lengths))
    console.print(_traffic_table(traffic))
    console.print(_result_table(results))
    if options.json:
        document = {
            "days": options.days,
            "reoffer": options.reoffer,
            "lengths": [asdict(k) for k in lengths],
            "traffic": [asdict(t) for t in traffic],
            "results": [asdict(r) for r in results],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if options.svg:
        rates = {name: [_of(results, name, cap, "hit_rate") for cap in CAPS] for name in STORES}
        options.svg.write_text(bars([f"cap {cap:g}" for cap in CAPS], rates))
    return 0


def _describe(seed: int) -> Traffic:
    trace = traces[seed]
    live = fmean(trace.live_pages)
    ideal = replay(trace, PageLru(len(trace.parent), sys.maxsize), look=False)
    requests = sum(isinstance(event, Request) for event in trace.events)
    return Traffic(
        seed=seed,
        requests=requests,
        restarts=len(trace.events) - requests,
        live_tokens=int(live * PAGE_TOKENS),
        working_set=int(live * KV_BYTES) + len(START_TOKENS) * TAIL_BYTES,
        computed_tokens=len(trace.parent) * PAGE_TOKENS,
        offered_bytes=ideal.written,
        ideal_tokens=ideal.restored_tokens,
    )


def _replay(traffic: Traffic, name: str, cap: float, reoffer: bool) -> Result:
    trace = traces[traffic.seed]
    pages, size = len(trace.parent), int(cap * traffic.working_set)
    refused = 0
    if name == "kvtier":
        kvtier = Kvtier(pages, size, reoffer=reoffer)
        outcome = replay(trace, kvtier)
        refused = kvtier.refused
    else:
        store = PageLru if name == "page LRU" else SegmentLru
        outcome = replay(trace, store(pages, size))
    full = next((i for i, stored in enumerate(outcome.stored) if stored > 0.7 * size), 0)
    return Result(
        seed=traffic.seed,
        store=name,
        cap=cap,
        hit_rate=outcome.restored_tokens / max(1, traffic.ideal_tokens),
        restorable=outcome.restorable[-1],
        least_restorable=min(outcome.restorable[full:]),
        restorable_tokens=outcome.restorable_tokens,
        written=outcome.written / (pages * KV_BYTES),
        refused_tokens=refused * PAGE_TOKENS,
    )


def _of(results: list[Result], name: str, cap: float, figure: str) -> list[float]:
    """A figure of one store under one cap, for each seed."""
    return [getattr(r, figure) for r in results if (r.store, r.cap) == (name, cap)]


def _length_table(lengths: list[Kept]) -> Table:
    losses = (*(f"cut by {cut // 1000}K" for cut in CUTS), "by any")
    table = _table("tokens", "offered", "", "kept", "", "of KV", *losses)
    for k in lengths:
        table.add_row(
            f"{k.tokens:,}",
            f"{k.offered} tails",
            format_size(k.offered_bytes),
            f"{k.tails} tails",
            format_size(k.bytes),
            f"{k.multiple:.2f}",
            *(f"{loss:,}" for loss in k.losses),
        )
    return table


def _traffic_table(traffic: list[Traffic]) -> Table:
    table = _table("seed", "requests", "restarts", "live", "computed", "offered", "ideal")
    for t in traffic:
        table.add_row(
            str(t.seed),
            f"{t.requests:,}",
            str(t.restarts),
            f"{t.live_tokens / 1e6:.2f}M = {format_size(t.working_set)}",
            f"{t.computed_tokens / 1e6:.1f}M",
            format_size(t.offered_bytes),
            f"{t.ideal_tokens / 1e6:.1f}M",
        )
    return table


def _result_table(results: list[Result]) -> Table:
    columns = ("token hit rate", "restorable bytes", "least", "restorable", "written", "refused")
    table = _table("cap", "store", *columns)
    for cap in CAPS:
        for name in STORES:
            table.add_row(
                f"{cap:g}",
                name,
                _spread([100 * x for x in _of(results, name, cap, "hit_rate")], ".1f") + " %",
                _spread([100 * x for x in _of(results, name, cap, "restorable")], ".1f") + " %",
                f"{100 * min(_of(results, name, cap, 'least_restorable')):.1f} %",
                _spread([x / 1e6 for x in _of(results, name, cap, "restorable_tokens")], ".2f")
                + "M",
                f"{fmean(_of(results, name, cap, 'written')):.1f}",
                f"{fmean(_of(results, name, cap, 'refused_tokens')) / 1e6:.1f}M",
            )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.MARKDOWN)
    for column in columns:
        table.add_column(column, justify="left" if column == "store" else "right")
    return table


def _spread(figures: list[float], form: str) -> str:
    """The mean, and in brackets the least and the greatest."""
    mean, least, most = (format(x, form) for x in (fmean(figures), min(figures), max(figures)))
    return mean if len(figures) == 1 else f"{mean} ({least} to {most})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m retention_sim", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--days", type=float, default=7.0, help="length of the traffic")
    parser.add_argument("--reoffer", action="store_true", help="SGLang has the patch reoffer")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--svg", type=Path, help="write the plot of the hit rates there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
