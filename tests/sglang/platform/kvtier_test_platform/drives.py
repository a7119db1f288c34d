"""A drive that is bad for one process of a server and well for the others.

The library of `tools/powercut/shim.c` is preloaded into the whole server, and each of its SGLang
processes takes orders for it over a socket: the file calls that fail or hang are the real ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from threading import Thread
from typing import Any

FOLDER = "TEST_DRIVES"
"""Environment variable with the folder of the sockets, each named by its process's id."""


def listen() -> None:
    """Take orders from now on, where the server was started with `preloaded`."""
    folder = os.environ.get(FOLDER)
    if folder is not None:
        address = str(Path(folder) / str(os.getpid()))
        Thread(target=_obey, args=(address,), name="test-drives", daemon=True).start()


def _obey(address: str) -> None:
    library = _declared(ctypes.CDLL(None))
    with Listener(address, "AF_UNIX") as listener:
        while True:
            with listener.accept() as caller:
                name, arguments = caller.recv()
                caller.send(getattr(library, name)(*arguments))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    number, text = ctypes.c_int, ctypes.c_char_p
    library.fault_set.argtypes = [*[number] * 4, ctypes.c_long, ctypes.c_double, text]
    library.fault_met.restype = ctypes.c_long
    return library


def preloaded(source: Path, folder: Path) -> dict[str, str]:
    """Environment of a server whose drives can be made bad. `folder`: an empty one, with a short
    path, since a socket's may have 107 characters."""
    library = folder / "shim.so"
    command = ["gcc", "-O1", "-fPIC", "-shared", "-w", "-U_FORTIFY_SOURCE", "-o", str(library)]
    subprocess.run([*command, str(source), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), FOLDER: str(folder)}


class Drive:
    """The drive as one process sees it."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._address = str(folder / str(pid))

    @contextlib.contextmanager
    def fault(
        self, operation: int, path: str, mode: int, *, error: int = 0, seconds: float = 0.0
    ) -> Iterator[None]:
        """Calls on files whose path has `path` in it meet the fault until the end of the block.

        `operation` and `mode` are those of `powercut.shim`. AssertionError if none met it.
        """
        self._call("fault_set", 0, operation, mode, error, -1, seconds, path.encode())
        try:
            yield
            assert self._call("fault_met", 0), "no file call met the fault"
        finally:
            self._call("fault_clear")

    def _call(self, name: str, *arguments: Any) -> Any:
        with Client(self._address, "AF_UNIX") as process:
            process.send((name, arguments))
            return process.recv()
