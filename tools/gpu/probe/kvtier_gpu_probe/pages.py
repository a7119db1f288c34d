"""Is what was stored what the device holds?

SGLang copies pages from the device to host memory on a stream of its own, beside the model, and
hands host pages to the store once it believes the copy complete. A page stored too early differs
from the device's page, which does not change once it is computed. So every page that was stored
is copied from the device again, with nothing else running, and compared with what the store
returns.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

BATCH = 64

_copied: dict[int, int] = {}
"""Of the KV pool: first host slot of a page -> first device slot it was copied from."""

_stored: dict[str, int] = {}
"""Key of a stored page -> first device slot."""


def note_copy(host: Any, controller: Any, device_indices: Any, *_: Any, **__: Any) -> None:
    """After HybridCacheController.write."""
    if host is not None and os.environ.get("GPU_PROBE"):
        size = controller.page_size
        _copied.update(zip(host[::size].tolist(), device_indices[::size].tolist(), strict=True))


def note_put(
    controller: Any, host_indices: Any, token_ids: Any, hash_value: Any = None, *_: Any, **__: Any
) -> None:
    """Before HybridCacheController.write_storage."""
    if hash_value and os.environ.get("GPU_PROBE"):
        slots = host_indices[:: controller.page_size].tolist()
        _stored.update(
            (key, _copied[slot])
            for key, slot in zip(hash_value, slots, strict=True)
            if slot in _copied
        )


def report(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    """After Scheduler.get_internal_state: compare, and write this rank's result."""
    from kvtier.integration.plugin import ours

    place = os.environ.get("GPU_PROBE")
    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    backend = ours(controller)
    if not place or backend is None or not _stored:
        return
    try:
        result = compare(controller, backend)
    except Exception as error:  # the server is to live on, and the client to see why
        log.exception("probe")
        result = {"error": f"{type(error).__name__}: {error}"}
    result["rank"] = backend.rank.tp_rank
    Path(f"{place}.{backend.rank.tp_rank}.json").write_text(json.dumps(result))


def compare(controller: Any, backend: Any) -> dict[str, int]:
    """`pages` that the store has, how many of them are `different` from the device's, and, to
    show that the comparison can tell, how many differ from the page stored next to them."""
    backend.flush(60)
    pool = backend.pools["kv"].pool
    counts = {"stored": len(_stored), "pages": 0, "bytes": 0, "different": 0, "neighbours": 0}
    # A device page that was freed and used again tells nothing about the first key.
    latest = {slot: key for key, slot in _stored.items()}
    items = [(key, slot) for slot, key in latest.items()]
    for start in range(0, len(items), BATCH):
        keys, slots = zip(*items[start : start + BATCH], strict=True)
        fresh = pool.alloc(len(keys) * pool.page_size)
        found = pool.alloc(len(keys) * pool.page_size)
        if fresh is None or found is None:
            raise RuntimeError("the host pool has no room for the comparison")
        try:
            _copy_from_device(controller, slots, fresh)
            here = backend.batch_get_v1(list(keys), found)
            device, stored = _page_bytes(pool, fresh), _page_bytes(pool, found)
        finally:
            pool.free(fresh)
            pool.free(found)
        for number, there in enumerate(here):
            if there:
                counts["pages"] += 1
                counts["bytes"] += len(stored[number])
                counts["different"] += stored[number] != device[number]
                counts["neighbours"] += stored[number] != device[number - 1]
    return counts


def _copy_from_device(controller: Any, slots: tuple[int, ...], host: torch.Tensor) -> None:
    """As SGLang does it (managers/cache_controller.py, start_writing), alone on the device."""
    from sglang.srt.managers.cache_controller import CacheOperation

    size = controller.page_size
    device = (torch.tensor(slots)[:, None] + torch.arange(size)).reshape(-1)
    device = device.to(controller.mem_pool_device_allocator.device)
    operation = CacheOperation(host, device, -1)
    host_moved, device_moved, transfers = controller._move_write_operation(operation)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    completion = controller.l2_transfer_engine.submit_device_to_host(
        controller._l2_transfers(host_moved, device_moved, transfers)
    )
    completion.finish_event.synchronize()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _page_bytes(pool: Any, indices: torch.Tensor) -> list[bytes]:
    pointers, sizes = pool.get_page_buffer_meta(indices)
    count = len(indices) // pool.page_size
    pieces = len(pointers) // count
    parts = [ctypes.string_at(p, int(s)) for p, s in zip(pointers, sizes, strict=True)]
    return [b"".join(parts[i * pieces : (i + 1) * pieces]) for i in range(count)]
