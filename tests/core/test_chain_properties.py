"""Any life of growing sessions under a cap: no stored page lies behind a hole, what is kept of a
session ends at a boundary, and the directory never takes more than the cap."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from making import (
    KV,
    contents,
    fresh_index,
    frozen_copy,
    get,
    identity,
    key,
    lose_index,
    put,
    settings,
    store_of,
)

from kvtier.backends.local import disk_usage
from kvtier.chains import chains
from kvtier.collection import collect
from kvtier.collector import Collector
from kvtier.identity import Identity
from kvtier.index import Index
from kvtier.pages import ROOT, Column, Link
from kvtier.pins import pin, pinned, unpin
from kvtier.store import Store

MIB = 1 << 20
CAP = 12 * MIB
SIZE, TAIL = 24_000, 60_000
SWA = Column("swa")
MODELS = {"dense": identity("dense"), "hybrid": Identity.of({"page_tokens": 512, "m": "hybrid"})}
"""The hybrid model has four pages to the grid of `kvtier.tails`."""

STEPS = 45


class Life:
    """Sessions of two models in one store, and what may be asked of it at any moment."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.root = folder / "0"
        self.kills = 0
        self.sessions: list[tuple[str, list[bytes]]] = []
        self.start()

    def start(self) -> None:
        self.store = Store.open(settings(self.root, limit=CAP, segment_size=MIB, grace=0.0))
        self.spaces = {name: self.store.namespace(i, KV) for name, i in MODELS.items()}

    # What happens

    def turn(self) -> None:
        """A session grows, or a new one begins, or one parts from another."""
        kind = self.chance.random()
        if not self.sessions or kind < 0.3:
            self.sessions.append((self.chance.choice(sorted(MODELS)), []))
            at = -1
        else:
            at = self.chance.randrange(len(self.sessions))
        model, chain = self.sessions[at]
        if chain and kind > 0.8:
            chain = chain[: self.chance.randrange(1, len(chain) + 1)]
            self.sessions.append((model, chain))
            at = -1
        fresh = [key("page", self.chance.random()) for _ in range(self.chance.randrange(1, 9))]
        space = self.spaces[model]
        # As SGLang does after a miss: what is not there is computed and offered again.
        there = int(space.contains(KV, chain).argmin()) if chain else 0
        there = len(chain) if chain and space.contains(KV, chain).all() else there
        offered = chain[there:] + fresh
        link = Link(chain[there - 1] if there else ROOT, there)
        if model == "hybrid":
            tail = offered[-2:]
            first = there + len(offered) - len(tail)
            before = (chain + fresh)[first - 1] if first else ROOT
            put(space, tail, contents(tail, TAIL, "t"), SWA, Link(before, first), window=1)
        put(space, offered, contents(offered, SIZE), link=link)
        self.sessions[at] = (model, chain + fresh)

    def use(self) -> None:
        if self.sessions:
            model, chain = self.chance.choice(self.sessions)
            promised = self.spaces[model].contains(KV, chain)
            length = len(chain) if promised.all() else int(promised.argmin())
            got = get(self.spaces[model], chain, SIZE)
            assert got[:length] == contents(chain[:length], SIZE), "a promise was not kept"
            for page, part in zip(chain, got, strict=True):
                assert part in (None, *contents([page], SIZE))

    def collect(self) -> None:
        """As `kvtier gc` and the server's own collections do, with an index of its own."""
        share = self.chance.choice((0.3, 0.6, 0.9))
        collect(self.store.layout, Index(self.store.layout), int(CAP * share), grace=0.0)

    def pin(self) -> None:
        held = pinned(self.store.layout)
        for namespace, pages in held.items():
            for page in pages:
                unpin(self.store.layout, namespace, page)
        if self.sessions:
            model, chain = self.chance.choice(self.sessions)
            pin(self.store.layout, bytes.fromhex(self.spaces[model].id), chain[-1])

    def flush(self) -> None:
        assert self.store.flush(120)

    def restart(self) -> None:
        self.store.close()
        if self.chance.random() < 0.5:
            lose_index(store_of(self.root))
        self.start()

    def kill(self) -> None:
        """The process dies at this moment: go on in a copy of the directory."""
        self.kills += 1
        copy = frozen_copy(self.store.root, self.folder / str(self.kills))
        self.store.close()
        shutil.rmtree(self.root)
        self.root = copy
        self.start()

    # What always holds

    def check(self) -> None:
        assert disk_usage(self.store.root) <= CAP
        for index in (fresh_index(self.store.root), Index(self.store.layout, readonly=True)):
            for found in chains(index):
                # A tail comes before the page it belongs to: alone it lies behind no hole.
                tails = np.array([stored.run.trailing for stored in found.runs])[found.part_run]
                assert found.reachable[found.parts[~tails]].all(), "a page lies behind a hole"


@pytest.mark.parametrize("seed", range(6))
def test_any_life_under_a_cap(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Collections are made here, where the dice says so; each costs a process otherwise.
    monkeypatch.setattr(Collector, "due", lambda collector: False)
    monkeypatch.setattr(Collector, "wait_for_space", lambda *_: False)
    chance = random.Random(seed)
    life = Life(tmp_path, chance)
    steps = [life.turn] * 12 + [life.use] * 4 + [life.collect] * 3 + [life.flush] * 2
    steps += [life.pin, life.restart, life.kill]
    try:
        for _ in range(STEPS):
            chance.choice(steps)()
            life.check()
        life.flush()
        collect(life.store.layout, Index(life.store.layout), CAP // 2, grace=0.0)
        life.check()
        for found in chains(fresh_index(life.store.root)):
            old = found.used_ns < found.used_ns.max() - 60_000_000_000
            assert found.useful[old].all(), "an old page is kept that no restore can use"
    finally:
        life.store.close()
