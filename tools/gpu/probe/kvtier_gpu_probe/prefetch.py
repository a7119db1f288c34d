"""SGLang's prefetch without kvtier's patch of it, for a comparison within one server."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock


def maybe_unpatched(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around Scheduler._prefetch_kvcache: while the client's marker is there, the tree's
    prefetch_from_storage is SGLang's own function."""
    place = os.environ.get("GPU_PROBE")
    if not place or not Path(f"{place}.unpatched").exists():
        return original(scheduler, *args, **kwargs)
    tree = scheduler.tree_cache
    upstream = MethodType(inspect.unwrap(type(tree).prefetch_from_storage), tree)
    with mock.patch.object(tree, "prefetch_from_storage", upstream):
        return original(scheduler, *args, **kwargs)
