"""A process that stores session after session until its standard input ends, then says how many.

Arguments: root, the writer's name, pages of a session, bytes of a part, settings as JSON. Pages
that were refused are counted; any other fault ends it with a traceback.
"""

from __future__ import annotations

import json
import select
import sys
from pathlib import Path

from making import KV, contents, identity, keys, put, settings

from kvtier.pages import ROOT, Link
from kvtier.store import Store

STEP = 8


def main() -> None:
    """Put sessions, a few pages at a time."""
    root, name, pages, size, changes = sys.argv[1:]
    store = Store.open(settings(Path(root), **json.loads(changes)))
    namespace = store.namespace(identity(), KV)
    print("ready", flush=True)
    sessions = stored = refused = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        chain = keys((name, sessions), int(pages))
        for start in range(0, len(chain), STEP):
            some = chain[start : start + STEP]
            link = Link(chain[start - 1] if start else ROOT, start)
            answer = put(namespace, some, contents(some, int(size)), link=link)
            stored, refused = stored + int(answer.sum()), refused + int((~answer).sum())
        sessions += 1
    store.flush(60)
    print(json.dumps({"sessions": sessions, "stored": stored, "refused": refused}), flush=True)
    store.close()


if __name__ == "__main__":
    main()
