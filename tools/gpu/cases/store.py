"""The files of a tier, seen from outside."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from kvtier.integration.probes import restore

STILL = 1.5
"""Seconds without a change after which a tier counts as having written everything."""


class Size(NamedTuple):
    files: int
    bytes: int


def size(store: Path) -> Size:
    """Files and the bytes of disk that they take."""
    found = []
    for path in store.rglob("*"):
        try:
            if path.is_file():
                found.append(path.stat().st_blocks * 512)
        except FileNotFoundError:
            continue  # replaced meanwhile
    return Size(len(found), sum(found))


def settle(store: Path, timeout: float = 60) -> tuple[Size, float]:
    """Wait until the tier is still; what it holds, and the seconds it went on writing."""
    began = changed = time.monotonic()
    last = size(store)
    while time.monotonic() - changed < STILL and time.monotonic() - began < timeout:
        time.sleep(0.1)
        now = size(store)
        if now != last:
            last, changed = now, time.monotonic()
    return last, changed - began


def forget(store: Path) -> None:
    """Drop the page cache of the tier's files, so that reads come from the drive."""
    os.sync()
    restore.forget(store)
