"""Bad file systems, drives and memory below a serving store, each followed by a power cut."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import functools
import os
from pathlib import Path

from powercut import shim
from powercut.bench import Bench, Scenario, play
from powercut.filesystem import (
    NOLOGFLUSH,
    FileSystem,
    make_image,
    private_mounts,
    shut_down,
    work_folder,
)
from powercut.fuse import Drive
from powercut.result import Result
from powercut.shim import SYNC, fault

_MADV_PAGEOUT = 21


def run(runs: int, seed: int) -> list[Result]:
    """Each scenario `runs` times."""
    if not shim.in_preloaded_process():
        shim.start_again()
    private_mounts()
    techniques = (_real, _drives, _lost_sync, _memory)
    results = [technique(runs, seed) for technique in techniques]
    shim.remove()
    return results


def _on(
    system: FileSystem, scenario: Scenario, seed: int, result: Result, drive: Drive | None = None
) -> None:
    """Play on a file system, cut its power, mount it again and look."""

    def cut() -> None:
        if drive is not None:
            drive.controls.set(hang=0, read_error=0, write_error=0, flush_failures=0)
        with contextlib.suppress(OSError):  # it is down already
            system.cut()
        system.unmount()
        system.mount()

    name = f"{scenario.__name__.strip('_').replace('_', ' ')} on {system.kind}"
    play(scenario, system.path, seed, name, result, between=cut)


# File systems


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


def _goes_down(bench: Bench) -> None:
    """The file system goes down below a running server, which stays alive."""
    bench.fill()
    shut_down(bench.root, NOLOGFLUSH)
    bench.serve(6)
    bench.logged()


def _real(runs: int, seed: int) -> Result:
    result = Result("faults of real file systems")
    for number in range(runs):
        for kind in ("ext4", "xfs"):
            for scenario in (_full, _goes_down):
                with work_folder() as folder:
                    system = FileSystem(kind, folder)
                    try:
                        _on(system, scenario, seed + number, result)
                    finally:
                        system.close()
    return result.done()


# Drives


def _drives(runs: int, seed: int) -> Result:
    """A drive in user space fails or hangs below ext4: the kernel's own waits are the real ones."""
    result = Result("faults of a drive")
    for number in range(runs):
        for scenario in (_drive_fails, _drive_hangs, _drive_fails_once):
            with work_folder() as folder:
                drive = Drive(make_image("ext4", folder / "image"), folder)
                system = None
                try:
                    system = FileSystem("ext4", folder, drive.path)
                    there = functools.partial(scenario, drive=drive)
                    there.__name__ = scenario.__name__  # type: ignore[attr-defined]
                    _on(system, there, seed + number, result, drive)
                finally:
                    drive.controls.set(hang=0, read_error=0, write_error=0, flush_failures=0)
                    if system is not None:
                        system.close()
                    drive.close()
    return result.done()


def _drive_fails(bench: Bench, drive: Drive) -> None:
    """Reads and writes get EIO for good, and memory is short: nothing mapped stays by itself."""
    bench.fill()
    bench.close()
    bench.open()
    _page_out(bench.root)
    drive.controls.set(read_error=errno.EIO, write_error=errno.EIO)
    bench.serve(6)
    bench.logged()


def _drive_hangs(bench: Bench, drive: Drive) -> None:
    """The drive answers nothing for a while; threads that wait for it cannot even be killed."""
    bench.fill()
    _page_out(bench.root)
    drive.controls.set(hang=1)
    bench.serve()
    drive.controls.set(hang=0)
    bench.resumed()
    bench.logged()


def _drive_fails_once(bench: Bench, drive: Drive) -> None:
    """One flush fails; what the file system makes of it is its own matter."""
    bench.fill()
    drive.controls.set(flush_error=errno.EIO, flush_failures=1)
    bench.serve()


def _page_out(root: Path) -> None:
    """Take from memory what this process has mapped of the store, as the kernel does when memory
    is short, and what it has cached."""
    libc = ctypes.CDLL(None)
    for _ in range(3):
        os.sync()  # the kernel takes only clean pages that no processor is just handling
        for line in Path("/proc/self/maps").read_text().splitlines():
            if str(root) in line:
                start, end = (int(text, 16) for text in line.split()[0].split("-"))
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_PAGEOUT)
        Path("/proc/sys/vm/drop_caches").write_text("1")


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
                    scenario = functools.partial(sync_fails, path=path, after=number // 2 % 3)
                    scenario.__name__ = f"a sync of {path} fails"  # type: ignore[attr-defined]
                    _on(system, scenario, seed + number, result)
                finally:
                    system.close()
    return result.done()


# Memory


def _memory(runs: int, seed: int) -> Result:
    """A control group leaves less memory than is written: neither killed nor stalled."""
    result = Result("a limit of memory")
    groups = Path("/sys/fs/cgroup/memory")
    if not groups.is_dir():
        groups = Path("/sys/fs/cgroup")
    group = groups / f"kvtier-powercut-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        result.figures["not run"] = f"control groups cannot be made here: {error.strerror}"
        return result.done()
    limit = group / "memory.limit_in_bytes"
    limit = limit if limit.exists() else group / "memory.max"
    try:
        limit.write_text(str(48 << 20))
        for number in range(runs):
            with work_folder() as folder:
                system = FileSystem("xfs", folder)
                try:
                    scenario = functools.partial(_much, group=group)
                    scenario.__name__ = "more written than memory"  # type: ignore[attr-defined]
                    _on(system, scenario, seed + number, result)
                finally:
                    system.close()
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()
    return result.done()


def _much(bench: Bench, group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
    bench.close()
    for direct in (True, False):
        bench.config = dataclasses.replace(bench.config, direct_io=direct)
        bench.open()
        numbers = []
        for _ in range(50):
            numbers.append(bench.put(128))
            bench.store.flush(60)
        for number in numbers:
            bench.look(number)
        bench.close()
    bench.open()
    bench.resumed()
    (group.parent / "cgroup.procs").write_text(str(os.getpid()))
