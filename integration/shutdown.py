"""SIGTERM commits what waits to be committed, within a bounded time, before it does its work."""

from __future__ import annotations

import signal
import threading
import weakref
from types import FrameType

from kvtier.store import Store

SECONDS = 5.0
"""Longest time a shutdown waits for the drive."""

_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def commit_at_sigterm(store: Store) -> None:
    """From now on SIGTERM flushes this store first. What SIGTERM did before, it still does.

    SGLang 0.5.23 sets no handler in its schedulers, and a service manager signals all processes of
    a unit at once. Python runs handlers in the main thread only, where SGLang opens its storage.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    first = not _stores
    _stores.add(store)
    if not first:
        return
    before = signal.getsignal(signal.SIGTERM)

    def commit(number: int, frame: FrameType | None) -> None:
        for open_store in list(_stores):
            open_store.flush(SECONDS)
        signal.signal(number, before if before is not None else signal.SIG_DFL)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, commit)
