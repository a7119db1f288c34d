"""SGLang's storage contract (HiCacheStorage) kept by a kvtier store.

The only place where errors become misses: whatever goes wrong below, SGLang gets an answer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvtier import telemetry
from kvtier.boundaries import restorable, run_length
from kvtier.complaints import Complaints
from kvtier.config import Config
from kvtier.errors import ConfigError, KvtierError, StoreError, UnreachableError
from kvtier.identity import Identity, Weights
from kvtier.integration import engine
from kvtier.integration.host_pages import HostPages, Loan
from kvtier.integration.shutdown import commit_at_sigterm
from kvtier.pages import KEY_BYTES, ROOT, Bools, Column, Link, PoolPages
from kvtier.sizes import format_size
from kvtier.store import Namespace, Store

log = logging.getLogger(__name__)

KV = PoolName.KV.value

# Pools of 0.5.23 that are needed at a boundary only (unified_cache/components/swa.py, mamba.py,
# and the state pools derived from SWA); at a call the transfer's own policy decides.
TRAILING_POOLS = frozenset(
    {
        PoolName.SWA.value,
        PoolName.AUXILIARY_SWA.value,
        PoolName.DRAFT_SWA.value,
        PoolName.MAMBA.value,
        PoolName.DEEPSEEK_V4_C4_STATE.value,
        PoolName.DEEPSEEK_V4_C4_INDEXER_STATE.value,
        PoolName.DEEPSEEK_V4_C128_STATE.value,
    }
)

# Weights replaced while the server runs have no checkpoint that could name them.
_weights_replaced = threading.Event()


def weights_replaced() -> None:
    """Stop serving and storing in this process: its weights are no longer those of the identity."""
    if not _weights_replaced.is_set():
        _weights_replaced.set()
        log.warning(
            "kvtier stores and restores nothing from now on, since the weights are being replaced "
            "at run time: restart the server to use it again."
        )


class Traffic:
    """Pages and GB/s of each call since SGLang last asked, for its own /metrics."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics = StorageMetrics()

    def add(self, direction: str, pages: int, size: int, seconds: float) -> None:
        """`direction`: "prefetch" or "backup", as SGLang calls them."""
        with self._lock:
            getattr(self._metrics, f"{direction}_pgs").append(pages)
            getattr(self._metrics, f"{direction}_bandwidth").append(size / 1e9 / max(seconds, 1e-9))

    def take(self) -> StorageMetrics:
        with self._lock:
            metrics, self._metrics = self._metrics, StorageMetrics()
            return metrics


class KvtierStorage(HiCacheStorage):  # type: ignore[misc] # SGLang is not typed
    """One rank's end of a kvtier store.

    SGLang constructs it with its config, then registers the host pools, then calls
    `on_host_pools_registered`. Raises ConfigError for a wrong setting; StoreError, from there on,
    for a store of a newer format or a place that is no store. A store that cannot be reached
    (missing, unwritable, full) costs only the tier when the server starts: one error line, and
    every lookup is a miss. An attach at run time fails with it instead.

    `options` is what SGLang's built-in backends (host pool) or dynamic ones (a dict) get besides;
    the pool comes once more through `register_mem_pool_host`.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, options: object = None) -> None:
        extra = dict(storage_config.extra_config or {})
        # Set by SGLang from --file-storage-path for every backend (unified_radix_cache.py).
        extra.pop("file_storage_path", None)
        if "class_name" in extra and not extra.get("interface_v1"):
            raise ConfigError(
                'The dynamic backend moves pages by address only: add "interface_v1": 1 to the '
                "extra config."
            )
        self.config = Config.load(extra, os.environ)
        self.rank = storage_config
        self.complaints = Complaints()
        self.traffic = Traffic() if storage_config.enable_storage_metrics else None
        self.parents_first = True
        """SGLang offers a page after its parent; under write_back it evicts leaves first."""
        self.window_pages: int | None = None
        """Pages of its sliding window that SGLang's tree needs before a boundary, 0 without one.
        None until it is known: then no tail is left out."""
        self.pools: dict[str, HostPages] = {}
        self._columns: dict[str, Column] = {}
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._weights: tuple[Weights, Weights | None] | None = None
        self._adapters: dict[str, str] = {}
        self._namespace: Namespace | None = None

    # --- opening and closing ------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        self._register(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        if _weights_replaced.is_set():
            raise KvtierError(
                "The weights were replaced at run time, so pages cannot be named: restart the "
                "server to use kvtier again."
            )
        try:
            self._store = self._open_store()
        except StoreError as error:
            # Disks come and go; what isn't a store, or a newer one, stays so until somebody acts.
            if not isinstance(error, UnreachableError) or not _server_is_starting():
                raise
            log.error("kvtier: the server goes on without it: %s", error)
            return
        try:
            hashes = self._store.root / "index" / "fingerprints"
            self._adapters = engine.read_adapters(self.config.fingerprint, hashes)
            self._weights = engine.read_weights(self.config.fingerprint, hashes)
            identity = self._identity(self._weights)
        except BaseException:
            self.close()
            raise
        shards = sorted({column.shard for column in self._columns.values()} - {""})
        log.info(
            "kvtier: store %s, %s free; namespace %s%s, pools %s",
            self._store.root,
            _free_space(self._store.root),
            identity.id,
            f", shard {' '.join(shards)}" if shards else "",
            " ".join(self.pools),
        )

    def _open_store(self) -> Store:
        """The store, after a page went through it and came back."""
        store = Store.open(self.config)
        try:
            store.canary()
        except BaseException:
            store.close()
            raise
        commit_at_sigterm(store)
        return store

    def close(self) -> None:
        with self._lock:
            store, self._store, self._namespace = self._store, None, None
        if store is not None:
            store.close()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was put is durable and visible; False if that took longer."""
        store = self._store
        return store is None or store.flush(timeout)

    def _register(self, name: str, pool: Any) -> None:
        known = self.pools.get(name)
        if known is not None and known.pool is pool:
            return
        pages = HostPages(name, pool)
        with self._lock:
            # Copied, so that calls under way see either all pools or those before.
            self.pools = {**self.pools, name: pages}
            self._columns[name] = Column(name, engine.shard_of(name, pool, self.rank))
            self._namespace = None

    def _identity(self, weights: tuple[Weights, Weights | None]) -> Identity:
        return engine.identity_of(self.rank, self.pools, TRAILING_POOLS, weights, self._adapters)

    def _open_namespace(self) -> Namespace | None:
        """The namespace of all pools registered so far; None while there is no store.

        It is registered with the first call and not before: SGLang may add pools (draft models,
        buffer mode) after `on_host_pools_registered`.
        """
        if _weights_replaced.is_set():
            return None
        if self._namespace is None:
            with self._lock:
                if self._namespace is None and self._store is not None and self._weights:
                    judges = self.parents_first and engine.is_writer(
                        KV, self.pools[KV].pool, self.rank
                    )
                    self._namespace = self._store.namespace(
                        self._identity(self._weights), self._columns[KV] if judges else None
                    )
                    telemetry.KV_COPIES.set(engine.copies(KV, self.pools[KV].pool, self.rank))
        return self._namespace

    @contextmanager
    def _faults_are_misses(self, call: str) -> Iterator[None]:
        """The border to SGLang: whatever goes wrong inside is logged and goes no further."""
        try:
            yield
        except Exception as error:
            kind = f"{call}: {type(error).__name__}"
            self.complaints.add(kind, f"{kind}: {error}")
            log.debug("kvtier: %s", kind, exc_info=True)

    # --- lookup -------------------------------------------------------------------------------

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        with self._faults_are_misses("batch_exists"):
            namespace = self._open_namespace()
            if namespace is not None and keys:
                return run_length(namespace.contains(self._columns[KV], page_keys(keys)))
        return 0

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """All legal boundaries; per pool, and for "kv" without regard to the other pools, the
        longest prefix it could serve."""
        with self._faults_are_misses("batch_exists_v2"):
            namespace = self._open_namespace()
            if namespace is not None and keys:
                return self._boundaries(namespace, keys, pool_transfers or [])
        return PoolTransferResult(0, {}, [])

    def _boundaries(
        self, namespace: Namespace, keys: Sequence[str], transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult:
        names = [name for name in (KV, *(str(t.name) for t in transfers)) if name in self.pools]
        columns = [self._columns[name] for name in names]
        stored: dict[str, Bools] = dict(
            zip(names, namespace.contains_each(columns, page_keys(keys)), strict=True)
        )
        nothing: Bools = np.zeros(len(keys), dtype=np.bool_)

        def present(transfer: PoolTransfer) -> Bools:
            return stored.get(str(transfer.name), nothing)

        of = defaultdict(list)
        for transfer in transfers:
            of[transfer.hit_policy].append(transfer)
        # BLOCK_GROUPS pools never gate a hit and 0.5.23 emits none: they get no verdict.
        whole, tails = of[PoolHitPolicy.ALL_PAGES], of[PoolHitPolicy.TRAILING_PAGES]
        answer = restorable(
            stored[KV],
            [present(transfer) for transfer in whole],
            [(present(transfer), max(1, len(transfer.keys or ()))) for transfer in tails],
        )
        boundaries = dict(
            zip(
                [KV, *(str(transfer.name) for transfer in (*whole, *tails))],
                [answer.kv_run, *answer.all_pages, *answer.trailing],
                strict=True,
            )
        )
        return PoolTransferResult(answer.longest, boundaries, list(answer.restorable))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # --- get ----------------------------------------------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        transfer = PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys)
        with self._faults_are_misses("batch_get_v1"):
            return self._get([transfer])[0]
        return _nothing(transfer)

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        names = [transfer.name for transfer in transfers]
        with self._faults_are_misses("batch_get_v2"):
            return dict(zip(names, self._get(transfers), strict=True))
        return {transfer.name: _nothing(transfer) for transfer in transfers}

    def _get(self, transfers: Sequence[PoolTransfer]) -> list[list[bool]]:
        """Read all transfers in one request; for each its pages' success."""
        namespace = self._open_namespace()
        found = [_nothing(transfer) for transfer in transfers]
        if namespace is None:
            return found
        loans: list[tuple[int, HostPages, Loan]] = []
        requests = []
        for position, transfer in enumerate(transfers):
            pages = self._pages(transfer)
            if pages is None:
                continue
            loan = pages.lend(transfer.host_indices, len(transfer.keys), filled=False)
            loans.append((position, pages, loan))
            requests.append(self._pool_pages(transfer, loan))
        if not requests:
            return found
        began = time.perf_counter()
        answers = namespace.get(requests)
        self._count("prefetch", requests, answers, began)
        for (position, pages, loan), arrived in zip(loans, answers, strict=True):
            pages.land(loan, transfers[position].host_indices, arrived)
            found[position] = arrived.tolist()
        return found

    # --- put ----------------------------------------------------------------------------------

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        transfer = PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys)
        with self._faults_are_misses("batch_set_v1"):
            return self._put(transfer, _link(extra_info))
        return _nothing(transfer)

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        stored = {transfer.name: _nothing(transfer) for transfer in transfers}
        with self._faults_are_misses("batch_set_v2"):
            link = _link(extra_info)
            for transfer in transfers:
                stored[transfer.name] = self._put(transfer, link)
        return stored

    def _put(self, transfer: PoolTransfer, link: Link) -> list[bool]:
        count = len(transfer.keys or ())
        namespace = self._open_namespace()
        pages = None if namespace is None else self._pages(transfer)
        if namespace is None or pages is None:
            return _nothing(transfer)
        if not engine.is_writer(pages.name, pages.pool, self.rank):
            return [True] * count  # another rank stores these bytes
        loan = pages.lend(transfer.host_indices, count, filled=True)
        request = self._pool_pages(transfer, loan)
        began = time.perf_counter()
        stored = namespace.put(request, link, all_tails=self.window_pages is None)
        self._count("backup", [request], [stored], began)
        answer: list[bool] = stored.tolist()
        return answer

    def _count(
        self, direction: str, requests: list[PoolPages], answers: list[Bools], began: float
    ) -> None:
        if self.traffic is None:
            return
        moved = [int(answer.sum()) for answer in answers]
        size = sum(
            pages * request.buffers.part_bytes
            for pages, request in zip(moved, requests, strict=True)
        )
        self.traffic.add(direction, sum(moved), size, time.perf_counter() - began)

    def _pages(self, transfer: PoolTransfer) -> HostPages | None:
        """The host pool of a transfer; None if it names no page or an unknown pool."""
        if not transfer.keys:
            return None
        pages = self.pools.get(str(transfer.name))
        if pages is None:
            self.complaints.add(
                f"pool {transfer.name}", f"SGLang never registered the pool {transfer.name}."
            )
        return pages

    def _pool_pages(self, transfer: PoolTransfer, loan: Loan) -> PoolPages:
        return PoolPages(
            self._columns[str(transfer.name)],
            page_keys(transfer.keys),
            loan.buffers,
            window=self._window(transfer),
        )

    def _window(self, transfer: PoolTransfer) -> int:
        if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
            return 0
        # A recurrent state is one page, whatever the sliding window is (mamba.py, PREFETCH).
        return 1 if transfer.name == PoolName.MAMBA else self.window_pages or 1

    # --- the rest of the contract -------------------------------------------------------------

    def clear(self) -> bool:
        """Drop every page of this namespace."""
        with self._faults_are_misses("clear"):
            namespace = self._open_namespace()
            if namespace is not None:
                if namespace.clear():
                    return True
                self.complaints.add("clear", "the drive did not take the clear: try it again.")
        return False

    def get_stats(self) -> StorageMetrics | None:
        return None if self.traffic is None else self.traffic.take()

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        self._refuse_tensors()

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        self._refuse_tensors()
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        self._refuse_tensors()
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:  # fmt: skip
        self._refuse_tensors()
        return False

    def _refuse_tensors(self) -> None:
        # A page by tensor has its bytes in another order than one by address in some layouts.
        self.complaints.add(
            "tensors", "SGLang asked for pages as tensors; kvtier moves them by address only."
        )


def _nothing(transfer: PoolTransfer) -> list[bool]:
    return [False] * len(transfer.keys or ())


def page_keys(keys: Sequence[str]) -> list[bytes]:
    """The 32-byte page keys written as hex digits in `keys`. Raises ValueError for others."""
    if not set(map(len, keys)) <= {2 * KEY_BYTES}:
        raise ValueError("A page key is not a SHA-256 in hex.")
    joined = bytes.fromhex("".join(keys))
    split: list[bytes] = np.frombuffer(joined, f"V{KEY_BYTES}").tolist()
    return split


def _link(extra_info: HiCacheStorageExtraInfo | None) -> Link:
    """Where a call's first key hangs, from the keys before it (None if SGLang didn't say)."""
    before = extra_info.prefix_keys if extra_info is not None else None
    if before is None:
        return Link()
    return Link(page_keys(before[-1:])[0] if before else ROOT, len(before))


def _server_is_starting() -> bool:
    """SGLang publishes a backend attached at run time only once it is attached."""
    return engine.setting("hicache_storage_backend") is not None


def _free_space(path: os.PathLike[str]) -> str:
    with suppress(OSError):
        stat = os.statvfs(path)
        return format_size(stat.f_bavail * stat.f_frsize)
    return "unknown space"
