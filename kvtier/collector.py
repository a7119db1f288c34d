"""Collections beside a running server: when one is due, and a process of its own that makes it.

To choose what goes means to look at every page of the store, in seconds of Python for a large one.
A server's decode loop would stand still beside that in its own interpreter, so
`python -m kvtier.collector` does it, at low priority and once for all processes of a store.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvtier.collection import collect
from kvtier.complaints import Complaints
from kvtier.config import Config
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.quota import Quota, margin
from kvtier.sizes import format_size

AHEAD = 32
"""A collection frees one part in so many of the cap ahead; twice as much each time that commits had
to wait for the last one, up to a quarter of the cap."""

TAILS = 16
"""Superseded tails are dropped once tails of one part in so many of the store were written, but not
before 64 MiB of them, or when no more come for `IDLE_SECONDS`."""

TAIL_BYTES = 64 << 20
IDLE_SECONDS = 20.0

_FRUITLESS_SECONDS = 30.0
"""When there was nothing to free, it is not tried again for so long."""

_PAUSE_SECONDS = 1.0
"""From the end of one collection to the next."""

_NICENESS = 10

_BUSY = 75
"""Exit status while another process collects (EX_TEMPFAIL of sysexits.h)."""

logger = logging.getLogger("kvtier")


class Collector:
    """Starts collections. `due` and `start` are for the keeper's thread, the rest for others."""

    def __init__(self, layout: Layout, quota: Quota, config: Config) -> None:
        self.wake = threading.Event()
        """Set when `due` should be asked soon."""
        self._layout = layout
        self._quota = quota
        self._config = config
        self._complaints = Complaints()
        self._process: subprocess.Popen[bytes] | None = None
        self._done = threading.Condition()
        self._wanted = 0
        """Bytes that a commit waits for."""
        self._rounds = 0
        self._not_before = self._hopeless_until = 0.0
        self._tail_bytes = 0
        self._tails_at = 0.0
        self._doublings = 0

    def wrote_tails(self, size: int) -> None:
        """So many bytes of trailing pools were written."""
        self._tail_bytes += size
        self._tails_at = time.monotonic()

    def wait_for_space(self, size: int, timeout: float) -> bool:
        """Ask for so many bytes and wait for the end of a collection, but no longer than this;
        False if the last one found nothing to free."""
        with self._done:
            if time.monotonic() < self._hopeless_until:
                return False
            self._wanted, rounds = size, self._rounds
            self.wake.set()
            self._done.wait_for(lambda: self._rounds > rounds, timeout)
            return True

    def due(self) -> bool:
        """Whether it is time for a collection: then note what was used, and `start` it."""
        ready = self._process is None and time.monotonic() >= self._not_before
        return ready and self._needed()

    def close(self) -> None:
        """End a collection that is under way: what it logged counts, the rest stays."""
        self._not_before = math.inf
        process = self._process
        if process is not None:
            process.kill()  # what was stopped, or was started with SIGTERM ignored, ends as well
        with self._done:
            self._hopeless_until = math.inf
            self._rounds += 1
            self._done.notify_all()

    def _ahead(self, cap: int) -> int:
        return max(min(cap // 4, (cap // AHEAD) << self._doublings), 2 * self._wanted)

    def _needed(self) -> bool:
        standing = self._quota.standing()
        if self._wanted or standing.room < self._ahead(standing.cap) // 2:
            return True
        if not self._tail_bytes:
            return False
        idle = time.monotonic() - self._tails_at > IDLE_SECONDS
        return idle or self._tail_bytes > max(TAIL_BYTES, standing.used // TAILS)

    def start(self) -> None:
        """Start a collection."""
        self._doublings = min(8, self._doublings + 1) if self._wanted else self._doublings // 2
        standing = self._quota.measure()
        outstanding = standing.taken - standing.used
        room = margin(standing.cap) + outstanding + self._ahead(standing.cap)
        self._tail_bytes = 0
        # -P: the working directory may hold other modules of these names.
        words = [sys.executable or "python3", "-P", "-m", "kvtier.collector"]
        words += [str(self._layout.path), "--store", self._layout.store_id.hex()]
        words += ["--limit", str(max(0, standing.cap - room))]
        words += ["--grace", str(self._config.grace)]
        words += ["--tails", str(self._config.tails_per_chain)]
        words += ["--segment-size", str(self._config.segment_size)]
        named = vars(self._quota.limits).items()
        limits = {name: str(value) for name, value in named if value is not None}
        words += ["--limits", json.dumps(limits)]
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        except OSError as error:
            self._give_up_for_now()
            self._complaints.add("collector", f"cannot start a collection: {error}")
            return
        self._process = process
        follow = threading.Thread(target=self._follow, args=(process,), daemon=True)
        follow.name = "kvtier-collection"
        follow.start()

    def _give_up_for_now(self) -> None:
        later = time.monotonic() + _FRUITLESS_SECONDS
        self._hopeless_until = max(self._hopeless_until, later)
        self._not_before = max(self._not_before, later)

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for a collection's end and say what it did."""
        output, errors = process.communicate()
        self._not_before = max(self._not_before, time.monotonic() + _PAUSE_SECONDS)
        freed, enough = 0, False
        try:
            result = json.loads(output.splitlines()[-1])
            freed, enough, cut = int(result["freed"]), bool(result["enough"]), result["sessions"]
            if cut:
                size = format_size(freed)
                logger.info("kvtier: %s freed: %d sessions lost their end", size, int(cut))
            if result["fault"]:
                self._complaints.add("collector", f"a collection {result['fault']}")
        except (ValueError, LookupError, TypeError):
            closed = math.isinf(self._not_before)
            if process.returncode not in (_BUSY, -signal.SIGTERM) and not closed:
                lines = errors.decode(errors="replace").strip().splitlines() or ["no output"]
                self._complaints.add("collector", f"a collection failed: {lines[-1]}")
        self._quota.measure()
        with self._done:
            if process.returncode != _BUSY:
                if not enough and freed <= 0:
                    self._give_up_for_now()
                self._rounds += 1
                self._wanted = 0
            self._process = None
            self._done.notify_all()
        self.wake.set()


@contextlib.contextmanager
def alone(layout: Layout, *, wait: bool) -> Iterator[bool]:
    """Hold the right to collect, which one process of a store has at a time; False if another has
    it and `wait` is not set. It ends with the process."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(layout.index / "collecting", flags, 0o600)
    try:
        layout.adopt(layout.index / "collecting")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def main() -> None:
    """Make one collection and print what it did as JSON, unless another is at work."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.collector", description=main.__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--store", required=True, help="the store's id: no other is touched")
    parser.add_argument("--limit", type=int, required=True, help="bytes on disk to come under")
    parser.add_argument("--grace", type=float, required=True, help="seconds left to readers")
    parser.add_argument("--tails", type=int, required=True, help="most tails kept per chain")
    parser.add_argument("--limits", required=True, help="the store's limits, as settings in JSON")
    parser.add_argument("--segment-size", type=int, required=True, help="bytes of a segment")
    words = parser.parse_args()
    os.nice(_NICENESS)
    layout = Layout.open(words.root, create=False)
    if layout.store_id.hex() != words.store:
        sys.exit(f"another store is at {words.root} now")
    with alone(layout, wait=False) as mine:
        if not mine:
            sys.exit(_BUSY)
        done = collect(
            layout,
            Index(layout),
            words.limit,
            grace=words.grace,
            tails_per_chain=words.tails,
            limits=Config(**json.loads(words.limits)).limits,
            segment_size=words.segment_size,
        )
        result = {
            "freed": done.before - done.after,
            "enough": done.enough,
            "sessions": done.sessions,
            "fault": done.fault,
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
