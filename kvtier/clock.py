"""The store's clock: stamps that only go forward, over processes, restarts and a wrong clock.

What was used last is decided by stamps. The system's clock may be hours ahead when a machine starts
and be set back later, and a session must not stay, or go, because of that.
"""

from __future__ import annotations

import threading
import time

_LARGEST = 1 << 62
"""A stamp from here on, after the year 2116, is damage or nonsense, and nothing goes by it."""


class Clock:
    """Nanoseconds since 1970 as the system says, unless that is behind a stamp that was given or
    seen before: then it goes on from there. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._at = time.monotonic_ns()
        """When that was, on a clock that nobody sets."""

    def now(self) -> int:
        """A stamp greater than all before."""
        with self._lock:
            at = time.monotonic_ns()
            self._last = max(time.time_ns(), self._last + max(1, at - self._at))
            self._at = at
            return self._last

    def saw(self, stamp: int) -> None:
        """Somebody gave this stamp before now."""
        with self._lock:
            at = time.monotonic_ns()
            if self._last + at - self._at < stamp < _LARGEST:
                self._last, self._at = stamp, at
