"""For the GPU cases only: an SGLang plugin that sees what a client cannot.

- Dummy weights with which the output depends on every token of the prompt. SGLang's own are so
  small that a model says the same whatever it is asked.
- Stored pages compared with the device's, when a client asks for /server_info.
- SGLang's prefetch without kvtier's patch of it, while a client asks for that.
"""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"


def install() -> None:
    """Entry point of group `sglang.srt.plugins`."""
    from kvtier_gpu_probe import pages, prefetch, weights

    hooks = {
        "sglang.srt.model_loader.weight_utils.initialize_dummy_weights": (
            weights.fill,
            HookType.REPLACE,
        ),
        f"{CONTROLLER}.write": (pages.note_copy, HookType.AFTER),
        f"{CONTROLLER}.write_storage": (pages.note_put, HookType.BEFORE),
        f"{SCHEDULER}.get_internal_state": (pages.report, HookType.AFTER),
        f"{SCHEDULER}._prefetch_kvcache": (prefetch.maybe_unpatched, HookType.AROUND),
    }
    for target, (function, kind) in hooks.items():
        HookRegistry.register(target, function, kind)
