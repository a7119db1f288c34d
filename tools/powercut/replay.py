"""Power cuts below a drive: what a drive was told is recorded, and every state that a cut may leave
is made and opened.

After a flush all writes before it are there. Of those after it any may be there or not, in any
order, and in any of their sectors.
"""

from __future__ import annotations

import bisect
import functools
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from powercut.filesystem import FileSystem, make_image, private_mounts, work_folder
from powercut.fuse import Drive, Write
from powercut.process import Child, checked, hear_all
from powercut.result import Result
from powercut.workload import Message, Oracle, settings, verify, write

SECTOR = 512


@dataclass
class Recording:
    """What a drive was told while a store was written, and when what was promised."""

    kind: str
    seed: int
    start: Path
    """The drive's bytes before."""
    log: list[Write | None] = field(default_factory=list)
    messages: list[tuple[int, Message]] = field(default_factory=list)
    """(entries of the log there were when it was heard, message)."""
    writers: int = 1

    def oracle_at(self, flush: int) -> Oracle:
        """What must be there once the flush at this entry of the log is done.

        A message heard after a flush speaks of what that flush, or an earlier one, made durable.
        """
        oracle = Oracle(self.seed)
        for at, message in self.messages:
            entry = bisect.bisect_left(self.flushes, at) - 1
            if message["say"] == "put" or (entry >= 0 and self.flushes[entry] <= flush):
                oracle.hear(message)
        return oracle

    @functools.cached_property
    def flushes(self) -> list[int]:
        """Entries of the log that are flushes."""
        return [entry for entry, what in enumerate(self.log) if what is None]


def run(runs: int, seed: int, kinds: tuple[str, ...] = ("ext4", "xfs")) -> list[Result]:
    """About `runs` images of each kind of file system."""
    private_mounts()
    return [_replays(kind, runs, seed) for kind in kinds]


def _replays(kind: str, runs: int, seed: int) -> Result:
    result = Result(f"write-log replay, {kind}")
    while result.runs < runs:
        rng = random.Random(f"{seed}/{kind}/{result.runs}")
        with work_folder() as folder:
            recording = _record(kind, folder, rng)
            result.count("recordings")
            _replay(recording, runs - result.runs, rng, result)
    return result.done()


def _record(kind: str, folder: Path, rng: random.Random) -> Recording:
    start = make_image(kind, folder / "start")
    image = folder / "image"
    _copy(start, image)
    drive = Drive(image, folder)
    seed = rng.getrandbits(32)
    recording = Recording(kind, seed, start)
    oracle = Oracle(seed)

    def hear(message: Message) -> None:
        recording.messages.append((drive.entries, message))
        oracle.hear(message)

    system = None
    try:
        system = FileSystem(kind, folder, drive.path)
        writers = recording.writers = rng.choice((1, 2))
        seeds = [rng.getrandbits(32)] * writers
        config = settings(system.path, direct_io=rng.random() < 0.75)
        duties = rng.choice(((), ("collect",), ("save", "rebuild"), ("reopen",)))
        children = [
            Child(
                lambda send, s=s: write(
                    config, Oracle(seed), send, random.Random(s), steps=15, duties=duties
                ),
                answers=True,
            )
            for s in seeds
        ]
        while not all(child.ended for child in children):
            hear_all(children, 1.0, hear)
        for child in children:
            if child.wait(hear):
                raise RuntimeError(f"recording failed: {child.errors}")
        recording.log = drive.log()
    finally:
        if system is not None:
            system.close()
        drive.close()
    return recording


def _replay(recording: Recording, images: int, rng: random.Random, result: Result) -> None:
    """Make two states for each of so many flushes and open them, in the order of the log."""
    flushes, folder = recording.flushes, recording.start.parent
    result.count("flushes recorded", len(flushes))
    chosen = sorted(rng.sample(flushes, min(len(flushes), max(1, images // 2))) * 2)
    base = folder / "base"
    _copy(recording.start, base)
    durable = 0
    with base.open("r+b", buffering=0) as file:
        for number, flush in enumerate(chosen):
            for what in recording.log[durable:flush]:
                if what is not None:
                    _apply(file.fileno(), what.offset, what.data)
            durable = flush
            window = _until_flush(recording.log, flush + 1)
            image = folder / "cut"
            _copy(base, image)
            plain = number % 2 == 0
            if not plain:
                _apply_some(image, window, rng)
            name = f"{recording.writers} writers, seed {recording.seed}, flush {flush}"
            result.runs += 1
            result.count("at a flush" if plain else "with torn and reordered writes")
            wrong, parts = _look(recording, image, oracle := recording.oracle_at(flush))
            result.fail(name if plain else f"{name} and some", wrong)
            result.count("parts found exact", parts)
            result.count("parts required", len(oracle.promised))


def _look(recording: Recording, image: Path, oracle: Oracle) -> tuple[list[str], int]:
    """(what is wrong with a store on this image, parts that are there)."""
    system = None
    try:
        system = FileSystem(recording.kind, image.parent, image)
        config = settings(system.path)
        return checked(lambda: verify(config, oracle))
    except OSError as error:
        return [f"the file system cannot be mounted: {error}"], 0
    finally:
        if system is not None:
            system.close()


def _until_flush(log: list[Write | None], start: int) -> list[Write]:
    window = []
    for what in log[start:]:
        if what is None:
            break
        window.append(what)
    return window


def _apply_some(image: Path, window: list[Write], rng: random.Random) -> None:
    """Some of the writes, in some order, some of them only in some sectors."""
    share = rng.random()
    order = rng.sample(window, len(window)) if rng.random() < 0.5 else window
    with image.open("r+b", buffering=0) as file:
        for what in order:
            if rng.random() > share:
                continue
            if rng.random() < 0.7:
                _apply(file.fileno(), what.offset, what.data)
                continue
            sectors = range(0, len(what.data), SECTOR)
            kept = rng.random()
            for at in sectors:
                if rng.random() < kept:
                    _apply(file.fileno(), what.offset + at, what.data[at : at + SECTOR])


def _apply(fd: int, offset: int, data: bytes) -> None:
    os.pwrite(fd, data, offset)


def _copy(source: Path, target: Path) -> None:
    """Copy a file with its holes."""
    target.unlink(missing_ok=True)
    with source.open("rb") as reader, target.open("wb") as writer:
        size = os.fstat(reader.fileno()).st_size
        os.truncate(writer.fileno(), size)
        at = 0
        while at < size:
            try:
                at = os.lseek(reader.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            end = os.lseek(reader.fileno(), at, os.SEEK_HOLE)
            reader.seek(at)
            writer.seek(at)
            while at < end:
                piece = os.pread(reader.fileno(), min(1 << 20, end - at), at)
                os.pwrite(writer.fileno(), piece, at)
                at += len(piece)
    shutil.copymode(source, target)
