"""The platform class SGLang instantiates for `SGLANG_PLATFORM=kvtier_cpu`."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class HostPlatform(CpuDeviceMixin, SRTPlatform):
    """Host memory as the device.

    SGLang's own CPU platform cannot be used: HiCache is refused on it, and its attention needs
    kernels of a wheel built for the CPU.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()  # no Triton, no graphs, no HiCache device kernels

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"
