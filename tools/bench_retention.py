"""What long sessions take on disk, and what a store at its cap still takes in: on real files.

    python tools/bench_retention.py [--root DIR] [--tokens 777000] [--cap 4G] [--json]

The session has the geometry of DeepSeek-V4.1-Flash (docs/retention.md) and is stored in chunks of
2,048 tokens, as SGLang does, beside the collections that a server makes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvtier import collector, telemetry
from kvtier.backends.local import disk_usage
from kvtier.config import Config
from kvtier.identity import Identity
from kvtier.pages import ROOT, Column, Link, PageBuffers, PoolPages
from kvtier.sizes import format_size, parse_size
from kvtier.store import Namespace, Store

PAGE_TOKENS = 256
CHUNK = 8
KV_BYTES, SWA_BYTES = 417_920, 6_439_680
KV, SWA = Column("kv"), Column("swa")


def main() -> None:
    """Run both and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=None, help="a folder on the drive to measure")
    parser.add_argument("--tokens", type=int, default=777_000)
    parser.add_argument("--cap", type=parse_size, default=parse_size("4G"))
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kvtier-retention-", dir=words.root))
    try:
        session = one_session(root / "session", words.tokens)
        full = at_the_cap(root / "full", words.cap)
    finally:
        shutil.rmtree(root)
    if words.json:
        print(json.dumps({"session": session, "at_the_cap": full}, indent=2))
        return
    kv, disk = session["kv_bytes"], session["disk_bytes"]
    print(
        f"{words.tokens:,} tokens: {format_size(kv)} of KV, {format_size(disk)} on disk "
        f"({disk / kv:.2f} times), {session['tails']} tails; written {session['written'] / kv:.2f} "
        f"times the KV; a cut costs at most {session['worst_cut']:.2f} of its allowance; "
        f"last boundary restored: {session['restored']}"
    )
    print(
        f"cap {format_size(words.cap)}: {full['free_mb_s']:.0f} MB/s before it is reached, "
        f"{full['full_mb_s']:.0f} MB/s at it ({full['full_mb_s'] / full['free_mb_s']:.2f}); "
        f"refused {full['refused_pages']} pages; never more than {format_size(full['peak'])}"
    )


def one_session(root: Path, tokens: int) -> dict[str, object]:
    """A session grows from nothing, chunk by chunk."""
    pages = tokens // PAGE_TOKENS
    store = Store.open(Config(root=root, min_free=0))
    namespace = store.namespace(Identity.of({"page_tokens": PAGE_TOKENS}), KV)
    chain = [hashlib.sha256(b"%d" % page).digest() for page in range(pages)]
    # The last page of a chunk is a node of its own in SGLang's tree (components/swa.py,
    # _maybe_split_leaf_for_swa_lock); of the node before it only the last page has its window.
    ends = {*range(CHUNK, pages, CHUNK), pages}
    start = 0
    for end in sorted(ends | {end - 1 for end in ends}):
        before = chain[end - 2] if end > 1 else ROOT
        _put(namespace, SWA, chain[end - 1 : end], SWA_BYTES, Link(before, end - 1), window=1)
        link = Link(chain[start - 1] if start else ROOT, start)
        _put(namespace, KV, chain[start:end], KV_BYTES, link)
        start = end
    assert store.flush(120)
    [written] = [m.samples[0].value for m in telemetry.WRITTEN_BYTES.collect()]
    _until(lambda: int(namespace.contains(SWA, chain).sum()) <= 45, collector.IDLE_SECONDS + 120)
    time.sleep(2 * store.config.grace)
    there = np.flatnonzero(namespace.contains(SWA, chain)) + 1
    cut = np.arange(1, pages + 1)
    loss = cut - np.concatenate(([0], there))[np.searchsorted(there, cut, side="right")]
    allowed = np.maximum(CHUNK, (pages - cut) / 4)
    memory = np.zeros(SWA_BYTES, np.uint8)
    [got] = namespace.get([PoolPages(SWA, chain[-1:], _buffers(memory, 1))])
    restored = bool(got.all()) and bool((memory == _content(chain[-1:], SWA_BYTES)).all())
    restored &= bool(namespace.contains(KV, chain).all())
    store.close()
    return {
        "kv_bytes": pages * KV_BYTES,
        "disk_bytes": disk_usage(root / "kvtier"),
        "written": written,
        "tails": len(there),
        "worst_cut": float((loss / allowed).max()),
        "restored": restored,
    }


def at_the_cap(root: Path, cap: int) -> dict[str, float]:
    """Sessions of 100,000 tokens without tails until the cap was written four times."""
    store = Store.open(Config(root=root, limit=cap, min_free=0, put_deadline=60.0))
    namespace = store.namespace(Identity.of({"page_tokens": PAGE_TOKENS}), KV)
    session, refused, peak = 390, 0, 0
    # Bytes and seconds, before the cap is reached and at it: a median of rates would hide stalls.
    took: dict[bool, list[float]] = {False: [0, 0], True: [0, 0]}
    written, number = 0, 0
    while written < 4 * cap:
        full = written > cap
        begun = time.perf_counter()
        size = 0
        for _ in range(max(1, cap // 16 // (session * KV_BYTES))):
            chain = [hashlib.sha256(b"%d/%d" % (number, page)).digest() for page in range(session)]
            number += 1
            for start in range(0, session, 128):
                some = chain[start : start + 128]
                link = Link(chain[start - 1] if start else ROOT, start)
                stored = _put(namespace, KV, some, KV_BYTES, link)
                refused += len(some) - stored
                size += stored * KV_BYTES
        took[full][0] += size
        took[full][1] += time.perf_counter() - begun
        peak = max(peak, disk_usage(store.root))
        written += size
    begun = time.perf_counter()
    store.flush(600)
    took[True][1] += time.perf_counter() - begun
    store.close()
    return {
        "free_mb_s": took[False][0] / 1e6 / took[False][1],
        "full_mb_s": took[True][0] / 1e6 / took[True][1],
        "refused_pages": refused,
        "peak": peak,
    }


def _put(
    namespace: Namespace,
    column: Column,
    keys: list[bytes],
    size: int,
    link: Link,
    *,
    window: int = 0,
) -> int:
    memory = _content(keys, size)
    pages = PoolPages(column, keys, _buffers(memory, len(keys)), window)
    return int(namespace.put(pages, link).sum())


def _content(keys: list[bytes], size: int) -> np.ndarray:
    """Bytes that differ from page to page."""
    memory = np.tile(np.resize(_NOISE, size), len(keys))
    for page, key in enumerate(keys):
        memory[page * size : page * size + len(key)] = np.frombuffer(key, np.uint8)
    return memory


_NOISE = np.random.default_rng(0).integers(0, 256, 1 << 22, np.uint8)


def _buffers(memory: np.ndarray, pages: int) -> PageBuffers:
    size = len(memory) // pages
    places = memory.ctypes.data + size * np.arange(pages, dtype=np.uint64)
    return PageBuffers(places.astype(np.uint64).reshape(-1, 1), (size,))


def _until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.5)


if __name__ == "__main__":
    main()
