"""What a kvtier store has committed, while servers write to it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.place import store_path
from kvtier.status import statuses

PATIENCE = 600.0


class StoredColumn(NamedTuple):
    """One pool of one shard of one namespace."""

    namespace: str
    pool: str
    shard: str


Pages = Counter[StoredColumn]
"""Committed pages of each column."""


def committed_pages(root: Path) -> Pages:
    """Read the store's manifests; empty if there is no store yet. Changes nothing in it."""
    path = store_path(root)
    pages: Pages = Counter()
    if not path.exists():
        return pages
    index = Index(Layout.open(path, create=False), readonly=True)
    for stored in index.runs():
        columns = index.columns(stored.run.namespace)
        for block in stored.run.blocks:
            column = columns[block.column]
            name = StoredColumn(stored.run.namespace.hex(), column.pool, column.shard)
            pages[name] += len(stored.positions)
    return pages


def kv_pages(pages: Pages) -> int:
    """Pages of the KV pools, all shards and namespaces together."""
    return sum(count for column, count in pages.items() if column.pool == "kv")


def wait_for_kv_pages(root: Path, count: int, timeout: float = PATIENCE) -> None:
    """Wait until the store has committed `count` KV pages, all shards together, and all else that
    its servers have put. Before that, not even the server that stored them finds them all."""
    wait_until(lambda: kv_pages(committed_pages(root)) >= count, f"{count} KV pages", timeout)
    layout, seen = Layout.open(store_path(root), create=False), time.time_ns()

    def settled() -> bool:
        return all(
            status.updated_ns > seen and not status.uncommitted_tokens
            for status in statuses(layout)
        )

    wait_until(settled, "end of the commit", timeout)


def wait_until(condition: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
    """Poll until `condition` holds. Raises TimeoutError naming what did not come."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} after {timeout:.0f} s")
        time.sleep(0.1)
