"""What kvtier uses of SGLang besides its hooks, looked for by capability and not by version."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.server_args import ServerArgs

FIELDS = {
    "HiCacheStorageConfig": (
        "tp_rank",
        "tp_size",
        "pp_rank",
        "pp_size",
        "attn_cp_rank",
        "attn_cp_size",
        "dcp_rank",
        "dcp_size",
        "is_mla_model",
        "model_name",
        "logical_page_size",
        "extra_config",
    ),
    "HiCacheStorageExtraInfo": ("prefix_keys",),
    "PoolTransfer": ("name", "host_indices", "keys", "hit_policy"),
    "PoolTransferResult": ("kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"),
}
"""Fields of the structures that SGLang passes or takes."""

METHODS = {
    "register_mem_pool_host": ("mem_pool_host",),
    "register_mem_host_pool_v2": ("host_pool", "host_pool_name"),
    "on_host_pools_registered": (),
    "batch_exists": ("keys", "extra_info"),
    "batch_exists_v2": ("keys", "pool_transfers", "extra_info"),
    "batch_get_v1": ("keys", "host_indices", "extra_info"),
    "batch_set_v1": ("keys", "host_indices", "extra_info"),
    "batch_get_v2": ("transfers", "extra_info"),
    "batch_set_v2": ("transfers", "extra_info"),
}
"""Methods of HiCacheStorage that SGLang calls, with the parameters it passes."""

CONTROLLER = ("_page_get_zero_copy", "_page_set_zero_copy")


def missing() -> list[str]:
    """What isn't there, in words; empty if all is."""
    return list(_missing())


def _missing() -> Iterator[str]:
    for name, fields in FIELDS.items():
        yield from _lost(name, _parameters(getattr(hicache_storage, name, None)), fields)
    for name, parameters in METHODS.items():
        method = getattr(hicache_storage.HiCacheStorage, name, None)
        yield from _lost(f"HiCacheStorage.{name}", _parameters(method), parameters)
    for name in CONTROLLER:
        if not hasattr(HiCacheController, name):
            yield f"HiCacheController.{name} (not there)"
    if not hasattr(HybridCacheController, "parse_storage_backend_extra_config"):
        yield "HybridCacheController.parse_storage_backend_extra_config (not there)"
    try:
        from kvtier.integration import engine, storage  # noqa: F401 - names that are gone show here
    except (ImportError, AttributeError) as error:
        yield str(error)
    else:
        yield from _lost("ServerArgs", namespace_of(ServerArgs), engine.LEAVES)


def _parameters(target: Any) -> Any:
    return None if target is None else inspect.signature(target).parameters


def _lost(name: str, there: Any, wanted: tuple[str, ...]) -> Iterator[str]:
    if there is None:
        yield f"{name} (not there)"
        return
    lost = [field for field in wanted if field not in there]
    if lost:
        yield f"{name} (without {', '.join(lost)})"
