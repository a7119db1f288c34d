"""`kvtier pin` and `kvtier unpin`: sessions that go last when a store is over its limit."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvtier.backends.local import disk_usage
from kvtier.chains import Chains, chains
from kvtier.cli.common import (
    AsJson,
    Root,
    cap_of,
    count,
    find_session,
    find_store,
    none_or,
    out,
    progress,
)
from kvtier.errors import StoreError
from kvtier.index import Index
from kvtier.pins import Pins, pinned
from kvtier.pins import pin as set_pin
from kvtier.pins import unpin as take_pin
from kvtier.sizes import format_size

Key = Annotated[
    str, typer.Argument(metavar="KEY", help="The session, as `kvtier inspect` shows it.")
]


def pin(key: Key, root: Root = None, as_json: AsJson = False) -> None:
    """Keep a session longer than all that are not pinned, whenever it was used.

    What is pinned is the session as it is now, with all before it; pin it again when it has grown.
    A pin that would not fit under the store's limit is refused.

    Example: `kvtier pin 4f2a91c07be3d815 /mnt/nvme`
    """
    layout = find_store(root)
    with progress.status(f"reading {layout.path}"):
        found = chains(Index(layout, readonly=True))
        used = disk_usage(layout.path)
    c, leaf = find_session(found, key)
    wanted = {namespace: dict(keys) for namespace, keys in pinned(layout).items()}
    wanted.setdefault(c.namespace, {})[c.keys[leaf].tobytes()] = 0
    size, cap = _held_bytes(found, wanted), cap_of(layout, used)
    if size > cap.bytes:
        already = size - _held_bytes(found, pinned(layout))
        raise StoreError(
            f"The pin needs {format_size(already)} more, {format_size(size)} with all other pins, "
            f"and the store may take {format_size(cap.bytes)} ({cap.name}): "
            "unpin others or raise the limit."
        )
    set_pin(layout, c.namespace, c.keys[leaf].tobytes())
    pages = int(c.depth[leaf])
    if as_json:
        document = {"key": c.keys[leaf].tobytes().hex(), "pages": pages, "pinned_bytes": size}
        print(json.dumps(document, indent=2))
    else:
        out.print(
            f"Pinned {count(pages)} pages; all pins hold {format_size(size)} of "
            f"{format_size(cap.bytes)}.",
            highlight=False,
        )


def unpin(key: Key, root: Root = None, as_json: AsJson = False) -> None:
    """Let a pinned session go again like any other.

    Example: `kvtier unpin 4f2a91c07be3d815 /mnt/nvme`
    """
    layout = find_store(root)
    hits = [
        (namespace, page)
        for namespace, pages in pinned(layout).items()
        for page in pages
        if page.hex().startswith(key.lower())
    ]
    if len(hits) != 1:
        raise StoreError(
            f"{none_or(len(hits))} pins have a key that begins with {key!r}: "
            "`kvtier inspect` shows them."
        )
    take_pin(layout, *hits[0])
    if as_json:
        print(json.dumps({"key": hits[0][1].hex()}, indent=2))
    else:
        out.print(f"Unpinned {hits[0][1].hex()[:16]}.", highlight=False)


def _held_bytes(found: list[Chains], pins: Pins) -> int:
    return sum(int(c.bytes[c.above(c.pages_of(pins.get(c.namespace, ())))].sum()) for c in found)
