"""Is what was stored what the device holds?

SGLang copies pages from the device to host memory on a stream of its own, beside the model, and
hands host pages to the store once it believes the copy complete. A page stored too early differs
from the device's page, which does not change once it is computed. So each page that the tree still
has on the device is copied from there again, with nothing else running, and compared with what the
store returns for it: on every rank, in every pool.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvtier_gpu_probe.marks import PLACE, asked

log = logging.getLogger(__name__)

BATCH = 64
"""Pages in a round: the comparison takes twice their room in host memory."""

_nodes: dict[str, set[int]] = {"computed": set(), "loaded": set()}
"""Of the tree: those that were handed to the store, and the ends of what came from host memory."""


def note_backup(_: Any, tree: Any, node_id: int, *__: Any, **___: Any) -> None:
    """After UnifiedRadixCache.write_backup_storage."""
    _nodes["computed"].add(node_id)


def note_load(loaded: bool, tree: Any, *, node_id: int, **__: Any) -> None:
    """After UnifiedRadixCache._load_back_transfers."""
    if loaded:
        _nodes["loaded"].add(node_id)


def report(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    """After Scheduler.get_internal_state, if the client asked: write this rank's comparison."""
    from kvtier.integration.plugin import ours

    backend = ours(getattr(scheduler.tree_cache, "cache_controller", None))
    if backend is None or not asked("pages"):
        return
    try:
        result = {"rank": backend.rank.tp_rank, **compare(scheduler.tree_cache, backend)}
    except Exception as error:  # the server is to live on, and the client to see why
        log.exception("probe")
        result = {"rank": backend.rank.tp_rank, "error": f"{type(error).__name__}: {error}"}
    unfinished = Path(f"{PLACE}.{backend.rank.tp_rank}.part")
    unfinished.write_text(json.dumps(result))
    unfinished.rename(unfinished.with_suffix(".json"))


def compare(tree: Any, backend: Any) -> dict[str, Any]:
    """The Counts of each pool, for the pages on the paths to what was `loaded`, and for the others,
    that were `computed` here. A computed page that the store had before may differ: what is stored
    first stays.
    """
    if not backend.flush(60):
        raise RuntimeError("the store was still writing after 60 s")
    loaded = _paths(tree.tree_core, _nodes["loaded"])
    computed = _paths(tree.tree_core, _nodes["computed"]) - loaded
    found = {"loaded": _count(tree, backend, loaded), "computed": _count(tree, backend, computed)}
    return {
        origin: {name: asdict(counts) for name, counts in pools.items()}
        for origin, pools in found.items()
        if pools
    }


@dataclass
class Counts:
    on_device: int = 0
    pages: int = 0
    """Of those, how many the store has."""
    bytes: int = 0
    different: int = 0
    neighbours: int = 0
    """How many differ from the device's page before them: the comparison can tell pages apart."""
    stored_digest: int = 0
    """Of what the store returned, whatever the order: ranks that share pages have the same."""


def _count(tree: Any, backend: Any, nodes: set[int]) -> dict[str, Counts]:
    found: dict[str, Counts] = {}
    before: dict[str, bytes] = {}
    for node in sorted(nodes):
        for name, keys, device, stored in _both(tree, backend, node):
            counts = found.setdefault(name, Counts())
            counts.on_device += len(device)
            for key, here, there in zip(keys, device, stored, strict=True):
                if there is not None:
                    counts.pages += 1
                    counts.bytes += len(there)
                    counts.different += there != here
                    counts.neighbours += there != before.get(name, there)
                    digest = hashlib.sha256(key.encode() + there).digest()
                    counts.stored_digest ^= int.from_bytes(digest[:6])
                before[name] = here
    return found


def _paths(core: Any, nodes: set[int]) -> set[int]:
    """Nodes of the tree on the paths to these."""
    live = set()
    for node in nodes:
        with suppress(KeyError):  # evicted, or the caches were emptied
            (path,) = core.collect_path_info([node])
            live |= {step.node_id for step in path}
    return live


def _both(
    tree: Any, backend: Any, node: int
) -> Iterator[tuple[str, list[str], list[bytes], list[Any]]]:
    """Of each pool that has bytes of a node on the device: its name, the pages' keys, the pages
    there, and the store's (None where it has none)."""
    controller = tree.cache_controller
    for kv, others in _parts(tree, node):
        with (
            _room(controller, kv, others, 0x55) as fresh,
            _room(controller, kv, others, 0xAA) as held,
        ):
            _copy_from_device(controller, fresh)
            answers = backend.batch_get_v2([t for t in held if str(t.name) in backend.pools])
            for here, there in zip(fresh, held, strict=True):
                device = _page_bytes(controller, here)
                if device:
                    arrived = zip(_page_bytes(controller, there), answers[there.name], strict=True)
                    stored = [page if ok else None for page, ok in arrived]
                    yield str(here.name), here.keys, device, stored


def _parts(tree: Any, node: int) -> Iterator[tuple[Any, list[Any]]]:
    """What of a node is on the device, with the keys of its pages: the KV pool's transfer and the
    other pools', BATCH pages at a time; what is only kept for the node's end comes with the last.
    """
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase

    # Meant for SGLang's other kind of storage, and the only view of a node that both of its trees,
    # in Python and in Rust, give.
    own = {t.name: t for t in tree.tree_core.build_external_linker_offload_transfers(node) or ()}
    kv = own.pop(PoolName.KV, None)
    if kv is None:
        return
    kinds = {ComponentType.SWA: PoolName.SWA, ComponentType.MAMBA: PoolName.MAMBA}
    components = {kind: [own[name]] for kind, name in kinds.items() if name in own}
    size = len(kv.device_indices) // len(kv.keys)
    for start in range(0, len(kv.keys), BATCH):
        part = replace(
            kv,
            keys=kv.keys[start : start + BATCH],
            device_indices=kv.device_indices[start * size : (start + BATCH) * size],
        )
        ends = components if start + BATCH >= len(kv.keys) else {}
        derived = tree._build_sidecar_transfers(CacheTransferPhase.BACKUP_HOST, part, ends)
        yield part, [*(t for found in ends.values() for t in found), *derived]


@contextmanager
def _room(controller: Any, kv: Any, others: list[Any], byte: int) -> Iterator[list[Any]]:
    """Room in host memory for the pages of these transfers, the KV pool's first, filled with a
    byte: what is neither copied nor read must not look like it."""
    allocation = controller.allocate_host_transfers(
        kv.device_indices, [replace(t, host_indices=None) for t in others] or None
    )
    if allocation is None:
        raise RuntimeError("host memory has no room for the comparison")
    host, resolved = allocation
    transfers = [replace(kv, host_indices=host), *(resolved or ())]
    try:
        for transfer in transfers:
            for pointer, size in _pieces(controller, transfer):
                ctypes.memset(pointer, byte, size)
        yield transfers
    finally:
        controller.mem_pool_host.free(host)
        controller.mem_pool_host.release_transfers(resolved)


def _copy_from_device(controller: Any, transfers: list[Any]) -> None:
    """As SGLang does it (managers/cache_controller.py, start_writing), alone on the device."""
    from sglang.srt.managers.cache_controller import CacheOperation

    kv, *others = transfers
    operation = CacheOperation(
        kv.host_indices, kv.device_indices, -1, pool_transfers=others or None
    )
    moved = controller._move_write_operation(operation)
    _wait_for_device()
    completion = controller.l2_transfer_engine.submit_device_to_host(
        controller._l2_transfers(*moved)
    )
    completion.finish_event.synchronize()
    _wait_for_device()


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _page_bytes(controller: Any, transfer: Any) -> list[bytes]:
    """The pages' bytes in host memory; nothing for a pool without bytes (DeepSeek V4's "kv")."""
    parts = [ctypes.string_at(pointer, size) for pointer, size in _pieces(controller, transfer)]
    each = len(parts) // len(transfer.keys)
    return [b"".join(parts[i : i + each]) for i in range(0, len(parts), each or 1)]


def _pieces(controller: Any, transfer: Any) -> list[tuple[int, int]]:
    """Where the pages of a transfer are in host memory: address and bytes, page by page."""
    pool = controller.mem_pool_host.get_entry(transfer.name).host_pool
    pointers, sizes = pool.get_page_buffer_meta(transfer.host_indices) or ((), ())
    return [(int(p), int(s)) for p, s in zip(pointers, sizes, strict=True)]
