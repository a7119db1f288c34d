"""The lowest free memory of each NVIDIA card, sampled through NVML."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from kvtier.integration.probes.client import ProbeError

INTERVAL = 0.1
"""Seconds between two samples."""


@dataclass
class Card:
    """One card. Sizes in bytes, times in seconds since the first sample."""

    number: int
    """As nvidia-smi counts."""
    name: str
    total: int
    free: int
    """At the last sample."""
    least_free: int
    least_at: float


class Watch:
    """Samples all cards while the block runs. ProbeError where none can be read."""

    def __init__(self) -> None:
        self.cards: list[Card] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._nvml = _nvml()
        handles = range(self._nvml.nvmlDeviceGetCount())
        self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(number) for number in handles]
        for number, handle in enumerate(self._handles):
            name = self._nvml.nvmlDeviceGetName(handle)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            card = Card(number, str(name), memory.total, memory.free, memory.free, 0.0)
            self.cards.append(card)
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._nvml.nvmlShutdown()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            for card, handle in zip(self.cards, self._handles, strict=True):
                card.free = self._nvml.nvmlDeviceGetMemoryInfo(handle).free
                if card.free < card.least_free:
                    card.least_free = card.free
                    card.least_at = time.monotonic() - self._began


def _nvml() -> Any:
    """NVML, initialised, with at least one card."""
    try:
        import pynvml
    except ImportError:
        raise ProbeError(
            "NVIDIA cards are read with nvidia-ml-py, which is not here: pip install nvidia-ml-py."
        ) from None
    try:
        pynvml.nvmlInit()
        if pynvml.nvmlDeviceGetCount():
            return pynvml
    except pynvml.NVMLError as error:
        raise ProbeError(
            f"There is no NVIDIA card to watch here ({error}): run this on the server's machine."
        ) from None
    raise ProbeError("There is no NVIDIA card to watch here: run this on the server's machine.")
