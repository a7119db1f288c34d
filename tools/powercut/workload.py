"""What is stored, and what must be there afterwards.

Pages have bytes that follow from their names, so whoever reads one knows what it must hold. A
writer announces what it is about to put before it puts it, and what lookups show as committed
after a flush; the oracle collects both, outside the store and outside the writer's process.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.ma
import numpy.typing as npt

from kvtier.backends.local import disk_usage
from kvtier.collection import collect
from kvtier.collector import Collector
from kvtier.config import Config
from kvtier.identity import Identity
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.pages import ROOT, Column, Link, PageBuffers, PoolPages
from kvtier.store import Namespace, Store

Message = dict[str, Any]
Send = Callable[[Message], None]

GUARD = 0xA5
"""Fills memory that a get must not touch."""

IDENTITY = Identity.of({"model": "power cut"})


@dataclass(frozen=True)
class Pool:
    """A pool of the model: pieces of a page in bytes, whether each rank has its own, and whether
    it is needed at boundaries only."""

    name: str
    pieces: tuple[int, ...]
    sharded: bool
    trailing: bool = False

    @property
    def part_bytes(self) -> int:
        return sum(self.pieces)

    def column(self, rank: int) -> Column:
        return Column(self.name, f"tp{rank}" if self.sharded else "")


KV = Pool("kv", (2000, 4000), sharded=True)
POOLS = (
    Pool("swa", (8192, 8, 800), sharded=True, trailing=True),
    Pool("indexer", (264,), sharded=False),
    Pool("facts", (), sharded=False),  # pages without bytes, as DeepSeek V4's anchor pool has
    KV,
)
"""In SGLang's order: a page's KV comes after its other pools."""

TAIL = 3
"""Pages at the end of each put that have the trailing pool."""

_ = numpy.ma  # NumPy loads it at first use: once here, not in every forked process

_PATTERN = np.random.default_rng(1).integers(0, 256, 16384, np.uint8)


def delete_nothing_unasked() -> None:
    """From now on, stores of this process delete pages where the lab says so and nowhere else: its
    oracle has to know of each."""
    Collector.due = lambda collector: False  # type: ignore[method-assign]
    Collector.wait_for_space = lambda *_: False  # type: ignore[method-assign]


def settings(root: Path, **changes: Any) -> Config:
    """Small segments and commits, so that a short run crosses every edge of them."""
    values: dict[str, Any] = {
        "commit_interval": 0.005,
        "commit_size": 256 << 10,
        "segment_size": 1 << 20,
        "staging_size": 2 << 20,
        "read_threads": 2,
        "grace": 0.0,
        "min_free": 0,
    }
    return Config(root=root, **(values | changes))


def content(column: Column, keys: Sequence[bytes], size: int) -> npt.NDArray[np.uint8]:
    """What these pages hold; uint8 (n, size)."""
    found = np.tile(_PATTERN[:size], (len(keys), 1))
    for number, key in enumerate(keys):
        name = repr((column, key)).encode()
        mark = np.frombuffer(hashlib.blake2b(name, digest_size=64).digest(), np.uint8)
        found[number] ^= np.resize(mark, size)
    return found


def buffers(memory: npt.NDArray[np.uint8], pool: Pool) -> PageBuffers:
    """The rows of `memory`, uint8 (n, part_bytes), as pages in pieces."""
    starts = np.concatenate(([0], np.cumsum(pool.pieces)[:-1])).astype(np.uint64)
    if not pool.pieces:
        return PageBuffers(np.zeros((len(memory), 0), np.uint64), ())
    rows = np.arange(len(memory), dtype=np.uint64) * np.uint64(memory.strides[0])
    base = np.uint64(memory.ctypes.data)
    return PageBuffers(base + rows[:, None] + starts[None, :], pool.pieces)


def put(namespace: Namespace, rank: int, pool: Pool, keys: Sequence[bytes], link: Link) -> bool:
    """Put pages whose memory is reused at once; whether all were taken."""
    column = pool.column(rank)
    memory = content(column, keys, pool.part_bytes)
    pages = PoolPages(column, list(keys), buffers(memory, pool), int(pool.trailing))
    answer = namespace.put(pages, link)
    memory[:] = GUARD
    return bool(answer.all())


def get(
    namespace: Namespace, rank: int, pool: Pool, keys: Sequence[bytes]
) -> tuple[npt.NDArray[np.bool_], list[str]]:
    """(which pages came, what is wrong): each page that came is exact, no other was touched."""
    column = pool.column(rank)
    memory = np.full((len(keys), pool.part_bytes), GUARD, np.uint8)
    [came] = namespace.get([PoolPages(column, list(keys), buffers(memory, pool))])
    right = (memory == content(column, keys, pool.part_bytes)).all(axis=1)
    untouched = (memory == GUARD).all(axis=1)
    wrong = []
    for number in np.flatnonzero(came & ~right):
        wrong.append(f"wrong bytes: {column} {keys[number].hex()[:12]}")
    if pool.part_bytes:
        for number in np.flatnonzero(~came & ~untouched):
            wrong.append(f"memory of a page that did not come: {column} {keys[number].hex()[:12]}")
    return came, wrong


@dataclass
class Chain:
    """A sequence of pages; the first `fork` of them belong to the chain `stem`."""

    number: int
    stem: int
    fork: int
    length: int = 0
    """Pages that were ever put, those of the stem included."""
    tails: set[int] = field(default_factory=set)
    """Pages for which the trailing pool was put."""


@dataclass
class Oracle:
    """What was ever put, and what was shown as committed."""

    seed: int
    chains: dict[int, Chain] = field(default_factory=dict)
    promised: set[tuple[Column, bytes]] = field(default_factory=set)
    acknowledged: int = 0
    """Parts ever promised."""
    deleting: int = 0
    """Deletions under way: what lookups show meanwhile is no promise."""
    deleted: bool = False
    """Something was deleted by the processes that run now."""
    deleted_ns: int = 0
    _names: dict[tuple[int, int], bytes] = field(default_factory=dict, repr=False)

    def key(self, number: int, page: int) -> bytes:
        """Key of a chain's page."""
        chain = self.chains[number]
        while page < chain.fork:
            chain = self.chains[chain.stem]
        place = (chain.number, page)
        if place not in self._names:
            name = f"{self.seed}/{chain.number}/{page}".encode()
            self._names[place] = hashlib.sha256(name).digest()
        return self._names[place]

    def keys(self, number: int) -> list[bytes]:
        """Keys of all pages of a chain that were ever put."""
        return [self.key(number, page) for page in range(self.chains[number].length)]

    def hear(self, message: Message) -> None:
        """Take in what a writer says."""
        match message["say"]:
            case "put":
                number, end = message["chain"], message["end"]
                chain = self.chains.setdefault(
                    number, Chain(number, message["stem"], message["fork"], message["fork"])
                )
                chain.length = max(chain.length, end)
                chain.tails.update(range(max(message["start"], end - TAIL), end))
            case "held" if self._promises(message):
                column, keys = Column(*message["column"]), self.keys(message["chain"])
                held = {(column, keys[page]) for page in message["pages"]}
                self.acknowledged += len(held - self.promised)
                self.promised |= held
            case "deleting":
                self.deleting += 1
                self.deleted = True
                self.promised.clear()
            case "deleted":
                self.deleting -= 1
                self.deleted_ns = max(self.deleted_ns, message["at"])

    def settled(self) -> None:
        """Every process that wrote or deleted has ended."""
        self.deleting = 0
        self.deleted = False
        self.deleted_ns = time.monotonic_ns()

    def _promises(self, message: Message) -> bool:
        """Whether what lookups showed cannot have been deleted before, unseen by who looked."""
        if self.deleting or message["at"] <= self.deleted_ns:
            return False
        return bool(message["fresh"]) or not self.deleted


def write(
    config: Config,
    oracle: Oracle,
    send: Send,
    rng: random.Random,
    *,
    rank: int = 0,
    steps: int = 1 << 30,
    duties: Sequence[str] = (),
) -> None:
    """Put families, step by step, and say what is committed. `duties`: what else is done now and
    then: collect, save, rebuild, reopen.

    Writers that start from the same oracle and the same `rng` put the same pages, whatever their
    duties are: ranks of one server, or servers that are asked the same.
    """
    aside = random.Random(rng.random())
    store, namespace = _open(config, rank)
    for _ in range(steps):
        plan = _plan(oracle, rng)
        send(plan)
        oracle.hear(plan)
        put_family(namespace, rank, oracle, plan)
        if rng.random() < 0.7:
            store.flush(30.0)
            report(store, namespace, oracle, plan["chain"], send, rank=rank)
        duty = aside.choice(duties) if duties and aside.random() < 0.3 else ""
        if duty == "collect":
            delete(store.layout, aside.uniform(0.3, 1.0), send)
            for number in aside.sample(sorted(oracle.chains), min(4, len(oracle.chains))):
                report(store, namespace, oracle, number, send, rank=rank)
        elif duty == "save":
            store.index.save()
        elif duty == "rebuild":
            index = Index(store.layout)
            index.rebuild()
            index.save()
        elif duty == "reopen":
            store.close()
            report_closed = plan["chain"]
            store, namespace = _open(config, rank)
            report(store, namespace, oracle, report_closed, send, rank=rank)
    store.close()


def _open(config: Config, rank: int) -> tuple[Store, Namespace]:
    store = Store.open(config)
    return store, store.namespace(IDENTITY, KV.column(rank))


def _plan(oracle: Oracle, rng: random.Random) -> Message:
    """The next put: a new chain, a fork, or more of a chain."""
    known = sorted(oracle.chains)
    kind = rng.choice(("new", "fork", "more", "more", "again")) if known else "new"
    number = (known[-1] + 1) if known else 0
    stem = fork = start = 0
    if kind == "fork":
        stem = rng.choice(known)
        fork = start = rng.randint(0, oracle.chains[stem].length)
    elif kind in ("more", "again"):
        number = rng.choice(known)
        chain = oracle.chains[number]
        stem, fork = chain.stem, chain.fork
        start = chain.length if kind == "more" else chain.fork
    pages = rng.choice((1, 2, 7, 16, 40))
    return {
        "say": "put",
        "chain": number,
        "stem": stem,
        "fork": fork,
        "start": start,
        "end": start + pages,
    }


def put_family(namespace: Namespace, rank: int, oracle: Oracle, plan: Message) -> None:
    """Put all pools of the planned pages."""
    keys = oracle.keys(plan["chain"])
    start, end = plan["start"], plan["end"]
    for pool in POOLS:
        first = max(start, end - TAIL) if pool.trailing else start
        link = Link(keys[first - 1] if first else ROOT, first)
        put(namespace, rank, pool, keys[first:end], link)


def report(
    store: Store, namespace: Namespace, oracle: Oracle, number: int, send: Send, *, rank: int
) -> None:
    """Say what lookups show of a chain, after a look at what other processes did."""
    at = time.monotonic_ns()
    try:
        store.index.refresh()
        fresh = not store.index.health().unreadable
    except OSError:  # the power is gone, and deletions may not have been seen
        fresh = False
    tell(namespace, oracle, number, send, rank=rank, at=at, fresh=fresh)


def tell(
    namespace: Namespace,
    oracle: Oracle,
    number: int,
    send: Send,
    *,
    at: int,
    rank: int = 0,
    fresh: bool = False,
) -> None:
    """Say what lookups show of a chain. `at`: a time before which nothing of it was looked up;
    `fresh`: all that was done until then has been seen."""
    keys = oracle.keys(number)
    for pool in POOLS:
        column = pool.column(rank)
        pages = np.flatnonzero(namespace.contains(column, keys)).tolist()
        message = {"say": "held", "chain": number, "column": list(column), "pages": pages}
        send(message | {"at": at, "fresh": fresh})


def delete(layout: Layout, share: float, send: Send) -> None:
    """Bring a store down to a share of its size."""
    send({"say": "deleting"})
    collect(layout, Index(layout), int(disk_usage(layout.path) * share), grace=0.0)
    send({"say": "deleted", "at": time.monotonic_ns()})


def verify(
    config: Config, oracle: Oracle, *, ranks: int = 1, misses_allowed: bool = False
) -> tuple[list[str], int]:
    """(what is wrong with a store after a fault, parts that are there).

    All that was promised is there; each page is exact or absent; what lookups show can be read;
    no page is behind a hole; a new writer works on. `misses_allowed`: promised pages may be gone,
    and a lookup may show a page that a get then misses (rot, not power cuts).
    """
    wrong: list[str] = []
    parts = 0
    store, namespace = _open(config, 0)
    there: dict[Column, set[bytes]] = {}
    for rank in range(ranks):
        for pool in POOLS:
            if rank and not pool.sharded:
                continue
            column = pool.column(rank)
            for number in oracle.chains:
                keys = oracle.keys(number)
                shown = namespace.contains(column, keys)
                have = [key for key, is_shown in zip(keys, shown, strict=True) if is_shown]
                there.setdefault(column, set()).update(have)
                wrong += _read(namespace, rank, pool, have, misses_allowed)
                lost = [key for key in keys if key not in there[column]][:2]
                for key in lost:
                    wrong += get(namespace, rank, pool, [key])[1]
                parts += len(have)
    if not misses_allowed:
        for column, key in oracle.promised:
            if key not in there.get(column, ()):
                wrong.append(f"committed and gone: {column} {key.hex()[:12]}")
        wrong += list(_holes(oracle, there, ranks))
    wrong += _works_on(store, namespace, oracle)
    store.close()
    return wrong, parts


def _read(
    namespace: Namespace, rank: int, pool: Pool, keys: list[bytes], misses_allowed: bool
) -> list[str]:
    """What is wrong with pages that lookups show."""
    if not keys:
        return []
    came, wrong = get(namespace, rank, pool, keys)
    if came.all():
        return wrong
    if misses_allowed:
        for key in keys[int(came.sum()) :]:
            wrong += get(namespace, rank, pool, [key])[1]
        return wrong
    missed = [keys[i].hex()[:12] for i in np.flatnonzero(~came)]
    return [*wrong, f"shown and not readable: {pool.column(rank)} {missed[:3]}"]


def _holes(oracle: Oracle, there: dict[Column, set[bytes]], ranks: int) -> Iterator[str]:
    """KV pages whose parent is gone: they take space and nobody can ever reach them. Parts of
    other pools may outlive the KV of their page; they are no use without it, and no harm."""
    for rank in range(ranks):
        have = there.get(KV.column(rank), set())
        for number in oracle.chains:
            keys = oracle.keys(number)
            for page in range(1, len(keys)):
                if keys[page] in have and keys[page - 1] not in have:
                    yield f"behind a hole: {KV.column(rank)} page {page} of chain {number}"


def _works_on(store: Store, namespace: Namespace, oracle: Oracle) -> list[str]:
    """A chain nobody knows is put, committed and read back."""
    keys = [hashlib.sha256(f"{oracle.seed}/probe/{i}".encode()).digest() for i in range(3)]
    wrong = []
    for pool in POOLS:
        if not put(namespace, 0, pool, keys, Link(ROOT, 0)):
            wrong.append(f"a new put of {pool.name} was refused")
    if not store.flush(60.0):
        wrong.append("a new put was not committed")
    for pool in POOLS:
        came, more = get(namespace, 0, pool, keys)
        wrong += more
        if not came.all():
            wrong.append(f"a new put of {pool.name} cannot be read")
    return wrong
