"""What each running process says of itself, for `inspect`: a small file, locked while it runs."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass, fields

from kvtier.layout import Layout

PREFIX = "status-"

_SIZE = 4096
"""The file is written in place with one call of this size, so that readers see a whole one."""


@dataclass(frozen=True)
class Status:
    """One process at one moment. Times in seconds, sizes in bytes."""

    pid: int
    host: str
    updated_ns: int
    uncommitted_bytes: int
    uncommitted_tokens: int
    uncommitted_seconds: float
    """Age of the oldest page that is not durable yet; 0 without one."""
    failures: int
    """Batches that could not be made durable since the start."""
    reads_stopped: str
    """Why no reads are tried now; empty if they are."""
    writes_stopped: str
    cap_bytes: int | None = None
    """What the store may take as this process knows its limits."""
    cap_by: str = ""
    """The limit that says so."""


class StatusFile:
    """This process's file. Nothing here raises: a status is never worth a fault."""

    def __init__(self, layout: Layout, name: str) -> None:
        self._path = layout.index / f"{PREFIX}{name}.json"
        self._fd = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            layout.adopt(self._path)
        except OSError:
            self.close()

    def write(self, **values: object) -> None:
        """Replace what the file says."""
        if self._fd < 0:
            return
        about = {"pid": os.getpid(), "host": socket.gethostname(), "updated_ns": time.time_ns()}
        text = json.dumps(about | values)[:_SIZE]
        try:
            os.pwrite(self._fd, text.ljust(_SIZE).encode(), 0)
        except OSError:
            self.close()

    def close(self) -> None:
        """Remove the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            try:
                self._path.unlink()
            except OSError:
                pass  # it is not locked any more, so nobody believes it


def statuses(layout: Layout) -> list[Status]:
    """What running processes say. Files of processes that died are passed over."""
    found = []
    for path in sorted(layout.index.glob(f"{PREFIX}*.json")):
        try:
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    values = json.loads(file.read(_SIZE))
                    known = (field.name for field in fields(Status) if field.name in values)
                    found.append(Status(**{name: values[name] for name in known}))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def remove_dead(layout: Layout) -> None:
    """Remove the files of processes that died."""
    for path in layout.index.glob(f"{PREFIX}*.json"):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        except OSError:
            continue  # alive, or somebody else was faster
