"""SGLang's prefetch without kvtier's patch of it, for a comparison within one server."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any
from unittest import mock

from kvtier_gpu_probe.marks import asked


def maybe_unpatched(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around Scheduler._prefetch_kvcache: while the client's marker is there, the tree's
    prefetch_from_storage is SGLang's own function."""
    if not asked("unpatched"):
        return original(scheduler, *args, **kwargs)
    tree = scheduler.tree_cache
    upstream = MethodType(inspect.unwrap(type(tree).prefetch_from_storage), tree)
    with mock.patch.object(tree, "prefetch_from_storage", upstream):
        return original(scheduler, *args, **kwargs)
