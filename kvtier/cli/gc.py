"""`kvtier gc`: bring a store under a limit."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated

import typer

from kvtier.backends.local import disk_usage
from kvtier.cli.common import (
    AsJson,
    Root,
    Yes,
    agree_on_loss,
    agree_on_unit,
    cap_of,
    count,
    find_store,
    marked,
    out,
    progress,
    settings,
)
from kvtier.collection import collect
from kvtier.collector import alone
from kvtier.index import Index
from kvtier.limits import Space, parse_amount
from kvtier.sizes import format_size


def gc(
    root: Root = None,
    limit: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            show_default="the store's own limits, see kvtier limit",
            help="What the store may take: 1000G, 1.5Ti, 80%, 0.",
        ),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Bring a store under a limit, beside running servers or without any.

    Tails that later ones supersede go first, then the ends of the sessions that were not used for
    longest, pinned ones last; no page that another needs ever goes before it. K, M, G, T are powers
    of 1000; Ki, Mi, Gi, Ti of 1024; 80% is a share of the file system. A --limit under which more
    than a quarter of what is stored goes, or a pinned session, is asked about. Exit status 1 if the
    limit cannot be reached (foreign files, or space a running server holds).

    Examples:

    * `kvtier gc --limit 1000G /mnt/nvme`
    * `kvtier gc --limit 500Gi --dry-run`
    """
    layout = find_store(root)
    if limit:
        size = parse_amount(limit).of(Space.of(layout.path).size)
        if not (dry_run or yes):
            agree_on_unit("--limit", limit)
            agree_on_loss(layout, size)
    else:
        size = cap_of(layout, disk_usage(layout.path)).bytes
    config = settings("grace", "tails_per_chain", "segment_size")
    with progress.status(f"reading {layout.path}") as status:
        status.update("waiting for another collection")
        with contextlib.nullcontext() if dry_run else alone(layout, wait=True):
            index = Index(layout, readonly=dry_run)
            done = collect(
                layout,
                index,
                size,
                grace=config.grace,
                tails_per_chain=config.tails_per_chain,
                segment_size=config.segment_size,
                dry_run=dry_run,
                progress=status.update,
            )
    if as_json:
        document = {
            "limit_bytes": size,
            "before_bytes": done.before,
            "after_bytes": done.after,
            "freed_bytes": done.before - done.after,
            "pages": done.pages,
            "tails": done.tails,
            "sessions": done.sessions,
            "dry_run": dry_run,
            "enough": done.enough,
        }
        print(json.dumps(document, indent=2))
    else:
        verb = "Would free" if dry_run else "Freed"
        out.print(
            f"{verb} {format_size(done.before - done.after)}: {count(done.tails)} superseded "
            f"tails, {count(done.pages)} pages at the end of {count(done.sessions)} sessions. "
            f"{'Then' if dry_run else 'Now'} {format_size(done.after)} on disk, limit "
            f"{format_size(size)}.",
            highlight=False,
        )
        if not done.enough:
            out.print(
                marked(
                    "yellow",
                    "Not under the limit:",
                    " the rest is foreign files, space that running servers are writing, or what a "
                    "file system cannot free in part.",
                )
            )
    if not done.enough:
        raise typer.Exit(1)
