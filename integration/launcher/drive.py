"""How fast the store's drive is, measured in a moment before a start."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvtier.errors import KvtierError

_THREADS = 4  # as many reads at a time as the store has (read_threads)
_SAMPLE = 64 * 2**20
_PIECE = 4 * 2**20


@dataclass(frozen=True)
class Speed:
    """The store's drive, measured. Bytes a second, seconds, bytes."""

    read: float
    sync: float
    free: int
    direct: bool
    """Whether the file system takes O_DIRECT."""


def measure(store: Path) -> Speed:
    """Write, sync and read back 64 MiB beside the store. KvtierError if that cannot be done."""
    place = store
    while not place.exists() and place != place.parent:
        place = place.parent
    scratch = place / f".kvtier-launch-{os.getpid()}.tmp"
    try:
        return _measured(scratch)
    except OSError as error:
        raise KvtierError(
            f"The store's drive ({place}) cannot be used: {error.strerror}."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def _measured(scratch: Path) -> Speed:
    piece = memoryview(mmap.mmap(-1, _PIECE))  # aligned, as O_DIRECT needs it
    piece[:] = os.urandom(_PIECE)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    direct = True
    try:
        file = os.open(scratch, flags | os.O_DIRECT, 0o600)
    except OSError:
        direct = False
        scratch.unlink(missing_ok=True)  # some file systems create it and then refuse
        file = os.open(scratch, flags, 0o600)
    try:
        for offset in range(0, _SAMPLE, _PIECE):
            os.pwrite(file, piece, offset)
        os.fdatasync(file)
        syncs = []
        for _ in range(5):
            began = time.perf_counter()
            os.pwrite(file, piece[:4096], 0)
            os.fdatasync(file)
            syncs.append(time.perf_counter() - began)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(partial(_read, file), range(_THREADS)))
        seconds = time.perf_counter() - began
        system = os.fstatvfs(file)
    finally:
        os.close(file)
    free = system.f_bavail * system.f_frsize
    return Speed(_SAMPLE / seconds, sorted(syncs)[2], free, direct)


def _read(file: int, number: int) -> None:
    """This thread's quarter of the sample."""
    piece = mmap.mmap(-1, _PIECE)
    part = _SAMPLE // _THREADS
    for offset in range(number * part, (number + 1) * part, _PIECE):
        os.preadv(file, [piece], offset)
