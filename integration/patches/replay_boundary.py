"""A restore ends where the prompt may match, so that it matches at all.

DeepSeek-V4.1 computes the last 128 tokens of a cached prefix again (decoder bounded replay), so
SGLang 0.5.23 matches a prompt of N tokens up to N - 128 only (mem_cache/common.py,
`_req_radix_key`). But it prefetches up to N - 1 (scheduler.py, `_prefetch_kvcache`), and of the
sliding window's pool only the last page of that. With N = k * 256 + 1 to 127 the match must end
one page earlier, where no window is: the same prompt after a restart matches nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from kvtier.integration.patches.scheme import Hook, Patch


def end_prefetch_where_matching_ends(
    original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around Scheduler._prefetch_kvcache, which asks the request how far it may match at most: for
    that call its answer heeds what the tree computes again, as the match does."""
    from kvtier.integration.plugin import ours

    tree = scheduler.tree_cache
    if ours(getattr(tree, "cache_controller", None)) is None:
        return original(scheduler, req, *args, **kwargs)
    computed_again: int = tree.swa_reprefill_tail_tokens(req)
    longest: Callable[[int], int] = req._compute_max_prefix_len

    def longest_match(tokens: int) -> int:
        return min(longest(tokens), max(0, tokens - computed_again))

    req._compute_max_prefix_len = longest_match
    try:
        return original(scheduler, req, *args, **kwargs)
    finally:
        del req._compute_max_prefix_len


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_REQUEST = "sglang.srt.managers.schedule_batch.Req"
_TREE = "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache"

PATCH = Patch(
    hooks=(
        Hook(
            f"{_SCHEDULER}._prefetch_kvcache",
            HookType.AROUND,
            end_prefetch_where_matching_ends,
            ("self", "req"),
        ),
    ),
    relies_on=(
        f"{_TREE}.swa_reprefill_tail_tokens(req)",
        f"{_REQUEST}._compute_max_prefix_len(input_len)",
    ),
)
