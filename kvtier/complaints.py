"""Log lines about faults: one per kind and interval, so that a bad drive does not fill the log."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict

logger = logging.getLogger("kvtier")

INTERVAL = 10.0
"""Seconds between two lines of one kind."""


class Complaints:
    """What was said when, and how often it was kept back. Safe to use from several threads."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self._interval = interval
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._kept: defaultdict[str, int] = defaultdict(int)

    def add(self, kind: str, text: str, error: BaseException | None = None) -> None:
        """Log `text`, with the traceback of `error` if given, or count it for the next line."""
        now = time.monotonic()
        with self._lock:
            if now - self._last.get(kind, -self._interval) < self._interval:
                self._kept[kind] += 1
                return
            self._last[kind] = now
            kept = self._kept.pop(kind, 0)
        more = f" ({kept} more like it)" if kept else ""
        logger.error("kvtier: %s%s", text, more, exc_info=error)
