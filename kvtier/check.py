"""Checks a store: manifests, places, identities, and if asked every byte of payload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.backends.local import read_extent
from kvtier.catalog import StoredRun
from kvtier.errors import IdentityError
from kvtier.format import ALIGNMENT, Block, Grave, align, checksum, part_seed
from kvtier.identity import stored_identity
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.memory import Arena
from kvtier.report import foreign_files

PIECE_BYTES = 16 << 20

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


@dataclass
class Findings:
    """What a check found. Only `damaged` and `truncated` cost pages; they are misses, never wrong
    bytes."""

    pages: int = 0
    parts: int = 0
    verified: int = 0
    """Bytes of payload whose checksums were right."""
    damaged: list[Grave] = field(default_factory=list)
    """Places whose payload is not what was stored."""
    truncated: list[str] = field(default_factory=list)
    """Segments whose file is missing, or shorter than its manifest says."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Files that could not be read, and why."""
    manifests: dict[str, int] = field(default_factory=dict)
    """Manifest name to places that held no frame."""
    identities: list[str] = field(default_factory=list)
    """What is wrong with identity documents."""
    foreign: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Nothing is damaged. Foreign files and torn ends of manifests are no damage: a crash
        leaves those, and a reader skips them."""
        return not (self.damaged or self.truncated or self.unreadable or self.identities)


def check(
    layout: Layout,
    index: Index,
    *,
    payload: bool = False,
    progress: Progress = lambda done, total: None,
) -> Findings:
    """Look at everything and change nothing. `payload`: read and verify every stored byte."""
    health = index.health()
    found = Findings(
        manifests=dict(health.damaged),
        unreadable={f"{name}.kvm": why for name, why in health.unreadable.items()},
        foreign=foreign_files(layout),
    )
    runs = list(index.runs())
    for namespace in sorted({stored.run.namespace for stored in runs}):
        try:
            stored_identity(layout.namespaces, namespace.hex())
        except IdentityError as error:
            found.identities.append(str(error))
    total = sum(b.part_bytes * len(s.positions) for s in runs for b in s.run.blocks)
    done = 0
    sizes: dict[str, int] = {}
    arena = Arena(PIECE_BYTES + 2 * ALIGNMENT) if payload else None
    for stored in runs:
        found.pages += len(stored.positions)
        found.parts += len(stored.positions) * len(stored.run.blocks)
        end = max((block.offset + block.size for block in stored.run.blocks), default=0)
        short = end > _size(layout, stored.segment, sizes)
        if short and stored.segment not in found.truncated:
            found.truncated.append(stored.segment)
        if arena is None:
            continue
        for block in stored.run.blocks:
            _verify(layout, stored, block, arena, found)
            done += block.part_bytes * len(stored.positions)
            progress(done, total)
    return found


def _size(layout: Layout, segment: str, known: dict[str, int]) -> int:
    if segment not in known:
        try:
            known[segment] = layout.payload(segment).stat().st_size
        except OSError:
            known[segment] = 0
    return known[segment]


def _verify(layout: Layout, stored: StoredRun, block: Block, arena: Arena, found: Findings) -> None:
    """Verify the live parts of one block, some at a time."""
    size = block.part_bytes
    if not size:
        return
    run = stored.run
    if size > PIECE_BYTES:
        arena = Arena(size + 2 * ALIGNMENT)
    step = max(1, PIECE_BYTES // size)
    positions = stored.positions.tolist()
    while positions:
        first = positions[0]
        batch = [p for p in positions if p < first + step]
        positions = positions[len(batch) :]
        start = (block.offset + first * size) // ALIGNMENT * ALIGNMENT
        end = align(block.offset + (batch[-1] + 1) * size)
        path = layout.payload(stored.segment)
        try:
            got = read_extent(path, start, arena.view[: end - start], direct=True)
        except OSError as error:
            found.unreadable[path.name] = error.strerror or str(error)
            return
        for position in batch:
            at = block.offset + position * size - start
            seed = part_seed(run.namespace, block.column, run.key(position))
            right = at + size <= got and (
                checksum(arena.view[at : at + size], seed) == int(block.part_checksums[position])
            )
            if right:
                found.verified += size
            else:
                found.damaged.append(stored.grave(position, 1))
