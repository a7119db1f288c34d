"""Bad drives, full disks, missing rights, hanging calls: each while a store serves.

Each scenario: pages are stored; the fault comes; puts, lookups and gets go on, raise nothing, and
end within their deadlines; no page is wrong; the fault is logged; it goes, and the service resumes
without a restart; a fresh process finds all that was ever promised.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier import breaker
from kvtier.store import Store
from powercut import shim
from powercut.filesystem import NOLOGFLUSH, FileSystem, private_mounts, work_folder
from powercut.process import Child, checked
from powercut.result import Result
from powercut.shim import BLOCK, CREATE, DELAY, OPEN, READ, RENAME, SHORT, SYNC, WRITE, fault
from powercut.workload import (
    IDENTITY,
    KV,
    POOLS,
    Oracle,
    Send,
    get,
    put_family,
    report,
    settings,
    verify,
)

DEADLINE = 0.5
"""Read and put deadline of the stores here, in seconds."""

PATIENCE = 30.0
"""No call may take so long: the deadline, and all that a busy machine may add."""

NOBODY = 65534


class Bench:
    """A store that serves while something is wrong with its drive."""

    def __init__(self, root: Path, send: Send, seed: int, **changes: Any) -> None:
        self.root, self.send = root, send
        self.rng = random.Random(seed)
        self.oracle = Oracle(seed)
        values: dict[str, Any] = {"read_deadline": DEADLINE, "put_deadline": DEADLINE}
        self.config = settings(root, **(values | changes))
        self.wrong: list[str] = []
        self.log: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = self.log.append  # type: ignore[method-assign]
        logging.getLogger("kvtier").addHandler(handler)
        logging.getLogger("kvtier").propagate = False
        breaker.FIRST_PAUSE = 0.2  # not what is tested here, and there are many scenarios
        self.open()

    def open(self) -> None:
        self.store = Store.open(self.config)
        self.pages = self.store.namespace(IDENTITY, KV.column(0))

    def timed(self, call: Callable[[], Any], what: str) -> Any:
        """The call's answer; what it raised, and a hang, is a violation."""
        began = time.monotonic()
        try:
            return call()
        except Exception as error:  # nothing may leave a call: the engine is not at fault
            self.wrong.append(f"{what} raised {type(error).__name__}: {error}")
        finally:
            took = time.monotonic() - began
            if took > PATIENCE:
                self.wrong.append(f"{what} took {took:.1f} s")

    def put(self, pages: int = 12) -> int:
        """Put a new chain; its number."""
        number = len(self.oracle.chains)
        plan = {"say": "put", "chain": number, "stem": 0, "fork": 0, "start": 0, "end": pages}
        self.send(plan)
        self.oracle.hear(plan)
        self.timed(lambda: put_family(self.pages, 0, self.oracle, plan), "put")
        return number

    def look(self, number: int) -> None:
        """Look a chain up, promise what is shown, and read it."""
        keys = self.oracle.keys(number)

        def tell(message: dict[str, Any]) -> None:
            self.send(message)
            self.oracle.hear(message)

        self.timed(
            lambda: report(self.store, self.pages, 0, self.oracle, number, tell), "a lookup"
        )
        for pool in POOLS:
            answer = self.timed(functools.partial(get, self.pages, 0, pool, keys), "a get")
            if answer is not None:
                self.wrong += answer[1]

    def fill(self) -> None:
        """Chains that are committed before anything goes wrong."""
        for _ in range(3):
            self.put()
        if not self.store.flush(60):
            self.wrong.append("nothing was committed before the fault")
        for number in range(3):
            self.look(number)
        self.log.clear()

    def serve(self, rounds: int = 3) -> None:
        """What an engine does meanwhile."""
        for _ in range(rounds):
            number = self.put()
            self.timed(lambda: self.store.flush(DEADLINE), "a flush")
            self.look(number)
            self.look(self.rng.randrange(3))

    def resumed(self) -> None:
        """The fault has gone: soon a new chain is stored and read, and old ones are there."""
        deadline = time.monotonic() + 60
        while True:
            number = self.put()
            self.store.flush(5)
            keys = self.oracle.keys(number)
            there = all(
                self.pages.contains(pool.column(0), keys)[-1:].all()
                and get(self.pages, 0, pool, keys[-1:])[0].all()
                for pool in POOLS
            )
            if there:
                break
            if time.monotonic() > deadline:
                self.wrong.append("the service did not resume within 60 s")
                break
            time.sleep(0.1)
        self.look(number)

    def logged(self, *, most: int = 12) -> None:
        """The fault was said, in lines a person can read, and not over and over."""
        lines = [record for record in self.log if record.levelno >= logging.WARNING]
        if not lines:
            self.wrong.append("nothing was logged")
        if len(lines) > most:
            texts = [record.getMessage() for record in lines]
            self.wrong.append(f"{len(lines)} lines were logged: {texts[:3]}")
        for record in lines:
            if record.exc_info:
                self.wrong.append(f"a traceback was logged: {record.exc_info[1]!r}")

    def close(self) -> None:
        self.timed(lambda: self.store.close(10), "close")


Scenario = Callable[[Bench], None]
_SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Register a scenario under its name."""
    _SCENARIOS[function.__name__.strip("_").replace("_", " ")] = function
    return function


def _under(bench: Bench, *faults: tuple, quiet: bool = False, **settings_: Any) -> None:
    """Serve under faults, each (operation, path, keywords of `fault`)."""
    bench.fill()
    with contextlib.ExitStack() as stack:
        met = [
            stack.enter_context(fault(operation, path, slot=slot, **keywords))
            for slot, (operation, path, keywords) in enumerate(faults)
        ]
        bench.serve()
        if not any(one.met for one in met):
            bench.wrong.append("the fault was never met")
    bench.resumed()
    if not quiet:
        bench.logged()


for _name, _number in (
    ("EIO", errno.EIO), ("ENOSPC", errno.ENOSPC), ("EDQUOT", errno.EDQUOT), ("EROFS", errno.EROFS),
):  # fmt: skip
    for _what, _path in (("payload", ".kvs"), ("manifests", ".kvm")):
        _SCENARIOS[f"{_name} writing {_what}"] = functools.partial(
            lambda bench, path, number: _under(bench, (WRITE, path, {"error": number})),
            path=_path, number=_number,
        )  # fmt: skip
    _SCENARIOS[f"{_name} creating files"] = functools.partial(
        lambda bench, number: _under(
            bench,
            (CREATE, "kvtier/", {"error": number}),
            (WRITE, ".kvs", {"error": number}),
        ),
        number=_number,
    )

for _what, _path in (("payload", ".kvs"), ("manifests", ".kvm")):
    for _times, _often in ((1, "once"), (-1, "always")):
        _SCENARIOS[f"a sync of {_what} fails {_often}"] = functools.partial(
            lambda bench, path, times: _under(
                bench, (SYNC, path, {"error": errno.EIO, "times": times})
            ),
            path=_path, times=_times,
        )  # fmt: skip


@scenario
def short_writes(bench: Bench) -> None:
    _under(bench, (WRITE, "/segments/", {"mode": SHORT, "times": 40}), quiet=True)


@scenario
def short_reads(bench: Bench) -> None:
    _under(bench, (READ, ".kvs", {"mode": SHORT, "times": 5}), quiet=True)


@scenario
def reads_fail_once(bench: Bench) -> None:
    _under(bench, (READ, ".kvs", {"error": errno.EIO, "times": 1}))


@scenario
def reads_fail_always(bench: Bench) -> None:
    _under(bench, (READ, ".kvs", {"error": errno.EIO}))


@scenario
def segments_may_not_be_opened(bench: Bench) -> None:
    _under(bench, (OPEN, ".kvs", {"error": errno.EACCES}))


@scenario
def too_many_open_files(bench: Bench) -> None:
    _under(bench, (OPEN, "kvtier/", {"error": errno.EMFILE}), quiet=True)


@scenario
def manifests_cannot_be_read(bench: Bench) -> None:
    _under(bench, (READ, ".kvm", {"error": errno.EIO}), quiet=True)


@scenario
def the_index_cannot_be_saved(bench: Bench) -> None:
    bench.fill()
    for operation in (RENAME, WRITE, SYNC):
        with fault(operation, "/index/", error=errno.ENOSPC):
            bench.close()
        bench.open()
        for number in range(3):
            bench.look(number)
    bench.logged()
    bench.resumed()


@scenario
def a_read_never_returns(bench: Bench) -> None:
    _under(bench, (READ, ".kvs", {"mode": BLOCK}))


@scenario
def opening_never_returns(bench: Bench) -> None:
    _under(bench, (OPEN, ".kvs", {"mode": BLOCK}))


@scenario
def a_write_never_returns(bench: Bench) -> None:
    _under(bench, (WRITE, ".kvs", {"mode": BLOCK}), quiet=True)


@scenario
def a_sync_never_returns(bench: Bench) -> None:
    _under(bench, (SYNC, ".kvm", {"mode": BLOCK}), quiet=True)


@scenario
def a_slow_drive(bench: Bench) -> None:
    """Every read and sync takes longer than the deadline."""
    slow = {"mode": DELAY, "seconds": 2 * DEADLINE}
    _under(bench, (READ, ".kvs", slow), (SYNC, ".kvs", slow))


@scenario
def a_drive_that_takes_thirty_seconds(bench: Bench) -> None:
    bench.fill()
    slow = {"mode": DELAY, "seconds": 30.0}
    with fault(READ, ".kvs", **slow, times=2), fault(WRITE, ".kvs", **slow, times=1, slot=1):
        bench.serve()
    bench.resumed()
    bench.logged()


@scenario
def a_collection_is_stopped(bench: Bench) -> None:
    """Another process holds the store's lock and does not go on."""
    bench.fill()
    layout = bench.store.layout

    def hold(send: Send) -> None:
        with layout.lock():
            send({"say": "held"})
            signal.pause()

    holder = Child(hold)
    heard: list[dict] = []
    while not heard and not holder.ended:
        holder.listen(0.1, heard.append)
    bench.serve()
    holder.kill()
    holder.wait()
    bench.resumed()


@scenario
def the_directory_is_removed(bench: Bench) -> None:
    bench.fill()
    bench.send({"say": "deleting"})
    shutil.rmtree(bench.root / "kvtier")
    bench.serve()
    bench.logged()
    bench.close()
    bench.open()
    bench.resumed()


@scenario
def segments_are_removed(bench: Bench) -> None:
    bench.fill()
    bench.send({"say": "deleting"})
    for path in (bench.root / "kvtier" / "segments").iterdir():
        path.unlink()
    bench.serve()
    bench.resumed()


@scenario
def rights_are_taken(bench: Bench) -> None:
    """As a user without privileges: directories lose all their rights, and get them back."""
    bench.close()
    os.chmod(bench.root, 0o777)
    for path in (bench.root / "kvtier").rglob("*"):
        os.chown(path, NOBODY, NOBODY)
    os.chown(bench.root / "kvtier", NOBODY, NOBODY)
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    bench.open()
    bench.fill()
    folders = [bench.root / "kvtier" / name for name in ("segments", "index", "")]
    for folder in folders:
        folder.chmod(0)
    bench.serve()
    for folder in reversed(folders):
        folder.chmod(0o700)
    bench.resumed()


@scenario
def the_clock_goes_back(bench: Bench) -> None:
    bench.fill()
    now = time.time_ns
    steps = iter(range(10**9))
    time.time_ns = lambda: now() - next(steps) * 3600 * 10**9  # an hour with every look at it
    bench.serve()
    bench.close()
    bench.open()
    bench.serve()
    time.time_ns = now
    bench.resumed()


@scenario
def file_sizes_are_limited(bench: Bench) -> None:
    """RLIMIT_FSIZE: writes behind it fail with EFBIG."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    bench.fill()
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
    bench.serve(6)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    bench.resumed()
    bench.logged()


def run(runs: int, seed: int) -> list[Result]:
    """Each scenario `runs` times, those with real file systems included."""
    if not shim.in_preloaded_process():
        shim.start_again()
    private_mounts()
    results = [_scenarios(runs, seed), _real(runs, seed), _lost_sync(runs, seed)]
    shutil.rmtree(os.environ["POWERCUT_SHIM"], ignore_errors=True)
    return results


def _scenarios(runs: int, seed: int) -> Result:
    result = Result("faults of file calls")
    result.figures["scenarios"] = len(_SCENARIOS)
    for number in range(runs):
        for name, play in _SCENARIOS.items():
            if runs == 1 and "thirty" in name:
                continue
            with tempfile.TemporaryDirectory(prefix="kvtier-faults-") as folder:
                _played(play, Path(folder), seed + number, name, result)
    return result.done()


def _played(
    play: Scenario, root: Path, seed: int, name: str, result: Result, **changes: Any
) -> Oracle:
    """Play a scenario in a process of its own, then look from a fresh one."""
    oracle = Oracle(seed)
    said: list[dict] = []

    def hear(message: dict) -> None:
        (said.append if message["say"] == "played" else oracle.hear)(message)

    def work(send: Send) -> None:
        bench = Bench(root, send, seed, **changes)
        play(bench)
        bench.close()
        send({"say": "played", "wrong": bench.wrong, "lines": len(bench.log)})

    child = Child(work)
    status = child.wait(hear)
    result.runs += 1
    if not said:
        result.fail(name, [f"the process ended with status {status}: {child.errors}"])
    else:
        result.fail(name, said[0]["wrong"])
    oracle.settled()
    wrong, parts = checked(lambda: verify(settings(root), oracle))
    result.fail(f"{name}, afterwards", wrong)
    result.count("parts found exact", parts)
    return oracle


# Real file systems


def _full(bench: Bench) -> None:
    """The disk is really full, then gets room."""
    bench.fill()
    ballast = bench.root / "ballast"
    with ballast.open("wb") as file, contextlib.suppress(OSError):
        while True:
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, 1 << 20)
    with ballast.with_name("crumbs").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    bench.serve(6)
    ballast.unlink()
    bench.resumed()
    bench.logged()


def _shut_down(bench: Bench) -> None:
    """The file system goes down below a running server, which stays alive."""
    bench.fill()
    import fcntl
    import struct

    fd = os.open(bench.root, os.O_RDONLY)
    fcntl.ioctl(fd, 0x8004587D, struct.pack("<I", NOLOGFLUSH))
    os.close(fd)
    bench.serve(6)
    bench.logged()


def _real(runs: int, seed: int) -> Result:
    result = Result("faults of real file systems")
    for number in range(runs):
        for kind in ("ext4", "xfs"):
            for play in (_full, _shut_down):
                with work_folder() as folder:
                    system = FileSystem(kind, folder)
                    try:
                        _on(system, play, seed + number, result)
                    finally:
                        system.close()
    return result.done()


def _on(system: FileSystem, play: Scenario, seed: int, result: Result) -> None:
    oracle = Oracle(seed)
    said: list[dict] = []

    def hear(message: dict) -> None:
        (said.append if message["say"] == "played" else oracle.hear)(message)

    def work(send: Send) -> None:
        bench = Bench(system.path, send, seed)
        play(bench)
        send({"say": "played", "wrong": bench.wrong})

    name = f"{play.__name__.strip('_').replace('_', ' ')} on {system.kind}"
    child = Child(work)
    status = child.wait(hear)
    result.runs += 1
    if said:
        result.fail(name, said[0]["wrong"])
    else:
        result.fail(name, [f"the process ended with status {status}: {child.errors}"])
    oracle.settled()
    with contextlib.suppress(OSError):
        system.cut()
    system.unmount()
    system.mount()
    wrong, parts = checked(lambda: verify(settings(system.path), oracle))
    result.fail(f"{name}, after a power cut", wrong)
    result.count("parts found exact", parts)


def _lost_sync(runs: int, seed: int) -> Result:
    """A sync fails once, later ones work, the power is cut: nothing may have been promised that
    only the failed sync stood for."""
    result = Result("a failed sync, then a power cut")

    def sync_fails(bench: Bench, path: str, after: int) -> None:
        bench.fill()
        for _ in range(after):
            bench.serve(1)
        with fault(SYNC, path, error=errno.EIO, times=1) as met:
            bench.serve(2)
            if not met.met:
                bench.wrong.append("no sync failed")
        bench.serve(2)

    for number in range(5 * runs):
        path = (".kvs", ".kvm")[number % 2]
        for kind in ("ext4", "xfs"):
            with work_folder() as folder:
                system = FileSystem(kind, folder)
                try:
                    play = functools.partial(sync_fails, path=path, after=number // 2 % 3)
                    play.__name__ = f"a sync of {path} fails"  # type: ignore[attr-defined]
                    _on(system, play, seed + number, result)
                finally:
                    system.close()
    return result.done()
