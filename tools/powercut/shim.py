"""Faults on the real code path: a preloaded library fails or holds up this process's file calls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from powercut.filesystem import LabError

OPEN, READ, WRITE, SYNC, RENAME, UNLINK, TRUNCATE, CREATE = range(8)
FAIL, SHORT, BLOCK, DELAY = 1, 2, 3, 4

_LOADED = "POWERCUT_SHIM"


def in_preloaded_process() -> bool:
    """Whether the library is loaded here."""
    return _LOADED in os.environ


def start_again() -> None:
    """Replace this process by one that has the library loaded. LabError if it cannot be built."""
    folder = tempfile.mkdtemp(prefix="kvtier-shim-")
    library = Path(folder) / "shim.so"
    source = Path(__file__).with_name("shim.c")
    command = ["gcc", "-O1", "-fPIC", "-shared", "-w", "-U_FORTIFY_SOURCE"]
    try:
        subprocess.run([*command, "-o", str(library), str(source), "-ldl"], check=True)
    except FileNotFoundError:
        raise LabError("gcc is missing: apt-get install gcc libc6-dev") from None
    environment = os.environ | {"LD_PRELOAD": str(library), _LOADED: folder}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def remove() -> None:
    """Remove the library's file; what has it loaded keeps it."""
    shutil.rmtree(os.environ[_LOADED], ignore_errors=True)


@contextlib.contextmanager
def fault(
    operation: int,
    path: str = "",
    *,
    mode: int = FAIL,
    error: int = 0,
    times: int = -1,
    seconds: float = 0.0,
    slot: int = 0,
) -> Iterator[Fault]:
    """What happens to calls on files whose path has `path` in it, until the end of the block."""
    library = ctypes.CDLL(None)
    library.fault_set(
        slot, operation, mode, error, ctypes.c_long(times), ctypes.c_double(seconds), path.encode()
    )
    try:
        yield Fault(slot)
    finally:
        library.fault_clear()


class Fault:
    """A fault that is set."""

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self._library = ctypes.CDLL(None)
        self._library.fault_met.restype = self._library.fault_held.restype = ctypes.c_long

    @property
    def met(self) -> int:
        """Calls that met it."""
        return int(self._library.fault_met(self._slot))

    @property
    def held(self) -> int:
        """Calls that it holds up now."""
        return int(self._library.fault_held(self._slot))

    def wait_until_held(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not self.held:
            if time.monotonic() > deadline:
                raise TimeoutError("no call was held up")
            time.sleep(0.001)
