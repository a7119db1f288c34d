"""SHA-256 of whole weight files, taken once per version of a file."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvtier.errors import IdentityError
from kvtier.sizes import format_size

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with bytes hashed so far and in all, by one thread at a time."""

CACHE_NAME = "weights-sha256.json"
LOCK_NAME = "weights-sha256.lock"
CACHE_ENTRIES = 4096
CHUNK = 8 << 20
THREADS = 8

SETTLED_NS = 2 * 10**9
"""A file touched less than this before its hash was begun isn't remembered: file times move in
ticks, so a second change could leave the same ones behind."""

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a fault of reading `path` into an IdentityError."""
    try:
        yield
    except OSError as error:
        raise IdentityError(
            f"{error.filename or path} cannot be read ({error.strerror or error}), so the model's "
            "pages cannot be named: mend that and start again."
        ) from error


def file_hashes(
    paths: Sequence[Path], cache_dir: Path | None, progress: Progress | None
) -> tuple[list[bytes], int]:
    """The SHA-256 of every file in order, and how many bytes were read for it.

    A blob of a hub cache is not read, and neither is a file that has the device, inode, size and
    times it had when `cache_dir` last learned its hash. Of several processes with one cache, one
    reads and the others wait for it. Raises IdentityError.
    """
    hashes: dict[Path, bytes] = {}
    versions: dict[Path, str] = {}
    for path in paths:
        with reading(path):
            versions[path] = _version(path.stat())
        if blob := hub_hash(path):
            hashes[path] = blob
    with _alone(cache_dir):
        remembered = _remembered(cache_dir)
        for path in versions.keys() - hashes.keys():
            if known := remembered.get(versions[path]):
                hashes[path] = known
        missing = {path: version for path, version in versions.items() if path not in hashes}
        total = sum(_bytes_of(version) for version in missing.values())
        began = time.time_ns()
        if missing:
            log.info("Hashing %s of weights, once per version of a file.", format_size(total))
        hashes |= _read_all(missing, _Meter(total, progress))
        settled = {
            version: hashes[path]
            for path, version in missing.items()
            if _touched(version) < began - SETTLED_NS
        }
        if cache_dir is not None and settled:
            _remember(cache_dir, remembered, settled)
    return [hashes[path] for path in paths], total


def hub_hash(path: Path) -> bytes | None:
    """The SHA-256 in the name of the blob that `path` links to, in a Hugging Face hub cache.

    Large files lie there as blobs/<SHA-256 of the content>; smaller ones carry a git SHA-1 of 40
    digits, which is no evidence here.
    """
    blob = path.resolve()
    if path.is_symlink() and blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
        return bytes.fromhex(blob.name)
    return None


class _Meter:
    """Adds up what the threads have read and tells the caller."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)


def _read_all(versions: dict[Path, str], meter: _Meter) -> dict[Path, bytes]:
    with ThreadPoolExecutor(THREADS, thread_name_prefix="kvtier-sha256") as pool:
        found = pool.map(lambda path: _hash(path, versions[path], meter), versions)
        return dict(zip(versions, found, strict=True))


def _hash(path: Path, version: str, meter: _Meter) -> bytes:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    with reading(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            meter.add(count)
        if _version(os.fstat(file.fileno())) != version:
            raise IdentityError(f"{path} changed while it was read: leave it and start again.")
    return digest.digest()


def _version(status: os.stat_result) -> str:
    """What changes whenever a file's content may have changed."""
    times = f"{status.st_mtime_ns}:{status.st_ctime_ns}"
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{times}"


def _bytes_of(version: str) -> int:
    return int(version.split(":")[2])


def _touched(version: str) -> int:
    """The later of a version's two times, in ns."""
    return max(int(time_ns) for time_ns in version.split(":")[-2:])


@contextmanager
def _alone(cache_dir: Path | None) -> Iterator[None]:
    """Hold the cache's lock, which ends with the process; without one if there can be none."""
    with ExitStack() as stack:
        if cache_dir is not None:
            try:
                cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = os.open(cache_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                log.warning(
                    "The hashes of the weights cannot be kept in %s (%s): each start reads the "
                    "weights again.",
                    cache_dir,
                    error.strerror or error,
                )
        yield


def _remembered(cache_dir: Path | None) -> dict[str, bytes]:
    """Versions and hashes of the cache, oldest first; none if it is absent, damaged or not ours.

    Who can write the cache can pass off other weights, so only a file of our own that nobody else
    may write counts.
    """
    if cache_dir is None:
        return {}
    try:
        with (cache_dir / CACHE_NAME).open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return {}
            entries = json.loads(file.read())
        return {str(version): bytes.fromhex(digest) for version, digest in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        # It only saves time: absent, unreadable or damaged, it is written anew.
        return {}


def _remember(cache_dir: Path, old: dict[str, bytes], fresh: dict[str, bytes]) -> None:
    """Add to the cache. A fault costs the next start its time, not this one."""
    entries = {version: old[version] for version in old if version not in fresh} | fresh
    newest = list(entries.items())[-CACHE_ENTRIES:]
    text = json.dumps({version: digest.hex() for version, digest in newest}, indent=0)
    try:
        # The files of NamedTemporaryFile are 0600.
        with tempfile.NamedTemporaryFile("w", dir=cache_dir, delete=False) as file:
            try:
                file.write(text)
                file.flush()
                Path(file.name).replace(cache_dir / CACHE_NAME)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        log.warning(
            "The hashes of the weights could not be kept in %s (%s): the next start reads the "
            "weights again.",
            cache_dir,
            error.strerror or error,
        )
