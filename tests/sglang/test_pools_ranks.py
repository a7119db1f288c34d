"""Several ranks on one store, at SGLang's storage interface: what they share, and what not."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pools import BACKEND, mla_pool, page_bytes
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

PAGE, PAGES = 64, 6
DEVICE_POOL = {
    "size": PAGE * 16,
    "page_size": PAGE,
    "dtype": torch.bfloat16,
    "layer_num": 2,
    "device": "cpu",
    "enable_memory_saver": False,
}
KEYS = get_storage_hash_str(list(range(PAGE * PAGES)), None, page_size=PAGE)
FROM_THE_START = HiCacheStorageExtraInfo(prefix_keys=[])

MLA_WITH_MHA_DRAFT = (PoolName.KV, "mla"), (PoolName.DRAFT, "mha")
MLA_WITH_MLA_DRAFT = (PoolName.KV, "mla"), (PoolName.DRAFT, "mla")
MHA = ((PoolName.KV, "mha"),)


class Rank:
    """One tensor parallel rank: its host pools, and its end of the store at `root`.

    Host memory starts with random bytes that depend on `seed`.
    """

    def __init__(self, root: Path, tp_rank: int, pools, *, tp_size: int = 2, seed: int = 0):
        device = {
            "mla": lambda: mla_pool(**DEVICE_POOL),
            "mha": lambda: MHATokenToKVPool(head_num=2, head_dim=32, **DEVICE_POOL),
        }
        noise = torch.Generator().manual_seed(seed)
        self.pools = {}
        for name, kind in pools:
            pool = self.pools[name] = build_kv_host_pool(kv_pool=device[kind](), page_size=PAGE)
            pool.kv_buffer.view(torch.uint8).random_(0, 256, generator=noise)
        self.config = HiCacheStorageConfig(
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=pools[0][1] == "mla",
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="dummy",
            extra_config={"root": str(root)},
        )
        kv = self.pools[PoolName.KV]
        self.storage = StorageBackendFactory.create_backend(BACKEND, self.config, kv)
        self.storage.register_mem_pool_host(kv)
        for name, pool in self.pools.items():
            self.storage.register_mem_host_pool_v2(pool, name)
        self.storage.on_host_pools_registered()

    def bytes_of(self, pool: PoolName, first: int) -> list[bytes]:
        """The test's pages of a pool, which lie from host page `first` on."""
        return [page_bytes(self.pools[pool], (first + ordinal) * PAGE) for ordinal in range(PAGES)]

    def store(self, pool: PoolName, first: int, pages: int = PAGES) -> list[bool]:
        keys, slots = KEYS[:pages], _slots(first, pages)
        if pool is PoolName.KV:
            return self.storage.batch_set_v1(keys, slots, FROM_THE_START)
        transfer = PoolTransfer(pool, host_indices=slots, keys=keys)
        return self.storage.batch_set_v2([transfer], FROM_THE_START)[pool]

    def fetch(self, pool: PoolName, first: int) -> list[bool]:
        slots = _slots(first, PAGES)
        if pool is PoolName.KV:
            return self.storage.batch_get_v1(KEYS, slots, FROM_THE_START)
        transfer = PoolTransfer(pool, host_indices=slots, keys=KEYS)
        return self.storage.batch_get_v2([transfer], FROM_THE_START)[pool]

    def hit(self) -> int:
        """Pages that this rank could restore."""
        others = [PoolTransfer(name, keys=KEYS) for name in self.pools if name is not PoolName.KV]
        answer = self.storage.batch_exists_v2(KEYS, others, FROM_THE_START)
        return answer.kv_hit_pages


def _slots(first: int, pages: int) -> torch.Tensor:
    return torch.arange(first * PAGE, (first + pages) * PAGE)


@pytest.fixture
def start(tmp_path):
    """A maker of ranks on one store, closed at the end."""
    root = tmp_path / "store"
    args = ServerArgs(
        model_path="dummy",
        page_size=PAGE,
        enable_hierarchical_cache=True,
        hicache_storage_backend=BACKEND,
        hicache_storage_backend_extra_config=json.dumps({"root": str(root)}),
    )
    set_global_server_args_for_scheduler(args)
    with contextlib.ExitStack() as stack:

        def start(tp_rank: int, pools, *, tp_size: int = 2, **options) -> Rank:
            place = {"tp_rank": tp_rank, "attn_tp_rank": tp_rank, "pp_rank": 0, "pp_size": 1}
            sizes = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), tp_size)
            stack.enter_context(get_parallel().override(**place, **sizes))
            rank = Rank(root, tp_rank, pools, tp_size=tp_size, **options)
            stack.callback(rank.storage.close)
            return rank

        yield start


def test_non_writers_store_and_get_their_own_mha_draft_pages(start):
    first, second = (start(rank, MLA_WITH_MHA_DRAFT, seed=rank) for rank in (0, 1))
    shared = first.bytes_of(PoolName.KV, 2)
    own = [rank.bytes_of(PoolName.DRAFT, 2) for rank in (first, second)]
    assert own[0] != own[1]
    for rank in (first, second):
        assert rank.store(PoolName.DRAFT, 2) == [True] * PAGES
    assert first.store(PoolName.KV, 2) == [True] * PAGES
    for rank in (first, second):
        rank.storage.close()

    for number in (1, 0):  # the ranks may come in any order
        rank = start(number, MLA_WITH_MHA_DRAFT, seed=10 + number)
        assert rank.hit() == PAGES
        for pool, stored in ((PoolName.DRAFT, own[number]), (PoolName.KV, shared)):
            assert rank.fetch(pool, 5) == [True] * PAGES
            assert rank.bytes_of(pool, 5) == stored


def test_what_a_rank_lacks_of_its_draft_ends_its_own_answer(start):
    first, second = (start(rank, MLA_WITH_MHA_DRAFT, seed=rank) for rank in (0, 1))
    first.store(PoolName.DRAFT, 0)
    first.store(PoolName.KV, 0)
    second.store(PoolName.DRAFT, 0, pages=2)
    for rank in (first, second):
        rank.storage.close()

    assert start(0, MLA_WITH_MHA_DRAFT).hit() == PAGES
    assert start(1, MLA_WITH_MHA_DRAFT).hit() == 2


def test_a_replicated_draft_is_stored_once(start):
    first, second = (start(rank, MLA_WITH_MLA_DRAFT, seed=rank) for rank in (0, 1))
    stored = first.bytes_of(PoolName.DRAFT, 0)
    # Rank 1 would be wrong to store bytes under rank 0's name, and must not hold up its operation.
    assert second.store(PoolName.DRAFT, 0) == [True] * PAGES
    assert first.store(PoolName.DRAFT, 0) == [True] * PAGES
    assert first.store(PoolName.KV, 0) == [True] * PAGES
    for rank in (first, second):
        rank.storage.close()

    rank = start(1, MLA_WITH_MLA_DRAFT, seed=3)
    assert rank.hit() == PAGES
    assert rank.fetch(PoolName.DRAFT, 7) == [True] * PAGES
    assert rank.bytes_of(PoolName.DRAFT, 7) == stored


def test_ranks_with_the_same_keys_never_get_each_others_bytes(start):
    ranks = [start(rank, MHA, tp_size=4, seed=rank) for rank in range(4)]
    own = [rank.bytes_of(PoolName.KV, 1) for rank in ranks]
    for rank in ranks:
        assert rank.store(PoolName.KV, 1) == [True] * PAGES
        rank.storage.close()

    for number in (2, 0, 3, 1):
        rank = start(number, MHA, tp_size=4, seed=10 + number)
        assert rank.fetch(PoolName.KV, 9) == [True] * PAGES
        assert rank.bytes_of(PoolName.KV, 9) == own[number]


@pytest.mark.parametrize("pools", [MHA, MLA_WITH_MHA_DRAFT], ids=["mha", "mla-mha-draft"])
def test_another_tensor_parallel_size_finds_nothing(start, pools):
    rank = start(0, pools)
    for pool, _ in reversed(pools):
        rank.store(pool, 0)
    rank.storage.close()

    wider = start(0, pools, tp_size=4)
    before = wider.bytes_of(PoolName.KV, 0)
    assert wider.hit() == 0
    assert wider.fetch(PoolName.KV, 0) == [False] * PAGES
    assert wider.bytes_of(PoolName.KV, 0) == before
    assert start(0, pools).hit() == PAGES


@pytest.mark.parametrize(
    ("pool", "kind", "stored"),
    [
        (PoolName.DRAFT, "mha", True),
        (PoolName.DRAFT_SWA, "mha", True),
        (PoolName.DRAFT, "mla", False),
        (PoolName.INDEXER, "mla", False),
        (PoolName.MAMBA, "mha", True),
    ],
)
def test_sglang_offers_rank_sharded_pools_on_non_writers(start, pool, kind, stored):
    """HybridCacheController.should_backup does so for mooncake only, without kvtier's hook."""
    rank = start(1, ((PoolName.KV, "mla"), (pool, kind)))
    controller = SimpleNamespace(
        backup_skip=True,
        storage_backend=rank.storage,
        storage_config=rank.config,
        storage_backend_type=BACKEND,
        mem_pool_host=SimpleNamespace(
            entry_map={pool: SimpleNamespace(host_pool=rank.pools[pool])}
        ),
    )
    transfer = PoolTransfer(pool, keys=KEYS)
    assert HybridCacheController.should_backup(controller, transfer) is stored
