"""The on-disk structures, declared once. docs/format.md is checked against this module.

All integers are little-endian. Everything here is pure: bytes in, values out.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.pages import KEY_BYTES, Column

FORMAT_VERSION = 1
"""Version of the whole store. A reader refuses a store with a greater number."""

ALIGNMENT = 4096
"""Blocks start at multiples of this many bytes, so that they can be written past the page cache."""

FRAME_ALIGNMENT = 8
"""Frames start at multiples of this many bytes; a reader that lost its way scans in these steps."""

MAX_BODY_BYTES = 1 << 24
MAX_RUN_PAGES = 1 << 12
"""Bounds a decoder holds a frame to before it believes anything else in it."""

FRAME_MAGIC = b"KVTF"

FRAME_HEADER = struct.Struct("<4sBBHIIQQ16s16sQ")
"""magic, type, version, reserved, body bytes, reserved, sequence, time in ns, segment id,
store id, checksum (XXH3-64 of header and body with this field zero)."""

RUN_HEADER = struct.Struct("<16s32sIIHHI")
"""namespace, parent key, ordinal of the first page, pages, blocks, flags, window."""

BLOCK = struct.Struct("<QQQQBBHI")
"""column id, offset in the segment, bytes of one part, checksum of the block, encoding,
checksum algorithm, reserved, reserved."""

TOMBSTONE_ENTRY = struct.Struct("<16sQII")
"""segment id, offset of the run's frame in its manifest, first page, pages."""

WIPE_HEADER = struct.Struct("<16sII")
"""namespace, entries, reserved."""

WIPE_ENTRY = struct.Struct("<16sQ")
"""segment id, manifest offset below which the namespace's runs are gone."""

RECENCY_HEADER = struct.Struct("<16sII")
"""namespace, entries, reserved."""

RECENCY_ENTRY = struct.Struct("<32sQ")
"""page key, time in ns at which it was last restored or extended."""

COLUMN_HEADER = struct.Struct("<16sII")
"""namespace, entries, reserved."""

COLUMN_ENTRY = struct.Struct("<QBB")
"""column id, bytes of the pool's name, bytes of the shard's label; the two follow in ASCII."""

COUNT = struct.Struct("<II")
"""entries, reserved."""


class FrameType(IntEnum):
    """What a frame records. 1 is kept for the opening of a manifest."""

    RUN = 2
    TOMBSTONE = 3
    DOOM = 4
    WIPE = 5
    RECENCY = 6
    COLUMNS = 7


class RunFlag(IntEnum):
    """Bits of a run's flags."""

    PARENT_KNOWN = 1
    TRAILING = 2


RAW = 0
"""Encoding of a block: its parts one after the other as they were in memory."""

XXH3_64 = 1
"""Checksum algorithm of a block and its parts."""


class FormatError(ValueError):
    """Bytes that are not a frame this version understands."""


def checksum(data: bytes | memoryview, seed: int = 0) -> int:
    """XXH3-64 of `data`."""
    return xxhash.xxh3_64_intdigest(data, seed)


def running_checksum(seed: int) -> xxhash.xxh3_64:
    """The same of data that comes in pieces: `update` it, then ask for `intdigest`."""
    return xxhash.xxh3_64(seed=seed)


def column_id(column: Column) -> int:
    """The 64-bit name of a column in run frames: XXH3-64 of pool, NUL, shard."""
    return checksum(f"{column.pool}\0{column.shard}".encode("ascii"))


def part_seed(namespace: bytes, column: int, key: bytes | memoryview) -> int:
    """Seed of a part's checksum: it ties the bytes to what they are, so that the right bytes in
    the wrong place don't pass."""
    return checksum(namespace + column.to_bytes(8, "little") + bytes(key))


def block_seed(namespace: bytes, column: int, keys: bytes | memoryview) -> int:
    """Seed of a whole block's checksum, from all keys of its run."""
    return checksum(namespace + column.to_bytes(8, "little") + bytes(keys))


def align(size: int, step: int = ALIGNMENT) -> int:
    """`size` rounded up to a multiple of `step`."""
    return -(-size // step) * step


@dataclass(frozen=True)
class Frame:
    """One decoded frame: its header's fields and the body's bytes."""

    type: int
    sequence: int
    time_ns: int
    segment_id: bytes
    store_id: bytes
    body: bytes | memoryview
    size: int
    """Bytes of the frame in the manifest, padding included."""


def encode_frame(
    type_: FrameType,
    body: bytes,
    *,
    sequence: int,
    time_ns: int,
    segment_id: bytes,
    store_id: bytes,
) -> bytes:
    """A frame, padded to `FRAME_ALIGNMENT`. ValueError for a body that no reader would accept."""
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"a body of {len(body)} bytes is larger than {MAX_BODY_BYTES}")
    fields = (FRAME_MAGIC, type_, FORMAT_VERSION, 0, len(body), 0, sequence, time_ns, segment_id)
    blank = FRAME_HEADER.pack(*fields, store_id, 0)
    digest = checksum(blank + body)
    frame = FRAME_HEADER.pack(*fields, store_id, digest) + body
    return frame.ljust(align(len(frame), FRAME_ALIGNMENT), b"\0")


def decode_frame(data: bytes | memoryview, offset: int) -> Frame:
    """The frame at `offset` of `data`; FormatError if none, or if its checksum is wrong."""
    end = offset + FRAME_HEADER.size
    if end > len(data):
        raise FormatError("truncated frame header")
    magic, type_, version, _, length, _, sequence, time_ns, segment_id, store_id, digest = (
        FRAME_HEADER.unpack_from(data, offset)
    )
    if magic != FRAME_MAGIC or version > FORMAT_VERSION or length > MAX_BODY_BYTES:
        raise FormatError("not a frame of this format")
    if end + length > len(data):
        raise FormatError("truncated frame body")
    body = data[end : end + length]
    hasher = xxhash.xxh3_64(data[offset : end - 8])
    hasher.update(bytes(8))
    hasher.update(body)
    if hasher.intdigest() != digest:
        raise FormatError("frame checksum mismatch")
    size = align(FRAME_HEADER.size + length, FRAME_ALIGNMENT)
    return Frame(type_, sequence, time_ns, segment_id, store_id, body, size)


def scan_frames(data: bytes | memoryview) -> Iterator[tuple[int, Frame | None, int]]:
    """Every frame of a manifest: (offset, frame, bytes).

    Bytes that are no frame come as one (offset, None, bytes): a hole between good frames, or a
    torn end. Later frames still count.
    """
    view = memoryview(data)
    raw = bytes(data) if not isinstance(data, bytes) else data
    offset = 0
    while offset < len(view):
        try:
            frame = decode_frame(view, offset)
        except FormatError:
            found = offset
            while True:
                found = raw.find(FRAME_MAGIC, found + 1)
                if found < 0:
                    yield offset, None, len(view) - offset
                    return
                if found % FRAME_ALIGNMENT:
                    continue
                try:
                    decode_frame(view, found)
                except FormatError:
                    continue
                break
            yield offset, None, found - offset
            offset = found
            continue
        yield offset, frame, frame.size
        offset += frame.size


@dataclass(frozen=True)
class Block:
    """The parts of one column for all pages of a run, one after the other in the segment."""

    column: int
    offset: int
    part_bytes: int
    checksum: int
    part_checksums: npt.NDArray[np.uint64] = field(repr=False)
    """uint64 (pages,); empty if parts have no bytes."""

    @property
    def size(self) -> int:
        """Bytes of the block if the run has one page for each part checksum."""
        return self.part_bytes * len(self.part_checksums)


@dataclass(frozen=True)
class Run:
    """Neighbouring pages of one chain, stored together: keys and one block a column."""

    namespace: bytes
    parent: bytes | None
    """Key before the first page; ROOT (b"") at the start of a sequence; None if unknown."""
    ordinal: int
    window: int
    """Pages that a boundary needs before it, of pools that are needed at boundaries only; else
    0."""
    keys: bytes | memoryview
    """32 bytes a page."""
    blocks: Sequence[Block]

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def trailing(self) -> bool:
        """The pools of this run are needed at boundaries only."""
        return self.window > 0

    def key(self, position: int) -> bytes:
        """Key of the page at `position`."""
        return bytes(self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES])

    def block(self, column: int) -> Block | None:
        """The block of a column id, None if the run has none."""
        return next((block for block in self.blocks if block.column == column), None)


def encode_run(run: Run) -> bytes:
    """Body of a run frame."""
    flags = RunFlag.TRAILING if run.trailing else 0
    parent = bytes(KEY_BYTES)
    if run.parent is not None:
        flags |= RunFlag.PARENT_KNOWN
        parent = run.parent or parent
    head = RUN_HEADER.pack(
        run.namespace, parent, run.ordinal, len(run), len(run.blocks), flags, run.window
    )
    parts = [head, bytes(run.keys)]
    for block in run.blocks:
        parts.append(
            BLOCK.pack(
                block.column, block.offset, block.part_bytes, block.checksum, RAW, XXH3_64, 0, 0
            )
        )
    parts += [block.part_checksums.astype("<u8").tobytes() for block in run.blocks]
    return b"".join(parts)


def decode_run(body: bytes | memoryview) -> Run:
    """A run from its frame's body; FormatError if the counts don't add up."""
    if len(body) < RUN_HEADER.size:
        raise FormatError("truncated run header")
    namespace, parent, ordinal, pages, count, flags, window = RUN_HEADER.unpack_from(body)
    keys_end = RUN_HEADER.size + pages * KEY_BYTES
    offset = keys_end + count * BLOCK.size
    if not 0 < pages <= MAX_RUN_PAGES or offset > len(body):
        raise FormatError("run header out of bounds")
    blocks = []
    for index in range(count):
        column, start, part_bytes, digest, encoding, algorithm, _, _ = BLOCK.unpack_from(
            body, keys_end + index * BLOCK.size
        )
        if encoding != RAW or algorithm != XXH3_64:
            raise FormatError(f"unknown encoding {encoding} or checksum algorithm {algorithm}")
        sums = pages if part_bytes else 0
        if offset + sums * 8 > len(body):
            raise FormatError("truncated part checksums")
        blocks.append(
            Block(column, start, part_bytes, digest, np.frombuffer(body, "<u8", sums, offset))
        )
        offset += sums * 8
    link: bytes | None = None
    if flags & RunFlag.PARENT_KNOWN:
        link = parent if any(parent) else b""
    window = max(1, window) if flags & RunFlag.TRAILING else 0
    return Run(namespace, link, ordinal, window, body[RUN_HEADER.size : keys_end], blocks)


@dataclass(frozen=True)
class Grave:
    """Pages of one run that are gone: named by place, never by key, so that a rebuild neither
    revives what was deleted nor kills what was stored again."""

    segment_id: bytes
    frame_offset: int
    first: int
    pages: int


def encode_tombstone(graves: Sequence[Grave]) -> bytes:
    """Body of a tombstone frame."""
    entries = (TOMBSTONE_ENTRY.pack(g.segment_id, g.frame_offset, g.first, g.pages) for g in graves)
    return COUNT.pack(len(graves), 0) + b"".join(entries)


def decode_tombstone(body: bytes | memoryview) -> list[Grave]:
    """Graves of a tombstone frame."""
    return [Grave(*entry) for entry in _entries(body, COUNT, TOMBSTONE_ENTRY, count_at=0)]


def encode_wipe(namespace: bytes, upto: Sequence[tuple[bytes, int]]) -> bytes:
    """Body of a wipe frame: runs of `namespace` below (segment id, manifest offset) are gone."""
    entries = b"".join(WIPE_ENTRY.pack(*entry) for entry in upto)
    return WIPE_HEADER.pack(namespace, len(upto), 0) + entries


def decode_wipe(body: bytes | memoryview) -> tuple[bytes, list[tuple[bytes, int]]]:
    """Namespace and (segment id, manifest offset) pairs of a wipe frame."""
    entries = _entries(body, WIPE_HEADER, WIPE_ENTRY, count_at=1)
    return bytes(body[:16]), [(segment, offset) for segment, offset in entries]


def encode_recency(namespace: bytes, used: Sequence[tuple[bytes, int]]) -> bytes:
    """Body of a recency frame: (page key, time in ns) pairs."""
    entries = b"".join(RECENCY_ENTRY.pack(*entry) for entry in used)
    return RECENCY_HEADER.pack(namespace, len(used), 0) + entries


def decode_recency(body: bytes | memoryview) -> tuple[bytes, list[tuple[bytes, int]]]:
    """Namespace and (page key, time in ns) pairs of a recency frame."""
    entries = _entries(body, RECENCY_HEADER, RECENCY_ENTRY, count_at=1)
    return bytes(body[:16]), [(key, time_ns) for key, time_ns in entries]


def encode_columns(namespace: bytes, columns: Sequence[Column]) -> bytes:
    """Body of a columns frame: what the column ids of a namespace stand for."""
    parts = [COLUMN_HEADER.pack(namespace, len(columns), 0)]
    for column in columns:
        pool, shard = column.pool.encode("ascii"), column.shard.encode("ascii")
        parts += [COLUMN_ENTRY.pack(column_id(column), len(pool), len(shard)), pool, shard]
    return b"".join(parts)


def decode_columns(body: bytes | memoryview) -> tuple[bytes, dict[int, Column]]:
    """Namespace and {column id: column} of a columns frame."""
    data = bytes(body)
    if len(data) < COLUMN_HEADER.size:
        raise FormatError("truncated columns frame")
    namespace, count, _ = COLUMN_HEADER.unpack_from(data)
    columns, offset = {}, COLUMN_HEADER.size
    for _ in range(count):
        if offset + COLUMN_ENTRY.size > len(data):
            raise FormatError("truncated columns frame")
        ident, pool_bytes, shard_bytes = COLUMN_ENTRY.unpack_from(data, offset)
        offset += COLUMN_ENTRY.size
        names = data[offset : offset + pool_bytes + shard_bytes]
        offset += pool_bytes + shard_bytes
        if offset > len(data):
            raise FormatError("truncated column name")
        try:
            text = names.decode("ascii")
        except UnicodeDecodeError as error:
            raise FormatError("column names are not ASCII") from error
        columns[ident] = Column(text[:pool_bytes], text[pool_bytes:])
    return namespace, columns


def _entries(
    body: bytes | memoryview, head: struct.Struct, entry: struct.Struct, *, count_at: int
) -> Iterator[tuple]:  # type: ignore[type-arg]
    if len(body) < head.size:
        raise FormatError("truncated frame")
    count = head.unpack_from(body)[count_at]
    end = head.size + count * entry.size
    if end > len(body):
        raise FormatError("frame has fewer entries than it says")
    return entry.iter_unpack(body[head.size : end])


def new_id() -> bytes:
    """A fresh random 16-byte id."""
    return uuid.uuid4().bytes
