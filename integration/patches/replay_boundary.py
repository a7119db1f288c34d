"""A restore ends where the prompt may match, so that it matches at all.

DeepSeek-V4.1 computes the last 128 tokens of a cached prefix again (decoder bounded replay), so
SGLang 0.5.23 matches a prompt of N tokens up to N - 128 only (mem_cache/common.py,
`_req_radix_key`). But it prefetches up to N - 1 (scheduler.py, `_prefetch_kvcache`), and of the
sliding window's pool only the last page of that. With N = k * 256 + 1 to 127 the match must end
one page earlier, where no window is: the same prompt after a restart matches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from kvtier.integration.patches.scheme import Hook, Patch


def end_prefetch_where_matching_ends(
    original: Callable[..., Any],
    tree: Any,
    request: Any,
    last_host_node_id: Any,
    new_input_tokens: Sequence[int],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around UnifiedRadixCache.prefetch_from_storage, which gets N - 1 tokens of a prompt."""
    from kvtier.integration.plugin import ours

    computed_again = tree.swa_reprefill_tail_tokens()
    if computed_again and ours(tree.cache_controller) is not None:
        end = len(new_input_tokens) - (computed_again - 1)
        new_input_tokens = new_input_tokens[: max(0, end)]
    return original(tree, request, last_host_node_id, new_input_tokens, *args, **kwargs)


_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"

PATCH = Patch(
    hooks=(
        Hook(
            f"{_TREE}.prefetch_from_storage",
            HookType.AROUND,
            end_prefetch_where_matching_ends,
            ("self", "request", "last_host_node_id", "new_input_tokens"),
        ),
    ),
    relies_on=("sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.swa_reprefill_tail_tokens",),
)
