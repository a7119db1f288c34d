"""Where a server listens: whether that is free before a start, and the server's own afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError, KvtierError
from kvtier.integration.launcher.command import Command

_LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""


@dataclass(frozen=True)
class Address:
    """Host and port of SGLang's HTTP server."""

    host: str
    port: int
    scheme: str = "http"

    @classmethod
    def of(cls, command: Command) -> Address:
        """Where the command makes SGLang listen. ConfigError for a port that is none."""
        port = command.value("port") or "30000"
        if not (port.isdecimal() and 0 < int(port) < 2**16):
            raise ConfigError(f"--port {port}: give a number from 1 to 65535.")
        scheme = "https" if command.value("ssl-certfile") else "http"
        return cls(command.value("host") or "127.0.0.1", int(port), scheme)

    @property
    def url(self) -> str:
        """For a client on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def check_free(self) -> None:
        """KvtierError, with the remedy, if a server could not listen here now."""
        try:
            found = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except (OSError, UnicodeError):
            raise KvtierError(
                f"--host {self.host} is no address of this machine: give 127.0.0.1 or 0.0.0.0."
            ) from None
        failed = [error for family, *_, where in found if (error := _bind(family, where))]
        for error in failed:
            if error.errno == errno.EADDRINUSE:
                raise KvtierError(
                    f"Another process has port {self.port} of {self.host}: stop it, or give "
                    "another port after --, as in -- --port 30001."
                )
            if error.errno in (errno.EACCES, errno.EPERM):
                raise KvtierError(
                    f"You may not open port {self.port}: give one above 1023 after --, as in "
                    "-- --port 30000."
                )
        if len(failed) == len(found):
            raise KvtierError(
                f"--host {self.host} is no address of this machine ({failed[0].strerror}): give "
                "127.0.0.1 or 0.0.0.0."
            )

    def is_anothers(self, leader: int) -> bool:
        """Whether the port is listened on, and by no process of the session that `leader` leads.
        False where /proc does not tell."""
        sockets = _listening(self.port)
        return bool(sockets) and sockets.isdisjoint(_sockets(leader))


def _bind(family: int, where: tuple[object, ...]) -> OSError | None:
    """What keeps a server from this address; as asyncio, which also takes one in TIME_WAIT."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(where)
    except OSError as error:
        return error
    return None


def _listening(port: int) -> set[str]:
    """Inodes of the sockets that listen on the port, at whatever address."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


def _sockets(leader: int) -> set[str]:
    """Inodes of the sockets that processes of the session have open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.getsid(int(process.name)) == leader:
                for file in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        found.add(str(file.readlink()).removeprefix("socket:[").rstrip("]"))
    return found
