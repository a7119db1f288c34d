"""Any life of a store against a dict: puts, lookups, reads, collections, kills, lost indexes.

A part's bytes have a version, which grows when the part is deleted, so that what is deleted and
comes back is seen.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import settings as examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from making import (
    KV,
    content,
    copies,
    fresh_index,
    frozen_copy,
    get_each,
    identity,
    keys,
    lose_index,
    put,
    saved_index,
    settings,
    store_of,
)

import kvtier.committer
import kvtier.deletion
from kvtier.backends.local import disk_usage
from kvtier.collection import collect
from kvtier.format import column_id
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.pages import ROOT, Column, Link
from kvtier.store import Namespace, Store

MODELS = ("bf16", "fp8")
SIZES = {KV: 4000, Column("kv", "tp1"): 4000, Column("swa", "tp0"): 700}
TRUNK = keys("trunk", 8)
CHAINS = (TRUNK + keys("left", 4), TRUNK[:5] + keys("right", 6), keys("other", 6))


class Part(NamedTuple):
    """One pool's bytes for one page of one model."""

    model: str
    column: Column
    key: bytes


WHICH = st.integers(0, 1)
ALL = [
    Part(model, column, page)
    for model in MODELS
    for column in SIZES
    for page in sorted({page for chain in CHAINS for page in chain})
]
SLACK_BYTES = 64 << 10
"""Tombstones take some space before they give any."""

MODELS_OF = {identity(model).id_bytes: model for model in MODELS}
COLUMNS_OF = {column_id(column): column for column in SIZES}


@dataclass
class Process:
    """An open store and what it has put since it was last flushed."""

    store: Store
    spaces: dict[str, Namespace]
    waiting: set[Part]


def _live(index: Index) -> set[Part]:
    return {
        Part(MODELS_OF[namespace], COLUMNS_OF[column], page)
        for namespace, column, page in copies(index)
    }


class Lives(RuleBasedStateMachine):
    """`must`: parts that are certainly there. `may`: parts that were put, and lost or not."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = contextlib.ExitStack()
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
        self.root = self.folder / "0"
        self.kills = 0
        self.must: set[Part] = set()
        self.may: set[Part] = set()
        self.version: dict[Part, int] = {}
        self.processes: list[Process] = []
        self._start()

    def teardown(self) -> None:
        try:
            self._end_all()
            self._start()
            self._check(ALL)
            self._end_all()
            self._rebuilt_equals_saved()
        finally:
            for process in self.processes:
                process.store.close()
            self.patches.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    # Inside

    @property
    def path(self) -> Path:
        return store_of(self.root)

    def _start(self) -> None:
        store = Store.open(settings(self.root, segment_size=1 << 20))
        spaces = {model: store.namespace(identity(model)) for model in MODELS}
        self.processes.append(Process(store, spaces, set()))

    def _end(self, process: Process) -> None:
        self.processes.remove(process)
        process.store.close()
        self._settled(process)

    def _end_all(self) -> None:
        for process in list(self.processes):
            self._end(process)

    def _settled(self, process: Process) -> None:
        """What the process has put is there now, unless it was deleted since."""
        self.must |= process.waiting & self.may
        self.may -= process.waiting
        process.waiting.clear()

    def _flush(self) -> None:
        for process in self.processes:
            assert process.store.flush(120)
            self._settled(process)
        self._notice()

    def _notice(self) -> None:
        """Let every process see what the others did. Without it a page that another process has
        just deleted may be taken for stored by a put: a miss later, as after any deletion."""
        for process in self.processes:
            process.store.index.refresh()

    def _bytes(self, part: Part) -> bytes:
        return content(SIZES[part.column], part, self.version.get(part, 0))

    def _deleted(self, parts: set[Part]) -> None:
        self.must -= parts
        self.may -= parts
        for process in self.processes:
            process.waiting -= parts
        for part in parts:
            self.version[part] = self.version.get(part, 0) + 1

    def _check(self, parts: list[Part]) -> None:
        for process in self.processes:
            process.store.index.refresh()
            for (model, column), page_keys in _by_column(parts):
                space = process.spaces[model]
                mine = [Part(model, column, page) for page in page_keys]
                there = space.contains(column, page_keys).tolist()
                for part, answer in zip(mine, there, strict=True):
                    assert answer or part not in self.must, f"{part} is gone"
                    assert not answer or part in self.must | self.may, f"{part} came back"
                for part, got in zip(
                    mine, get_each(space, page_keys, SIZES[column], column), strict=True
                ):
                    if got is None:
                        assert part not in self.must, f"{part} cannot be read"
                    else:
                        assert part in self.must | self.may, f"{part} came back"
                        assert got == self._bytes(part), f"{part} has other bytes"

    def _rebuilt_equals_saved(self) -> None:
        assert copies(saved_index(self.path)) == copies(fresh_index(self.path))

    # What can happen

    @initialize(seed=st.integers(0, 2**32), puts=st.booleans())
    def begin(self, seed: int, puts: bool) -> None:
        """Segments get their names, and so their order, by a chance that can be repeated."""
        chance = random.Random(seed)
        for module in (kvtier.committer, kvtier.deletion):
            self.patches.enter_context(
                mock.patch.object(module, "new_id", lambda: chance.randbytes(16))
            )
        self.restart(lose=False)
        for model in MODELS if puts else ():
            for chain in CHAINS:
                self.put(0, model, KV, chain, slice(0, 12))
        self._flush()

    @rule(
        which=WHICH,
        model=st.sampled_from(MODELS),
        column=st.sampled_from(list(SIZES)),
        chain=st.sampled_from(CHAINS),
        pages=st.sampled_from((slice(0, 12), slice(0, 3), slice(1, 4), slice(4, 9), slice(5, 6))),
    )
    def put(self, which: int, model: str, column: Column, chain: list[bytes], pages: slice) -> None:
        process = self.processes[which % len(self.processes)]
        start, page_keys = pages.start, chain[pages]
        parts = [Part(model, column, page) for page in page_keys]
        link = Link(chain[start - 1] if start else ROOT, start)
        values = [self._bytes(part) for part in parts]
        window = int(column.pool == "swa")
        assert put(process.spaces[model], page_keys, values, column, link, window=window).all()
        process.waiting |= set(parts)
        self.may |= set(parts) - self.must

    @rule()
    def flush(self) -> None:
        self._flush()
        self._check(sorted(self.must))

    @rule(parts=st.lists(st.sampled_from(ALL), max_size=20, unique=True))
    def look(self, parts: list[Part]) -> None:
        self._check(parts)

    @rule(model=st.sampled_from(MODELS), which=WHICH)
    def clear(self, model: str, which: int) -> None:
        self._flush()
        self.processes[which % len(self.processes)].spaces[model].clear()
        self._deleted({part for part in ALL if part.model == model})
        self._notice()

    @rule(share=st.sampled_from((0.0, 0.3, 0.6, 0.9)))
    def collect(self, share: float) -> None:
        self._flush()
        layout = Layout.open(self.path, create=False)
        index = Index(layout)
        before = _live(index)
        limit = int(disk_usage(self.path) * share)
        result = collect(layout, index, limit, grace=0.0)
        after = _live(fresh_index(self.path))
        assert result.before - result.after > -SLACK_BYTES
        assert after <= before
        assert _live(index) == after
        for part in after:
            for chain in CHAINS:
                if part.key in chain:
                    above = [part._replace(key=p) for p in chain[: chain.index(part.key)]]
                    if before.issuperset(above) and part.column.pool == "kv":
                        assert after.issuperset(above), "a page was left without those before it"
        self._deleted(set(ALL) - after)
        self.must, self.may = after, set()
        self._notice()
        self._check(sorted(before))

    @rule(part=st.sampled_from(ALL))
    def break_page(self, part: Part) -> None:
        """A drive returns other bytes for a part than were written."""
        self._flush()
        if part not in self.must:
            return
        for stored in fresh_index(self.path).runs():
            block = stored.run.block(column_id(part.column))
            if block is None or MODELS_OF[bytes(stored.run.namespace)] != part.model:
                continue
            for position in stored.positions.tolist():
                if stored.run.key(position) == part.key:
                    with (self.path / "segments" / f"{stored.segment}.kvs").open("r+b") as file:
                        file.seek(block.offset + position * block.part_bytes + 99)
                        file.write(b"other bytes")
        # Pages lie in runs with those of other pools; a tombstone takes the page out of the run.
        self.must -= {part._replace(column=column) for column in SIZES}
        self.may |= {part._replace(column=column) for column in SIZES}
        got = [
            get_each(process.spaces[part.model], [part.key], SIZES[part.column], part.column)
            for process in self.processes
        ]
        assert got == [[None]] * len(self.processes)
        self._flush()
        self._gone(part)

    def _gone(self, part: Part) -> None:
        """Settle what the index has of the page that lost a part."""
        live = _live(fresh_index(self.path))
        assert part not in live
        for other in [part._replace(column=column) for column in SIZES]:
            self.may.discard(other)
            if other in live:
                self.must.add(other)
            else:
                self._deleted({other})

    @rule()
    def kill(self) -> None:
        """All processes die at this moment: go on in a copy of the directory."""
        self.kills += 1
        self.root = frozen_copy(self.path, self.folder / str(self.kills))
        for process in self.processes:
            process.store.close()
        self.processes.clear()
        self._start()

    @rule(lose=st.booleans())
    def restart(self, lose: bool) -> None:
        self._end_all()
        if lose:
            lose_index(self.path)
        self._start()

    @precondition(lambda self: len(self.processes) < 2)
    @rule()
    def start_another(self) -> None:
        self._start()

    @precondition(lambda self: len(self.processes) > 1)
    @rule(which=WHICH)
    def end_one(self, which: int) -> None:
        self._end(self.processes[which])

    @rule(which=WHICH)
    def save(self, which: int) -> None:
        self.processes[which % len(self.processes)].store.index.save()

    @rule(which=WHICH)
    def rebuild(self, which: int) -> None:
        self._flush()
        index = self.processes[which % len(self.processes)].store.index
        before = copies(index)
        index.rebuild()
        assert copies(index) == before
        self._rebuilt_equals_saved()


def _by_column(parts: list[Part]) -> Iterator[tuple[tuple[str, Column], list[bytes]]]:
    groups: dict[tuple[str, Column], list[bytes]] = {}
    for part in parts:
        groups.setdefault((part.model, part.column), []).append(part.key)
    yield from groups.items()


TestLives = Lives.TestCase
TestLives.settings = examples(max_examples=20, stateful_step_count=20)


@pytest.mark.parametrize("seed", range(25))
def test_a_life_by_dice(seed: int) -> None:
    """Hypothesis looks near what it has tried; dice go further."""
    chance = random.Random(seed)
    life = Lives()
    try:
        life.begin(seed, puts=True)
        for _ in range(25):
            _step(life, chance)
    finally:
        life.teardown()


def _step(life: Lives, chance: random.Random) -> None:
    which, model = chance.randrange(2), chance.choice(MODELS)
    chain = chance.choice(CHAINS)
    start = chance.randrange(len(chain))
    pages = chance.choice((slice(0, 12), slice(start, start + 3)))
    match chance.choices(STEPS, WEIGHTS)[0]:
        case "put":
            life.put(which, model, chance.choice(list(SIZES)), chain, pages)
        case "look":
            life.look(ALL)
        case "clear":
            life.clear(model, which)
        case "collect":
            life.collect(chance.choice((0.3, 0.6, 0.8, 0.9)))
        case "damage":
            life.break_page(chance.choice(ALL))
        case "restart":
            life.restart(lose=chance.random() < 0.5)
        case "another" if len(life.processes) < 2:
            life.start_another()
        case "end" if len(life.processes) > 1:
            life.end_one(which)
        case "save":
            life.save(which)
        case "rebuild":
            life.rebuild(which)
        case "kill":
            life.kill()
        case _:
            life.flush()


STEPS, WEIGHTS = zip(
    *{
        "put": 8,
        "flush": 2,
        "look": 2,
        "clear": 1,
        "collect": 2,
        "damage": 2,
        "restart": 2,
        "another": 2,
        "end": 1,
        "save": 1,
        "rebuild": 1,
        "kill": 1,
    }.items(),
    strict=True,
)
