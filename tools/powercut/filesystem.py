"""A file system on a loop device whose power can be cut; all of it goes with this process.

Mounts are made in a mount namespace of our own and loop devices clear themselves, so that nothing
is left behind whatever happens to the process. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

DEFAULT, LOGFLUSH, NOLOGFLUSH = 0, 1, 2
"""How FS_IOC_SHUTDOWN goes down: all synced first, log flushed first, nothing flushed
(EXT4_GOING_FLAGS_*, XFS_FSOP_GOING_FLAGS_*)."""

_FS_IOC_SHUTDOWN = 0x8004587D
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LOOP_CLR_FD = 0x4C01
_LO_FLAGS_AUTOCLEAR = 4
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_MNT_DETACH = 2

_WORK = "kvtier-powercut-"

_libc = ctypes.CDLL(None, use_errno=True)

SIZES = {"ext4": 96 << 20, "xfs": 320 << 20}
"""Bytes of an image; XFS wants 300 MiB at least, of which most stay holes."""

_MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,nodiscard", "-J", "size=8"),
    "xfs": ("mkfs.xfs", "-q", "-f", "-K"),
}


class LabError(Exception):
    """The lab cannot work here; one sentence with what to do."""


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def private_mounts() -> None:
    """Give this process, and those it starts, mounts that nobody else sees."""
    if os.geteuid() != 0:
        raise LabError("Mounting needs root: run it with sudo.")
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount --make-rprivate")


def mount(source: str, target: Path, kind: str, options: str = "") -> None:
    """mount(2); OSError with its reason."""
    result = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode(), 0, options.encode() or None
    )
    _check(result, f"mount {kind}")


def unmount(target: Path, *, lazily: bool = False) -> None:
    """umount2(2), tried again while dying processes still hold files."""
    deadline = time.monotonic() + 30
    while True:
        if not _libc.umount2(os.fsencode(target), _MNT_DETACH if lazily else 0):
            return
        number = ctypes.get_errno()
        if time.monotonic() > deadline:
            raise OSError(number, f"umount {target}: {os.strerror(number)}")
        time.sleep(0.002)


def shut_down(path: Path, how: int) -> None:
    """FS_IOC_SHUTDOWN of the file system that holds `path`."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _FS_IOC_SHUTDOWN, struct.pack("<I", how))
    finally:
        os.close(fd)


class Loop:
    """A loop device over a file; it clears itself when its last user is gone."""

    def __init__(self, image: Path) -> None:
        backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._fd, self.device = self._attach(backing)
        finally:
            os.close(backing)

    @staticmethod
    def _attach(backing: int) -> tuple[int, str]:
        info = struct.pack("<5Q4I64s64s32s2Q", *(0,) * 8, _LO_FLAGS_AUTOCLEAR, b"", b"", b"", 0, 0)
        request = struct.pack("<II", backing, 512) + info + bytes(64)
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            for _ in range(64):
                number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
                device = f"/dev/loop{number}"
                if not Path(device).exists():
                    os.mknod(device, 0o60600, os.makedev(7, number))
                fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.ioctl(fd, _LOOP_CONFIGURE, request)
                    return fd, device
                except OSError:  # somebody else was faster
                    os.close(fd)
        finally:
            os.close(control)
        raise LabError("No free loop device: end what uses them.")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._fd, _LOOP_CLR_FD)
        os.close(self._fd)


class FileSystem:
    """ext4 or XFS on a loop device over `image`, mounted at `path`."""

    def __init__(self, kind: str, folder: Path, image: Path | None = None) -> None:
        self.kind = kind
        self.path = folder / "mount"
        self.path.mkdir(exist_ok=True)
        self.image = image or make_image(kind, folder / "image")
        self._loop = Loop(self.image)
        self._mounted = False
        try:
            self.mount()
        except BaseException:
            self.close()
            raise

    def mount(self) -> None:
        """Mount it, which replays its journal."""
        options = "nouuid" if self.kind == "xfs" else ""
        mount(self._loop.device, self.path, self.kind, options)
        self._mounted = True

    def cut(self, how: int = NOLOGFLUSH) -> None:
        """Nothing reaches the device from now on; what the journal does not hold is lost."""
        shut_down(self.path, how)

    def unmount(self) -> None:
        unmount(self.path)
        self._mounted = False

    def close(self) -> None:
        if self._mounted:
            with contextlib.suppress(OSError):
                unmount(self.path, lazily=True)
            self._mounted = False
        self._loop.close()


def make_image(kind: str, image: Path) -> Path:
    """A file with an empty file system."""
    image.unlink(missing_ok=True)
    with image.open("wb") as file:
        file.truncate(SIZES[kind])
    try:
        path = f"{os.environ.get('PATH', '')}:/usr/sbin"
        environment = os.environ | {"PATH": path}
        command = [*_MAKE[kind], str(image)]
        subprocess.run(command, check=True, capture_output=True, env=environment)
    except FileNotFoundError:
        package = {"ext4": "e2fsprogs", "xfs": "xfsprogs"}[kind]
        raise LabError(f"{_MAKE[kind][0]} is missing: apt-get install {package}") from None
    except subprocess.CalledProcessError as error:
        raise LabError(f"{_MAKE[kind][0]} failed: {error.stderr.decode().strip()}") from None
    return image


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """A folder in memory for images; gone at the end, with what is mounted in it."""
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    for left in base.glob(f"{_WORK}*"):
        owner = left.name.removeprefix(_WORK).split("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
    with tempfile.TemporaryDirectory(
        prefix=f"{_WORK}{os.getpid()}-", dir=base, ignore_cleanup_errors=True
    ) as name:
        try:
            yield Path(name)
        finally:
            for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
                target = line.split()[1]
                if target.startswith(name):
                    try:
                        unmount(Path(target), lazily=True)
                    except OSError as error:
                        print(error, file=sys.stderr)
