"""Gives space back to the file system: dead segments are removed, dead extents punched out."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvtier.backends.local import disk_usage, punch, unlink_segment
from kvtier.catalog import Segment
from kvtier.format import (
    ALIGNMENT,
    FormatError,
    FrameType,
    decode_tombstone,
    decode_wipe,
    scan_frames,
)
from kvtier.index import Index
from kvtier.layout import PAYLOAD_SUFFIX, Layout, segment_id
from kvtier.status import remove_dead

_SLACK_BYTES = 16 << 10
"""Space below this is not worth a system call: the file system's own blocks look the same."""

_SCRATCH_SECONDS = 60.0
"""A file gets its name within moments of its creation."""

_NO_HOLES = (errno.EOPNOTSUPP, errno.ENOSYS)

Extents = npt.NDArray[np.int64]


def reclaim(layout: Layout, index: Index) -> int:
    """Free what no live page uses, and say how many bytes the store takes on disk after that.

    To be called a grace time after the deletions were logged. Space that a running writer has not
    committed yet is not touched. File systems that cannot punch holes free whole segments only.
    """
    # Without the lock, since it takes long for many runs: what is gone never comes back, and what
    # is new lies behind the payload that the manifests name at this moment.
    index.refresh()
    segments = [replace(segment) for segment in index.segments() if not segment.unreadable]
    live = live_extents(index)
    dead = [s for s in segments if not s.live and s.name not in live]
    holes = True
    for segment in segments:
        if holes and segment not in dead:
            extents = live.get(segment.name, np.zeros((0, 2), np.int64))
            holes = _punch_dead(layout, segment, extents)
    with layout.lock():
        index.refresh()
        present = {segment.ident for segment in index.segments()}
        for segment in dead:
            _remove(layout, segment, present)
        _remove_orphans(layout, index)
    return disk_usage(layout.path)


def live_extents(index: Index) -> dict[str, Extents]:
    """Bytes of each segment that live pages use: ascending, disjoint (start, end) rows, widened
    to whole blocks of the file system."""
    pieces: dict[str, list[Extents]] = defaultdict(list)
    for stored in index.runs():
        for block in stored.run.blocks:
            if not block.part_bytes:
                pieces[stored.segment].append(np.zeros((0, 2), np.int64))
                continue
            start = block.offset + stored.positions * block.part_bytes
            pieces[stored.segment].append(np.stack((start, start + block.part_bytes), axis=1))
    return {name: _joined(np.concatenate(rows)) for name, rows in pieces.items()}


def _joined(rows: Extents) -> Extents:
    rows = np.stack((rows[:, 0] // ALIGNMENT, -(-rows[:, 1] // ALIGNMENT)), axis=1) * ALIGNMENT
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    if not len(rows):
        return rows
    ends = np.maximum.accumulate(rows[:, 1])
    starts = np.flatnonzero(np.concatenate(([True], rows[1:, 0] > ends[:-1])))
    return np.stack((rows[starts, 0], ends[np.append(starts[1:], len(rows)) - 1]), axis=1)


def _punch_dead(layout: Layout, segment: Segment, live: Extents) -> bool:
    """Punch what lies between live extents; False if the file system cannot."""
    path = layout.payload(segment.name)
    try:
        status = path.stat()
    except FileNotFoundError:
        return True
    used = int((live[:, 1] - live[:, 0]).sum())
    if status.st_blocks * 512 <= used + _SLACK_BYTES:
        return True
    # What a running writer has not committed yet lies behind what its manifest names.
    end = segment.payload_end if segment.live else status.st_size
    edges = np.concatenate(([0], live.ravel(), [max(end, int(live.max(initial=0)))]))
    try:
        for start, stop in edges.reshape(-1, 2).tolist():
            punch(path, start, stop)
    except OSError as error:
        if error.errno in _NO_HOLES:
            return False
        raise
    return True


def _remove(layout: Layout, segment: Segment, present: set[bytes]) -> None:
    """Remove a dead segment; its manifest stays while it holds tombstones of others that are
    there, or a rebuild would revive what they deleted."""
    try:
        if _still_needed(layout, segment, present):
            layout.payload(segment.name).unlink(missing_ok=True)
        else:
            unlink_segment(layout, segment.name)
            present.discard(segment.ident)
    except (BlockingIOError, FileNotFoundError):
        return  # held by a reader at this moment, or another collection was faster


def _still_needed(layout: Layout, segment: Segment, present: set[bytes]) -> bool:
    others = present - {segment.ident}
    for _, frame, _ in scan_frames(layout.manifest(segment.name).read_bytes()):
        if frame is None:
            continue
        try:
            if frame.type == FrameType.TOMBSTONE:
                named = {grave.segment_id for grave in decode_tombstone(frame.body)}
            elif frame.type == FrameType.WIPE:
                named = {ident for ident, _ in decode_wipe(frame.body)[1]}
            else:
                continue
        except FormatError:
            continue
        if named & others:
            return True
    return False


def _remove_orphans(layout: Layout, index: Index) -> None:
    """Remove what a process that died left without a use: payload whose manifest is gone, and
    scratch files. Manifests get their names before payload is made, and snapshots are written
    under the lock held here, so none of it belongs to anybody alive."""
    known = {segment.name for segment in index.segments()}
    with os.scandir(layout.segments) as entries:
        names = [entry.name for entry in entries if entry.name.endswith(PAYLOAD_SUFFIX)]
    for name in names:
        stem = name.removesuffix(PAYLOAD_SUFFIX)
        if segment_id(stem) and stem not in known and not layout.manifest(stem).exists():
            layout.payload(stem).unlink(missing_ok=True)
    remove_dead(layout)
    for scratch in layout.index.glob(".*.tmp"):
        scratch.unlink(missing_ok=True)
    for folder in (layout.path, layout.namespaces, layout.segments, layout.pins):
        for scratch in folder.glob(".*.tmp"):
            with contextlib.suppress(FileNotFoundError):  # it just got its name
                if time.time() - scratch.stat().st_mtime > _SCRATCH_SECONDS:
                    scratch.unlink()
