"""Pinned chains, which go last when a store is over its limit: one small file each."""

from __future__ import annotations

import contextlib
import re
import stat
import time
from collections import defaultdict
from pathlib import Path

from kvtier.layout import Layout

_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{64})")

Pins = dict[bytes, dict[bytes, int]]
"""Namespace to page keys and the time in ns at which each was pinned."""


def pinned(layout: Layout) -> Pins:
    """All pins of a store. A pin holds a page and all pages before it."""
    found: Pins = defaultdict(dict)
    if layout.pins.is_dir():
        for path in layout.pins.iterdir():
            match = _NAME.fullmatch(path.name)
            with contextlib.suppress(FileNotFoundError):  # just unpinned
                if match and stat.S_ISREG((status := path.lstat()).st_mode):
                    namespace, key = bytes.fromhex(match[1]), bytes.fromhex(match[2])
                    found[namespace][key] = status.st_mtime_ns
    return dict(found)


def pin(layout: Layout, namespace: bytes, key: bytes) -> None:
    """Pin a page and all before it. OSError if that could not be made durable."""
    layout.pins.mkdir(mode=0o700, exist_ok=True)
    layout.adopt(layout.pins)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    layout.write_once(_path(layout, namespace, key), f"pinned {now}\n")


def unpin(layout: Layout, namespace: bytes, key: bytes) -> None:
    """Take a pin away; nothing happens without one."""
    _path(layout, namespace, key).unlink(missing_ok=True)


def _path(layout: Layout, namespace: bytes, key: bytes) -> Path:
    return layout.pins / f"{namespace.hex()}-{key.hex()}"
