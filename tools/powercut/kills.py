"""kill -9 of processes that put, commit, collect, check, rebuild and save."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.check import check
from kvtier.collection import collect
from kvtier.deletion import bury
from kvtier.index import Index
from kvtier.layout import Layout
from powercut.process import Child, checked, hear_some
from powercut.result import Result
from powercut.workload import Oracle, Send, delete, settings, verify, write

LIFE = 15
"""Kills that one store lives through."""

FILE_CALLS = (
    "open", "pwrite", "fdatasync", "fsync", "ftruncate", "rename", "replace", "unlink", "link",
    "close", "mkdir",
)  # fmt: skip
"""Functions of `os` at which a process may be told to kill itself."""

MANIFEST_SLACK = 3 << 20
"""Bytes that a store may take beyond its pages after a collection: a segment and some blocks."""


def run(runs: int, seed: int) -> list[Result]:
    """`runs` kills of single processes, and as many of ranks of one server."""
    return [_kills("kill -9", runs, seed, ranks=1), _kills("kill -9 of ranks", runs, seed, ranks=3)]


def _kills(technique: str, runs: int, seed: int, *, ranks: int) -> Result:
    result = Result(technique)
    while result.runs < runs:
        with tempfile.TemporaryDirectory(prefix="kvtier-kills-") as folder:
            life = min(LIFE, runs - result.runs)
            _life(Path(folder), life, f"{seed}/{technique}/{result.runs}", ranks, result)
    return result.done()


def _life(root: Path, kills: int, seed: str, ranks: int, result: Result) -> None:
    rng = random.Random(seed)
    oracle = Oracle(rng.getrandbits(32))
    for number in range(kills):
        duties = rng.choice(((), ("save", "rebuild"), ("collect",), ("reopen",)))
        common = rng.getrandbits(32)
        victims = []
        for rank in range(ranks):
            work = _work(root, oracle, common, rank, duties if rank == 0 else ())
            victims.append(Child(_mortal(work, rng)))
        if rng.random() < 0.5 and oracle.chains:
            tool = rng.choice((_collect, _fsck, _save))
            victims.append(Child(_mortal(lambda send, t=tool: t(root, send, rng), rng)))
            result.count("kills with a tool beside")
        for victim in rng.sample(victims, len(victims)):
            hear_some(victims, rng, oracle.hear)
            victim.kill()
        name = f"{seed} kill {number}"
        for victim in victims:
            status = victim.wait(oracle.hear)
            if status not in (0, signal.SIGKILL):
                result.fail(name, [f"a process ended with {status}: {victim.errors}"])
        oracle.settled()
        wrong, parts = checked(lambda: verify(settings(root), oracle, ranks=ranks))
        result.runs += 1
        result.count("processes killed", len(victims))
        result.count("parts found exact", parts)
        result.fail(name, wrong)
        if wrong:
            break
    result.fail(f"{seed} at the end", checked(lambda: (_nothing_leaks(root), 0))[0])
    result.count("parts acknowledged", oracle.acknowledged)


def _work(
    root: Path, oracle: Oracle, common: int, rank: int, duties: tuple[str, ...]
) -> Callable[[Send], None]:
    config = settings(root)
    return lambda send: write(config, oracle, send, random.Random(common), rank=rank, duties=duties)


def _mortal(work: Callable[[Send], None], rng: random.Random) -> Callable[[Send], None]:
    """The same work; half of the time it kills itself at some file operation."""
    if rng.random() < 0.5:
        return work
    calls = rng.choice((3, 10, 40, 150))
    left = rng.randint(1, calls)
    after = rng.random() < 0.5

    def dying(send: Send) -> None:
        _die_at_call(left, after=after)
        work(send)

    return dying


def _die_at_call(left: int, *, after: bool) -> None:
    """End this process by SIGKILL at its `left`-th file operation, before or right after it."""

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left <= 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = function(*args, **kwargs)
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call

    for name in FILE_CALLS:
        setattr(os, name, wrapped(getattr(os, name)))


def _collect(root: Path, send: Send, rng: random.Random) -> None:
    delete(Layout.open(root / "kvtier", create=False), rng.uniform(0.2, 0.9), send)


def _fsck(root: Path, send: Send, rng: random.Random) -> None:
    """What `kvtier fsck --rebuild-index --verify-payload` does."""
    layout = Layout.open(root / "kvtier", create=False)
    index = Index(layout)
    index.rebuild()
    index.save()
    found = check(layout, index, payload=True)
    with layout.lock():
        bury(layout, found.damaged)


def _save(root: Path, send: Send, rng: random.Random) -> None:
    Index(Layout.open(root / "kvtier", create=False)).save()


def _nothing_leaks(root: Path) -> list[str]:
    """After a collection nothing is left of what killed processes did not finish."""
    layout = Layout.open(root / "kvtier", create=False)
    os.utime(layout.segments)
    for scratch in layout.path.rglob(".*.tmp"):
        os.utime(scratch, (0, 0))  # as if it had been left a while ago
    index = Index(layout)
    collected = collect(layout, index, 0, grace=0.0)
    wrong = []
    if len(index):
        wrong.append(f"{len(index)} pages are left after everything was to go")
    left = [path.name for path in layout.path.rglob(".*.tmp")]
    payload = sum(path.stat().st_blocks * 512 for path in layout.segments.glob("*.kvs"))
    if left or payload or collected.after > MANIFEST_SLACK:
        wrong.append(f"left behind: {left[:5]}, {payload} payload, {collected.after} in all")
    return wrong
