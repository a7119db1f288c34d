"""Keeps the number of manifests bounded: what those without payload still say goes into one."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from kvtier.backends.local import SegmentWriter, unlink_segment
from kvtier.catalog import Segment
from kvtier.format import (
    FormatError,
    FrameType,
    Grave,
    decode_recency,
    decode_tombstone,
    decode_wipe,
    encode_recency,
    encode_tombstone,
    encode_wipe,
    new_id,
    scan_frames,
)
from kvtier.index import Index
from kvtier.layout import Layout

MOST_MANIFESTS = 64
"""Manifests without payload are merged when there are more."""

_ENTRIES = 1 << 15
"""In one frame; a body has at most 16 MiB."""

Bodies = list[tuple[FrameType, bytes]]


def merge_manifests(layout: Layout, index: Index) -> int:
    """If there are more than `MOST_MANIFESTS` manifests without payload, put what they still say
    into one and remove them; how many went. OSError if the store cannot be written; then, as after
    a kill at any moment, all is said once or twice."""
    index.refresh()
    spent = _spent(layout, index)
    if len(spent) <= MOST_MANIFESTS:
        return 0
    said = _Said(layout.store_id, {segment.ident for segment in index.segments()})
    read = []
    for segment in spent:
        with contextlib.suppress(OSError):
            said.read(segment, layout.manifest(segment.name).read_bytes())
            read.append(segment)
    bodies = said.bodies(index)
    writer = SegmentWriter(layout, new_id()[:12], 0, direct=False)
    gone = 0
    try:
        # Alone, so that whoever commits or saves an index sees the old ones or the new one.
        with layout.lock():
            if bodies:
                writer.log(bodies, index.stamp())
            for segment in read:
                # Held by a reader at this moment, or removed by somebody else.
                with contextlib.suppress(BlockingIOError, FileNotFoundError):
                    unlink_segment(layout, segment.name)
                    gone += 1
    finally:
        if writer.manifest_size:
            writer.close()
        else:
            writer.abandon()
    layout.payload(writer.name).unlink(missing_ok=True)
    index.refresh()
    index.ring()
    return gone


def _spent(layout: Layout, index: Index) -> list[Segment]:
    """Segments of dead writers that have neither live pages nor payload."""
    used = {stored.segment for stored in index.runs()}
    return [
        segment
        for segment in index.segments()
        if not (segment.live or segment.unreadable or segment.name in used)
        and not layout.payload(segment.name).exists()
    ]


def tombstones(graves: Sequence[Grave]) -> Bodies:
    """Frames that say that these places are gone."""
    steps = range(0, len(graves), _ENTRIES)
    return [(FrameType.TOMBSTONE, encode_tombstone(graves[at : at + _ENTRIES])) for at in steps]


class _Said:
    """What manifests say about pages of others."""

    def __init__(self, store_id: bytes, present: set[bytes]) -> None:
        """`present`: ids of the segments whose manifests are there, those to be merged included:
        a kill may leave any of them."""
        self._store_id = store_id
        self._present = present
        self._graves: dict[tuple[bytes, int], set[tuple[int, int]]] = defaultdict(set)
        self._wipes: dict[bytes, dict[bytes, int]] = defaultdict(dict)
        self._uses: dict[bytes, dict[bytes, int]] = defaultdict(dict)

    def read(self, segment: Segment, data: bytes) -> None:
        """Take in a manifest."""
        for _, frame, _ in scan_frames(data):
            if frame is None:
                continue
            if frame.segment_id != segment.ident or frame.store_id != self._store_id:
                continue
            with contextlib.suppress(FormatError):
                if frame.type == FrameType.TOMBSTONE:
                    self._bury(decode_tombstone(frame.body))
                elif frame.type == FrameType.WIPE:
                    self._wipe(*decode_wipe(frame.body))
                elif frame.type == FrameType.RECENCY:
                    namespace, used = decode_recency(frame.body)
                    _raise(self._uses[namespace], used)

    def _bury(self, graves: Iterable[Grave]) -> None:
        for grave in graves:
            if grave.segment_id in self._present:
                place = (grave.segment_id, grave.frame_offset)
                self._graves[place].add((grave.first, grave.pages))

    def _wipe(self, namespace: bytes, ends: Iterable[tuple[bytes, int]]) -> None:
        there = [(ident, end) for ident, end in ends if ident in self._present]
        _raise(self._wipes[namespace], there)

    def bodies(self, index: Index) -> Bodies:
        """Frames that say the same; of uses, the last one of each page that is there."""
        graves = [
            Grave(ident, offset, first, end - first)
            for (ident, offset), places in sorted(self._graves.items())
            for first, end in _joined(places)
        ]
        bodies = tombstones(graves)
        for namespace, ends in self._wipes.items():
            for some in _pieces(list(ends.items())):
                bodies.append((FrameType.WIPE, encode_wipe(namespace, some)))
        for namespace, used in self._uses.items():
            columns, keys = list(index.columns(namespace)), list(used)
            found = index.contains_each(namespace, columns, b"".join(keys))
            there = np.any([np.zeros(len(keys), np.bool_), *found], axis=0)
            kept = [(keys[at], used[keys[at]]) for at in np.flatnonzero(there).tolist()]
            for some in _pieces(kept):
                bodies.append((FrameType.RECENCY, encode_recency(namespace, some)))
        return bodies


def _raise(values: dict[bytes, int], more: Iterable[tuple[bytes, int]]) -> None:
    """Keep the greater value of each key."""
    for key, value in more:
        values[key] = max(value, values.get(key, 0))


def _pieces(entries: list[tuple[bytes, int]]) -> list[list[tuple[bytes, int]]]:
    return [entries[at : at + _ENTRIES] for at in range(0, len(entries), _ENTRIES)]


def _joined(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first, end) of stretches from (first, pages), neighbours and overlaps joined."""
    joined: list[tuple[int, int]] = []
    for first, pages in sorted(places):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], first + pages)
        else:
            joined.append((first, first + pages))
    return joined
