"""One cap for the store's directory over all its processes: space is reserved before it is
written.

Why the cap holds. Call what the directory takes U, and what processes were granted and have not
written yet O. U + O grows by grants only, and every grant is counted. A measurement reads O first
and walks the directory then, so what was written meanwhile is counted twice and nothing is missed;
what was granted since O was read is added. So `Account.taken` is never less than U + O, and no
grant lets it pass the cap. What others put into the directory is seen at the next measurement.

The limits are looked at within every grant and before what was granted ahead is used. So once
`Account.taken` leaves a lowered cap its margin, the cap holds, whatever was granted before; and a
store that is below a cap when it is lowered passes it by no more than what was reserved for writes
under way.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from kvtier.backends.local import disk_usage
from kvtier.complaints import Complaints
from kvtier.layout import Layout
from kvtier.ledger import Account, Busy, Ledger
from kvtier.limits import Limits, LimitsFile, Space
from kvtier.sizes import format_size

CHUNK = 64 << 20
"""Most bytes a process takes ahead of their use, so that it touches the file rarely."""

STALE_SECONDS = 10.0
"""A measurement older than this is made anew on use: foreign files may have come."""

_RETRY_SECONDS = 1.0
"""A store that is full is measured no more often than this, nor for more than a twentieth of the
time."""

_DAY = 86400
_NS = 10**9


def margin(cap: int) -> int:
    """Bytes below a cap that are never granted, for what nobody reserves: manifests (about 50
    bytes a page), directories, status files and blocks of the file system's own. Only what comes
    between two measurements, 10 s, counts: 64 MiB are the manifests of a million pages. A 64th of
    a small cap; 16 blocks at least, since each process starts with some files."""
    return min(cap, max(64 << 10, min(64 << 20, cap // 64)))


class Standing(NamedTuple):
    """Where a store stands. Bytes."""

    used: int
    """What the directory took at the last measurement."""
    taken: int
    """No less than what it takes, and all processes might yet write."""
    cap: int
    """What it may take."""
    room: int
    """What may still be granted before the cap; negative by how far the store is above."""
    limit: str
    """The name of the limit that sets the cap: `limit` or `min_free`."""


class Quota:
    """This process's share in the space of a store. Safe to use from several threads.

    Nothing here raises. Where the ledger cannot be used (a read-only or full file system, one
    without open file description locks), the cap holds for this process alone, after one warning.

    `reserve` what is about to be written, write it, then `spend` it; `give_back` what was reserved
    and of which nothing was written. Sizes are what the file system will take: whole blocks.
    Opening, `reserve` and `measure` may walk the directory; call them where that may take a
    second, and from a thread that nobody waits for on a drive that may hang.

    A child of a fork has no share: its calls refuse. A lock lives as long as any copy of its
    descriptor, so the parent's copy is closed there as well.
    """

    def __init__(
        self, layout: Layout, settings: Limits, *, clock: Callable[[], float] = time.time
    ) -> None:
        """`settings`: what counts where the store's limits file names nothing. `clock`: seconds
        since 1970."""
        self.reason = ""
        """Why the last `reserve` was refused, for a person; empty if it was granted."""
        self.measurements = 0
        """How often this process walked the directory."""
        self._layout = layout
        self._limits_file = LimitsFile(layout, settings)
        self._clock = clock
        self._complaints = Complaints()
        self._lock = threading.Lock()
        self._measuring = threading.Lock()
        self._closed = False
        self._ledger = Ledger(layout)
        self._limits = self._limits_file.current()
        self._spare = 0
        """Granted to this process and not reserved yet."""
        self._touched = clock()
        self._day = int(clock() // _DAY)
        self._retry = _RETRY_SECONDS
        self._standing = Standing(0, 0, 0, 0, "limit")
        _quotas.add(self)
        self.measure()

    # What the committer does

    def reserve(self, size: int) -> bool:
        """Whether `size` more bytes may be written to the store now; else `reason` says why not.

        Most calls take one system call, a look whether the limits changed. Others take eight more
        in the ledger, and now and then a measurement: every 10 s on use by whoever comes first,
        and if the size would not fit, at most once a second.
        """
        for last in (False, True):
            with self._lock:
                granted = self._take(size, last)
            if granted is not None:
                return granted
            self.measure()
        return False

    def spend(self, size: int) -> None:
        """`size` bytes that were reserved are on the drive, or some of them may be, as after a
        write that failed. Call it when the file system has given them their blocks: after the
        write, or after the sync where that is what does so. One system call."""
        with self._lock:
            self._ledger.hold(self._ledger.held - min(size, self._reserved))

    def give_back(self, size: int) -> None:
        """Nothing was written of `size` bytes that were reserved, and nothing will be: they serve
        the next reservation."""
        with self._lock:
            self._spare += min(size, self._reserved)

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        with self._lock:
            if not self._closed:
                if self._spare:
                    with contextlib.suppress(Busy), self._ledger.locked() as account:
                        self._return_spare(account)
                self._closed = True
                self._ledger.forget()

    # What the keeper and collectors do

    def headroom(self) -> int:
        """Bytes that may still be granted before the cap, all processes together, what this one
        has ahead included; negative by how far the store is above. Of the last measurement and
        what was granted since: a look into the ledger, without a walk of the directory."""
        return self.standing().room

    def standing(self) -> Standing:
        """The same with what it comes from."""
        with self._lock:
            if not self._closed:
                self._limits_file.current()  # read before others have to wait for this process
                try:
                    with self._ledger.locked() as account:
                        self._take_note(account)
                        if account.measured:
                            self._standing = self._stand(account, self._space(account))
                except Busy:
                    pass
            return self._standing

    @property
    def limits(self) -> Limits:
        """What this process goes by now."""
        return self._limits

    def measure(self) -> Standing:
        """Walk the directory, for all processes: after space was freed, and now and then instead
        of in the committer. Neither the ledger nor this object is locked meanwhile."""
        asked = self._now()
        with self._measuring:
            if self._begin_measurement(asked):
                self._finish_measurement()
        return self.standing()

    # Within

    @property
    def _reserved(self) -> int:
        """Reserved by callers and not spent."""
        return self._ledger.held - self._spare

    def _now(self) -> int:
        return int(self._clock() * _NS)

    def _take(self, size: int, last: bool) -> bool | None:
        """Reserve from what is at hand or from the ledger; None if a measurement comes first,
        which is never so the `last` time."""
        if self._closed:
            self.reason = "the store is closed"
            return False
        granted: bool | None = True
        recent = 0 <= self._clock() - self._touched < STALE_SECONDS
        if self._changed() or size > self._spare or not recent:
            try:
                with self._ledger.locked() as account:
                    self._take_note(account)
                    granted = self._ask(account, size, last)
            except Busy:
                granted, self.reason = False, "another process holds index/quota and is stuck"
        if granted:
            self._spare -= size
            self.reason = ""
        return granted

    def _ask(self, account: Account, size: int, last: bool) -> bool | None:
        """See to it that `size` bytes are spare; None if a measurement comes first."""
        self._touched = self._clock()
        due = not last and self._due(account, STALE_SECONDS, account.measured)
        if not due and not account.measured:
            self.reason = "the store's directory could not be measured"
            return False
        if not due:
            room, self.reason = self._room(account)
            need = size - self._spare
            if max(need, 0) <= room:
                if need > 0:
                    self._grant(account, max(need, min(CHUNK, room // 16)))
                return True
            due = not last and self._due(account, self._retry, 0)
        if due:
            account.tried = self._now()
            return None
        return False

    def _due(self, account: Account, seconds: float, since: int) -> bool:
        """Whether it is time to measure: `seconds` passed since then, nobody has begun to
        meanwhile, or there is nothing to go by. A clock that was set back makes it time."""
        now = self._now()
        return not account.measured or all(
            not 0 <= now - then < seconds * _NS for then in (since, account.tried)
        )

    def _room(self, account: Account) -> tuple[int, str]:
        """(what may still be granted; what to say to whoever needs more)."""
        space = self._space(account)
        standing = self._standing = self._stand(account, space)
        # Between measurements others may fill the file system, too.
        min_free = self._limits.min_free.of(space.size)
        free = space.free - min_free - self._ledger.held
        text = (
            f"the store takes {format_size(standing.taken)} of {format_size(standing.cap)} (limit)",
            f"only {format_size(space.free)} of the file system are free "
            f"(min_free is {format_size(min_free)})",
        )
        rooms = [(standing.room - self._spare, text[standing.limit == "min_free"]), (free, text[1])]
        daily = self._limits.daily_writes
        if daily is not None:
            self._roll(account)
            why = f"daily_writes of {format_size(daily)} are spent until 00:00 UTC"
            rooms.append((daily - account.written, why))
        return min(rooms)

    def _stand(self, account: Account, space: Space) -> Standing:
        cap = self._limits.cap(account.used, Space(space.size, account.free))
        room = cap.bytes - margin(cap.bytes) - account.taken + self._spare
        return Standing(account.used, account.taken, cap.bytes, room, cap.name)

    def _space(self, account: Account) -> Space:
        try:
            return Space.of(self._layout.path)
        except OSError:
            return Space(0, account.free)  # what is written there will fail as well

    def _grant(self, account: Account, size: int) -> None:
        self._roll(account)
        account.granted += size
        account.written += size
        self._ledger.hold(self._ledger.held + size)
        self._spare += size

    def _roll(self, account: Account) -> None:
        if account.day != self._day:
            account.day, account.written = self._day, 0

    def _changed(self) -> bool:
        return self._limits_file.current() != self._limits or self._clock() // _DAY != self._day

    def _take_note(self, account: Account) -> None:
        """Go by new limits, and a new day, from now on: what was granted ahead under the old ones
        goes back."""
        if self._changed():
            self._return_spare(account)
            self._limits, self._day = self._limits_file.current(), int(self._clock() // _DAY)

    def _return_spare(self, account: Account) -> None:
        account.granted -= self._spare
        if account.day == self._day:
            account.written = max(0, account.written - self._spare)
        self._ledger.hold(self._ledger.held - self._spare)
        self._spare = 0

    def _begin_measurement(self, asked: int) -> bool:
        """False if a measurement that began since `asked` is there already."""
        with self._lock:
            if self._closed:
                return False
            self._ledger.open()
            try:
                with self._ledger.locked() as account:
                    if asked < account.measured <= self._now():
                        return False
                    account.tried = self._now()
                    self._epoch, self._base = account.epoch, account.granted
                    self._others = self._ledger.others() + self._ledger.held
                    self._began = account.tried
            except Busy:
                return False
        return True

    def _finish_measurement(self) -> None:
        begun = time.monotonic()
        try:
            free = Space.of(self._layout.path).free
            used = disk_usage(self._layout.path)
            # The lesser: what came or went during the walk is in one of the two.
            free = min(free, Space.of(self._layout.path).free)
        except OSError as error:
            self._complaints.add(
                "measure",
                f"cannot measure {self._layout.path} ({error.strerror or error}): "
                "check its permissions and the drive",
            )
            return
        with self._lock:
            self.measurements += 1
            self._retry = max(_RETRY_SECONDS, 20 * (time.monotonic() - begun))
            try:
                with self._ledger.locked() as account:
                    if self._began < account.measured <= self._now():
                        return  # somebody else's is newer
                    if self._epoch != account.epoch:
                        return  # what was granted before is counted nowhere
                    account.used, account.free, account.measured = used, free, self._began
                    account.reserved, account.base = self._others, self._base
            except Busy:
                pass


_quotas: weakref.WeakSet[Quota] = weakref.WeakSet()


def _after_fork() -> None:
    for quota in _quotas:
        quota._ledger.forget()
        quota._closed = True
        quota._lock, quota._measuring = threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
