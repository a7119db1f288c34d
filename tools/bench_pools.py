"""What bench_quick.py measures through: host pools, and the two backends driven as SGLang does.

The calls are those of SGLang 0.5.23 (cache_controller.py: _generic_page_set, _page_set_zero_copy
and the two for get; hybrid_cache_controller.py: sidecar pools first when it stores, last when it
loads), without its threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvtier.integration.storage import KvtierStorage

CALL_PAGES = 128
"""Pages of a call: STORAGE_BATCH_SIZE of SGLang."""

PAGE_TOKENS = 64
FSYNC_THREADS = 16
KV = PoolName.KV


@dataclass(frozen=True)
class Shape:
    """What a page is made of: its parts in bytes, by pool. A part of 0 bytes is an anchor."""

    name: str
    parts: dict[PoolName, int]

    @property
    def page_bytes(self) -> int:
        return sum(self.parts.values())


SHAPES = (
    Shape("64 KiB", {KV: 64 << 10}),
    Shape(
        "418 KB (V4.1, four parts)",
        {
            KV: 0,
            PoolName.DEEPSEEK_V4_C1: 149_760,
            PoolName.DEEPSEEK_V4_C1_INDEXER: 17_408,
            PoolName.DEEPSEEK_V4_C2: 224_640,
            PoolName.DEEPSEEK_V4_C2_INDEXER: 26_112,
        },
    ),
    Shape("1 MiB", {KV: 1 << 20}),
)


class PageFirstPool:
    """A host pool in SGLang's page_first layout: one piece of memory a page."""

    layout = "page_first"
    dtype = torch.uint8
    page_size = PAGE_TOKENS

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.size = pages * PAGE_TOKENS
        self.memory = torch.zeros((pages, page_bytes), dtype=torch.uint8)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.memory[int(index) // PAGE_TOKENS].flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.memory.shape[1], dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.memory[int(index) // PAGE_TOKENS] = data_page

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = indices[::PAGE_TOKENS] // PAGE_TOKENS
        page_bytes = self.memory.shape[1]
        return (self.memory.data_ptr() + pages * page_bytes).tolist(), [page_bytes] * len(pages)


class Pages:
    """n pages in host pools and their chain's keys. Keys change with every `renew`."""

    def __init__(self, shape: Shape, count: int) -> None:
        self.shape = shape
        self.count = count
        self.keys: list[str] = []
        self.pools: dict[PoolName, Any] = {
            name: PageFirstPool(count, size)
            if size
            else LogicalHostPool(count * PAGE_TOKENS, PAGE_TOKENS, "page_first")
            for name, size in shape.parts.items()
        }
        noise = np.random.default_rng(count)
        for memory in self._memories():
            memory.numpy()[:] = np.frombuffer(noise.bytes(memory.numel()), np.uint8).reshape(
                memory.shape
            )
        self._digests = self._digest()

    @property
    def bytes(self) -> int:
        return self.count * self.shape.page_bytes

    def renew(self, seed: str) -> None:
        """A new chain of keys, as SGLang makes them: each from the one before."""
        self.keys = []
        key = hashlib.sha256(seed.encode())
        for _ in range(self.count):
            self.keys.append(key.hexdigest())
            key = hashlib.sha256(key.digest())

    def blank(self) -> None:
        """Overwrite all pages, so that what is in them afterwards came from a store."""
        for memory in self._memories():
            memory.zero_()

    def intact(self) -> bool:
        """Whether all pages have the bytes they had at first."""
        return self._digest() == self._digests

    def _memories(self) -> list[torch.Tensor]:
        return [pool.memory for pool in self.pools.values() if isinstance(pool, PageFirstPool)]

    def _digest(self) -> list[bytes]:
        return [hashlib.blake2b(memory.numpy()).digest() for memory in self._memories()]


class Side:
    """One backend with the pools of `pages` registered, and the calls SGLang would make."""

    storage: Any

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.storage.register_mem_pool_host(pages.pools[KV])
        for name, pool in pages.pools.items():
            self.storage.register_mem_host_pool_v2(pool, name)

    def put(self, start: int, end: int) -> None:
        """Store the pages from `start` to `end`, sidecar pools first."""
        keys, slots, before = self._call(start, end)
        sidecars = self._transfers(keys, slots)
        if sidecars:
            results = self.storage.batch_set_v2(sidecars, before)
            assert all(all(result) for result in results.values()), "pages were refused"
        assert self.put_kv(keys, slots, before), "pages were refused"

    def get(self, start: int, end: int) -> None:
        """Load the pages from `start` to `end`, sidecar pools last."""
        keys, slots, before = self._call(start, end)
        assert self.get_kv(keys, slots, before), "pages are missing"
        sidecars = self._transfers(keys, slots)
        if sidecars:
            results = self.storage.batch_get_v2(sidecars, before)
            assert all(all(result) for result in results.values()), "pages are missing"

    def lookup(self, start: int, end: int) -> Callable[[], int]:
        """A call that says how many of the pages from `start` to `end` could be loaded."""
        keys, slots, before = self._call(start, end)
        sidecars = self._transfers(keys, slots)
        if sidecars:
            return lambda: self.storage.batch_exists_v2(keys, sidecars, before).kv_hit_pages
        return lambda: self.storage.batch_exists(keys, before)

    def put_kv(self, keys: list[str], slots: torch.Tensor, before: HiCacheStorageExtraInfo) -> bool:
        raise NotImplementedError

    def get_kv(self, keys: list[str], slots: torch.Tensor, before: HiCacheStorageExtraInfo) -> bool:
        raise NotImplementedError

    def sync(self) -> None:
        """Make everything stored so far durable."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _call(
        self, start: int, end: int
    ) -> tuple[list[str], torch.Tensor, HiCacheStorageExtraInfo]:
        slots = torch.arange(start * PAGE_TOKENS, end * PAGE_TOKENS)
        before = HiCacheStorageExtraInfo(prefix_keys=self.pages.keys[:start])
        return self.pages.keys[start:end], slots, before

    def _transfers(self, keys: list[str], slots: torch.Tensor) -> list[PoolTransfer]:
        names = [name for name in self.pages.pools if name != KV]
        return [PoolTransfer(name=name, host_indices=slots, keys=keys) for name in names]


class KvtierSide(Side):
    """kvtier with its default settings."""

    name = "kvtier"

    def __init__(self, pages: Pages, root: Path) -> None:
        self.storage = KvtierStorage(_rank({"root": str(root)}))
        super().__init__(pages)
        self.storage.on_host_pools_registered()

    def put_kv(self, keys: list[str], slots: torch.Tensor, before: HiCacheStorageExtraInfo) -> bool:
        return all(self.storage.batch_set_v1(keys, slots, before))

    def get_kv(self, keys: list[str], slots: torch.Tensor, before: HiCacheStorageExtraInfo) -> bool:
        return all(self.storage.batch_get_v1(keys, slots, before))

    def sync(self) -> None:
        assert self.storage.flush(), "the store did not become durable"

    def close(self) -> None:
        self.storage.close()


class FileSide(Side):
    """SGLang's own HiCacheFile. It never syncs by itself.

    `sync` does an fsync of each file from many threads, so that they share the journal's commits;
    one by one would take more than ten times as long. `sync_all` is one syncfs, the least that
    makes files durable, and useless on a machine where others write, too.
    """

    name = "HiCacheFile"

    def __init__(self, pages: Pages, root: Path) -> None:
        root.mkdir()
        self.root = root
        self.storage = HiCacheFile(_rank(None), str(root))
        super().__init__(pages)

    def put_kv(self, keys: list[str], slots: torch.Tensor, before: HiCacheStorageExtraInfo) -> bool:
        pool = self.pages.pools[KV]
        pages = [pool.get_data_page(slots[i * PAGE_TOKENS]) for i in range(len(keys))]
        return bool(self.storage.batch_set(keys, pages))

    def get_kv(self, keys: list[str], slots: torch.Tensor, before: HiCacheStorageExtraInfo) -> bool:
        pool = self.pages.pools[KV]
        targets = [pool.get_dummy_flat_data_page() for _ in keys]
        for i, page in enumerate(self.storage.batch_get(keys, targets)):
            if page is None:
                return False
            pool.set_from_flat_data_page(slots[i * PAGE_TOKENS], page)
        return True

    def sync(self) -> None:
        with ThreadPoolExecutor(FSYNC_THREADS) as threads:
            list(threads.map(_sync_file, self.root.iterdir()))
        _sync_file(self.root)

    def sync_all(self) -> None:
        sync_file_system(self.root)

    def clear(self) -> None:
        """Remove every file."""
        for path in self.root.iterdir():
            path.unlink()

    def close(self) -> None:
        pass


def publish_settings() -> None:
    """Make this process look like a scheduler that resolved its arguments: kvtier reads them."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE_TOKENS))


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file_system(path: Path) -> None:
    """syncfs(2) of the file system that holds `path`. OSError if that failed."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs failed", str(path))
    finally:
        os.close(fd)


def forget_cached(folder: Path) -> str:
    """Take the files below `folder` out of the page cache; how, in words."""
    sync_file_system(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return "posix_fadvise(DONTNEED)"
    return "posix_fadvise(DONTNEED) and drop_caches=1"


def calls(count: int) -> Sequence[tuple[int, int]]:
    """(start, end) of the calls for `count` pages."""
    return [(at, min(at + CALL_PAGES, count)) for at in range(0, count, CALL_PAGES)]


def _rank(extra: dict[str, Any] | None) -> HiCacheStorageConfig:
    extra = None if extra is None else json.loads(json.dumps(extra))
    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=True, enable_storage_metrics=False, is_page_first_layout=True,
        model_name="bench", extra_config=extra,
    )  # fmt: skip
