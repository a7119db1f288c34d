"""Late reads: a read stalls past its deadline while its pages are handed to another request.

What the stalled read brings must never land in those pages, however late it comes.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvtier import breaker
from kvtier.pages import ROOT, Link, PoolPages
from kvtier.store import Namespace, Store
from powercut import shim
from powercut.process import checked
from powercut.result import Result
from powercut.shim import BLOCK, READ, Fault, fault
from powercut.workload import GUARD, IDENTITY, KV, Oracle, buffers, content, put, settings

PAGES = 40
CHAINS = 8


def run(runs: int, seed: int) -> list[Result]:
    """`runs` stores, each with 20 stalled requests."""
    if not shim.in_preloaded_process():
        shim.start_again()
    result = Result("late reads")
    for number in range(runs):
        with tempfile.TemporaryDirectory(prefix="kvtier-late-") as folder:
            root = Path(folder)
            wrong, requests = checked(lambda r=root, n=number: _stalls(r, random.Random(seed + n)))
        result.runs += requests
        result.fail(f"{seed + number}", wrong)
    shim.remove()
    return [result.done()]


def _stalls(root: Path, rng: random.Random) -> tuple[list[str], int]:
    breaker.FIRST_PAUSE = 0.0  # the next read is tried at once
    changes: dict[str, Any] = {"read_deadline": 0.1, "commit_interval": 0.0, "read_threads": 4}
    store = Store.open(settings(root, **changes))
    namespace = store.namespace(IDENTITY, KV.column(0))
    oracle = Oracle(rng.getrandbits(32))
    for number in range(CHAINS):
        oracle.hear({"say": "put", "chain": number, "stem": 0, "fork": 0, "start": 0, "end": PAGES})
        put(namespace, 0, KV, oracle.keys(number), Link(ROOT, 0))
        store.flush(60)
    wrong: list[str] = []
    for _ in range(20):
        first, second = rng.sample(range(CHAINS), 2)
        wrong += _stall(namespace, oracle.keys(first), oracle.keys(second), rng)
    store.close()
    return wrong, 20


def _stall(
    namespace: Namespace, asked: list[bytes], others: list[bytes], rng: random.Random
) -> list[str]:
    """One request stalls; its memory is given to another, before or after the read comes."""
    column = KV.column(0)
    memory = np.full((PAGES, KV.part_bytes), GUARD, np.uint8)
    request = PoolPages(column, asked, buffers(memory, KV))
    wrong = []
    with fault(READ, ".kvs", mode=BLOCK, times=rng.randint(1, 3)) as stalled:
        deadline, first = time.monotonic() + 60, True
        while True:
            [came] = namespace.get([request])
            if stalled.met or time.monotonic() > deadline:  # else it was given up before it began
                break
            first = False
        stalled.wait_until_held()
        right = content(column, asked, KV.part_bytes)
        if (memory[came] != right[came]).any():
            wrong.append("wrong bytes in a page that came")
        if came.all() and first:  # a later one may find that only the first was stalled
            wrong.append("a stalled request came whole")
        mine = content(column, others, KV.part_bytes)
        memory[:] = mine  # SGLang has handed the pages on, and somebody filled them
        seen = memory.copy()
        if not stalled.held:
            wrong.append("the read was not stalled any more")
    _quiet(stalled)
    if (memory != seen).any():
        wrong.append("a late read landed in memory that belongs to somebody else")
    deadline = time.monotonic() + 30
    while True:
        memory[:] = GUARD
        [came] = namespace.get([PoolPages(column, others, buffers(memory, KV))])
        if came.all() or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if not came.all() or (memory != mine).any():
        wrong.append(f"the next request for that memory got {int(came.sum())} pages, or wrong ones")
    return wrong


def _quiet(stalled: Fault) -> None:
    """Wait until the reads that were held up have ended in their own memory."""
    while stalled.held:
        time.sleep(0.001)
    time.sleep(0.05)
