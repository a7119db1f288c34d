"""`kvtier gc`: bring a store under a limit."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from kvtier.cli.common import AsJson, Root, count, find_store, out, progress
from kvtier.collection import collect
from kvtier.config import Config
from kvtier.errors import StoreError
from kvtier.index import Index
from kvtier.sizes import format_size, parse_size


def gc(
    root: Root = None,
    limit: Annotated[
        str, typer.Option(metavar="SIZE", help="What the store may take (needed): 1000G, 1.5Ti, 0.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a store under a limit, beside running servers or without any.

    The ends of the sessions that were not used for longest go first; no page that another needs
    ever goes before it. K, M, G, T are powers of 1000; Ki, Mi, Gi, Ti of 1024. Exit status 1 if
    the limit cannot be reached (foreign files, or space a running server holds).

    Examples:

    * `kvtier gc --limit 1000G /mnt/nvme`
    * `kvtier gc --limit 500Gi --dry-run`
    """
    if not limit:
        raise StoreError("Say how much the store may take on disk, for example --limit 1000G.")
    size = parse_size(limit)
    layout = find_store(root)
    grace = Config.load(None, {k: v for k, v in os.environ.items() if k == "KVTIER_GRACE"}).grace
    with progress.status(f"reading {layout.path}") as status:
        index = Index(layout, readonly=dry_run)
        done = collect(layout, index, size, grace=grace, dry_run=dry_run, progress=status.update)
    if as_json:
        document = {
            "limit_bytes": size,
            "before_bytes": done.before,
            "after_bytes": done.after,
            "freed_bytes": done.before - done.after,
            "pages": done.pages,
            "sessions": done.sessions,
            "dry_run": dry_run,
            "enough": done.enough,
        }
        print(json.dumps(document, indent=2))
    else:
        verb = "Would free" if dry_run else "Freed"
        out.print(
            f"{verb} {format_size(done.before - done.after)}: {count(done.pages)} pages at the end "
            f"of {count(done.sessions)} sessions. {'Then' if dry_run else 'Now'} "
            f"{format_size(done.after)} on disk, limit {format_size(size)}.",
            highlight=False,
        )
        if not done.enough:
            out.print(
                "[yellow]Not under the limit:[/] the rest is foreign files, space that running "
                "servers are writing, or what a file system cannot free in part."
            )
    if not done.enough:
        raise typer.Exit(1)
