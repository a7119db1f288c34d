"""What a store may take and write: the settings of each process, and over them the store's own
limits file, which a person changes while servers run."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.errors import ConfigError
from kvtier.layout import Layout, sync_directory
from kvtier.sizes import exact_size, parse_size

logger = logging.getLogger("kvtier")

FILE = "limits.json"

_LARGEST_FILE = 1 << 16
_SHARE = re.compile(r"(\d+(\.\d*)?|\.\d+)\s*%", re.ASCII)


@dataclass(frozen=True)
class Amount:
    """Bytes, or a share of the file system in percent."""

    bytes: int = 0
    percent: float | None = None

    def of(self, total: int) -> int:
        """Bytes, on a file system of `total` bytes."""
        return self.bytes if self.percent is None else int(total * self.percent / 100)

    def __str__(self) -> str:
        if self.percent is None:
            return exact_size(self.bytes)
        return f"{Decimal(str(self.percent)):f}".removesuffix(".0") + "%"


def parse_amount(value: object) -> Amount:
    """ "1000G" or a number of bytes, or "80%" of the file system. ConfigError for anything else."""
    if isinstance(value, Amount):
        return value
    if isinstance(value, str) and "%" in value:
        match = _SHARE.fullmatch(value.strip())
        if match is None or float(match[1]) > 100:
            raise ConfigError(f"{value!r} is not a share: give 0% to 100%, or a size like 1000G.")
        return Amount(percent=float(match[1]))
    try:
        return Amount(parse_size(value))  # type: ignore[arg-type]  # it refuses other types itself
    except ConfigError as error:
        raise ConfigError(f"{error} A share of the file system is written 80%.") from None


class Space(NamedTuple):
    """A file system: its size and what an ordinary user may still take of it, in bytes."""

    size: int
    free: int

    @classmethod
    def of(cls, path: Path) -> Space:
        """Of the file system that `path` lies on. OSError if it does not answer."""
        found = os.statvfs(path)
        return cls(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


class Cap(NamedTuple):
    """What the directory may take, in bytes, and the limit that says so."""

    bytes: int
    name: str


@dataclass(frozen=True)
class Limits:
    """The limits of a store as one process knows them. None: no such limit."""

    limit: Amount | None = None
    min_free: Amount = Amount(percent=5.0)
    daily_writes: int | None = None

    def cap(self, used: int, space: Space) -> Cap:
        """What the directory may take; `used`: bytes it takes of this file system already."""
        by_space = Cap(max(0, used + space.free - self.min_free.of(space.size)), "min_free")
        if self.limit is None:
            return by_space
        return min(Cap(self.limit.of(space.size), "limit"), by_space, key=lambda cap: cap.bytes)


Named = dict[str, Amount | int]
"""Limits by name, as a limits file has them: no name, no say."""

_PARSERS: dict[str, Callable[[Any], Amount | int]] = {
    "limit": parse_amount,
    "min_free": parse_amount,
    "daily_writes": parse_size,
}


def read_limits(layout: Layout) -> Named:
    """What the store's limits file says, {} without one.

    ConfigError, with the remedy, if it is damaged; OSError if it cannot be read.
    """
    path = layout.path / FILE
    try:
        with open(path, "rb", opener=_open_plain) as file:
            data = file.read(_LARGEST_FILE)
    except FileNotFoundError:
        return {}
    try:
        document = json.loads(data)
        return {name: _PARSERS[name](value) for name, value in document.items()}
    except ConfigError as error:
        reason = str(error).rstrip(".")
    except KeyError as error:
        reason = f"it names {error}, known are {', '.join(_PARSERS)}"
    except (ValueError, TypeError, AttributeError, RecursionError):
        reason = "it is not a JSON object"
    raise ConfigError(
        f"{path} is damaged and changes nothing for servers that run ({reason}): "
        "set the limits anew with `kvtier limit --set SIZE`, or remove them with --clear."
    )


def _open_plain(path: str, flags: int) -> int:
    """Follows no link and waits for no pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def write_limits(layout: Layout, named: Mapping[str, Amount | int]) -> None:
    """Replace the store's limits file, durably; without any name it is removed. OSError if that
    failed."""
    path = layout.path / FILE
    if not named:
        path.unlink(missing_ok=True)
        sync_directory(layout.path)
        return
    document = {
        name: str(value) if isinstance(value, Amount) else exact_size(value)
        for name, value in named.items()
    }
    layout.write_once(path, json.dumps(document, indent=2) + "\n")


class LimitsFile:
    """A process's settings under the store's limits file, kept up with it."""

    def __init__(self, layout: Layout, settings: Limits) -> None:
        self._layout = layout
        self._settings = settings
        self._seen: tuple[int, ...] = (-1,)
        self._unread: tuple[int, ...] = (-1,)
        self._limits = settings

    def current(self) -> Limits:
        """The limits that count; one call of stat unless the file was changed. Never raises: a file
        that is damaged, or being written, or cannot be read changes nothing, and is logged once
        for each of its changes. One that cannot be read is tried again each time."""
        try:
            status = (self._layout.path / FILE).lstat()
            seen: tuple[int, ...] = (status.st_ino, status.st_ctime_ns, status.st_size)
        except FileNotFoundError:
            seen = ()
        except OSError:
            return self._limits
        if seen != self._seen:
            try:
                self._limits = replace(self._settings, **read_limits(self._layout))  # type: ignore[arg-type]  # parsed by name
            except ConfigError as error:
                logger.error("kvtier: %s", error)
            except OSError as error:
                if seen != self._unread:
                    logger.error("kvtier: cannot read %s (%s)", self._layout.path / FILE, error)
                self._unread = seen
                return self._limits
            self._seen = seen
        return self._limits
