"""File calls that fail, come short or never return, and what else may happen to a serving store.

Each scenario: pages are stored; the fault comes; puts, lookups and gets go on, raise nothing, and
end within their deadlines; no page is wrong; the fault is logged; it goes, and the service resumes
without a restart; a fresh process finds all that was ever promised.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import shutil
import signal
import tempfile
import time
from pathlib import Path

from powercut import shim
from powercut.bench import DEADLINE, Bench, Scenario, play
from powercut.process import Child
from powercut.result import Result
from powercut.shim import BLOCK, CREATE, DELAY, OPEN, READ, RENAME, SHORT, SYNC, WRITE, fault
from powercut.workload import Send

NOBODY = 65534

_SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Register a scenario under its name."""
    _SCENARIOS[function.__name__.strip("_").replace("_", " ")] = function
    return function


def _under(bench: Bench, *faults: tuple, quiet: bool = False) -> None:
    """Serve under faults, each (operation, path, keywords of `fault`)."""
    bench.fill()
    with contextlib.ExitStack() as stack:
        met = [
            stack.enter_context(fault(operation, path, slot=slot, **keywords))
            for slot, (operation, path, keywords) in enumerate(faults)
        ]
        bench.serve(2)
        deadline = time.monotonic() + 60
        while not any(one.met for one in met) and time.monotonic() < deadline:
            bench.serve(1)
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
    if os.geteuid() == 0:
        bench.close()
        for path in (bench.root, *(bench.root / "kvtier").rglob("*"), bench.root / "kvtier"):
            os.chown(path, NOBODY, NOBODY)
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
    """Each scenario `runs` times."""
    if not shim.in_preloaded_process():
        shim.start_again()
    result = Result("faults of file calls")
    result.figures["scenarios"] = len(_SCENARIOS)
    for number in range(runs):
        for name, scenario_ in _SCENARIOS.items():
            if runs == 1 and "thirty" in name:
                continue
            with tempfile.TemporaryDirectory(prefix="kvtier-faults-") as folder:
                play(scenario_, Path(folder), seed + number, name, result)
    shim.remove()
    return [result.done()]
