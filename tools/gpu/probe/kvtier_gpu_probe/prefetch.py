"""SGLang's prefetch without kvtier's patch of it, for a comparison within one server."""

from __future__ import annotations

import inspect
from typing import Any

from kvtier_gpu_probe.marks import asked


def maybe_unpatched(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around Scheduler._prefetch_kvcache: while the client's marker is there, SGLang's own."""
    if asked("unpatched"):
        original = inspect.unwrap(type(scheduler)._prefetch_kvcache)
    return original(scheduler, *args, **kwargs)
