"""Test only: real SGLang 0.5.23 with HiCache on a machine without a GPU.

`SGLANG_PLATFORM=kvtier_cpu` selects it. The "device" is host memory: SGLang's CPU device
operations, `torch_native` attention, and copies between host and "device" pools in NumPy
(`kvcacheio`). `server` starts and kills whole servers on it.
"""

from __future__ import annotations

import os

PLATFORM = "kvtier_cpu"


def selected() -> bool:
    """Whether this process runs on the test platform."""
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM


def activate() -> str | None:
    """Entry point of group `sglang.srt.platforms`: the platform class, or None if not selected."""
    return "kvtier_test_platform.platform.HostPlatform" if selected() else None
