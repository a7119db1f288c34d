"""Pages that a store has lost are offered to it again.

SGLang 0.5.23 hands a node of its tree to the storage backend once, when it has reached host memory
(mem_cache/unified_radix_cache.py:1818, `_finish_write_through_ack`). After a clear, a wipe, a put
that was refused or a store attached late, the nodes of a living session are therefore missing, and
what comes after them can never be reached: kvtier refuses it (`no_parent`), and the session is
never stored again.

With this patch each tree remembers, from such an event on, what it has offered since; before a node
it offers those above it that it has not. The number of storage operations must be the same on all
ranks of a group, since SGLang consumes their acknowledgements in step (unified_radix_cache.py:3010
and 3298). So ranks decide from what they share: the tree, which is the same on all; a clear and an
attach, which SGLang sends to all; and for puts that one rank's store has refused a reduction of
their own, every 256th time that SGLang reduces its counts.
"""

from __future__ import annotations

import logging
from itertools import takewhile
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from kvtier.integration.patches.scheme import Hook, Patch

log = logging.getLogger(__name__)

EVERY = 256
"""Rounds of the scheduler between two looks at refused puts; doubles while they go on."""
LONGEST = 1 << 16
MOST = 1_000_000
"""Nodes remembered for each tree; after that all are offered once more, which costs a lookup."""


class _Offers:
    """What one tree has offered since a store has lost something. All but `refused`, which the
    backup thread of this rank sets, comes out the same on every rank."""

    def __init__(self) -> None:
        self.since: set[str] | None = None
        """The last page's key of each node that was offered; None before anything was lost."""
        self.rounds = 0
        self.pause = EVERY
        self.refused = False

    def start_anew(self, why: str) -> None:
        log.info("kvtier: pages are offered again: %s", why)
        self.since = set()


def _offers(tree: Any) -> _Offers:
    found: _Offers | None = getattr(tree, "kvtier_offers", None)
    if found is None:
        found = tree.kvtier_offers = _Offers()
    return found


def _offer_ancestors_first(original: Any, tree: Any, node_id: Any) -> Any:
    offers = _offers(tree)
    since = offers.since
    if since is None or tree.is_write_back:
        return original(tree, node_id)
    if len(since) > MOST:
        since.clear()
    [path] = tree.tree_core.collect_path_info([node_id])  # from below the root to the node
    last_keys = {info.node_id: tree.get_last_hash_value(info.node_id) for info in path}
    above = [ancestor for ancestor in last_keys if ancestor != node_id]
    lost = list(takewhile(lambda ancestor: last_keys[ancestor] not in since, reversed(above)))
    for ancestor in reversed(lost):
        if not tree.is_backuped(ancestor):
            break  # not in host memory: what comes after it can't be reached by storing it
        original(tree, ancestor)
        since.add(last_keys[ancestor])
    since.add(last_keys[node_id])
    return original(tree, node_id)


def _after_a_clear(cleared: bool, tree: Any) -> None:
    # Also if it failed here: on another rank it may not have.
    _offers(tree).start_anew("the store was cleared")


def _after_an_attach(result: Any, attachment: Any, *args: Any, **kwargs: Any) -> None:
    """At run time only: at its start a server attaches its store in another way."""
    _offers(attachment._cache).start_anew("a store was attached")


def _note_refused(result: None, controller: Any, operation: Any) -> None:
    """In the backup thread, for every operation whether it was stored or not."""
    pages = len(operation.hash_value)
    result_of_pools = getattr(
        operation, "pool_storage_result", None
    )  # of trees with one pool: none
    hits = result_of_pools.extra_pool_hit_pages if result_of_pools is not None else {}
    whole = controller.backup_skip or operation.completed_tokens >= pages * controller.page_size
    if not whole or any(
        hits.get(transfer.name, len(transfer.keys or ())) < len(transfer.keys or ())
        for transfer in getattr(operation, "pool_transfers", None) or ()
    ):
        controller.kvtier_refused = True


def _agree_on_refused(result: Any, tree: Any) -> None:
    """Every rank comes here equally often, since SGLang has just reduced its counts."""
    offers = _offers(tree)
    offers.rounds += 1
    if offers.rounds < offers.pause:
        return
    import torch

    controller = tree.cache_controller
    refused = torch.tensor([int(getattr(controller, "kvtier_refused", False))])
    if refused.item():
        controller.kvtier_refused = False  # one that comes in between is offered again with these
    tree._all_reduce(refused, torch.distributed.ReduceOp.MAX)
    offers.rounds = 0
    if not refused.item():
        offers.pause = EVERY
        return
    offers.pause = min(2 * offers.pause, LONGEST)
    offers.start_anew("puts were refused")


def _refusal(server_args: Any) -> str | None:
    if server_args.pp_size > 1:
        return "--pp-size is above 1, with which it has not been tested"
    return None


_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_ATTACHMENT = "sglang.srt.mem_cache.unified_cache.storage_attachment.StorageAttachment"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface"

PATCH = Patch(
    hooks=(
        Hook(
            f"{_TREE}.write_backup_storage",
            HookType.AROUND,
            _offer_ancestors_first,
            ("self", "node_id"),
        ),
        Hook(f"{_TREE}.clear_storage_backend", HookType.AFTER, _after_a_clear, ("self",)),
        Hook(f"{_TREE}._sync_hicache_ready_counts", HookType.AFTER, _agree_on_refused, ("self",)),
        Hook(f"{_ATTACHMENT}.attach", HookType.AFTER, _after_an_attach, ("self",)),
        Hook(
            f"{_CONTROLLER}._page_backup_or_log",
            HookType.AFTER,
            _note_refused,
            ("self", "operation"),
        ),
    ),
    relies_on=(
        f"{_CORE}.collect_path_info(self, end_node_ids)",
        f"{_TREE}.get_last_hash_value(self, node_id)",
        f"{_TREE}.is_backuped(self, node_id)",
        f"{_TREE}._all_reduce(self, data, tp_reduce_op)",
    ),
    refusal=_refusal,
)
