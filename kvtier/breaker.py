"""Keeps a failing drive from being asked again and again: the engine should not wait for it."""

from __future__ import annotations

import logging
import threading
import time

from kvtier import telemetry

logger = logging.getLogger("kvtier")

FAILURES = 3
"""Failures in a row after which a breaker opens; one read past its deadline, or a put
that found no room in staging by its own, is enough."""

FIRST_PAUSE = 5.0
LONGEST_PAUSE = 60.0
"""Seconds between trials: doubled after every trial that fails."""


class Breaker:
    """Closed: all goes through. Open: nothing does, until a pause is over; then one trial does, and
    how it ends decides. Safe to use from several threads."""

    def __init__(self, side: str) -> None:
        self.side = side
        """"reads" or "writes"."""
        self.reason = ""
        """What opened it; empty while it is closed."""
        self.recoveries = 0
        """Times it has closed again."""
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._next_trial = 0.0
        self._lock = threading.Lock()
        telemetry.BREAKER_OPEN.labels(side).set(0)

    @property
    def open(self) -> bool:
        """Whether calls are refused, trials aside."""
        return bool(self.reason)

    def allows(self) -> bool:
        """Whether a call may go to the drive now. While open, True is a trial."""
        if not self.reason:
            return True
        with self._lock:
            now = time.monotonic()
            if now < self._next_trial:
                return False
            self._next_trial = now + self._pause
            return True

    def ready(self) -> bool:
        """Whether a call may go to the drive, or a trial is due. Claims nothing."""
        return not self.reason or time.monotonic() >= self._next_trial

    def passed(self) -> None:
        """The drive did what it was asked."""
        if not (self._failures or self.reason):
            return
        with self._lock:
            was_open = bool(self.reason)
            self._failures, self._pause, self.reason = 0, FIRST_PAUSE, ""
            self.recoveries += was_open
            telemetry.BREAKER_OPEN.labels(self.side).set(0)
        if was_open:
            logger.warning("kvtier: %s work again", self.side)

    def failed(self, reason: str, *, at_once: bool = False) -> None:
        """The drive failed. `at_once`: once is enough to open."""
        with self._lock:
            self._failures = FAILURES if at_once else self._failures + 1
            if self._failures < FAILURES:
                return
            was_open = bool(self.reason)
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if was_open else FIRST_PAUSE
            self._next_trial = time.monotonic() + self._pause
            self.reason = reason
            telemetry.BREAKER_OPEN.labels(self.side).set(1)
        if not was_open:
            logger.error(
                "kvtier: no more %s for now (%s); tried again every %g to %g s",
                self.side,
                reason,
                FIRST_PAUSE,
                LONGEST_PAUSE,
            )
