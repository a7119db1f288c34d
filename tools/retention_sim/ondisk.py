"""`python -m retention_sim.ondisk`: the same traffic over real stores on a real drive.

Several processes have one store open, as several servers would, and take the requests in turn; its
own collections keep it under its cap, and sizes are those of the file system, sampled from outside.
Pages and tails have a hundredth of their bytes, and days pass in minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import shutil
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean

import numpy as np

from kvtier.backends.local import disk_usage
from kvtier.boundaries import restorable
from kvtier.chains import chains
from kvtier.config import Config
from kvtier.identity import Identity
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.pages import ROOT, Column, Link, PageBuffers, PoolPages
from kvtier.retention import SETTLE_NS
from kvtier.sizes import format_size
from kvtier.store import Namespace, Store
from retention_sim.engine import replay
from retention_sim.geometry import (
    CHUNK_PAGES,
    KV_BYTES,
    OFFERED_TAILS,
    PAGE_TOKENS,
    TAIL_BYTES,
    WINDOW_PAGES,
)
from retention_sim.stores import PageLru
from retention_sim.traffic import START_TOKENS, Request, Restart, Trace, generate

SCALE = 100
PAGE, TAIL = KV_BYTES // SCALE, TAIL_BYTES // SCALE
KV, SWA = Column("kv"), Column("swa")


@dataclass
class Found:
    """What came of it. Sizes in bytes."""

    cap: int
    peak: int
    """Most that the directory took at any sample."""
    samples: int
    restored_tokens: int
    ideal_tokens: int
    """What a store without a cap restores."""
    refused_pages: int
    stored: int
    """Payload at the end."""
    restorable: int
    """Payload at the end that some restore can use, or that is younger than a minute."""
    holes: int
    """Pages at the end that lie behind a missing one."""


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("--root", type=Path, default=None, help="a folder on the drive")
    parser.add_argument("--cap", type=float, default=1.0, help="in working sets")
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kvtier-traffic-", dir=words.root))
    try:
        found = run(generate(words.seed, words.days), root, words.cap, words.processes)
    finally:
        shutil.rmtree(root)
    if words.json:
        print(json.dumps(asdict(found), indent=2))
        return
    print(
        f"cap {format_size(found.cap)}, never more than {format_size(found.peak)} in "
        f"{found.samples} samples; token hit rate {found.restored_tokens / found.ideal_tokens:.3f};"
        f" {found.restorable / max(1, found.stored):.4f} of {format_size(found.stored)} can be "
        f"restored; {found.holes} pages behind a hole; {found.refused_pages} pages refused"
    )


def run(trace: Trace, root: Path, cap: float, processes: int) -> Found:
    """Send the trace over one store under `cap` working sets."""
    ideal = replay(trace, PageLru(len(trace.parent), 1 << 60), look=False)
    live = fmean(trace.live_pages)
    limit = int(cap * (live * PAGE + len(START_TOKENS) * TAIL))
    layout = Layout.open(root / "kvtier", create=True)
    context = multiprocessing.get_context("spawn")
    workers = []
    for _ in range(processes):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, root, limit))
        process.start()
        workers.append((here, process))
    samples: list[int] = []
    done = threading.Event()
    sampling = threading.Thread(target=_sample, args=(layout.path, samples, done))
    sampling.start()
    restored = refused = 0
    turn = 0
    for event in trace.events:
        if isinstance(event, Restart):
            continue
        here, _ = workers[turn % processes]
        turn += 1
        here.send(event)
        pages, lost = here.recv()
        restored, refused = restored + pages * PAGE_TOKENS, refused + lost
    for here, process in workers:
        here.send(None)
        process.join()
    done.set()
    sampling.join()
    found = chains(Index(layout, readonly=True))
    # What was written in the last minute counts as restorable: parts of it may still be to come.
    young = time.time_ns() - SETTLE_NS
    useful = sum(int(c.bytes[c.useful | (c.used_ns > young)].sum()) for c in found)
    holes = sum(int((c.complete & ~c.reachable).sum()) for c in found)
    stored = sum(int(c.bytes.sum()) for c in found)
    most = max(samples)
    return Found(
        limit, most, len(samples), restored, ideal.restored_tokens, refused, stored, useful, holes
    )


def _sample(path: Path, samples: list[int], done: threading.Event) -> None:
    while not done.wait(0.1):
        samples.append(disk_usage(path))


def _serve(requests: Connection, root: Path, limit: int) -> None:
    """One server: what it restores and what it could not store, a request at a time."""
    store = Store.open(
        Config(
            root=root, limit=limit, min_free=0, grace=0.5, segment_size=4 << 20, commit_size=1 << 20
        )
    )
    namespace = store.namespace(Identity.of({"page_tokens": PAGE_TOKENS}), KV)
    while (request := requests.recv()) is not None:
        answer = _request(namespace, request)
        store.flush(120)
        requests.send(answer)
    store.close()


def _request(namespace: Namespace, request: Request) -> tuple[int, int]:
    keys = [hashlib.sha256(b"%d" % page).digest() for page in request.pages.tolist()]
    held, asked = request.held, keys[request.held : request.matchable]
    start = held
    if asked:
        kv, swa = namespace.contains_each([KV, SWA], asked)
        start += restorable(kv, (), [(swa, WINDOW_PAGES)]).longest
    restored, refused = start - held, 0
    if restored:
        _get(namespace, KV, keys[held:start], PAGE)
        _get(namespace, SWA, keys[start - 1 : start], TAIL)
    ends = [*range(start + CHUNK_PAGES, request.prompt, CHUNK_PAGES), request.prompt, len(keys)]
    for end in ends:
        if end <= start:
            continue
        first = max(start, end - OFFERED_TAILS)
        _put(namespace, SWA, keys[:end], first, window=WINDOW_PAGES)
        refused += _put(namespace, KV, keys[:end], start, window=0)
        start = end
    return restored, refused


def _put(
    namespace: Namespace, column: Column, keys: list[bytes], first: int, *, window: int
) -> int:
    """Put the pages from `first` on; how many were refused."""
    size = TAIL if window else PAGE
    memory = np.concatenate([_content(key, size) for key in keys[first:]])
    link = Link(keys[first - 1] if first else ROOT, first)
    pages = PoolPages(column, keys[first:], _buffers(memory, len(keys) - first), window)
    return int((~namespace.put(pages, link)).sum())


def _get(namespace: Namespace, column: Column, keys: list[bytes], size: int) -> None:
    memory = np.zeros(len(keys) * size, np.uint8)
    [answer] = namespace.get([PoolPages(column, keys, _buffers(memory, len(keys)))])
    for number in np.flatnonzero(answer).tolist():
        got = memory[number * size : (number + 1) * size]
        if (got != _content(keys[number], size)).any():
            raise SystemExit("a page came back with other bytes")


def _content(key: bytes, size: int) -> np.ndarray:
    return np.resize(np.frombuffer(key, np.uint8), size)


def _buffers(memory: np.ndarray, pages: int) -> PageBuffers:
    size = len(memory) // pages
    places = memory.ctypes.data + size * np.arange(pages, dtype=np.uint64)
    return PageBuffers(places.astype(np.uint64).reshape(-1, 1), (size,))


if __name__ == "__main__":
    main()
