"""Two ranks of one server whose drives are not equally well: they decide alike, nobody waits.

The ranks of a tensor parallel server agree by collectives on what comes from the store. SGLang's
own checker runs along: it ends the server as soon as its ranks decide differently. The faults are
real file calls that fail or hang in one process (`kvtier_test_platform.drives`).
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvtier_test_platform.committed import committed_pages, wait_for_kv_pages, wait_until
from kvtier_test_platform.drives import Drive, preloaded
from kvtier_test_platform.server import PAGE_SIZE, Answer, Server, cacheable_tokens, prompt_tokens
from powercut.shim import BLOCK, DELAY, FAIL, READ, WRITE
from servers import MODELS, kvtier_server

from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.place import store_path

SHIM = Path(__file__).parents[2] / "tools" / "powercut" / "shim.c"

TP = 2
POLICIES = ("wait_complete", "timeout")
PATIENCE = 300.0
"""Seconds in which every call must be answered, many times what one takes."""

PROMPT = prompt_tokens(1, 700)
FIRST_TURN = PROMPT[:530]
OTHER = prompt_tokens(2, 300)

AT_THRESHOLD = prompt_tokens(3, 65)
"""Four whole pages, which are 64 tokens, as long as the model's sliding window."""
BEYOND_IT = [*AT_THRESHOLD, *prompt_tokens(4, 200)]

ALL = cacheable_tokens(len(PROMPT))


@dataclass
class Ranks:
    """A server of two ranks without storage, and what it answers to each prompt."""

    server: Server
    folder: Path
    outputs: dict[tuple[int, ...], list[int]]

    @contextlib.contextmanager
    def storage(self, root: Path, policy: str, **settings: Any) -> Iterator[None]:
        """Attach kvtier with a store of its own, whose drives' breakers are closed."""
        waits = {"prefetch_threshold": 64, "prefetch_timeout_base": PATIENCE / 2}
        waits |= {"put_deadline": 8, "read_deadline": 8}
        self.server.flush_cache()
        self.server.attach_storage("kvtier", {"root": str(root), **waits, **settings}, policy)
        try:
            yield
        finally:
            self.server.flush_cache()  # it waits until the last request is over on all ranks
            self.server.detach_storage()

    def ask(self, prompt: list[int]) -> Answer:
        """What a prompt gets with empty caches above the store; its output is always the same."""
        self.server.flush_cache()
        answer = self.server.generate(prompt)
        assert answer.output_ids == self.outputs[tuple(prompt)]
        assert answer.cached_tokens == answer.storage
        return answer

    def drive(self, rank: int) -> Drive:
        return Drive(self.folder, self.server.rank_pid(rank))

    def wait_until_restored(self, prompt: list[int]) -> None:
        wait_until(
            lambda: self.ask(prompt).storage == cacheable_tokens(len(prompt)),
            "restore after the fault had gone",
            PATIENCE,
        )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[Ranks]:
    """Attention with sliding windows: a second pool, and boundaries that are not everywhere."""
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
        server = kvtier_server(
            MODELS / "swa",
            tmp_path_factory.mktemp("ranks"),
            tp=TP,
            storage_backend=None,
            environment={
                **preloaded(SHIM, Path(folder)),
                "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
            },
        )
        with server:
            assert "Rank consensus checker is enabled" in server.log.read_text()
            outputs = {}
            for prompt in (PROMPT, FIRST_TURN, OTHER, AT_THRESHOLD, BEYOND_IT):
                server.flush_cache()
                outputs[tuple(prompt)] = server.generate(prompt).output_ids
            ranks = Ranks(server, Path(folder), outputs)
            with ranks.storage(tmp_path_factory.mktemp("first"), POLICIES[0]):
                ranks.ask(AT_THRESHOLD)  # compiles HiCache's page hash, if nobody did so before
            server.answer_timeout = PATIENCE
            yield ranks


def pages(root: Path, shard: str) -> int:
    """KV pages that a rank has committed."""
    return sum(
        count
        for column, count in committed_pages(root).items()
        if (column.pool, column.shard) == ("kv", shard)
    )


def segments(root: Path, pool: str, shard: str) -> set[str]:
    """Segments in which a rank has bytes of a pool."""
    index = Index(Layout.open(store_path(root), create=False), readonly=True)
    return {
        stored.segment
        for stored in index.runs()
        for block in stored.run.blocks
        for column in [index.columns(stored.run.namespace)[block.column]]
        if (column.pool, column.shard) == (pool, shard)
    }


@pytest.mark.parametrize(
    ("policy", "seconds", "read_deadline"),
    [
        ("wait_complete", 0.05, 30),
        ("wait_complete", 4.0, 1),
        ("wait_complete", None, 1),
        ("timeout", 0.05, 30),
        ("timeout", None, 1),
    ],
)
def test_one_rank_reads_slowly(ranks, tmp_path, policy, seconds, read_deadline):
    """Each of its reads takes so long (None: for ever), of pages and of what others committed."""
    restored = ALL if seconds is not None and seconds < read_deadline else 0
    mode = BLOCK if seconds is None else DELAY
    with ranks.storage(tmp_path, policy, read_deadline=read_deadline):
        assert ranks.ask(PROMPT).storage == 0
        wait_for_kv_pages(tmp_path, TP * (ALL // PAGE_SIZE))
        with ranks.drive(1).fault(READ, "/segments/", mode, seconds=seconds or 0.0):
            assert ranks.ask(PROMPT).storage == restored
            assert ranks.ask(PROMPT).storage == restored
            assert ranks.ask(OTHER).storage == 0
        ranks.wait_until_restored(PROMPT)


@pytest.mark.parametrize("mode", [FAIL, BLOCK], ids=["full", "hangs"])
def test_one_rank_cannot_write(ranks, tmp_path, mode):
    first, both = cacheable_tokens(len(FIRST_TURN)), len(PROMPT) // PAGE_SIZE
    with ranks.storage(tmp_path, "wait_complete"):
        ranks.ask(FIRST_TURN)
        wait_for_kv_pages(tmp_path, TP * (first // PAGE_SIZE))
        with ranks.drive(1).fault(WRITE, ".kvs", mode, error=errno.ENOSPC):
            assert ranks.ask(PROMPT).storage == first
            wait_until(lambda: pages(tmp_path, "tp0") >= both, "the other rank's pages")
            assert ranks.ask(PROMPT).storage == first, "what only one rank has is not usable"
            assert ranks.ask(OTHER).storage == 0
            assert pages(tmp_path, "tp1") == first // PAGE_SIZE
        ranks.wait_until_restored(PROMPT)
        ranks.wait_until_restored(OTHER)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_window_is_never_read(ranks, tmp_path, policy):
    """KV comes at once, the sliding window's pages never: there is no boundary without them."""
    with ranks.storage(tmp_path, policy, read_deadline=1):
        ranks.ask(PROMPT)
        wait_for_kv_pages(tmp_path, TP * (ALL // PAGE_SIZE))
        with contextlib.ExitStack() as faults:
            for rank in range(TP):
                [segment] = segments(tmp_path, "swa", f"tp{rank}")
                faults.enter_context(ranks.drive(rank).fault(READ, segment, BLOCK))
            assert ranks.ask(PROMPT).storage == 0
            assert ranks.ask(PROMPT).storage == 0
        ranks.wait_until_restored(PROMPT)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("threshold", "restored"), [(65, 0), (64, 64), (63, 64)])
def test_hits_around_the_threshold(ranks, tmp_path, policy, threshold, restored):
    """64 tokens are stored: one less than SGLang fetches, as many, one more; and none."""
    with ranks.storage(tmp_path, policy, prefetch_threshold=threshold):
        ranks.ask(AT_THRESHOLD)
        wait_for_kv_pages(tmp_path, TP * (64 // PAGE_SIZE))
        assert ranks.ask(BEYOND_IT).storage == restored
        assert ranks.ask(OTHER).storage == 0
