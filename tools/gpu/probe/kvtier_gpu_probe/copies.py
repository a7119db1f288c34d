"""Copies from the device that take long, and a scheduler that does not wait for them.

The first must change nothing. The second is what the comparison of pages has to find.
"""

from __future__ import annotations

from typing import Any

import torch

from kvtier_gpu_probe.marks import asked

CYCLES = 400_000_000
"""For so many the device sleeps before each copy: about 0.2 s on an H200."""


class Done:
    """In place of the event at the end of a copy."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def delay(engine: Any, *_: Any, **__: Any) -> None:
    """Before L2TransferEngine.submit_device_to_host."""
    if asked("slow") and torch.cuda.is_available():
        with torch.cuda.stream(engine.device_to_host_stream):
            torch.cuda._sleep(CYCLES)


def forget_to_wait(_: Any, controller: Any, *__: Any, **___: Any) -> None:
    """After HiCacheController.start_writing."""
    if asked("early") and controller.ack_write_queue:
        last = controller.ack_write_queue[-1]
        controller.ack_write_queue[-1] = last._replace(finish_event=Done(), timing_enabled=False)
