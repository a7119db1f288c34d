"""The cap of a store with running servers: real processes that store, sampled from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from making import (
    KV,
    PATIENCE,
    contents,
    fresh_index,
    get,
    identity,
    keys,
    opened,
    put,
    store_of,
    until,
)
from quotas import accounted, within

from kvtier import collector
from kvtier.backends.local import disk_usage
from kvtier.chains import chains
from kvtier.collector import alone
from kvtier.identity import Identity
from kvtier.layout import Layout
from kvtier.limits import Amount, write_limits
from kvtier.pages import Column, Link

HERE = Path(__file__).parent
MIB = 1 << 20
SIZE = 64 << 10
KVTIER = "from kvtier.cli import main; main()"


def _writer(root: Path, name: str, **changes: object) -> subprocess.Popen[str]:
    words = [root, name, 96, SIZE, json.dumps(changes)]
    return subprocess.Popen(
        [sys.executable, str(HERE / "session_writer.py"), *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(HERE)},
    )


def _end(writers: list[subprocess.Popen[str]]) -> list[dict[str, int]]:
    answers = [writer.communicate(timeout=PATIENCE)[0] for writer in writers]
    assert all(writer.returncode == 0 for writer in writers)
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def _no_holes(store: Path) -> None:
    for found in chains(fresh_index(store)):
        assert found.reachable.all()


def test_three_servers_and_a_gc_never_take_more_than_the_cap(tmp_path: Path) -> None:
    """Several times the cap is stored by three processes (R058); it is lowered meanwhile, and
    `kvtier gc` runs beside them. Sampled every 100 ms from outside."""
    cap, lower = 120 * MIB, 80 * MIB
    changes = {"limit": cap, "grace": 0.2, "commit_size": 2 * MIB, "staging_size": 8 * MIB}
    store = store_of(tmp_path)
    layout = Layout.open(store, create=True)
    writers = [_writer(tmp_path, str(n), **changes) for n in range(3)]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    sampling = subprocess.Popen(
        [sys.executable, str(HERE / "sampler.py"), str(store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for limit in ("100M", "50M"):
            time.sleep(5)
            words = [sys.executable, "-c", KVTIER, "gc", "--limit", limit, "--yes", str(tmp_path)]
            gc = subprocess.run(words, capture_output=True, text=True, check=False)
            assert gc.returncode in (0, 1), gc.stderr
        until(lambda: accounted(layout).granted > 3 * cap, "they stored no more than that")
        write_limits(layout, {"limit": Amount(lower)})
        until(lambda: within(layout, lower), "the lower limit was never reached")
        for _ in range(100):
            assert disk_usage(store) <= lower
            time.sleep(0.1)
    finally:
        answers = _end(writers)
        samples = json.loads(sampling.communicate(timeout=PATIENCE)[0])
    assert max(samples) <= cap
    assert sum(answer["stored"] for answer in answers) * SIZE > 3 * cap
    assert disk_usage(store) <= lower
    _no_holes(store)
    index = fresh_index(store)
    [found] = chains(index)
    with opened(tmp_path) as (_, namespace):
        for session in found.sessions()[:3]:
            chain = _chain_of(found.keys, found.parent, session.key)
            assert get(namespace, chain, SIZE) == contents(chain, SIZE)


def _chain_of(page_keys, parent, leaf: bytes) -> list[bytes]:  # type: ignore[no-untyped-def]
    page = next(i for i, key in enumerate(page_keys) if key.tobytes() == leaf)
    chain = []
    while page < len(page_keys):
        chain.append(page_keys[page].tobytes())
        page = int(parent[page])
    return chain[::-1]


def test_a_store_above_its_cap_is_trimmed_at_start(tmp_path: Path) -> None:
    """It holds other models' pages, a crash's scratch files and files of strangers (R062): its own
    go, oldest first; strangers' are left alone and count."""
    store = store_of(tmp_path)
    for number, model in enumerate(("old", "newer", "newest")):
        with opened(tmp_path, model) as (opened_store, namespace):
            chain = keys(model, 200)
            put(namespace, chain, contents(chain, SIZE), link=Link(b"", 0))
            assert opened_store.flush(60)
        assert number >= 0
    foreign = store / "segments" / "notes.txt"
    foreign.write_bytes(os.urandom(8 * MIB))
    scratch = store / "index" / ".snapshot.1.dead.tmp"
    scratch.write_bytes(os.urandom(2 * MIB))
    assert disk_usage(store) > 45 * MIB
    with opened(tmp_path, "served", limit=30 * MIB, grace=0.1) as (opened_store, namespace):
        until(lambda: disk_usage(store) <= 30 * MIB, "the store stayed above its cap")
        assert foreign.stat().st_size == 8 * MIB and not scratch.exists()
        opened_store.index.refresh()
        left = {
            model: int(opened_store.namespace(identity(model)).contains(KV, keys(model, 200)).sum())
            for model in ("old", "newer", "newest")
        }
        assert left["old"] == 0 and left["newer"] <= left["newest"] and left["newest"] > 100
    _no_holes(store)


def test_a_full_store_takes_new_sessions_and_keeps_the_last_used(tmp_path: Path) -> None:
    """The incoming session's head survives that others are stored (R066)."""
    size, changes = 128 << 10, {"limit": 24 * MIB, "grace": 0.2, "put_deadline": 60.0}
    with opened(tmp_path, **changes) as (store, namespace):
        head = keys("system prompt", 20)
        assert put(namespace, head, contents(head, size), link=Link(b"", 0)).all()
        for number in range(12):
            own = keys(("session", number), 40)
            for start in range(0, 40, 8):
                some = own[start : start + 8]
                link = Link(own[start - 1] if start else head[-1], 20 + start)
                assert put(namespace, some, contents(some, size), link=link).all()
            assert store.flush(PATIENCE)
            assert disk_usage(store.root) <= 24 * MIB
            chain = head + own
            assert get(namespace, chain, size) == contents(chain, size)
        assert store.failures == 0


def test_collections_go_by_the_limit_that_a_damaged_file_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    begin = subprocess.Popen

    def popen(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        started.append(words)
        return begin(words, **more)

    monkeypatch.setattr("kvtier.collector.subprocess.Popen", popen)
    with opened(tmp_path, limit=60 * MIB) as (store, _):
        write_limits(store.layout, {"limit": Amount(24 * MIB)})
        assert store.quota.standing().cap == 24 * MIB
        (store.root / "limits.json").write_text("{")
        store._collector.start()
        [words] = started
        assert json.loads(words[words.index("--limits") + 1])["limit"] == "24MiB"


def test_what_cannot_be_freed_refuses_new_pages_and_says_why(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    Layout.open(store, create=True)
    (store / "stranger").write_bytes(os.urandom(20 * MIB))
    changes = {"limit": 16 * MIB, "grace": 0.1, "put_deadline": 30.0}
    with opened(tmp_path, **changes) as (opened_store, namespace):
        chain = keys("chain", 8)
        put(namespace, chain, contents(chain, SIZE))
        assert opened_store.flush(PATIENCE)
        assert not namespace.contains(KV, chain).any()
        assert "of 16.8 MB (limit)" in opened_store.quota.reason
        assert (store / "stranger").stat().st_size == 20 * MIB


def test_only_one_collection_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, _):
        words = [sys.executable, "-m", "kvtier.collector", str(store.root)]
        words += ["--store", store.layout.store_id.hex()]
        words += ["--limit", "0", "--grace", "0", "--tails", "40"]
        words += [
            "--limits",
            '{"limit": "4097", "daily_writes": "500"}',
            "--segment-size",
            "1000000",
        ]
        with alone(store.layout, wait=False) as mine:
            assert mine
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout) == (75, "")
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and json.loads(done.stdout)["freed"] >= 0


def test_superseded_tails_go_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long session in chunks of 2,048 tokens, each with the tails that HiCache offers."""
    monkeypatch.setattr(collector, "IDLE_SECONDS", 0.5)
    page_bytes, tail_bytes = 41_792, 643_968  # a tenth of DeepSeek-V4.1-Flash's
    swa, served = Column("swa"), Identity.of({"page_tokens": 256})
    chain = keys("long", 400)
    with opened(tmp_path, grace=0.1, commit_size=4 * MIB, staging_size=16 * MIB) as (store, _):
        namespace = store.namespace(served, KV)
        for start in range(0, len(chain), 8):
            chunk = chain[start : start + 8]
            before = chain[start - 1] if start else b""
            tails, link = chunk[-2:], Link(chunk[-3], start + 6)
            assert put(
                namespace, tails, contents(tails, tail_bytes, "t"), swa, link, window=1
            ).all()
            assert put(
                namespace, chunk, contents(chunk, page_bytes), link=Link(before, start)
            ).all()
        assert store.flush(PATIENCE)

        def thinned() -> bool:
            return int(namespace.contains(swa, chain).sum()) <= 20

        until(thinned, "superseded tails were never dropped")
        store.index.refresh()
        kept_at = [n + 1 for n, there in enumerate(namespace.contains(swa, chain)) if there]
        assert kept_at[-1] == len(chain)
        for cut in range(1, len(chain) + 1):
            behind = max((at for at in kept_at if at <= cut), default=0)
            assert cut - behind <= max(8, (len(chain) - cut) / 4)
        assert get(namespace, chain, page_bytes) == contents(chain, page_bytes)
        last = chain[-1:]
        assert get(namespace, last, tail_bytes, swa) == contents(last, tail_bytes, "t")
        wanted = 400 * page_bytes + len(kept_at) * tail_bytes
        until(lambda: disk_usage(store.root) < 1.2 * wanted + MIB, "their space was not freed")
