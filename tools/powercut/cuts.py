"""Power cuts below a file system: it is shut down at a random moment and mounted again."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

from kvtier.config import Config
from powercut.filesystem import (
    DEFAULT,
    LOGFLUSH,
    NOLOGFLUSH,
    FileSystem,
    make_image,
    private_mounts,
    work_folder,
)
from powercut.process import Child, checked, hear_all, hear_some
from powercut.result import Result
from powercut.workload import Oracle, settings, verify, write

LIFE = 20
"""Cuts that one file system lives through."""


def run(runs: int, seed: int, kinds: tuple[str, ...] = ("ext4", "xfs")) -> list[Result]:
    """`runs` cuts on each kind of file system."""
    private_mounts()
    return [_cuts(kind, runs, seed) for kind in kinds]


def _cuts(kind: str, runs: int, seed: int) -> Result:
    result = Result(f"power cut below {kind}")
    with work_folder() as folder:
        while result.runs < runs:
            system = FileSystem(kind, folder, make_image(kind, folder / "image"))
            try:
                _life(system, min(LIFE, runs - result.runs), f"{seed}/{result.runs}", result)
            finally:
                system.close()
    return result.done()


def _life(system: FileSystem, cuts: int, seed: str, result: Result) -> None:
    """Cut the power of one file system again and again; its store goes on each time."""
    rng = random.Random(seed)
    oracle = Oracle(rng.getrandbits(32))
    for number in range(cuts):
        name = f"{system.kind} {seed} cut {number}"
        lives = rng.choice(("one", "one", "two", "one after the other"))
        duties = rng.choice(((), (), ("collect",), ("save", "rebuild"), ("reopen",)))
        changes = {
            "direct_io": rng.random() < 0.75,
            "commit_interval": rng.choice((0.0, 0.005, 0.05)),
        }
        start = _writer(settings(system.path, **changes), oracle, rng.getrandbits(32))
        children = [start(duties)]
        if lives == "two":
            children.append(start(()))  # two servers that are asked the same
        hear_some(children, rng, oracle.hear)
        if lives == "one after the other":
            children[0].kill()  # what it had not synced is seen by the next one
            children[0].wait(oracle.hear)
            children.append(start(()))
            hear_some(children, rng, oracle.hear)
        system.cut(rng.choice((NOLOGFLUSH, NOLOGFLUSH, LOGFLUSH, DEFAULT)))
        hear_all(children, rng.choice((0.0, 0.01)), oracle.hear)
        for child in children:
            child.kill()
            status = child.wait(oracle.hear)
            if status not in (0, signal.SIGKILL) and not _only_os_errors(child.errors):
                result.fail(name, [f"a writer ended with {status}: {child.errors}"])
        oracle.settled()
        system.unmount()
        system.mount()
        wrong, parts = checked(lambda: verify(settings(system.path), oracle))
        result.runs += 1
        result.count("parts found exact", parts)
        result.fail(name, wrong)
        result.count("cuts with a promise", bool(oracle.promised))
        if wrong:
            break
    result.count("parts acknowledged", oracle.acknowledged)


def _writer(config: Config, oracle: Oracle, seed: int) -> Callable[[tuple[str, ...]], Child]:
    """Starts processes that write the same pages with these settings."""
    return lambda duties: Child(
        lambda send: write(config, oracle, send, random.Random(seed), duties=duties)
    )


def _only_os_errors(errors: list[str]) -> bool:
    """Collections and index saves may say that the drive is gone; StoreError on opening, too."""
    last = [text.strip().splitlines()[-1] for text in errors]
    return bool(last) and all("OSError" in line or "UnreachableError" in line for line in last)
