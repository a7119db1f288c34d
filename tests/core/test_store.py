"""The store from end to end: what is put is got, exactly, by its owner, after a restart, too."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from making import (
    KV,
    Memory,
    contents,
    copies,
    cut,
    flip,
    fresh_index,
    frozen_copy,
    get,
    get_each,
    identity,
    key,
    keys,
    manifests,
    opened,
    put,
    saved_index,
    settings,
    store_of,
)

from kvtier.backends.local import disk_usage
from kvtier.format import ALIGNMENT, decode_run, scan_frames
from kvtier.identity import Identity
from kvtier.index import Index
from kvtier.pages import ROOT, Column, Link, PoolPages
from kvtier.space import reclaim
from kvtier.store import Store

SIZE = 5000


def _payload_bytes(store: Path) -> int:
    return sum(path.stat().st_size for path in (store / "segments").glob("*.kvs"))


def test_what_was_put_is_got_after_a_restart(tmp_path: Path) -> None:
    chain = keys("a", 300)
    parts = contents(chain, SIZE)
    with opened(tmp_path) as (store, namespace):
        for start in range(0, 300, 100):
            link = Link(chain[start - 1] if start else ROOT, start)
            assert put(namespace, chain[start:][:100], parts[start:][:100], link=link).all()
        assert store.flush(60)
        assert namespace.contains(KV, chain).all()
        assert get(namespace, chain, SIZE) == parts
    for _ in range(2):
        with opened(tmp_path) as (_, namespace):
            assert namespace.contains(KV, chain).all()
            assert get(namespace, chain, SIZE) == parts
            assert get(namespace, chain[::-1], SIZE) == parts[::-1]
            assert get(namespace, chain[7:250:9], SIZE) == parts[7:250:9]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 4095, 4096, 4097, 300_001])
def test_parts_of_any_size(tmp_path: Path, size: int, direct: bool) -> None:
    chain = keys("sizes", 5)
    parts = contents(chain, size)
    with opened(tmp_path, direct_io=direct) as (store, namespace):
        assert put(namespace, chain, parts).all()
        assert store.flush(60)
        assert get(namespace, chain, size) == parts
    with opened(tmp_path, direct_io=direct) as (_, namespace):
        assert get(namespace, chain, size) == parts
        if size:
            # Somebody who expects another size gets nothing.
            assert get(namespace, chain, size + 1) == [None] * 5


def test_the_pieces_of_a_page_may_be_cut_otherwise_when_it_comes_back(tmp_path: Path) -> None:
    chain = keys("cut", 3)
    parts = contents(chain, 999)
    with opened(tmp_path) as (store, namespace):
        put(namespace, chain, parts)
        assert store.flush(60)
        memory = Memory(3, (9, 90, 900))
        assert namespace.get([PoolPages(KV, chain, memory.buffers())])[0].all()
        assert memory.read() == parts
        assert memory.guards_hold()


def test_a_page_that_is_there_is_not_written_again_by_anybody(tmp_path: Path) -> None:
    # Report R036: an index that is lost or not asked writes everything twice.
    chain = keys("again", 100)
    parts = contents(chain, SIZE)
    with opened(tmp_path) as (store, namespace):
        put(namespace, chain[:60], parts[:60])
        assert put(namespace, chain, parts).all()
        assert store.flush(60)
    store_path = store_of(tmp_path)
    payload, before = _payload_bytes(store_path), copies(fresh_index(store_path))
    assert payload < 100 * SIZE * 1.2 + 10 * ALIGNMENT
    for lose in (False, True):
        if lose:
            (store_path / "index" / "snapshot").unlink()
        with opened(tmp_path) as (store, namespace):
            assert put(namespace, chain, parts).all()
            assert store.flush(60)
            assert get(namespace, chain, SIZE) == parts
        assert _payload_bytes(store_path) == payload
        assert copies(fresh_index(store_path)) == before


def test_pages_waiting_to_be_committed_are_not_staged_twice(tmp_path: Path) -> None:
    chain = keys("waiting", 50)
    parts = contents(chain, SIZE)
    with opened(tmp_path, commit_interval=60.0) as (store, namespace):
        for _ in range(5):
            assert put(namespace, chain, parts).all()
        assert not namespace.contains(KV, chain).any(), "visible before it was durable"
        assert get(namespace, chain, SIZE) == [None] * 50
        assert store.flush(60)
        assert namespace.contains(KV, chain).all()
    assert _payload_bytes(store_of(tmp_path)) < 50 * SIZE + 2 * ALIGNMENT


def test_batch_and_single_lookup_agree_with_holes(tmp_path: Path) -> None:
    # Report R054: a batched lookup that always missed, beside a single one that hit.
    chain = keys("holes", 1000)
    held = [number for number in range(1000) if number % 7 and number % 64 < 50]
    with opened(tmp_path) as (store, namespace):
        for start in range(0, len(held), 90):
            some = [chain[number] for number in held[start : start + 90]]
            assert put(namespace, some, contents(some, 100), link=Link()).all()
        assert store.flush(60)
    with opened(tmp_path) as (_, namespace):
        batch = namespace.contains(KV, chain)
        assert np.flatnonzero(batch).tolist() == held
        assert [bool(namespace.contains(KV, [one])[0]) for one in chain] == batch.tolist()
        for start in (0, 1, 399, 400, 401):
            assert namespace.contains(KV, chain[start:]).tolist() == batch[start:].tolist()
        got = get_each(namespace, chain[:100], 100)
        assert [part is not None for part in got] == batch[:100].tolist()
        # A get is for a prefix: it ends at the first hole, here page 0.
        assert get(namespace, chain, 100) == [None] * 1000
        expected = contents(chain[1:7], 100)
        assert get(namespace, chain[1:], 100) == expected + [None] * 993


def test_several_pools_of_a_page_come_back_together(tmp_path: Path) -> None:
    chain = keys("pools", 40)
    pools = {
        Column("kv", "tp0"): (4096, False),
        Column("index", ""): (132, False),
        Column("anchor", ""): (0, False),
        Column("swa", "tp0"): (777, True),
    }
    with opened(tmp_path) as (store, namespace):
        for column, (size, trailing) in pools.items():
            which = chain[-1:] if trailing else chain
            parts = contents(which, size, column)
            assert put(namespace, which, parts, column, window=int(trailing)).all()
        assert store.flush(60)
    with opened(tmp_path) as (_, namespace):
        memories, requests = {}, []
        for column, (size, trailing) in pools.items():
            which = chain[-1:] if trailing else chain
            memories[column] = Memory(len(which), cut(size))
            requests.append(PoolPages(column, which, memories[column].buffers()))
        answers = namespace.get(requests)
        assert all(answer.all() for answer in answers)
        for request in requests:
            memory = memories[request.column]
            assert memory.read() == contents(request.keys, pools[request.column][0], request.column)
            assert memory.guards_hold()
    # Pools that were put with the same pages share runs, so that a page costs one entry.
    frames = [
        decode_run(frame.body)
        for path in manifests(store_of(tmp_path))
        for _, frame, _ in scan_frames(path.read_bytes())
        if frame is not None and frame.type == 2
    ]
    assert sum(len(run.blocks) for run in frames) == len(pools)


def test_models_ranks_and_pools_never_see_each_others_pages(tmp_path: Path) -> None:
    # Reports R013 and R016: another KV dtype or layout is another identity. R022: so are shards.
    chain = keys("shared", 20)
    columns = [Column("kv", "tp0"), Column("kv", "tp1"), Column("kv"), Column("swa", "tp0")]
    models = ["bf16", "fp8", "fp8 but HND"]
    with opened(tmp_path) as (store, _):
        spaces = {model: store.namespace(Identity.of({"layout": model})) for model in models}
        for model in models[:2]:
            for column in columns[:2]:
                assert put(spaces[model], chain, contents(chain, SIZE, model, column), column).all()
        assert store.flush(60)
    with opened(tmp_path) as (store, _):
        spaces = {model: store.namespace(Identity.of({"layout": model})) for model in models}
        for model in models:
            for column in columns:
                there = model in models[:2] and column in columns[:2]
                assert spaces[model].contains(column, chain).tolist() == [there] * 20
                expected = contents(chain, SIZE, model, column) if there else [None] * 20
                assert get(spaces[model], chain, SIZE, column) == expected
        spaces["bf16"].clear()
        assert not spaces["bf16"].contains(columns[0], chain).any()
        assert spaces["fp8"].contains(columns[0], chain).all()


def test_other_prompts_adapters_and_salts_are_other_keys(tmp_path: Path) -> None:
    # Report R017: an adapter or a salt goes into the page key, so one differs in any byte.
    first = key("page")
    near = [bytes([*first[:at], first[at] ^ 1, *first[at + 1 :]]) for at in range(32)]
    with opened(tmp_path) as (store, namespace):
        put(namespace, [first], contents([first], SIZE))
        assert store.flush(60)
        assert get_each(namespace, near, SIZE) == [None] * 32
        # Eight bytes of a key are in the table; other bytes only count when pages are read.
        assert not namespace.contains(KV, near[:8]).any()
        for start in range(0, 32, 8):
            some = near[start : start + 8]
            put(namespace, some, contents(some, SIZE), link=Link())
        assert store.flush(60)
        for one, part in zip(
            [first, *near], get_each(namespace, [first, *near], SIZE), strict=True
        ):
            assert part in (None, *contents([one], SIZE))


def test_a_damaged_page_misses_alone_and_can_be_put_again(tmp_path: Path) -> None:
    chain = keys("damage", 30)
    parts = contents(chain, SIZE)
    with opened(tmp_path) as (_, namespace):
        put(namespace, chain, parts)
    [payload] = [p for p in (store_of(tmp_path) / "segments").glob("*.kvs") if p.stat().st_size]
    flip(payload, payload.read_bytes().index(parts[11]) + SIZE - 1, 7)
    with opened(tmp_path) as (store, namespace):
        assert namespace.contains(KV, chain).all(), "payload is not read by a lookup"
        # Report R024: what is not delivered is not written to; `get` checks the memory.
        assert get(namespace, chain, SIZE) == parts[:11] + [None] * 19
        assert get_each(namespace, chain, SIZE) == [*parts[:11], None, *parts[12:]]
        assert np.flatnonzero(~namespace.contains(KV, chain)).tolist() == [11]
        assert put(namespace, chain, parts).all()
        assert store.flush(60)
        assert get(namespace, chain, SIZE) == parts
    (store_of(tmp_path) / "index" / "snapshot").unlink()
    with opened(tmp_path) as (_, namespace):
        assert get(namespace, chain, SIZE) == parts


def test_a_damaged_page_stays_away_when_the_index_is_rebuilt(tmp_path: Path) -> None:
    chain = keys("damage", 5)
    with opened(tmp_path) as (_, namespace):
        put(namespace, chain, contents(chain, SIZE))
    [payload] = [p for p in (store_of(tmp_path) / "segments").glob("*.kvs") if p.stat().st_size]
    flip(payload, 2 * SIZE)
    with opened(tmp_path) as (store, namespace):
        assert get(namespace, chain, SIZE)[2:] == [None] * 3
        assert store.flush(60)
    index = fresh_index(store_of(tmp_path))
    assert copies(index) == copies(saved_index(store_of(tmp_path)))
    assert len(copies(index)) == 4


def test_right_bytes_in_the_wrong_place_do_not_pass(tmp_path: Path) -> None:
    # Report R006, and drives that write or read another sector than they were told.
    chain = keys("misdirected", 4)
    parts = contents(chain, 2 * ALIGNMENT)
    other = contents(chain, 2 * ALIGNMENT, "other rank")
    with opened(tmp_path) as (store, namespace):
        put(namespace, chain, parts)
        assert store.flush(60)  # in a run of its own: a page is dropped from all pools of its run
        put(namespace, chain, other, Column("kv", "tp1"))
    [payload] = [p for p in (store_of(tmp_path) / "segments").glob("*.kvs") if p.stat().st_size]
    data = bytearray(payload.read_bytes())
    second, rank = data.index(parts[1]), data.index(other[3])
    data[second : second + len(parts[0])] = parts[0]  # another page of the same rank
    data[rank : rank + len(other[3])] = parts[3]  # the same page of another rank
    payload.write_bytes(data)
    with opened(tmp_path) as (_, namespace):
        assert get_each(namespace, chain, 2 * ALIGNMENT) == [parts[0], None, *parts[2:]]
        rank1 = get_each(namespace, chain, 2 * ALIGNMENT, Column("kv", "tp1"))
        assert rank1 == [*other[:3], None]


def test_several_damaged_requests_leave_later_memory_alone(tmp_path: Path) -> None:
    # Report R024 over several pools of one call: each ends at its own first damaged page.
    chain = keys("pools", 9)
    columns = [Column("kv", f"tp{rank}") for rank in range(3)]
    with opened(tmp_path) as (_, namespace):
        for column in columns:
            put(namespace, chain, contents(chain, SIZE, column), column)
    [payload] = [p for p in (store_of(tmp_path) / "segments").glob("*.kvs") if p.stat().st_size]
    data = payload.read_bytes()
    for number, page in ((0, 8), (1, 0), (1, 5), (2, 4)):
        flip(payload, data.index(contents([chain[page]], SIZE, columns[number])[0]) + 100)
    with opened(tmp_path) as (_, namespace):
        memories = [Memory(9, cut(SIZE)) for _ in columns]
        answers = namespace.get(
            [
                PoolPages(column, chain, memory.buffers())
                for column, memory in zip(columns, memories, strict=True)
            ]
        )
        for column, memory, answer, good in zip(columns, memories, answers, (8, 0, 4), strict=True):
            assert answer.tolist() == [True] * good + [False] * (9 - good)
            assert memory.read()[:good] == contents(chain, SIZE, column)[:good]
            assert all(memory.untouched()[good:])
            assert memory.guards_hold()


def test_clear_drops_what_was_put_and_nothing_that_comes_later(tmp_path: Path) -> None:
    chain = keys("clear", 30)
    parts = contents(chain, SIZE)
    with opened(tmp_path) as (store, namespace):
        put(namespace, chain[:20], parts[:20])
        namespace.clear()
        assert not namespace.contains(KV, chain).any()
        assert get_each(namespace, chain, SIZE) == [None] * 30
        put(namespace, chain[:10], parts[:10])
        assert store.flush(60)
    for lose in (False, True):
        if lose:
            (store_of(tmp_path) / "index" / "snapshot").unlink()
        with opened(tmp_path) as (_, namespace):
            assert get_each(namespace, chain, SIZE) == parts[:10] + [None] * 20


def test_a_page_nobody_could_reach_is_refused(tmp_path: Path) -> None:
    chain = keys("orphan", 6)
    parts = contents(chain, SIZE)
    with opened(tmp_path) as (store, _):
        namespace = store.namespace(Identity.of({"model": "anchored"}), KV)
        assert not put(namespace, chain[2:], parts[2:], link=Link(chain[1], 2)).any()
        assert put(namespace, chain[2:4], parts[2:4], link=Link(None, 0)).all(), "unknown: taken"
        assert put(namespace, chain[:2], parts[:2], link=Link(ROOT, 0)).all()
        # Its parent waits to be committed, which is good enough.
        assert put(namespace, chain[2:], parts[2:], link=Link(chain[1], 2)).all()
        assert store.flush(60)
        assert get(namespace, chain, SIZE) == parts


def test_calls_after_close_answer_no(tmp_path: Path) -> None:
    chain = keys("late", 4)
    with opened(tmp_path) as (store, namespace):
        put(namespace, chain[:2], contents(chain[:2], SIZE))
    store.close()
    assert not put(namespace, chain[2:], contents(chain[2:], SIZE)).any()
    assert get(namespace, chain, SIZE) == [None] * 4
    assert not namespace.contains(KV, chain).any(), "what it would not give"
    assert store.flush(60)


def test_nothing_is_asked_and_nothing_answered(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace):
        assert put(namespace, [], []).tolist() == []
        assert namespace.contains(KV, []).tolist() == []
        assert get(namespace, [], SIZE) == []
        assert namespace.get([]) == []
        assert store.flush(60)


@pytest.mark.parametrize("size", [1 << 17, (1 << 18) - 5000, 1 << 18])
def test_a_page_up_to_all_of_staging_is_stored(tmp_path: Path, size: int) -> None:
    chain = keys("large", 5)
    sizes = {"staging_size": 1 << 18, "commit_size": 1 << 16}
    with opened(tmp_path, **sizes) as (store, namespace):
        assert put(namespace, chain, contents(chain, size)).all()
        assert put(namespace, chain, contents(chain, SIZE), Column("small")).all()
        assert store.flush(60)
        assert get(namespace, chain, size) == contents(chain, size)
    with opened(tmp_path, **sizes) as (_, namespace):
        assert get(namespace, chain, size) == contents(chain, size)
        assert get(namespace, chain, SIZE, Column("small")) == contents(chain, SIZE)


def test_a_page_larger_than_staging_is_named_and_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = keys("larger", 2)
    sizes = {"staging_size": 1 << 18, "commit_size": 1 << 16}
    with opened(tmp_path, **sizes) as (store, namespace):
        for _ in range(3):
            assert not put(namespace, chain, contents(chain, (1 << 18) + 4096)).any()
        assert put(namespace, chain, contents(chain, SIZE), Column("small")).all()
        assert store.flush(60)
        assert get(namespace, chain, SIZE, Column("small")) == contents(chain, SIZE)
    [line] = [r.getMessage() for r in caplog.records if "staging_size" in r.getMessage()]
    assert "the pool kv has 266 KB" in line and "set staging_size to 1040KiB or more" in line


def test_more_than_staging_holds_goes_through_it(tmp_path: Path) -> None:
    chain = keys("stream", 700)
    parts = contents(chain, 4096)
    sizes = {"staging_size": 1 << 18, "commit_size": 1 << 16, "segment_size": 1 << 20}
    with opened(tmp_path, **sizes) as (store, namespace):
        for start in range(0, 700, 50):
            link = Link(chain[start - 1] if start else ROOT, start)
            assert put(namespace, chain[start:][:50], parts[start:][:50], link=link).all()
        assert store.flush(60)
        assert get(namespace, chain, 4096) == parts
    with opened(tmp_path) as (_, namespace):
        assert get(namespace, chain, 4096) == parts
    assert len(manifests(store_of(tmp_path))) > 1


def test_a_flush_hurries_nothing_that_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the thread that commits looks again: what is put then waits for its batch."""
    chain, gate = keys("first", 2), threading.Event()
    with opened(tmp_path, commit_interval=60.0) as (store, namespace):
        committer, settle = store._committer, store._committer._settle
        monkeypatch.setattr(committer, "_settle", lambda batch: (settle(batch), gate.wait(60)))
        put(namespace, chain, contents(chain, SIZE))
        for _ in range(2):  # and with nothing to do
            assert store.flush(60)
            assert not committer._hurry
        gate.set()


def test_threads_put_get_and_save_at_once(tmp_path: Path) -> None:
    chains = {name: keys(name, 60) for name in range(4)}
    faults: list[object] = []
    done = threading.Event()

    with opened(tmp_path) as (store, namespace):

        def work(name: int) -> None:
            column = Column("kv", f"tp{name}")
            chain = chains[name]
            try:
                for start in range(0, 60, 4):
                    some = chain[start : start + 4]
                    put(namespace, some, contents(some, 700, name), column, Link(None, 0))
                    for part, one in zip(get(namespace, chain, 700, column), chain, strict=True):
                        assert part in (None, *contents([one], 700, name))
                assert store.flush(120)
                assert get(namespace, chain, 700, column) == contents(chain, 700, name)
            except BaseException as fault:
                faults.append(fault)
                raise

        def save() -> None:
            while not done.wait(0.002):
                store.index.save()

        saver = threading.Thread(target=save, daemon=True)
        saver.start()
        threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in chains]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive(), "threads wait for each other"
        done.set()
        saver.join(300)
        assert faults == []
    assert copies(saved_index(store_of(tmp_path))) == copies(fresh_index(store_of(tmp_path)))


def test_a_copy_of_the_directory_at_any_moment_is_a_store(tmp_path: Path) -> None:
    chain = keys("copied", 40)
    parts = contents(chain, SIZE)
    with opened(tmp_path) as (store, namespace):
        put(namespace, chain[:20], parts[:20])
        assert store.flush(60)
        put(namespace, chain[20:], parts[20:])
        copy = frozen_copy(store_of(tmp_path), tmp_path / "copy")
    assert not any(segment.live for segment in saved_index(copy / "kvtier").segments())
    with opened(copy) as (_, namespace):
        got = get_each(namespace, chain, SIZE)
        assert got[:20] == parts[:20]
        assert all(part in (None, parts[20 + at]) for at, part in enumerate(got[20:]))


def test_two_copies_of_a_page_stand_in_for_each_other(tmp_path: Path) -> None:
    chain = keys("twice", 6)
    parts = contents(chain, SIZE)
    with opened(tmp_path, commit_interval=60.0) as (one, first):
        with opened(tmp_path, commit_interval=60.0) as (_, second):
            put(first, chain, parts)
            put(second, chain[2:], parts[2:])
        assert one.flush(60)
        layout = one.layout
    index = Index(layout)
    assert [len(places) for _, places in sorted(copies(index).items())].count(2) == 4
    # Space in use by the other copy is not free.
    reclaim(layout, index)
    assert copies(fresh_index(layout.path)) == copies(index)
    payloads = sorted((layout.path / "segments").glob("*.kvs"))
    for number, payload in enumerate(payloads):
        page = 3 + number
        flip(payload, payload.read_bytes().index(parts[page]) + 7)
    with opened(tmp_path) as (store, namespace):
        for _ in range(2):
            get_each(namespace, chain, SIZE)
            assert store.flush(60)
        assert get(namespace, chain, SIZE) == parts
    assert copies(saved_index(layout.path)) == copies(fresh_index(layout.path))
    with opened(tmp_path) as (_, namespace):
        assert get(namespace, chain, SIZE) == parts


def test_clear_knows_what_others_have_just_committed(tmp_path: Path) -> None:
    chain = keys("theirs", 5)
    with opened(tmp_path) as (one, first), opened(tmp_path) as (_, second):
        for number in range(5):
            put(first, [chain[number]], contents([chain[number]], SIZE), link=Link())
            assert one.flush(60)
            second.clear()
            one.index.refresh()
            assert not first.contains(KV, chain).any()
    assert copies(fresh_index(store_of(tmp_path))) == {}


def test_the_identity_document_lies_beside_the_pages(tmp_path: Path) -> None:
    identity = Identity.of({"model": "model"}, {"path": "/models/one"})
    with opened(tmp_path) as (store, _):
        store.namespace(identity)
        store.namespace(Identity.of({"model": "other"}))
    documents = sorted((store_of(tmp_path) / "namespaces").glob("*.json"))
    assert {Identity.from_json(path.read_text(), path.stem) for path in documents} == {
        identity,
        Identity.of({"model": "other"}),
    }


def test_an_idle_start_and_stop_costs_no_space(tmp_path: Path) -> None:
    with opened(tmp_path) as (_, namespace):
        put(namespace, keys("a", 3), contents(keys("a", 3), SIZE))
    with opened(tmp_path):
        pass
    before = disk_usage(store_of(tmp_path)), Counter(p.name for p in store_of(tmp_path).rglob("*"))
    for _ in range(3):
        with opened(tmp_path):
            pass
    after = disk_usage(store_of(tmp_path)), Counter(p.name for p in store_of(tmp_path).rglob("*"))
    assert after == before


def test_a_closed_store_keeps_nothing_of_its_file_system_busy(tmp_path: Path) -> None:
    """Detached in a server that goes on: a mount below could not be unmounted."""
    chain = keys("detached", 20)
    with opened(tmp_path) as (_, namespace):
        put(namespace, chain, contents(chain, SIZE))
    gc.collect()
    gc.disable()
    try:
        store = Store.open(settings(tmp_path))
        namespace = store.namespace(identity())
        assert get(namespace, chain, SIZE) == contents(chain, SIZE)
        assert str(tmp_path) in Path("/proc/self/maps").read_text()
        store.close()
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
        held = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.exists()]
        assert not [name for name in held if name.startswith(str(tmp_path))]
        assert not namespace.contains(KV, chain).any()
        assert get(namespace, chain, SIZE) == [None] * len(chain)
        assert not put(namespace, chain, contents(chain, SIZE)).any()
    finally:
        gc.enable()
