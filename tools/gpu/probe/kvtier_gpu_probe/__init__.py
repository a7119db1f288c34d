"""For the GPU cases only: an SGLang plugin that sees what a client cannot.

- Dummy weights with which the output depends on every token of the prompt. SGLang's own are so
  small that a model says the same whatever it is asked.
- Stored pages compared with the device's, when the client asks for it.
- While it asks for that: copies from the device that take long, a scheduler that does not wait for
  them, SGLang's prefetch without kvtier's patch of it.
"""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
COPIES = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine"


def install() -> None:
    """Entry point of group `sglang.srt.plugins`."""
    from kvtier_gpu_probe import copies, pages, prefetch, weights

    hooks = {
        "sglang.srt.model_loader.weight_utils.initialize_dummy_weights": (
            weights.fill,
            HookType.REPLACE,
        ),
        f"{TREE}.write_backup_storage": (pages.note_backup, HookType.AFTER),
        f"{TREE}._load_back_transfers": (pages.note_load, HookType.AFTER),
        f"{SCHEDULER}.get_internal_state": (pages.report, HookType.AFTER),
        f"{COPIES}.submit_device_to_host": (copies.delay, HookType.BEFORE),
        f"{CONTROLLER}.start_writing": (copies.forget_to_wait, HookType.AFTER),
        f"{SCHEDULER}._prefetch_kvcache": (prefetch.maybe_unpatched, HookType.AROUND),
    }
    for target, (function, kind) in hooks.items():
        HookRegistry.register(target, function, kind)
