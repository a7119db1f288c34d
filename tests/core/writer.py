"""A process that puts a chain again and again in pieces and says what is safe; killed by tests.

Arguments: root, chain's name, pages, bytes of a part, then shards ("tp0,tp1"). Says "ready" once
the store is open, "safe N" once the first N pages of every shard are flushed, and "done" before it
closes the store. With "wait" as last argument, not "", it then waits to be killed.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from making import contents, identity, keys, put, settings

from kvtier.pages import ROOT, Column, Link
from kvtier.store import Store

STEP = 5


def main() -> None:
    """Put the chain."""
    root, name, pages, size, shards, then = sys.argv[1:]
    chain = keys(name, int(pages))
    columns = [Column("kv", shard) for shard in shards.split(",")]
    store = Store.open(settings(Path(root), commit_interval=0.01, segment_size=1 << 20))
    namespace = store.namespace(identity())
    print("ready", flush=True)
    for start in range(0, len(chain), STEP):
        some = chain[start : start + STEP]
        link = Link(chain[start - 1] if start else ROOT, start)
        for column in columns:
            parts = contents(some, int(size), column)
            if not put(namespace, some, parts, column, link).all():
                raise SystemExit("refused")
        if start // STEP % 4 == 3:
            if not store.flush(60):
                raise SystemExit("not flushed")
            print("safe", start + len(some), flush=True)
    if not store.flush(60):
        raise SystemExit("not flushed")
    print("safe", len(chain), flush=True)
    print("done", flush=True)
    if then == "wait":
        signal.pause()
    store.close()


if __name__ == "__main__":
    main()
