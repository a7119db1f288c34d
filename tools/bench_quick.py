#!/usr/bin/env python3
"""kvtier against SGLang's HiCacheFile on one drive, in one run: a few minutes, a few GiB.

Everything goes through SGLang's storage interface, 128 pages a call. Absolute figures depend on
the machine and on what else it does; the ratios within one run are what counts.
docs/performance.md explains the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from bench_pools import Pages, Shape, Side

MIB = 1 << 20
SAMPLE_BYTES = 384 * MIB
"""Bytes written and read per repetition."""

DRIVE_BLOCK = 16 * MIB
DRIVE_THREADS = 2

EXISTS_CALLS = 30
BUSY_SECONDS = 1.5
BUSY_FILE_PAGES = 8
"""Pages of a call of HiCacheFile beside a busy thread: 128 would take up to ten seconds."""

STORE_PAGES = 1_000_000
RUN_PAGES = 8
"""Pages of a run as V4.1's 2,048-token chunks give them."""

STORE_SEGMENTS = 400
ASKED_KEYS = 4096

progress = Console(stderr=True)


@dataclass
class Figures:
    """Medians of one page size; rates in MiB/s, times in seconds, by who was measured."""

    shape: str
    write: dict[str, float] = field(default_factory=dict)
    write_syncfs: dict[str, float] = field(default_factory=dict)
    """The same, with HiCacheFile's files made durable by a single syncfs at the end."""
    read: dict[str, float] = field(default_factory=dict)
    exists: dict[str, float] = field(default_factory=dict)
    busy_read: dict[str, float] = field(default_factory=dict)
    busy_exists: dict[str, float] = field(default_factory=dict)
    busy_ticks: dict[str, float] = field(default_factory=dict)
    """Share of its undisturbed speed that the busy thread kept during the reads."""


def main() -> None:
    arguments = _arguments()
    if arguments.answer:
        _answer(arguments.answer)
        return
    warnings.filterwarnings("ignore")
    with progress.status("importing SGLang"):
        from bench_pools import SHAPES, publish_settings

        publish_settings()
    logging.disable(logging.WARNING)  # HiCacheFile and kvtier say where they store
    shapes = [shape for shape in SHAPES if shape.name.split()[0].startswith(arguments.only)]
    folder = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=arguments.root))
    try:
        figures = [_measure(shape, folder, arguments.repeat) for shape in shapes]
        reopening = None
        if arguments.only in ("", "reopening"):
            reopening = _reopening(folder / "million", arguments.repeat)
    finally:
        with progress.status("removing what was written"):
            shutil.rmtree(folder, ignore_errors=True)
    _show(figures, reopening)
    if arguments.json:
        document = {"pages": [vars(f) for f in figures], "reopening": reopening}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--root", type=Path, default=Path(), help="directory on the drive to measure (.)"
    )
    parser.add_argument("--repeat", type=int, default=3, help="interleaved repetitions (3)")
    parser.add_argument(
        "--only", choices=["64", "418", "1", "reopening"], default="", help="one page size, or part"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- write, read, exists -----------------------------------------------------------------------


def _measure(shape: Shape, folder: Path, repeat: int) -> Figures:
    from bench_pools import FileSide, KvtierSide, Pages, sync_file_system

    pages = Pages(shape, SAMPLE_BYTES // shape.page_bytes)
    ours, theirs = KvtierSide(pages, folder / "kvtier"), FileSide(pages, folder / "files")
    write, syncfs, read, exists = (_Samples() for _ in range(4))

    def measure(side: Side) -> None:
        sync_file_system(folder)
        write.add(side.name, _durable_write(side, pages, side.sync))
        exists.add(side.name, *_exists(side, pages, EXISTS_CALLS))
        read.add(side.name, _cold_read(side, pages, folder))

    for number in range(repeat):
        with progress.status(f"{shape.name}: {number + 1} of {repeat}"):
            theirs.clear()
            pages.renew(f"{shape.name} {number} syncfs")
            sync_file_system(folder)
            syncfs.add(theirs.name, _durable_write(theirs, pages, theirs.sync_all))
            theirs.clear()
            pages.renew(f"{shape.name} {number}")
            for side in (ours, theirs) if number % 2 else (theirs, ours):
                measure(side)
            wrote, got = _drive(folder / "drive", pages.bytes)
            write.add("drive", wrote)
            read.add("drive", got)
    syncfs.add(ours.name, write.medians()[ours.name])
    figures = Figures(
        shape.name, write.medians(), syncfs.medians(), read.medians(), exists.medians()
    )
    for side in (ours, theirs):
        with progress.status(f"{shape.name}: {side.name} beside a busy thread"):
            _beside_busy_thread(side, pages, folder, figures)
        side.close()
    with progress.status("removing files"):
        shutil.rmtree(folder / "kvtier")
        shutil.rmtree(folder / "files")
    return figures


class _Samples:
    """Measured values by name."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, name: str, *values: float) -> None:
        self._values.setdefault(name, []).extend(values)

    def medians(self) -> dict[str, float]:
        return {name: median(values) for name, values in self._values.items()}


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _durable_write(side: Side, pages: Pages, sync: Callable[[], None]) -> float:
    """MiB/s of storing all pages, until they would survive a power cut."""
    from bench_pools import calls

    def work() -> None:
        for start, end in calls(pages.count):
            side.put(start, end)
        sync()

    return pages.bytes / MIB / _timed(work)


def _cold_read(side: Side, pages: Pages, folder: Path) -> float:
    """MiB/s of reading all pages; what was read is compared with what was stored."""
    from bench_pools import calls, forget_cached

    pages.blank()
    forget_cached(folder)
    seconds = _timed(lambda: [side.get(start, end) for start, end in calls(pages.count)])
    if not pages.intact():
        sys.exit(f"{side.name} returned other bytes than were stored")
    return pages.bytes / MIB / seconds


def _exists(side: Side, pages: Pages, count: int) -> list[float]:
    """Seconds of each of some lookups of 128 pages."""
    from bench_pools import calls

    whole = [call for call in calls(pages.count) if call[1] - call[0] == 128]
    times = []
    for start, end in itertools.islice(itertools.cycle(whole), count):
        lookup = side.lookup(start, end)
        began = time.perf_counter()
        found = lookup()
        times.append(time.perf_counter() - began)
        assert found == end - start, "stored pages are not found"
    return times


def _drive(path: Path, size: int) -> tuple[float, float]:
    """MiB/s of writing and syncing, then reading, as many bytes past the page cache."""
    memory = mmap.mmap(-1, DRIVE_BLOCK)
    memory.write(os.urandom(DRIVE_BLOCK))
    offsets = range(0, size, DRIVE_BLOCK)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)

    def write() -> None:
        list(threads.map(lambda at: os.pwrite(fd, memory, at), offsets))
        os.fdatasync(fd)

    def read() -> None:
        list(threads.map(lambda at: os.preadv(fd, [memory], at), offsets))

    try:
        with ThreadPoolExecutor(DRIVE_THREADS) as threads:
            wrote, got = _timed(write), _timed(read)
    finally:
        os.close(fd)
        path.unlink()
    return size / MIB / wrote, size / MIB / got


# --- beside a busy thread ----------------------------------------------------------------------


class _Spinner:
    """A thread that runs bytecode without a pause: what a decode loop does to the interpreter."""

    def __init__(self) -> None:
        self.ticks = 0
        self._end = False
        self._thread = threading.Thread(target=self._spin)

    def _spin(self) -> None:
        while not self._end:
            self.ticks += 1

    @contextlib.contextmanager
    def running(self) -> Iterator[float]:
        """Ticks per second of the thread when nothing else runs."""
        self._thread.start()
        try:
            before = self.ticks
            seconds = _timed(lambda: time.sleep(0.5))
            yield (self.ticks - before) / seconds
        finally:
            self._end = True
            self._thread.join()


def _beside_busy_thread(side: Side, pages: Pages, folder: Path, figures: Figures) -> None:
    from bench_pools import forget_cached

    call = BUSY_FILE_PAGES if side.name == "HiCacheFile" else 128
    forget_cached(folder)
    spinner = _Spinner()
    with spinner.running() as alone:
        before, began, done = spinner.ticks, time.perf_counter(), 0
        while done + call <= pages.count and time.perf_counter() - began < BUSY_SECONDS:
            side.get(done, done + call)
            done += call
        seconds = time.perf_counter() - began
        figures.busy_ticks[side.name] = (spinner.ticks - before) / seconds / alone
        figures.busy_read[side.name] = done * pages.shape.page_bytes / MIB / seconds
        count = 1 if side.name == "HiCacheFile" else EXISTS_CALLS
        figures.busy_exists[side.name] = median(_exists(side, pages, count))


# --- reopening a store -------------------------------------------------------------------------


def _reopening(root: Path, repeat: int) -> dict[str, float]:
    """Seconds from opening a store of a million pages to the answer of 4,096 keys."""
    from bench_pools import forget_cached

    with progress.status(f"building the manifests of {STORE_PAGES:,} pages"):
        _build_store(root)
    answers = []
    for number in range(repeat + 1):
        what = "with a snapshot" if number else "from the manifests alone"
        with progress.status(f"reopening {STORE_PAGES:,} pages {what}"):
            forget_cached(root)
            command = [sys.executable, __file__, "--answer", str(root)]
            began = time.time()
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            answer = json.loads(done.stdout)
            answer["process"] = answer.pop("answered") - began
            answers.append(answer)
    rebuilt, *snapshots = answers
    return {
        "rebuild": rebuilt["seconds"],
        "snapshot": median(answer["seconds"] for answer in snapshots),
        "process": median(answer["process"] for answer in snapshots),
        "anonymous": median(answer["anonymous"] for answer in snapshots),
        "mapped": median(answer["mapped"] for answer in snapshots),
    }


def _build_store(root: Path) -> None:
    """A store whose manifests tell of pages of V4.1's five pools; nobody reads their payload."""
    from bench_pools import SHAPES

    from kvtier import format as fmt
    from kvtier.config import Config
    from kvtier.layout import segment_name
    from kvtier.pages import KEY_BYTES, Column
    from kvtier.store import Store

    parts = {Column(str(name)): size for name, size in SHAPES[1].parts.items()}
    store = Store.open(Config(root=root))
    store.namespace(_bench_identity())
    store.close()
    namespace = _bench_identity().id_bytes
    noise = np.random.default_rng(1)
    keys = noise.bytes(STORE_PAGES * KEY_BYTES)
    sums = noise.integers(0, 1 << 63, (len(parts), RUN_PAGES), np.uint64)
    writer = fmt.new_id()[:12]
    runs = iter(range(0, STORE_PAGES, RUN_PAGES))
    per_segment = -(-STORE_PAGES // RUN_PAGES // STORE_SEGMENTS)
    for number in range(STORE_SEGMENTS):
        name = segment_name(writer, number)
        ident = writer + number.to_bytes(4, "little")
        bodies = [(fmt.FrameType.COLUMNS, fmt.encode_columns(namespace, list(parts)))]
        offset = 0
        for first in itertools.islice(runs, per_segment):
            blocks = []
            for (column, size), checksums in zip(parts.items(), sums, strict=True):
                part_sums = checksums if size else checksums[:0]
                blocks.append(fmt.Block(fmt.column_id(column), offset, size, first, part_sums))
                offset += fmt.align(size * RUN_PAGES)
            parent = keys[(first - 1) * KEY_BYTES : first * KEY_BYTES]
            mine = keys[first * KEY_BYTES : (first + RUN_PAGES) * KEY_BYTES]
            run = fmt.Run(namespace, parent, first, 0, mine, blocks)
            bodies.append((fmt.FrameType.RUN, fmt.encode_run(run)))
        names = {"segment_id": ident, "store_id": store.layout.store_id, "time_ns": time.time_ns()}
        frames = (
            fmt.encode_frame(kind, body, sequence=sequence, **names)
            for sequence, (kind, body) in enumerate(bodies)
        )
        store.layout.manifest(name).write_bytes(b"".join(frames))
        store.layout.payload(name).touch()
    first = STORE_PAGES // 2
    asked = keys[first * KEY_BYTES : (first + ASKED_KEYS) * KEY_BYTES]
    (root / "asked").write_bytes(asked)


def _bench_identity() -> Any:
    from kvtier.identity import Identity

    return Identity.of({"bench": "a million pages"})


def _answer(root: Path) -> None:
    """The fresh process: open the store and look the keys up in all five columns."""
    from kvtier.config import Config
    from kvtier.pages import KEY_BYTES, Column
    from kvtier.store import Store

    data = (root / "asked").read_bytes()
    keys = [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
    anonymous, mapped = _resident()
    began = time.perf_counter()
    store = Store.open(Config(root=root))
    namespace = store.namespace(_bench_identity())
    columns = store.index.columns(_bench_identity().id_bytes).values()
    found = [bool(namespace.contains(Column(*column), keys).all()) for column in columns]
    answer = {
        "seconds": time.perf_counter() - began,
        "answered": time.time(),
        "anonymous": _resident()[0] - anonymous,
        "mapped": _resident()[1] - mapped,
    }
    store.close()
    if found != [True] * 5:
        sys.exit("pages of the store are not found")
    print(json.dumps(answer))


def _resident() -> tuple[int, int]:
    """Bytes of this process in memory: its own, and those of mapped files (shared by a host)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {
        name: (text.split() or [""])[0] for name, text in (line.split(":", 1) for line in lines)
    }
    return int(sizes["RssAnon"]) << 10, int(sizes["RssFile"]) << 10


# --- the tables --------------------------------------------------------------------------------


def _show(figures: Sequence[Figures], reopening: dict[str, float] | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110)
    cold = "page cache dropped" if os.geteuid() == 0 else "posix_fadvise only: not root"
    table = Table(
        title=f"128 pages a call, cold reads ({cold}), medians, the drive beside them",
        title_justify="left",
    )
    for name in ("page", "what", "kvtier", "HiCacheFile", "ratio", "goal", "drive itself"):
        table.add_column(name, justify="left" if name in ("page", "what") else "right")
    for f in figures:
        table.add_row(f.shape, "durable write", *_rates(f.write, "2x"))
        table.add_row("", "… theirs by one syncfs", *_rates(f.write_syncfs, ""))
        table.add_row("", "cold read", *_rates(f.read, "2x"))
        table.add_row("", "exists x128", *_times(f.exists, "5x"))
        table.add_row("", "read, busy thread", *_rates(f.busy_read, ""))
        table.add_row("", "exists x128, busy thread", *_times(f.busy_exists, ""))
        kept = {name: f"{share:.0%}" for name, share in f.busy_ticks.items()}
        table.add_row("", "busy thread kept", kept["kvtier"], kept["HiCacheFile"], "", "", "")
        table.add_section()
    if figures:
        console.print(table)
    if reopening:
        pages = f"{STORE_PAGES:,} pages, {ASKED_KEYS:,} keys in five pools, fresh process"
        table = Table("reopening to the answer", "seconds", "goal", title=pages)
        snapshot = reopening["snapshot"]
        table.add_row("with its snapshot", _verdict(snapshot, snapshot < 0.5, ".3f"), "< 0.5")
        table.add_row("… and interpreter start", f"{reopening['process']:.3f}", "")
        table.add_row("from the manifests alone", f"{reopening['rebuild']:.1f}", "")
        console.print(table)
        own, shared = (reopening[name] / MIB for name in ("anonymous", "mapped"))
        console.print(f"memory: {own:.0f} MiB of its own, {shared:.0f} MiB shared by the host")


def _rates(values: dict[str, float], goal: str) -> tuple[str, ...]:
    ours, theirs = values["kvtier"], values["HiCacheFile"]
    ratio, drive = _ratio(ours / theirs, goal), ""
    if "drive" in values:
        drive = f"{values['drive']:.0f} MiB/s"
        if goal and ours < float(goal.rstrip("x")) * theirs and ours > 0.9 * values["drive"]:
            ratio = f"[yellow]{ours / theirs:.1f}x: drive's limit[/]"
    return f"{ours:.0f} MiB/s", f"{theirs:.0f} MiB/s", ratio, goal, drive


def _times(values: dict[str, float], goal: str) -> tuple[str, ...]:
    ours, theirs = values["kvtier"], values["HiCacheFile"]
    cells = f"{ours * 1e3:.3f} ms", f"{theirs * 1e3:.3f} ms"
    return *cells, _ratio(theirs / ours, goal), goal, ""


def _ratio(ratio: float, goal: str) -> str:
    good = not goal or ratio >= float(goal.rstrip("x"))
    return _verdict(ratio, good, ".1f", "x")


def _verdict(value: float, good: bool, digits: str, unit: str = "") -> str:
    return f"[{'green' if good else 'red'}]{value:{digits}}{unit}[/]"


if __name__ == "__main__":
    main()
