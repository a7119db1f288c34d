"""The index's snapshot: one checksummed file, replaced as a whole, mapped by every process.

It holds the frames of all live runs, where each came from, and a table from pages to runs. It is
derived: a missing, older or damaged snapshot costs a replay of the manifests, nothing else.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.format import ALIGNMENT, FORMAT_VERSION, FormatError, align, checksum
from kvtier.layout import write_durably
from kvtier.memory import keep_resident
from kvtier.pages import U64
from kvtier.table import Table

HEADER = struct.Struct("<4sIQQQ")
"""magic, format version, bytes of the JSON document, its checksum, checksum of what follows the
document and its padding."""

MAGIC = b"KVTS"

ARRAYS = ("table_keys", "table_values", "row_frame", "row_manifest", "row_segment")
"""Order in the file; all uint64. The frames follow."""


@dataclass
class Rows:
    """Where runs came from, one entry a run. Shape (n,), `frame` (n + 1,)."""

    frame: U64
    """Offset of each run's frame in `frames`, and the end."""
    manifest: U64
    """Offset of the frame in its segment's manifest."""
    segment: U64
    """Number of the segment in the index's list."""

    def __len__(self) -> int:
        return len(self.manifest)

    @classmethod
    def empty(cls) -> Rows:
        """No runs."""
        none = np.zeros(0, np.uint64)
        return cls(np.zeros(1, np.uint64), none, none)


@dataclass
class Snapshot:
    """What the file holds. `state` is the small rest of the index as a JSON document."""

    state: dict[str, Any]
    table: Table
    rows: Rows
    frames: memoryview
    _map: mmap.mmap | None = field(default=None, repr=False)

    @classmethod
    def load(cls, path: Path) -> Snapshot | None:
        """The snapshot at `path`, held in memory; None if there is no usable one."""
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                if not keep_resident(mapped):
                    mapped = _copied(file)
        except (OSError, ValueError):
            return None
        try:
            return cls._parse(mapped)
        except (FormatError, KeyError, TypeError, ValueError, struct.error):
            return None

    @classmethod
    def _parse(cls, mapped: mmap.mmap) -> Snapshot:
        view = memoryview(mapped)
        magic, version, length, document_sum, body_sum = HEADER.unpack_from(view)
        if magic != MAGIC or version != FORMAT_VERSION:
            raise FormatError("no snapshot of this format")
        end = HEADER.size + length
        text = bytes(view[HEADER.size : end])
        if len(text) != length or checksum(text) != document_sum:
            raise FormatError("snapshot document damaged")
        document = json.loads(text)
        start = offset = align(end)
        arrays: dict[str, U64] = {}
        for name in ARRAYS:
            count = int(document["arrays"][name])
            if offset + 8 * count > len(view):
                raise FormatError("snapshot truncated")
            arrays[name] = np.frombuffer(mapped, np.uint64, count, offset)
            offset += 8 * count
        end = offset + int(document["frames"])
        # The frames have checksums of their own, but whoever finds one damaged has already said
        # that its pages are there.
        if end > len(view) or checksum(view[start:end]) != body_sum:
            raise FormatError("snapshot damaged")
        frames = view[offset:end]
        rows = Rows(arrays["row_frame"], arrays["row_manifest"], arrays["row_segment"])
        table = Table(arrays["table_keys"], arrays["table_values"], int(document["bits"]))
        return cls(document["state"], table, rows, frames, mapped)

    def save(self, path: Path) -> None:
        """Replace the file at `path` atomically and durably. OSError if that failed."""
        arrays = (
            self.table.keys,
            self.table.values,
            self.rows.frame,
            self.rows.manifest,
            self.rows.segment,
        )
        document = {
            "state": self.state,
            "bits": self.table.bits,
            "frames": len(self.frames),
            "arrays": {name: len(array) for name, array in zip(ARRAYS, arrays, strict=True)},
        }
        text = json.dumps(document, separators=(",", ":")).encode()
        body = [array.astype("<u8", copy=False).tobytes() for array in arrays]
        hasher = xxhash.xxh3_64()
        for piece in body:
            hasher.update(piece)
        hasher.update(self.frames)
        head = HEADER.pack(MAGIC, FORMAT_VERSION, len(text), checksum(text), hasher.intdigest())
        padding = bytes(-(len(head) + len(text)) % ALIGNMENT)
        write_durably(path, (head, text, padding, *body, self.frames))


def _copied(file: BinaryIO) -> mmap.mmap:
    """A file's bytes in memory of our own. OSError if they cannot be read."""
    size = os.fstat(file.fileno()).st_size
    copy = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if file.readinto(copy) != size:  # type: ignore[attr-defined]
        raise OSError(errno.EIO, "the file became shorter while it was read")
    return copy


def compact(rows: Rows, frames: memoryview, keep: npt.NDArray[np.int64]) -> tuple[Rows, bytes]:
    """Only the rows in `keep` (ascending), with their frames moved together."""
    starts, ends = rows.frame[keep], rows.frame[keep + 1]
    breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
    spans = np.split(np.arange(len(keep)), breaks) if len(keep) else []
    pieces = [frames[int(starts[span[0]]) : int(ends[span[-1]])] for span in spans]
    offsets = np.concatenate(([0], np.cumsum((ends - starts).astype(np.int64)))).astype(np.uint64)
    return Rows(offsets, rows.manifest[keep], rows.segment[keep]), b"".join(pieces)
