"""The storage contract of SGLang, kept by the adapter on SGLang's own host pools."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kvtier_test_platform.committed import wait_until
from pools import Engine
from prometheus_client import REGISTRY
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvtier.errors import ConfigError, KvtierError, StoreError
from kvtier.integration import storage as storage_module
from kvtier.integration.storage import KvtierStorage, page_keys
from kvtier.pages import ROOT, Link

ALL, TRAILING = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES

WAIT = 60.0

Attach = Callable[..., KvtierStorage]


def config(root: Path, **changes: object) -> HiCacheStorageConfig:
    values: dict[str, object] = dict(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="served",
        extra_config={"root": str(root), "commit_interval": 0.01},
    )
    return HiCacheStorageConfig(**{**values, **changes})


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Attach]:
    """A maker of adapters for the host pools of an engine, each as a rank of its own."""
    made = []

    def attach(engine: Engine, **changes: object) -> KvtierStorage:
        storage = KvtierStorage(config(tmp_path / "ranks", **changes))
        made.append(storage)
        storage.register_mem_pool_host(engine.entries["kv"].host_pool)
        for name, entry in engine.entries.items():
            storage.register_mem_host_pool_v2(entry.host_pool, name)
        storage.on_host_pools_registered()
        return storage

    yield attach
    for storage in reversed(made):
        storage.close()


def keys(count: int, chain: int = 1) -> list[str]:
    """Page keys as SGLang hands them over: SHA-256 in hex."""
    names = (f"page {number} of chain {chain}" for number in range(count))
    return [hashlib.sha256(name.encode()).hexdigest() for name in names]


def slots(engine: Engine, pool: str, *numbers: int) -> torch.Tensor:
    page_size = engine.entries[pool].host_pool.page_size
    first = torch.tensor(numbers, dtype=torch.int64) * page_size
    return (first[:, None] + torch.arange(page_size)).reshape(-1)


def page(engine: Engine, pool: str, number: int) -> bytes:
    host = engine.entries[pool].host_pool
    data = host.get_data_page(number * host.page_size)
    return data.contiguous().view(torch.uint8).numpy().tobytes()


def scramble(engine: Engine, pool: str, *numbers: int) -> list[bytes]:
    """Fresh random bytes in pages of a host pool; what they are."""
    host = engine.entries[pool].host_pool
    for number in numbers:
        blank = host.get_dummy_flat_data_page()
        size = blank.numel() * blank.element_size()
        noise = torch.randint(0, 256, (size,), dtype=torch.uint8)
        host.set_from_flat_data_page(number * host.page_size, noise.view(blank.dtype))
    return [page(engine, pool, number) for number in numbers]


def after(*before: str) -> HiCacheStorageExtraInfo:
    return HiCacheStorageExtraInfo(prefix_keys=list(before))


# --- the KV pool ------------------------------------------------------------------------------


def test_pages_come_back_bit_for_bit_in_other_slots_and_after_a_restart(start, attach) -> None:
    engine = start("full")
    first = attach(engine)
    stored = scramble(engine, "kv", 0, 1, 2)
    assert first.batch_set_v1(keys(3), slots(engine, "kv", 0, 1, 2), after()) == [True] * 3
    scramble(engine, "kv", 0, 1, 2)  # SGLang may use the slots again at once
    assert first.flush(WAIT)
    assert first.batch_exists(keys(5)) == 3
    first.close()

    second = attach(engine)
    assert second.batch_exists(keys(3)) == 3
    assert second.batch_get_v1(keys(3), slots(engine, "kv", 7, 9, 8)) == [True] * 3
    assert [page(engine, "kv", number) for number in (7, 9, 8)] == stored


def test_from_the_first_missing_page_on_host_pages_stay_as_they_are(start, attach) -> None:
    engine = start("full")
    storage = attach(engine)
    stored = scramble(engine, "kv", 0, 1)
    storage.batch_set_v1(keys(2), slots(engine, "kv", 0, 1), after())
    storage.flush(WAIT)
    others = scramble(engine, "kv", 4, 5, 6)
    wanted = [*keys(2), *keys(1, chain=2)]
    assert storage.batch_get_v1(wanted, slots(engine, "kv", 4, 5, 6)) == [True, True, False]
    assert [page(engine, "kv", number) for number in (4, 5, 6)] == [*stored, others[2]]


def test_exists_agrees_with_itself_wherever_the_hole_is(start, attach) -> None:
    engine = start("full")
    storage = attach(engine)
    for hole in (0, 1, 4):
        chain = keys(5, chain=100 + hole)
        for number in set(range(5)) - {hole}:
            # Without prefix keys a page's parent is unknown and accepted.
            storage.batch_set_v1([chain[number]], slots(engine, "kv", number))
        storage.flush(WAIT)
        assert storage.batch_exists(chain) == hole
        assert [storage.exists(key) for key in chain] == [n != hole for n in range(5)]


def test_a_put_that_nobody_could_reach_is_refused(start, attach) -> None:
    engine = start("full")
    storage = attach(engine)
    orphan, parent = keys(2)[1:], keys(1)
    place = slots(engine, "kv", 0)
    assert storage.batch_set_v1(orphan, place, after(*parent)) == [False]
    assert storage.batch_set_v1(parent, place, after()) == [True]
    assert storage.batch_set_v1(orphan, place, after(*parent)) == [True]  # pending counts


def test_under_write_back_children_come_first(start, attach) -> None:
    engine = start("full")
    storage = attach(engine)
    storage.parents_first = False
    first, second = keys(2)
    place = slots(engine, "kv", 0)
    assert storage.batch_set_v1([second], place, after(first)) == [True]
    assert storage.batch_set_v1([first], place, after()) == [True]
    storage.flush(WAIT)
    assert storage.batch_exists([first, second]) == 2


def test_slots_that_do_not_fit_the_keys_are_a_miss_and_logged_once(start, attach, caplog) -> None:
    engine = start("full")
    storage = attach(engine)
    for _ in range(3):
        assert storage.batch_set_v1(keys(2), slots(engine, "kv", 0), after()) == [False] * 2
    assert storage.batch_get_v1(keys(2), slots(engine, "kv", 0)) == [False] * 2
    assert caplog.text.count("slots for 2 pages of 64 slots of pool kv") == 2  # one a call


def test_the_link_says_how_deep_a_page_hangs() -> None:
    chain = keys(3)
    assert storage_module._link(None) == Link()
    assert storage_module._link(HiCacheStorageExtraInfo()) == Link()
    assert storage_module._link(after()) == Link(ROOT, 0)
    assert storage_module._link(after(*chain)) == Link(bytes.fromhex(chain[-1]), 3)


@pytest.mark.parametrize(
    "wrong", [["abc"], ["__placeholder__"], ["00" * 31], ["00" * 31, "00" * 33]]
)
def test_what_is_no_page_key_is_never_taken_for_one(wrong) -> None:
    with pytest.raises(ValueError):
        page_keys(wrong)


# --- the other pools --------------------------------------------------------------------------


def put_families(storage: KvtierStorage, engine: Engine, chain: list[str]) -> None:
    """All pools of a DeepSeek-V4 chain, as a backup of one node does."""
    count = len(chain)
    place = slots(engine, "kv", *range(count))
    transfers = [
        PoolTransfer(PoolName(name), place, keys=chain, hit_policy=policy)
        for name, policy in policies(storage).items()
        if name != "kv"
    ]
    stored = storage.batch_set_v2(transfers, after())
    assert all(all(pages) for pages in stored.values())
    assert storage.batch_set_v1(chain, place, after()) == [True] * count
    assert storage.flush(WAIT)


def policies(storage: KvtierStorage) -> dict[str, PoolHitPolicy]:
    return {
        name: TRAILING if name in storage_module.TRAILING_POOLS else ALL for name in storage.pools
    }


def lookup(storage: KvtierStorage, **windows: int) -> list[PoolTransfer]:
    """Transfers as a prefetch's lookup has them: placeholders or no keys, no slots yet."""
    return [
        PoolTransfer(
            PoolName(name),
            keys=["__placeholder__"] * windows.get(name, 1) if policy == TRAILING else None,
            hit_policy=policy,
        )
        for name, policy in policies(storage).items()
        if name != "kv"
    ]


def test_a_whole_family_makes_every_boundary_legal(start, attach) -> None:
    engine = start("deepseek-v4")
    storage = attach(engine)
    put_families(storage, engine, keys(4))
    answer = storage.batch_exists_v2(keys(6), lookup(storage))
    assert answer.kv_hit_pages == 4
    assert answer.restorable_prefix_pages == [1, 2, 3, 4]
    # SGLang asks by PoolName (hybrid_cache_controller.py, _storage_hit_query).
    assert answer.extra_pool_hit_pages[PoolName.KV] == 4
    assert {str(name) for name in answer.extra_pool_hit_pages} == set(storage.pools)


@pytest.mark.parametrize(
    "lost",
    ["kv", "swa", *("deepseek_v4_" + name for name in
     ("c4", "c4_indexer", "c128", "c4_state", "c4_indexer_state"))],
)  # fmt: skip
def test_a_page_without_one_of_its_parts_is_no_boundary(start, attach, lost) -> None:
    """Report R002: page 2 of 4 lacks one pool."""
    engine = start("deepseek-v4")
    storage = attach(engine)
    chain = keys(4)
    for name, policy in policies(storage).items():
        for number, key in enumerate(chain):
            if (name, number) != (lost, 2):
                transfer = PoolTransfer(PoolName(name), slots(engine, name, number), keys=[key],
                                        hit_policy=policy)  # fmt: skip
                assert storage.batch_set_v2([transfer]) == {name: [True]}
    storage.flush(WAIT)
    answer = storage.batch_exists_v2(chain, lookup(storage))
    trailing = lost in storage_module.TRAILING_POOLS
    assert answer.restorable_prefix_pages == ([1, 2, 4] if trailing else [1, 2])
    assert answer.kv_hit_pages == (4 if trailing else 2)
    assert answer.extra_pool_hit_pages["kv"] == (2 if lost == "kv" else 4)
    place = slots(engine, lost, 1)
    found = storage.batch_get_v2([PoolTransfer(PoolName(lost), place, keys=[chain[2]])])
    assert found == {lost: [False]}


def test_trailing_windows_of_different_length_are_intersected(start, attach) -> None:
    """Report R001 through the adapter: windows of 2 and 1 pages with holes in different places."""
    engine = start("deepseek-v4")
    storage = attach(engine)
    chain = keys(5)
    storage.batch_set_v1(chain, slots(engine, "kv", *range(5)), after())
    for name, present in (("swa", (1, 2, 4)), ("deepseek_v4_c4_state", (2, 3, 4))):
        for number in present:
            transfer = PoolTransfer(PoolName(name), slots(engine, name, number),
                                    keys=[chain[number]], hit_policy=TRAILING)  # fmt: skip
            storage.batch_set_v2([transfer])
    storage.flush(WAIT)
    asked = [
        PoolTransfer(PoolName.SWA, keys=["__placeholder__"] * 2, hit_policy=TRAILING),
        PoolTransfer(PoolName.DEEPSEEK_V4_C4_STATE, keys=None, hit_policy=TRAILING),
    ]
    answer = storage.batch_exists_v2(chain, asked)
    assert answer == PoolTransferResult(3, {"kv": 5, "swa": 3, "deepseek_v4_c4_state": 5}, [3])


def test_several_pools_are_read_in_one_call(start, attach) -> None:
    engine = start("deepseek-v4")
    storage = attach(engine)
    names = [name for name in storage.pools if name != "kv"]
    stored = {name: scramble(engine, name, 0, 1) for name in names}
    put_families(storage, engine, keys(2))
    transfers = [
        PoolTransfer(PoolName(name), slots(engine, name, 3, 2), keys=keys(2)) for name in names
    ]
    assert storage.batch_get_v2(transfers) == {name: [True, True] for name in names}
    for name in names:
        assert [page(engine, name, 3), page(engine, name, 2)] == stored[name]


def test_calls_with_nothing_in_them(start, attach) -> None:
    engine = start("deepseek-v4")
    storage = attach(engine)
    assert storage.batch_get_v2([]) == {}
    assert storage.batch_set_v2([]) == {}
    assert storage.batch_get_v2([PoolTransfer(PoolName.SWA, keys=None)]) == {"swa": []}
    assert storage.batch_set_v2([PoolTransfer(PoolName.SWA, keys=[])]) == {"swa": []}
    assert storage.batch_exists([]) == 0
    assert storage.batch_exists_v2([], lookup(storage)) == PoolTransferResult(0, {}, [])
    assert storage.batch_set_v1([], torch.empty(0, dtype=torch.int64)) == []


def test_a_pool_that_was_never_registered_is_absent(start, attach, caplog) -> None:
    engine = start("full")
    storage = attach(engine)
    storage.batch_set_v1(keys(2), slots(engine, "kv", 0, 1), after())
    storage.flush(WAIT)
    unknown = PoolTransfer(PoolName.MAMBA, slots(engine, "kv", 0), keys=keys(1))
    answer = storage.batch_exists_v2(keys(2), [unknown])
    assert (answer.kv_hit_pages, answer.extra_pool_hit_pages) == (0, {"kv": 2, "mamba": 0})
    assert storage.batch_get_v2([unknown]) == {"mamba": [False]}
    assert storage.batch_set_v2([unknown]) == {"mamba": [False]}
    assert "never registered the pool mamba" in caplog.text


def test_a_pool_registered_late_belongs_to_the_identity(start, attach) -> None:
    engine = start("swa")
    early = attach(engine)
    without = early._open_namespace().id
    early.register_mem_host_pool_v2(engine.entries["swa"].host_pool, PoolName.DRAFT_SWA)
    assert early._open_namespace().id != without
    draft = PoolTransfer(PoolName.DRAFT_SWA, slots(engine, "swa", 0), keys=keys(1),
                         hit_policy=TRAILING)  # fmt: skip
    assert early.batch_set_v2([draft], after()) == {"draft_swa": [True]}


# --- ranks ------------------------------------------------------------------------------------


def test_a_replicated_pool_is_stored_once_and_read_by_all(start, attach) -> None:
    engine = start("mla")
    stored = scramble(engine, "kv", 0)
    other = attach(engine, is_mla_model=True, tp_rank=1, tp_size=2)
    writer = attach(engine, is_mla_model=True, tp_rank=0, tp_size=2)
    place = slots(engine, "kv", 0)
    assert other.batch_set_v1(keys(1), place, after()) == [True]
    other.flush(WAIT)
    assert writer.batch_exists(keys(1)) == 0
    assert writer.batch_set_v1(keys(1), place, after()) == [True]
    writer.flush(WAIT)
    wait_until(lambda: other.batch_exists(keys(1)) == 1, "page of the other rank")
    assert other.batch_get_v1(keys(1), slots(engine, "kv", 5)) == [True]
    assert page(engine, "kv", 5) == stored[0]
    assert REGISTRY.get_sample_value("kvtier_kv_copies") == 2


def test_each_tensor_parallel_rank_gets_its_own_heads(start, attach) -> None:
    engine = start("full")
    ranks = [attach(engine, tp_rank=rank, tp_size=4) for rank in range(4)]
    stored = []
    for rank in ranks:
        stored += scramble(engine, "kv", 0)
        assert rank.batch_set_v1(keys(1), slots(engine, "kv", 0), after()) == [True]
    for rank in ranks:
        rank.flush(WAIT)
    for rank, bytes_ in zip(ranks, stored, strict=True):
        assert rank.batch_get_v1(keys(1), slots(engine, "kv", 5)) == [True]
        assert page(engine, "kv", 5) == bytes_


def test_a_session_moves_between_data_parallel_ranks(start, attach) -> None:
    engine = start("full")
    here, there = attach(engine, dp_rank=0), attach(engine, dp_rank=1)
    here.batch_set_v1(keys(1), slots(engine, "kv", 0), after())
    here.flush(WAIT)
    wait_until(lambda: there.batch_exists(keys(1)) == 1, "page of the other rank")


# --- faults -----------------------------------------------------------------------------------


def test_a_store_taken_away_while_serving_is_never_an_exception(start, attach, tmp_path) -> None:
    engine = start("full")
    storage = attach(engine)
    place = slots(engine, "kv", 0, 1)
    storage.batch_set_v1(keys(2), place, after())
    storage.flush(WAIT)
    shutil.rmtree(tmp_path / "ranks")
    assert storage.batch_get_v1(keys(2), place) == [False, False]
    assert len(storage.batch_set_v1(keys(2, chain=2), place, after())) == 2
    storage.flush(WAIT)
    assert storage.batch_exists(keys(3, chain=3)) == 0
    assert storage.clear() in (True, False)


def test_whatever_breaks_below_is_a_miss_with_one_line(start, attach, caplog, monkeypatch) -> None:
    engine = start("full")
    storage = attach(engine)
    namespace = storage._open_namespace()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the cable is out")

    for name in ("put", "get", "contains", "contains_each", "clear"):
        monkeypatch.setattr(namespace, name, broken)
    place = slots(engine, "kv", 0)
    for _ in range(5):
        assert storage.batch_set_v1(keys(1), place, after()) == [False]
        assert storage.batch_get_v1(keys(1), place) == [False]
        assert storage.batch_exists(keys(1)) == 0
        assert storage.batch_exists_v2(keys(1), []) == PoolTransferResult(0, {}, [])
        assert storage.clear() is False
    assert caplog.text.count("the cable is out") == 5  # one a kind of call


def test_the_server_starts_without_a_store_it_cannot_reach(start, caplog) -> None:
    engine = start("full")
    storage = KvtierStorage(config(Path("/proc/nowhere")))
    storage.register_mem_pool_host(engine.entries["kv"].host_pool)
    storage.on_host_pools_registered()
    assert "goes on without it" in caplog.text
    place = slots(engine, "kv", 0)
    assert storage.batch_set_v1(keys(1), place, after()) == [False]
    assert storage.batch_get_v1(keys(1), place) == [False]
    assert storage.batch_exists(keys(1)) == 0
    assert storage.clear() is False
    assert storage.flush() is True
    storage.close()


def test_a_store_of_a_newer_format_stops_the_start(start, tmp_path) -> None:
    engine = start("full")
    root = tmp_path / "kvtier"
    root.mkdir()
    (root / "kvtier.json").write_text('{"format": 99, "store": "' + "0" * 32 + '"}')
    storage = KvtierStorage(config(root))
    storage.register_mem_pool_host(engine.entries["kv"].host_pool)
    with pytest.raises(StoreError, match="upgrade kvtier"):
        storage.on_host_pools_registered()


def test_a_wrong_setting_stops_the_start(tmp_path) -> None:
    with pytest.raises(ConfigError, match="did you mean root"):
        KvtierStorage(config(tmp_path, extra_config={"rooot": "x"}))
    with pytest.raises(ConfigError, match="interface_v1"):
        KvtierStorage(config(tmp_path, extra_config={"class_name": "KvtierStorage"}), {})


def test_keys_of_sglang_in_the_extra_config_are_not_ours_to_judge(tmp_path) -> None:
    extra = {"root": str(tmp_path), "file_storage_path": "/x", "prefetch_threshold": 1}
    assert KvtierStorage(config(tmp_path, extra_config=extra)).config.root == tmp_path


def test_replaced_weights_end_storing_and_restoring(start, attach, monkeypatch) -> None:
    engine = start("full")
    storage = attach(engine)
    place = slots(engine, "kv", 0)
    storage.batch_set_v1(keys(1), place, after())
    storage.flush(WAIT)
    monkeypatch.setattr(storage_module, "_weights_replaced", storage_module.threading.Event())
    storage_module.weights_replaced()
    assert storage.batch_exists(keys(1)) == 0
    assert storage.batch_get_v1(keys(1), place) == [False]
    assert storage.batch_set_v1(keys(1, chain=2), place, after()) == [False]
    with pytest.raises(KvtierError, match="replaced at run time"):
        attach(engine)


def test_clear_drops_everything_and_what_comes_after_is_kept(start, attach) -> None:
    engine = start("full")
    storage = attach(engine)
    place = slots(engine, "kv", 0)
    storage.batch_set_v1(keys(1), place, after())
    assert storage.clear() is True
    assert storage.batch_exists(keys(1)) == 0
    assert storage.batch_set_v1(keys(1), place, after()) == [True]
    storage.flush(WAIT)
    assert storage.batch_exists(keys(1)) == 1


def test_pages_as_tensors_are_answered_with_no(start, attach, caplog) -> None:
    storage = attach(start("full"))
    tensor = torch.zeros(4)
    assert storage.get("00" * 32, tensor) is None
    assert storage.batch_get(keys(2), [tensor, tensor]) == [None, None]
    assert storage.set("00" * 32, tensor) is False
    assert storage.batch_set(keys(2), [tensor, tensor]) is False
    assert caplog.text.count("by address only") == 1


def test_sglang_gets_pages_and_bandwidth_of_each_call_once(start, attach) -> None:
    engine = start("full")
    assert attach(engine).get_stats() is None
    storage = attach(engine, enable_storage_metrics=True)
    place = slots(engine, "kv", 0, 1)
    storage.batch_set_v1(keys(2), place, after())
    storage.flush(WAIT)
    storage.batch_get_v1(keys(2), place)
    metrics = storage.get_stats()
    assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([2], [2])
    assert metrics.backup_bandwidth[0] > 0 < metrics.prefetch_bandwidth[0]
    assert storage.get_stats().backup_pgs == []


def test_a_closed_adapter_answers_misses(start, attach) -> None:
    engine = start("full")
    storage = attach(engine)
    storage.close()
    storage.close()
    assert storage.batch_exists(keys(1)) == 0
    assert storage.batch_set_v1(keys(1), slots(engine, "kv", 0)) == [False]
