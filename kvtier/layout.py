"""The store directory: what lies where, who may read it, and how it is opened."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier import __version__
from kvtier.errors import StoreError, UnreachableError
from kvtier.format import FORMAT_VERSION, new_id

SUPERBLOCK = "kvtier.json"
SEGMENTS = "segments"
NAMESPACES = "namespaces"
INDEX = "index"
LOCK = "lock"
GATE = "gate"
PINS = "pins"
PAYLOAD_SUFFIX = ".kvs"
MANIFEST_SUFFIX = ".kvm"

_SEGMENT_NAME = re.compile(r"([0-9a-f]{24})-([0-9]{1,9})")


def segment_name(writer: bytes, number: int) -> str:
    """File name (no suffix) of a writer's segment; `writer`: 12 random bytes."""
    return f"{writer.hex()}-{number}"


def segment_id(name: str) -> bytes | None:
    """The 16-byte id a segment's name stands for: writer, then number; None for other names."""
    match = _SEGMENT_NAME.fullmatch(name)
    if not match:
        return None
    number = int(match[2])
    return bytes.fromhex(match[1]) + number.to_bytes(4, "little")


def segment_name_of(ident: bytes) -> str:
    """File name (no suffix) of the segment with this 16-byte id."""
    return segment_name(ident[:12], int.from_bytes(ident[12:], "little"))


@dataclass(frozen=True)
class Layout:
    """An existing store directory: its path and the id in its superblock."""

    path: Path
    store_id: bytes

    @property
    def segments(self) -> Path:
        """Where payload and manifests lie."""
        return self.path / SEGMENTS

    @property
    def namespaces(self) -> Path:
        """Where identity documents lie."""
        return self.path / NAMESPACES

    @property
    def pins(self) -> Path:
        """Where pinned chains are named; made with the first pin."""
        return self.path / PINS

    @property
    def index(self) -> Path:
        """Where what can be rebuilt lies."""
        return self.path / INDEX

    def payload(self, name: str) -> Path:
        """A segment's data file."""
        return self.segments / (name + PAYLOAD_SUFFIX)

    def manifest(self, name: str) -> Path:
        """A segment's manifest."""
        return self.segments / (name + MANIFEST_SUFFIX)

    @classmethod
    def open(cls, path: Path, *, create: bool) -> Layout:
        """The store at `path`; StoreError if it is missing (and not `create`), foreign, of a
        newer format, or cannot be read or written. Nothing is changed in those cases."""
        try:
            if create:
                _create(path)
            elif not path.is_dir():
                raise StoreError(f"No store at {path}: give the store or the mount that holds it.")
            return cls(path, _read_superblock(path))
        except OSError as error:
            raise UnreachableError(
                f"Cannot {'create or open' if create else 'read'} the store at {path}: "
                f"{error.strerror or error}; check that it exists and that this user owns it."
            ) from error

    def verify(self) -> None:
        """OSError (ESTALE) if the path names another store now, or none: a drive that was mounted
        over it, or is gone. Nothing there may be written or deleted then. Another OSError if that
        cannot be told, as without a free descriptor."""
        try:
            same = _read_superblock(self.path) == self.store_id
        except (StoreError, NotADirectoryError):
            same = False
        if not same:
            text = "another store, or none, is there now: restart once the right one is back"
            raise OSError(errno.ESTALE, text)

    @contextlib.contextmanager
    def lock(self, *, shared: bool = False) -> Iterator[None]:
        """Hold the store's commit lock: writers share it, a deletion or a snapshot has it alone.

        It ends with the process that holds it, also after kill -9. Who wants it alone closes the
        gate before it waits, or writers that follow each other would keep it out for ever.
        OSError if that fails, or if the path names another store now.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        gate = self._lock_file(GATE)
        try:
            fcntl.flock(gate, kind)
            fd = self._lock_file(LOCK)
            try:
                fcntl.flock(fd, kind)
                fcntl.flock(gate, fcntl.LOCK_UN)
                self.verify()
                yield
            finally:
                os.close(fd)
        finally:
            os.close(gate)

    def _lock_file(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path / name, flags, 0o600)
        try:
            self.adopt(self.path / name)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def adopt(self, path: Path) -> None:
        """Give a file made by root to the store's owner, so that a root shell leaves nothing
        behind that the server cannot open."""
        _adopt(path, self.path)

    def write_once(self, path: Path, text: str) -> None:
        """Write a small file so that after a power cut it is there whole or not at all."""
        write_durably(path, (text.encode(),))


def _adopt(path: Path, folder: Path) -> None:
    if os.geteuid() == 0:
        owner = folder.stat()
        if owner.st_uid != 0:
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def write_durably(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Replace `path` by these bytes atomically and durably, as a file of whoever has the directory
    it lies in. OSError if that failed."""
    with _scratch(path, pieces) as scratch:
        scratch.replace(path)
    sync_directory(path.parent)


@contextlib.contextmanager
def _scratch(path: Path, pieces: Iterable[bytes | memoryview]) -> Iterator[Path]:
    """A durable file with these bytes under another name beside `path`; gone at the end."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{new_id().hex()}.tmp")
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            _adopt(scratch, path.parent)
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Make names in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _create(path: Path) -> None:
    if path.is_symlink():
        raise StoreError(f"{path} is a symbolic link: name the directory it points to instead.")
    for folder in reversed([parent for parent in path.parents if not parent.exists()]):
        folder.mkdir(mode=0o755, exist_ok=True)  # whatever the umask: nobody may swap the store
    path.mkdir(mode=0o700, exist_ok=True)
    # Looked at before the superblock: what another process makes meanwhile is not foreign.
    names = sorted(entry.name for entry in path.iterdir())
    segments = (path / SEGMENTS).is_dir() and any((path / SEGMENTS).iterdir())
    if not (path / SUPERBLOCK).exists():
        foreign = [
            name
            for name in names
            if name not in (SEGMENTS, NAMESPACES, INDEX, LOCK, GATE, PINS, "lost+found")
            and not name.startswith(f".{SUPERBLOCK}.")
        ]
        if foreign:
            raise StoreError(
                f"{path} holds other files ({', '.join(foreign[:3])}) and no {SUPERBLOCK}: "
                "choose an empty directory, or the mount above it."
            )
        if segments:
            raise StoreError(
                f"{path} holds segments and no {SUPERBLOCK}: restore that file from a copy, or "
                "move the store away and start anew."
            )
        path.chmod(0o700)
        document = {
            "format": FORMAT_VERSION,
            "store": new_id().hex(),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "kvtier": __version__,
        }
        sync_directory(path.parent)
        _link_once(path / SUPERBLOCK, json.dumps(document, indent=2) + "\n")
    _read_superblock(path)
    for name in (SEGMENTS, NAMESPACES, INDEX):
        (path / name).mkdir(mode=0o700, exist_ok=True)
        if (path / name).is_symlink():
            raise StoreError(f"{path / name} is a symbolic link: remove it and start again.")
    sync_directory(path)


def _link_once(path: Path, text: str) -> None:
    """Create `path` with `text` unless another process was first."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path.parent / LOCK, flags, 0o600)
    try:
        _adopt(path.parent / LOCK, path.parent)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with _scratch(path, (text.encode(),)) as scratch:
            try:
                os.link(scratch, path)
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links: the lock keeps others out
                if not path.exists():
                    scratch.replace(path)
    finally:
        os.close(fd)
    sync_directory(path.parent)


def _read_superblock(path: Path) -> bytes:
    """The store's id; StoreError if this is no store or one we must not touch."""
    file = path / SUPERBLOCK
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            raise StoreError(f"{file} is not a regular file: this is not a kvtier store.")
        document = json.loads(file.read_text(encoding="utf-8"))
        version, ident = document["format"], bytes.fromhex(document["store"])
    except FileNotFoundError as error:
        raise StoreError(
            f"{path} is not a kvtier store (no {SUPERBLOCK}): "
            "give the store or the mount that holds it."
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{file} is damaged: restore it from a copy, or move the store away and start anew."
        ) from error
    if not isinstance(version, int) or len(ident) != 16:
        raise StoreError(
            f"{file} is damaged: restore it from a copy, or move the store away and start anew."
        )
    if version > FORMAT_VERSION:
        raise StoreError(
            f"{path} has format {version}, this kvtier ({__version__}) knows {FORMAT_VERSION}: "
            "upgrade kvtier, or use another root; the store was left untouched."
        )
    return ident
