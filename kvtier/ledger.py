"""The file `index/quota` in which the processes of a host account for a store's space.

The file has one record; what each process may yet write is the length of a lock that it holds on
bytes behind that record. So it ends with the process, also by kill -9, costs one system call to
change, and no damage of the file can touch it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from kvtier.format import checksum
from kvtier.layout import Layout

logger = logging.getLogger("kvtier")

FILE = "quota"

LEDGER = struct.Struct("<4sIqqqqqqqqqQQ")
"""magic, version, the fields of `Account`, checksum of all before it."""

MAGIC = b"KVTQ"
VERSION = 1

SPAN = 1 << 50
"""Bytes between the places at which processes hold their locks: process n has one that starts at
(n + 1) * SPAN and is one byte longer than what it may yet write."""

_END = (1 << 63) - 1
_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock of fcntl(2): type, whence, start, length, process."""

_PATIENCE = 1.0
"""Seconds to wait for another process to let go of the record. It holds it for microseconds,
unless it was stopped right there."""


@dataclass
class Account:
    """The record. Sizes in bytes, times in nanoseconds since 1970."""

    used: int = 0
    """What the directory took at the last measurement."""
    reserved: int = 0
    """What all processes might yet write, just before that measurement."""
    granted: int = 0
    """All that was ever granted, less what was given back unused."""
    base: int = 0
    """`granted`, just before the measurement."""
    free: int = 0
    """Free bytes of the file system at the measurement."""
    measured: int = 0
    """When the measurement began; 0: there was none."""
    tried: int = 0
    """When the last measurement began, also one that is not done yet or failed."""
    day: int = 0
    """Days since 1970 (UTC) that `written` is about."""
    written: int = 0
    """What was granted on that day, less what was given back unused."""
    epoch: int = 0
    """Random; another one means that the record was begun anew, with other counts."""

    @property
    def taken(self) -> int:
        """No less than what the directory takes and what all processes might yet write."""
        return self.used + self.reserved + self.granted - self.base


class Busy(Exception):
    """Another process does not let go of the record."""


class Ledger:
    """One process's hand on the file, or on memory of its own where the file cannot be used.

    Nothing here raises but Busy. Not safe for threads. The file is closed on exec; after a fork
    the child must call `forget`, since a lock lives as long as any copy of its descriptor.
    """

    def __init__(self, layout: Layout) -> None:
        self.held = 0
        """What this process may yet write."""
        self._layout = layout
        self._path = layout.index / FILE
        self._fd = -1
        self._file: tuple[int, int] = (0, 0)
        self._start = 0
        self._alone = Account()
        self._patience = _PATIENCE
        self._shut_out = False
        self._warned = False
        self.open()

    def open(self) -> None:
        """Take a place in the file, if there is none yet."""
        if self._fd >= 0:
            return
        self._shut_out = False
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._layout.verify()  # the ledger of another store is not for this process
            self._fd = os.open(self._path, flags, 0o600)
            self._layout.adopt(self._path)
            status = os.fstat(self._fd)
            self._file = (status.st_dev, status.st_ino)
            self._lock()
            try:
                taken = {start // SPAN for start, _ in self._others()}
                place = next(n for n in range(1, _END // SPAN) if n not in taken)
                self._start = place * SPAN
                _set(self._fd, fcntl.F_WRLCK, self._start, 1 + self.held)
                if self.held:
                    # Granted elsewhere: by a file that was replaced, or by this process alone.
                    account, _ = self._read()
                    account.granted += self.held
                    os.pwrite(self._fd, _encode(account), 0)
            finally:
                self._unlock()
        except Busy:
            self.forget()
            self._shut_out = True
        except (OSError, StopIteration) as error:
            self._give_up(error)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Account]:
        """The record, for this process alone; what is changed in it is written at the end."""
        account, sound = self._begin()
        before = replace(account)
        try:
            yield account
        finally:
            self._end(account, changed=account != before or not sound)

    def others(self) -> int:
        """What other processes might yet write. Exact while the record is locked, but for what
        they write meanwhile. 2 n + 1 system calls for n processes."""
        try:
            return sum(length - 1 for _, length in self._others()) if self._fd >= 0 else 0
        except OSError as error:
            self._give_up(error)
            return 0

    def hold(self, size: int) -> None:
        """Say what this process may yet write. More only while the record is locked; less at any
        time, after the bytes are on the drive."""
        more, self.held = size > self.held, size
        if self._fd < 0:
            return
        try:
            if more:
                _set(self._fd, fcntl.F_WRLCK, self._start, 1 + size)
            else:
                _set(self._fd, fcntl.F_UNLCK, self._start + 1 + size, SPAN - 1 - size)
        except OSError as error:
            self._give_up(error)

    def forget(self) -> None:
        """Close the file; the lock ends with the last copy of its descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _begin(self) -> tuple[Account, bool]:
        """(the record, whether it was sound); the record is locked if it is that of the file."""
        if self._fd >= 0 and not self._is_ours():
            self.forget()
            self.open()
        if self._shut_out:
            self.open()
            if self._shut_out:
                raise Busy
        if self._fd < 0:
            return self._alone, True
        try:
            self._lock()
            return self._read()
        except OSError as error:
            self._give_up(error)
            return self._alone, True

    def _end(self, account: Account, *, changed: bool) -> None:
        if self._fd >= 0:
            try:
                if changed:
                    os.pwrite(self._fd, _encode(account), 0)
                self._unlock()
            except OSError as error:
                self._give_up(error)
        if self._fd < 0:
            self._alone = account

    def _is_ours(self) -> bool:
        """Whether the file is still the one that has our lock."""
        try:
            status = self._path.lstat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._file

    def _lock(self) -> None:
        end, pause = time.monotonic() + self._patience, 0.0005
        while True:
            try:
                _set(self._fd, fcntl.F_WRLCK, 0, 1)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > end:
                    # Who is stopped stays so for a while: the next call does not wait.
                    self._patience = 0.0
                    raise Busy from None
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
        self._patience = _PATIENCE

    def _unlock(self) -> None:
        if self._fd >= 0:
            _set(self._fd, fcntl.F_UNLCK, 0, 1)

    def _read(self) -> tuple[Account, bool]:
        data = os.pread(self._fd, LEDGER.size, 0)
        account = decode(data)
        if account is not None:
            return account, True
        if data:
            logger.warning(
                "kvtier: %s is damaged or of another version: the store is measured anew, and "
                "daily_writes counts from zero",
                self._path,
            )
        return Account(epoch=int.from_bytes(os.urandom(8))), False

    def _others(self) -> list[tuple[int, int]]:
        """(start, length) of the lock of every other process."""
        found, pending = [], [(SPAN, _END)]
        while pending:
            start, end = pending.pop()
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
            kind, _, at, length, _ = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))
            if kind == fcntl.F_UNLCK:
                continue
            length = length or end - at  # 0: up to the end of every file
            found.append((at, length))
            pending += [span for span in ((start, at), (at + length, end)) if span[0] < span[1]]
        return found

    def _give_up(self, error: BaseException) -> None:
        """Go on with memory of our own."""
        self.forget()
        if not self._warned:
            self._warned = True
            logger.warning(
                "kvtier: cannot use %s (%s): the cap holds for this process alone; what others "
                "write is seen at the next measurement",
                self._path,
                getattr(error, "strerror", None) or "it has no place left",
            )


def written_on(layout: Layout, day: int) -> int:
    """Bytes granted on a day (days since 1970, UTC); 0 if no sound record is about it."""
    try:
        fd = os.open(layout.index / FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return 0
    try:
        account = decode(os.pread(fd, LEDGER.size, 0))
    except OSError:
        return 0
    finally:
        os.close(fd)
    return account.written if account is not None and account.day == day else 0


def decode(data: bytes) -> Account | None:
    """The record in these bytes, None if they are damaged or of another version."""
    if len(data) != LEDGER.size:
        return None
    magic, version, *fields, told = LEDGER.unpack(data)
    if (magic, version, told) != (MAGIC, VERSION, checksum(data[:-8])):
        return None
    return Account(*fields)


def _encode(account: Account) -> bytes:
    data = LEDGER.pack(MAGIC, VERSION, *astuple(account), 0)[:-8]
    return data + checksum(data).to_bytes(8, "little")


def _set(fd: int, kind: int, start: int, length: int) -> None:
    """Change this descriptor's lock on some bytes. BlockingIOError if another has one there."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
