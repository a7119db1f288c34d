"""Segments on a local file system: payload appended past the page cache, and read in extents."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from kvtier.format import ALIGNMENT, FrameType, align, encode_frame
from kvtier.layout import Layout, segment_id, segment_name, sync_directory
from kvtier.memory import Slice

WRITE_BYTES = 16 << 20
"""Slices that are neighbours in memory and in the file are written together up to this size."""

logger = logging.getLogger("kvtier")

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_libc = ctypes.CDLL(None, use_errno=True)

_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock of fcntl(2): type, whence, start, length, process."""


def open_direct(path: Path, flags: int, *, direct: bool) -> tuple[int, bool]:
    """(descriptor, whether it goes past the page cache). Some file systems cannot."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # open(2) makes the file even where it then refuses the flag.
            flags &= ~os.O_EXCL
            _say_that_it_is_refused(path.parent)
    return os.open(path, flags, 0o600), False


@functools.cache
def _say_that_it_is_refused(folder: Path) -> None:
    """Once for each folder in a process."""
    logger.warning(
        "kvtier: the file system of %s refuses O_DIRECT: pages pass through the page cache and are "
        "dropped from it, which is slower; ext4 and XFS take it",
        folder,
    )


class SegmentWriter:
    """A segment and its manifest, open for appending by this process alone.

    The manifest is locked before it gets its name: who sees it unlocked knows its writer is dead.
    """

    def __init__(self, layout: Layout, writer: bytes, number: int, *, direct: bool) -> None:
        self.name = segment_name(writer, number)
        ident = segment_id(self.name)
        assert ident is not None
        self.ident = ident
        self.size = 0
        """Bytes given out in the data file."""
        self.manifest_size = 0
        self._store_id = layout.store_id
        self._sequence = 0
        layout.verify()
        payload, manifest = layout.payload(self.name), layout.manifest(self.name)
        hidden = manifest.with_name(f".{manifest.name}.tmp")
        self._files = (payload, manifest, hidden)
        self._data = -1
        create = os.O_RDWR | os.O_CREAT | os.O_EXCL
        self._log = os.open(hidden, create | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._log, fcntl.LOCK_EX)
            layout.adopt(hidden)
            hidden.rename(manifest)
            self._data, self._direct = open_direct(payload, create, direct=direct)
            layout.adopt(payload)
            sync_directory(layout.segments)
        except BaseException:
            self.abandon()
            raise

    def reserve(self, size: int) -> int:
        """Offset for a block of `size` bytes."""
        offset = self.size
        self.size += align(size)
        return offset

    def write(self, blocks: Sequence[tuple[int, Slice]]) -> None:
        """Write staged blocks at their offsets. OSError if that failed."""
        for offset, data in _merged(blocks):
            written = 0
            while written < len(data):
                written += os.pwrite(self._data, data[written:], offset + written)
                if written < len(data) and written % ALIGNMENT:
                    raise OSError(errno.ENOSPC, "the file system took only part of a block")

    def sync(self) -> None:
        """Make what was written durable. OSError if that failed."""
        os.fdatasync(self._data)
        if not self._direct:
            os.posix_fadvise(self._data, 0, 0, os.POSIX_FADV_DONTNEED)

    def log(
        self,
        bodies: Sequence[tuple[FrameType, bytes]],
        time_ns: int | Sequence[int],
        *,
        hidden: bool = True,
    ) -> None:
        """Append frames to the manifest and make them durable. OSError if that failed.

        `time_ns`: of all frames, or of each. `hidden`: nobody may believe them before.
        """
        frames = []
        times = [time_ns] * len(bodies) if isinstance(time_ns, int) else time_ns
        for (kind, body), made in zip(bodies, times, strict=True):
            frames.append(
                encode_frame(
                    kind,
                    body,
                    sequence=self._sequence,
                    time_ns=made,
                    segment_id=self.ident,
                    store_id=self._store_id,
                )
            )
            self._sequence += 1
        data = b"".join(frames)
        if hidden:
            hide_from(self._log, self.manifest_size)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._log, data[written:], self.manifest_size + written)
            os.fdatasync(self._log)
        except OSError:
            # Nothing of this may be believed; what a crash leaves of it is exact all the same.
            os.ftruncate(self._log, self.manifest_size)
            raise
        hide_from(self._log, None)
        self.manifest_size += len(data)

    def abandon(self) -> None:
        """Give the segment up after a fault. If nothing was logged in it, its files go as well: a
        full disk would gain some with every attempt."""
        if not self.manifest_size:
            for path in self._files:
                with contextlib.suppress(OSError):  # the drive may refuse this, too
                    path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Append no more; the segment's lock ends. Later calls fail, and reach no other file."""
        for fd in (self._data, self._log):
            if fd >= 0:
                os.close(fd)
        self._data = self._log = -1


def hide_from(fd: int, offset: int | None) -> None:
    """Tell readers that an open manifest's bytes from `offset` on are not durable yet; None: all
    are. A lock that the kernel ends with the descriptor, and that nobody waits for."""
    kind = fcntl.F_UNLCK if offset is None else fcntl.F_WRLCK
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, offset or 0, 0, 0))


def durable_end(fd: int, size: int) -> int:
    """How much of the first `size` bytes of an open manifest its living writer has synced."""
    asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, start, _, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    return size if kind == fcntl.F_UNLCK else min(size, start)


def _merged(blocks: Sequence[tuple[int, Slice]]) -> list[tuple[int, memoryview]]:
    """(offset, bytes) with neighbours in both places joined."""
    joined: list[tuple[int, memoryview]] = []
    start: Slice | None = None
    size = offset = 0
    for place, piece in blocks:
        if (
            start is not None
            and place == offset + size
            and piece.start == start.start + size
            and size + piece.size <= WRITE_BYTES
        ):
            size += piece.size
            continue
        if start is not None:
            joined.append((offset, Slice(start.arena, start.start, size).view))
        start, size, offset = piece, piece.size, place
    if start is not None:
        joined.append((offset, Slice(start.arena, start.start, size).view))
    return joined


def read_extent(path: Path, start: int, buffer: memoryview, *, direct: bool) -> int:
    """Fill `buffer` from `start` of a segment (both aligned); bytes read. OSError on a fault.

    With `direct` what was read does not stay in the page cache, also where O_DIRECT is refused;
    without it, it does: the next reader of the host finds it there.
    """
    fd, passed_by = open_direct(path, os.O_RDONLY, direct=direct)
    try:
        done = 0
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done:]], start + done)
            done += count
            if not count or count % ALIGNMENT:
                break
        if done < len(buffer) and start + done < os.fstat(fd).st_size:
            raise OSError(errno.EIO, "the drive gave only part of what it has")
        if direct and not passed_by:
            os.posix_fadvise(fd, start, done, os.POSIX_FADV_DONTNEED)
        return done
    finally:
        os.close(fd)


def punch(path: Path, start: int, end: int) -> None:
    """Free the whole aligned blocks within [start, end). OSError where that is not possible."""
    start, end = align(start), end // ALIGNMENT * ALIGNMENT
    if end <= start:
        return
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        size = ctypes.c_int64(end - start)
        if _libc.fallocate64(fd, mode, ctypes.c_int64(start), size):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)


def unlink_segment(layout: Layout, name: str) -> None:
    """Remove a segment whose writer is dead: payload first, so that a manifest is never without
    need kept for bytes that are gone, and never gone before them. BlockingIOError if its writer
    lives."""
    manifest = layout.manifest(name)
    fd = os.open(manifest, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        layout.payload(name).unlink(missing_ok=True)
        manifest.unlink()
    finally:
        os.close(fd)


def disk_usage(path: Path) -> int:
    """Bytes that all files below `path` take on the file system, directories included. What goes
    meanwhile is not counted; OSError if `path` itself cannot be read."""
    total = 0
    pending = [path]
    while pending:
        folder = pending.pop()
        try:
            total += folder.lstat().st_blocks * 512
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(Path(entry.path))
                        else:
                            total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            if folder == path:
                raise
    return total
