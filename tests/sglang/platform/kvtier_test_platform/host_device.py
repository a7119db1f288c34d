"""What SGLang's host pools lack when the device is host memory too.

Every change is made only on the test platform and only to names that CUDA would have bound.
"""

from __future__ import annotations

import importlib

from kvtier_test_platform import drives, selected

POOL_MODULES = (
    "sglang.srt.mem_cache.memory_pool_host",
    "sglang.srt.mem_cache.pool_host.dsa",
    "sglang.srt.mem_cache.pool_host.mamba",
    "sglang.srt.mem_cache.pool_host.mha",
    "sglang.srt.mem_cache.pool_host.mla",
    "sglang.srt.mem_cache.pool_host.unified",
)
"""Modules that import the copy kernels by name, on CUDA only."""

PINNED_POOLS = (
    ("sglang.srt.mem_cache.pool_host.base", "HostKVCache"),
    ("sglang.srt.mem_cache.pool_host.mamba", "MambaPoolHost"),
    ("sglang.srt.mem_cache.pool_host.dsa", "DSAIndexerPoolHost"),
    ("sglang.srt.mem_cache.memory_pool_host", "DeepSeekV4PagedHostPool"),
    ("sglang.srt.mem_cache.memory_pool_host", "DeepSeekV4StateHostPool"),
)
"""Classes that set `pin_memory` in their constructor and allocate with it."""


class NeverPinned:
    """Attribute that stays False: pinning needs a CUDA driver."""

    def __get__(self, instance, owner=None) -> bool:
        return False

    def __set__(self, instance, value) -> None:
        pass


def install() -> None:
    """Entry point of group `sglang.srt.plugins`, called once in every SGLang process."""
    if not selected():
        return
    drives.listen()
    give_copy_kernels()
    forbid_pinning()
    give_stream_synchronize()
    take_absorbed_mla()


def give_copy_kernels() -> None:
    from kvtier_test_platform import kvcacheio

    for module in map(importlib.import_module, POOL_MODULES):
        for name, kernel in kvcacheio.KERNELS.items():
            if not hasattr(module, name):
                setattr(module, name, kernel)


def forbid_pinning() -> None:
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims, *, dtype, device, allocator, **_):
        return allocator.allocate(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS.default_factory = lambda: allocate
    for module, name in PINNED_POOLS:
        getattr(importlib.import_module(module), name).pin_memory = NeverPinned()


def give_stream_synchronize() -> None:
    """HiCache's error path waits for its copy stream; torch's CPU stream has no such method."""
    import torch

    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None


def take_absorbed_mla() -> None:
    """`torch_native` has one attention for prefill and decode: always absorb the projections."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register(
        "torch_native", lambda attention, batch: AttnForwardMethod.MLA
    )
