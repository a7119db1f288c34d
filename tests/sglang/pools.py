"""SGLang's own pools, radix tree and HiCache controller on a CPU, and the bytes inside them.

An `Engine` is what one server process has: device pools, host pools, a tree, a controller and a
storage backend, built by the fixtures that SGLang ships in its wheel
(`sglang.test.kits.unified_radix_cache`). `Stack` says which pools it has. `Engine.device_pages`
and `Engine.host_pages` read the bytes of *every* pool along a prompt, so that a test can compare
what was computed with what came back from the store.
"""

# ruff: noqa: E402 (SGLang reads its platform, and plugins patch its pools, before they are imported)
from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
import unittest
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("SGLANG_PLATFORM", "kvtier_cpu")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # sglang.test.test_utils indexes its first entry

from sglang.srt.plugins import load_plugins

load_plugins()  # before any pool is imported: the plugins patch them

import torch
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, EvictParams
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.memory_pool_host import (
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    LogicalHostPool,
)
from sglang.srt.mem_cache.pool_host import PoolEntry
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from kvtier.integration.storage import page_keys

torch.set_num_threads(1)  # small tensors: a pool of threads would only wait for busy cores

BACKEND = "kvtier"
DEADLINE_S = 600.0

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA

Pages = dict[str, dict[int, bytes]]
"""Pool name -> ordinal of the page in the prompt -> its bytes."""

# --- what an engine is built of --------------------------------------------------------------


PAGE_FIRST = (("page_first", "kernel"), ("page_first_direct", "direct"))
LAYER_FIRST = (("layer_first", "kernel"), ("layer_first", "direct"))
PAGE_HEAD = (("page_head", "kernel"),)
"""(host layout, I/O backend) pairs that SGLang runs together."""


@dataclass(frozen=True)
class Stack:
    """Which pools an engine has.

    `device_pool` builds the KV pool in place of the kit's class named `stands_for`. `pools` are
    the host pools that must travel; an engine refuses to start if SGLang built others.
    `layouts` are those that SGLang has for all of them.
    """

    name: str
    config: CacheConfig
    pools: frozenset[str]
    device_pool: Callable[..., Any] | None = None
    stands_for: str = "MHATokenToKVPool"
    layouts: tuple[tuple[str, str], ...] = PAGE_FIRST + LAYER_FIRST
    pages: int = 4
    """Pages of the prompt that the tests use."""


def mla_pool(**kit: Any) -> MLATokenToKVPool:
    return MLATokenToKVPool(kv_lora_rank=512, qk_rope_head_dim=64, **_common(kit))


def _dsa_pool(**kit: Any) -> DSATokenToKVPool:
    return DSATokenToKVPool(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        kv_cache_dim=576,
        index_head_dim=128,
        **_common(kit),
    )


def _common(kit: dict[str, Any]) -> dict[str, Any]:
    names = ("size", "page_size", "dtype", "layer_num", "device", "enable_memory_saver")
    return {name: kit[name] for name in names}


def _deepseek_pool(
    ratios: Sequence[int], *, sources: Sequence[int] = (), kv_layout: str = "v4"
) -> Callable[..., DeepSeekV4TokenToKVPool]:
    """DeepSeek-V4's pool with the byte layout of the real model and few layers.

    `ratios`: compression ratio of each layer. `sources`: the layers that own the shared caches of
    ratio 1 and 2 (`kv_source_layer_ids` of a V4.1 checkpoint). Sizes as SGLang's
    `KVCacheConfigurator` derives them.
    """

    def build(*, size: int, size_swa: int, page_size: int, device: str, **_: Any) -> Any:
        return DeepSeekV4TokenToKVPool(
            max_num_reqs=10,
            swa_size=size_swa,
            c4_size=size // 4,
            c128_size=size // 128,
            c4_state_pool_size=size_swa // page_size * 8,
            c128_state_pool_size=10 * 128,
            page_size=page_size,
            swa_page_size=page_size,
            dtype=torch.float8_e4m3fn,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=len(ratios),
            device=device,
            enable_memory_saver=False,
            compression_ratios=list(ratios),
            kv_source_layers=sources,
            full_size=size,
            start_layer=0,
            end_layer=len(ratios),
            kv_layout=kv_layout,
        )

    return build


_MHA = CacheConfig(page_size=64, kv_size=1024, max_context_len=1024, num_layers=3, head_dim=32)
_HYBRID = replace(_MHA, num_layers=4, full_attention_layer_ids=(1, 3))
_DEEPSEEK = CacheConfig(
    page_size=256,
    components=(FULL, SWA),
    sliding_window_size=128,
    kv_size=256 * 8,
    max_context_len=256 * 8,
)
_V4 = frozenset(
    "deepseek_v4_" + name for name in ("c4", "c4_indexer", "c128", "c4_state", "c4_indexer_state")
)
_V41 = frozenset("deepseek_v4_" + name for name in ("c1", "c1_indexer", "c2", "c2_indexer"))
_V41_RATIOS = (1, 2, 2, 2, 1, 2)
_V41_SOURCES = (0, 1, 2, 3)

STACKS = {
    stack.name: stack
    for stack in (
        Stack(
            "full",
            _MHA,
            frozenset({"kv"}),
            layouts=PAGE_FIRST + LAYER_FIRST + PAGE_HEAD,
        ),
        Stack(
            "swa",
            replace(_HYBRID, components=(FULL, SWA), sliding_window_size=128),
            frozenset({"kv", "swa"}),
            layouts=PAGE_FIRST + LAYER_FIRST + PAGE_HEAD,
            pages=5,
        ),
        Stack(
            "mamba",
            replace(
                _HYBRID,
                components=(FULL, MAMBA),
                enable_mamba_extra_buffer=True,
                mamba_cache_size=60,
            ),
            frozenset({"kv", "mamba"}),
            layouts=PAGE_FIRST,
        ),
        Stack(
            "swa-mamba",
            replace(
                _HYBRID,
                components=(FULL, SWA, MAMBA),
                sliding_window_size=128,
                enable_mamba_extra_buffer=True,
                mamba_cache_size=60,
            ),
            frozenset({"kv", "swa", "mamba"}),
            layouts=PAGE_FIRST,
            pages=5,
        ),
        Stack("mla", _MHA, frozenset({"kv"}), mla_pool),
        Stack("dsa", _MHA, frozenset({"kv", "indexer"}), _dsa_pool),
        Stack(
            "deepseek-v4",
            _DEEPSEEK,
            frozenset({"kv", "swa"}) | _V4,
            _deepseek_pool((0, 4, 128, 4)),
            stands_for="SWAKVPool",
        ),
        Stack(
            "deepseek-v4.1",
            _DEEPSEEK,
            frozenset({"kv", "swa"}) | _V41,
            _deepseek_pool(_V41_RATIOS, sources=_V41_SOURCES),
            stands_for="SWAKVPool",
        ),
        Stack(
            "deepseek-v4.1-fp4",
            _DEEPSEEK,
            frozenset({"kv", "swa"}) | _V41,
            _deepseek_pool(_V41_RATIOS, sources=_V41_SOURCES, kv_layout="v41"),
            stands_for="SWAKVPool",
        ),
    )
}

_LONG = replace(_HYBRID, page_size=4, kv_size=4096, max_context_len=4096)
_LONG_MAMBA = replace(_LONG, components=(FULL, MAMBA), enable_mamba_extra_buffer=True)
_LONG_SWA = replace(_LONG, components=(FULL, SWA), sliding_window_size=520)
_LONG_DSA = replace(_MHA, num_layers=1, kv_size=64 * 620, max_context_len=64 * 620)

LONG_STACKS = {
    name: replace(STACKS[name], config=config, pages=300)
    for name, config in (
        ("full", _LONG),
        ("swa", _LONG_SWA),
        ("mamba", _LONG_MAMBA),
        ("dsa", _LONG_DSA),
    )
}
"""Prompts of more pages than SGLang passes in one call for the KV pool (STORAGE_BATCH_SIZE, 128),
and a window that is longer than a call too."""

# --- the bytes of a pool ---------------------------------------------------------------------


def device_rows(entry: PoolEntry) -> tuple[list[torch.Tensor], int]:
    """The device tensors of a pool, each indexed by row first, and the slots that a row holds.

    The one place that knows how each kind of pool lays its bytes out on the device.
    """
    host, device = entry.host_pool, entry.device_pool
    tensors: list[torch.Tensor]
    if isinstance(host, LogicalHostPool):
        tensors, slots_per_row = [], host.page_size
    elif isinstance(host, DeepSeekV4PagedHostPool):
        tensors, slots_per_row = list(host.device_buffers), host.slot_page_size
    elif isinstance(host, DeepSeekV4StateHostPool):
        tensors, slots_per_row = list(host.device_page_views), host.swa_page_size
    elif isinstance(host, DSAIndexerPoolHost):
        tensors, slots_per_row = list(device.index_k_with_scale_buffer), host.page_size
    elif isinstance(device, MambaPool):
        parts = (device.mamba_cache.temporal, *device.mamba_cache.conv)
        tensors, slots_per_row = [layer for part in parts for layer in part.unbind()], 1
    elif isinstance(device, MLATokenToKVPool):
        tensors, slots_per_row = list(device.kv_buffer), 1
    elif isinstance(device, MHATokenToKVPool):
        tensors, slots_per_row = [*device.k_buffer, *device.v_buffer], 1
    else:
        raise TypeError(f"no reader for pool {entry.name} ({type(host).__name__})")
    return tensors, slots_per_row


def device_bytes(entry: PoolEntry, slots: torch.Tensor) -> bytes:
    """The bytes of one page: `slots` are its device slots in the pool's own numbering."""
    tensors, slots_per_row = device_rows(entry)
    rows = slots[::slots_per_row].to(torch.int64) // slots_per_row
    return b"".join(_raw(tensor[rows]) for tensor in tensors)


def host_bytes(entry: PoolEntry, slots: torch.Tensor) -> bytes:
    """The bytes of one host page: `slots` are its host slots."""
    return page_bytes(entry.host_pool, int(slots[0]))


def page_bytes(host_pool: Any, slot: int) -> bytes:
    """The bytes of the host page at `slot`, by SGLang's own page copy, not through pointers."""
    return _raw(host_pool.get_data_page(slot))


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


# --- an engine -------------------------------------------------------------------------------


class Engine(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """What one server process has, with its storage backend on the store at `root`.

    A `unittest.TestCase` only because SGLang's fixtures call its assertions and clean-ups.
    """

    __test__ = False

    def __init__(
        self,
        stack: Stack,
        root: Path,
        *,
        layout: str = "page_first",
        io: str = "kernel",
        write_policy: str = "write_through",
        host_memory: str = "cache",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.stack, self.cfg, self.root = stack, stack.config, root
        self._noise = torch.Generator().manual_seed(seed)
        pool_class = stack.device_pool or getattr(fixtures, stack.stands_for)
        with mock.patch.object(fixtures, stack.stands_for, pool_class):
            self.cache, self.allocator, self.requests = fixtures.build_fixture(self.cfg)
        self._attach(
            hicache_mem_layout=layout,
            hicache_io_backend=io,
            hicache_write_policy=write_policy,
            hicache_host_memory_mode=host_memory,
        )
        self.controller = self.cache.cache_controller
        self.entries: dict[str, PoolEntry] = {
            str(entry.name): entry for entry in self.controller.mem_pool_host.entries
        }
        self.assertEqual(set(self.entries), stack.pools)
        for entry in self.entries.values():
            for tensor in device_rows(entry)[0]:
                tensor.copy_(self._random(tensor))

    def _attach(self, **settings: str) -> None:
        args = ServerArgs(
            model_path="dummy",
            page_size=self.cfg.page_size,
            enable_hierarchical_cache=True,
            hicache_storage_backend=BACKEND,
            hicache_storage_backend_extra_config=json.dumps(
                {"root": str(self.root), "prefetch_threshold": 1}
            ),
            hicache_storage_prefetch_policy="wait_complete",
            **settings,
        )
        args._mamba_cache_chunk_size = max(CHUNK_SIZE, self.cfg.page_size)
        set_global_server_args_for_scheduler(args)
        self.cache.init_hicache(args, self.cache.cache_init_params)
        self.addCleanup(self.cache.release_host_resources)
        fixtures.drop_hicache_atexit_pin(self.cache)
        self.cache.write_through_threshold = 1 << 30  # back up when a test says so
        self.cache.load_back_threshold = 0
        controller = self.cache.cache_controller
        # The kit's host pools are as large as its device pools; SGLang would leave no room.
        controller.prefetch_capacity_limit = controller.mem_pool_host.size

    @property
    def storage(self) -> Any:
        return self.controller.storage_backend

    def close(self) -> None:
        """Detach the storage backend, as a server does when it ends in order."""
        self.controller.detach_storage_backend()
        self.doCleanups()

    # -- driving it

    def prompt(self, pages: int | None = None, start: int = 1) -> list[int]:
        """Tokens of whole pages; prompts with the same `start` are prefixes of each other."""
        return self._make_seq(start, pages or self.stack.pages)

    def compute(self, tokens: Sequence[int]) -> None:
        """Insert a prompt as if it had been computed: its device slots hold random bytes."""
        self._insert(self.cache, self.allocator, self.requests, tokens)
        if self.cfg.has_mamba:  # the kit hands out zeroed states
            leaf = fixtures.match_prefix(self.cache, tokens).last_device_node
            slots = fixtures.node_device_value(self.cache, leaf, MAMBA)
            for tensor in device_rows(self.entries["mamba"])[0]:
                state = tensor[slots].contiguous()
                tensor[slots] = self._random(state)

    def store(self, tokens: Sequence[int]) -> None:
        """Back the prompt up to the host pools, and from there to the storage backend."""
        leaf = fixtures.match_prefix(self.cache, tokens).last_device_node
        if self.cache.buffer_pipeline is not None:
            fixtures.write_backup(self.cache, leaf)
        else:
            self._backup_node(self.cache, leaf)
            self._write_path_to_l3(self.cache, leaf)
        self.settle()

    def evict(self) -> None:
        """Make room on the device for everything; a write_back server backs up only now."""
        everything = self.cfg.kv_size
        self.cache.evict(
            EvictParams(
                num_tokens=everything,
                swa_num_tokens=everything if self.cfg.has_swa else 0,
                mamba_num=self.cfg.mamba_cache_size if self.cfg.has_mamba else 0,
            )
        )
        self.settle()

    def settle(self) -> None:
        """Wait until the storage backend has acknowledged what it was given."""
        buffer = self.cache.buffer_pipeline
        if buffer is None:
            self._flush_l3_backups(self.cache, timeout=DEADLINE_S)
        else:
            self._pump_hicache_until(
                self.cache,
                lambda: not buffer.inflight_backup_node_ids and not buffer.ongoing_backup,
                "the backups were not acknowledged",
                timeout=DEADLINE_S,
            )

    def wait_until_seen(self, keys: list[str]) -> None:
        """Wait until the storage backend's lookups show what another engine has stored of a chain
        and a restore needs. KV is committed first."""
        deadline = time.monotonic() + DEADLINE_S
        namespace = self.storage._open_namespace()
        while not all(
            namespace.contains(
                self.storage._columns[pool], page_keys([keys[n] for n in sorted(ordinals)])
            ).all()
            for pool, ordinals in self.needed(len(keys)).items()
        ):
            self.assertLess(time.monotonic(), deadline, "what was stored never came into view")
            time.sleep(0.01)

    def prefetch(self, tokens: Sequence[int]) -> int:
        """Fetch from the storage backend into the host pools what the tree lacks of a prompt.

        Asks as `Scheduler._prefetch_kvcache` does; answers the tokens the tree then has. With
        host memory as a mere buffer, they are on the device then.
        """
        match = fixtures.match_prefix(self.cache, tokens)
        matched = match.device_prefix_len + match.host_hit_length
        anchor = match.last_host_node
        handle = CacheRequestHandle(f"prefetch-{time.monotonic_ns()}", 0)
        self.cache.prefetch_from_storage(
            handle,
            anchor,
            array("q", tokens[matched:]),
            self.cache.get_last_hash_value(anchor),
            self.cache.get_prefix_hash_values(anchor)
            if self.cache.hicache_storage_pass_prefix_keys
            else None,
            matched_prefix_tokens=array("q", tokens[:matched]),
        )
        self._run_prefetch_to_completion(self.cache, handle, timeout=DEADLINE_S)
        return self.matched(tokens)

    def prefetch_as(self, prefetch: Callable[..., Any], req: Req) -> None:
        """Prefetch a request's prompt by the scheduler's own function."""
        scheduler = SimpleNamespace(
            enable_hicache_storage=True, enable_lmcache=False, tree_cache=self.cache
        )
        prefetch(scheduler, req)
        self._run_prefetch_to_completion(self.cache, req.cache_request_handle, timeout=DEADLINE_S)

    def matched(self, tokens: Sequence[int]) -> int:
        """Tokens of a prompt that need not be computed."""
        match = fixtures.match_prefix(self.cache, tokens)
        return int(match.device_prefix_len + match.host_hit_length)

    def load_back(self, tokens: Sequence[int]) -> int:
        """Bring the host hit to the device as the scheduler does; tokens now on the device."""
        self._load_back_through_admission(self.cache, self.requests, tokens)
        self._finish_pending_loads(self.cache)
        return int(fixtures.match_prefix(self.cache, tokens).device_prefix_len)

    def _random(self, like: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(like)
        noise.view(torch.uint8).random_(0, 256, generator=self._noise)
        return noise

    def page_keys(self, tokens: Sequence[int]) -> list[str]:
        """Page keys along the prompt, as the tree hands them to the storage backend."""
        leaf = fixtures.match_prefix(self.cache, tokens).best_match_node
        return list(self._all_page_hashes(self.cache, leaf))

    # -- reading it

    def device_pages(self, tokens: Sequence[int]) -> Pages:
        leaf = fixtures.match_prefix(self.cache, tokens).last_device_node
        return self._pages(leaf, fixtures.node_device_value, device_bytes)

    def host_pages(self, tokens: Sequence[int]) -> Pages:
        leaf = fixtures.match_prefix(self.cache, tokens).last_host_node
        return self._pages(leaf, fixtures.node_host_value, host_bytes)

    def _pages(
        self,
        leaf: Any,
        slots_of: Callable[[Any, Any, ComponentType], torch.Tensor | None],
        read: Callable[[PoolEntry, torch.Tensor], bytes],
    ) -> Pages:
        """Every page that the nodes from the root to `leaf` hold, in every pool."""
        pages: Pages = {name: {} for name in self.entries}
        for pool, component in self.components().items():
            end = 0
            for node in self._path_chain(self.cache, leaf):
                end += fixtures.node_key_length(self.cache, node) // self.cfg.page_size
                slots = slots_of(self.cache, node, component)
                if slots is None:
                    continue
                # A node holds one recurrent state, at its end; other pools hold whole pages.
                groups = [slots] if component is MAMBA else slots.split(self.cfg.page_size)
                for ordinal, group in enumerate(groups, start=end - len(groups)):
                    pages[pool][ordinal] = read(self.entries[pool], group)
        return pages

    def components(self) -> dict[str, ComponentType]:
        """Which of the tree's components numbers the slots of each pool."""
        named = {PoolName.KV: FULL, PoolName.SWA: SWA, PoolName.MAMBA: MAMBA}
        derived = {s.pool_name: s.indices_from_pool for s in self.cache.sidecar_pool_specs}
        return {
            pool: named[derived.get(entry.name, entry.name)] for pool, entry in self.entries.items()
        }

    def needed(self, pages: int) -> dict[str, set[int]]:
        """The page ordinals that each pool must have to go on after `pages` pages."""
        window = -(-(self.cfg.sliding_window_size or 0) // self.cfg.page_size)
        first = {FULL: 0, SWA: max(0, pages - window), MAMBA: pages - 1}
        return {pool: set(range(first[c], pages)) for pool, c in self.components().items()}


@contextlib.contextmanager
def engines(root: Path) -> Iterator[Callable[..., Engine]]:
    """A maker of engines on one store; what is still open is closed at the end, newest first."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        )  # no process group exists here

        seeds = itertools.count(1)  # the memory of no two servers is alike

        def start(of: Stack | str, **options: Any) -> Engine:
            model = STACKS[of] if isinstance(of, str) else of
            engine = Engine(model, root, seed=next(seeds), **options)
            stack.callback(engine.close)
            return engine

        yield start


def assert_same_pages(got: Pages, want: Pages, needed: dict[str, set[int]]) -> None:
    """Every pool of `got` has the pages it needs, and every page of it the bytes of `want`."""
    assert got.keys() == want.keys() == needed.keys()
    for pool, found in got.items():
        assert needed[pool] <= found.keys(), f"{pool}: only pages {sorted(found)} came back"
        wrong = [ordinal for ordinal, data in found.items() if data != want[pool].get(ordinal)]
        assert not wrong, f"{pool}: pages {wrong} have other bytes"
