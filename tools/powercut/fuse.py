"""A drive in user space: one file served over FUSE that logs every write and every flush.

A loop device over it is a disk whose history is known, and that fails on command. The protocol is
spoken directly (include/uapi/linux/fuse.h), so that nothing needs to be installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from powercut.filesystem import mount, unmount

_IN_HEADER = struct.Struct("<IIQQIIIHH")
_OUT_HEADER = struct.Struct("<IiQ")
_ATTR_OUT = struct.Struct("<QII6Q10I")
_OPEN_OUT = struct.Struct("<QII")
_READ_IN = struct.Struct("<QQIIQII")
_INIT_OUT = struct.Struct("<IIIIHHIIHHII6I")
_LOG = struct.Struct("<QI")

_FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _RELEASE = 2, 3, 4, 14, 15, 16, 18
_FSYNC, _CLOSE, _INIT, _INTERRUPT, _DESTROY, _BATCH_FORGET = 20, 25, 26, 36, 38, 42
_FOPEN_DIRECT_IO = 1
_FUSE_BIG_WRITES = 1 << 5
_FUSE_MAX_PAGES = 1 << 22
_MAX_WRITE = 1 << 20

_FLUSH_MARK = (1 << 64) - 1


@dataclass(frozen=True)
class Write:
    """One write that reached the drive."""

    offset: int
    data: bytes


class Controls:
    """Switches of a drive, shared with the process that serves it."""

    NAMES = ("read_error", "write_error", "flush_error", "flush_failures", "hang", "entries")

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, 4096)).cast("q")

    def __getattr__(self, name: str) -> int:
        return self._words[self.NAMES.index(name)]

    def set(self, **values: int) -> None:
        """`read_error`, `write_error`: errno of every read or write, 0 for none. `flush_error`:
        errno of the next `flush_failures` flushes. `hang`: no request is answered while 1."""
        for name, value in values.items():
            self._words[self.NAMES.index(name)] = value


class Drive:
    """`image` served at `path`; the log of what it was told is at `log`."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.path = folder / "drive"
        self.path.touch()
        self.controls = Controls()
        self._log = folder / "log"
        self._log.write_bytes(b"")
        fd = os.open("/dev/fuse", os.O_RDWR)
        # A regular file as the root of a mount: no names to look up.
        mount("drive", self.path, "fuse", f"fd={fd},rootmode=100600,user_id=0,group_id=0")
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
                _Server(fd, image, self._log, self.controls).serve()
            os._exit(0)
        os.close(fd)

    @property
    def entries(self) -> int:
        """Entries of the log so far."""
        return self.controls.entries

    def log(self) -> list[Write | None]:
        """What the drive was told so far: writes, and None for a flush."""
        return list(read_log(self._log))

    def close(self) -> None:
        """Unplug it: what still waits for it gets EIO or ENOTCONN."""
        self.controls.set(hang=0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        with contextlib.suppress(OSError):
            unmount(self.path, lazily=True)


def read_log(path: Path) -> Iterator[Write | None]:
    """Writes in their order, None for a flush."""
    data = path.read_bytes()
    at = 0
    while at + _LOG.size <= len(data):
        offset, size = _LOG.unpack_from(data, at)
        at += _LOG.size
        if offset == _FLUSH_MARK:
            yield None
            continue
        yield Write(offset, data[at : at + size])
        at += size


class _Server:
    def __init__(self, fd: int, image: Path, log: Path, controls: Controls) -> None:
        self._fd = fd
        self._image = os.open(image, os.O_RDWR)
        self._size = os.fstat(self._image).st_size
        self._log = log.open("ab", buffering=0)
        self._controls = controls
        self._now = int(time.time())

    def serve(self) -> None:
        """Answer requests until the mount is gone."""
        while True:
            try:
                request = os.read(self._fd, _MAX_WRITE + 8192)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.ENOENT:  # a request that was taken back
                    continue
                return
            _, opcode, unique, *_ = _IN_HEADER.unpack_from(request)
            body = memoryview(request)[_IN_HEADER.size :]
            while self._controls.hang and opcode in (_READ, _WRITE, _FSYNC):
                time.sleep(0.01)
            if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            try:
                answer = self._answer(opcode, body)
                number = 0
            except OSError as error:
                answer, number = b"", error.errno or errno.EIO
            head = _OUT_HEADER.pack(_OUT_HEADER.size + len(answer), -number, unique)
            with contextlib.suppress(FileNotFoundError):  # interrupted meanwhile
                os.write(self._fd, head + answer)
            if opcode == _DESTROY:
                return

    def _answer(self, opcode: int, body: memoryview) -> bytes:
        try:
            answer = {
                _INIT: self._init,
                _GETATTR: self._attributes,
                _SETATTR: self._attributes,
                _OPEN: lambda body: _OPEN_OUT.pack(1, _FOPEN_DIRECT_IO, 0),
                _READ: self._read,
                _WRITE: self._write,
                _FSYNC: self._flush,
                _RELEASE: lambda body: b"",
                _CLOSE: lambda body: b"",
                _DESTROY: lambda body: b"",
            }[opcode]
        except KeyError:
            raise OSError(errno.ENOSYS, "not needed") from None
        return answer(body)

    def _init(self, body: memoryview) -> bytes:
        major, minor, ahead, _ = struct.unpack_from("<IIII", body)
        flags = _FUSE_BIG_WRITES | _FUSE_MAX_PAGES
        sizes = (64, 48, _MAX_WRITE, 1, _MAX_WRITE // 4096, 0, 0, 0)
        return _INIT_OUT.pack(major, min(minor, 36), ahead, flags, *sizes, *(0,) * 6)

    def _attributes(self, body: memoryview) -> bytes:
        times = (self._now,) * 3
        attributes = (1, self._size, self._size // 512, *times, 0, 0, 0, 0o100600, 1, 0, 0, 0)
        return _ATTR_OUT.pack(3600, 0, 0, *attributes, 4096, 0)

    def _read(self, body: memoryview) -> bytes:
        self._fail(self._controls.read_error)
        _, offset, size, *_ = _READ_IN.unpack_from(body)
        return os.pread(self._image, size, offset)

    def _write(self, body: memoryview) -> bytes:
        self._fail(self._controls.write_error)
        _, offset, size, *_ = _READ_IN.unpack_from(body)
        data = body[_READ_IN.size : _READ_IN.size + size]
        os.pwrite(self._image, data, offset)
        self._note(offset, bytes(data))
        return struct.pack("<II", size, 0)

    def _flush(self, body: memoryview) -> bytes:
        if self._controls.flush_failures > 0:
            self._controls.set(flush_failures=self._controls.flush_failures - 1)
            self._fail(self._controls.flush_error)
        self._note(_FLUSH_MARK, b"")
        return b""

    def _note(self, offset: int, data: bytes) -> None:
        self._log.write(_LOG.pack(offset, len(data)) + data)
        self._controls.set(entries=self._controls.entries + 1)

    @staticmethod
    def _fail(number: int) -> None:
        if number:
            raise OSError(number, os.strerror(number))
