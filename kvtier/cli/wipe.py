"""`kvtier wipe`: forget a session, a namespace or everything."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer

from kvtier.backends.local import disk_usage
from kvtier.chains import Chains, chains
from kvtier.cli.common import (
    AsJson,
    Root,
    count,
    find_session,
    find_store,
    marked,
    none_or,
    out,
    plain,
    progress,
    settings,
)
from kvtier.deletion import forget
from kvtier.errors import StoreError
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.pins import pinned, unpin
from kvtier.retention import Victims
from kvtier.sizes import format_size
from kvtier.space import reclaim


def wipe(
    root: Root = None,
    *,
    session: Annotated[
        str, typer.Option(metavar="KEY", help="Forget what only this session has.")
    ] = "",
    namespace: Annotated[
        str, typer.Option(metavar="ID", help="Forget all pages of one namespace.")
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="Forget all pages.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Forget a session, a namespace or everything, and give the space back; it asks before.

    Pages that other sessions share stay. Servers may run: they stop serving the pages at once, and
    space is freed a grace time later.

    Examples:

    * `kvtier wipe --session 4f2a91c07be3d815 /mnt/nvme`
    * `kvtier wipe --namespace 0b51 --yes`
    * `kvtier wipe --all --dry-run`
    """
    if (bool(session) + bool(namespace) + everything) != 1:
        raise StoreError("Say what to forget: one of --session KEY, --namespace ID and --all.")
    layout = find_store(root)

    def choose(found: list[Chains]) -> Sequence[Victims]:
        return _choose(found, session, namespace)

    with progress.status(f"reading {layout.path}"):
        index = Index(layout, readonly=dry_run)
        victims = choose(chains(index))
        before = disk_usage(layout.path)
    pages, size = sum(len(v.pages) for v in victims), sum(v.bytes for v in victims)
    if not (dry_run or yes):
        question = f"Forget {count(pages)} pages, {format_size(size)}, in {plain(layout.path)}?"
        try:
            agreed = typer.confirm(question, err=True)
        except typer.Abort:
            raise StoreError("Nobody answered, nothing is forgotten: give --yes.") from None
        if not agreed:
            raise typer.Abort
    running, after = index.health().live_writers, before - size
    if not dry_run:
        with progress.status("forgetting") as status:
            victims = forget(layout, index, choose)
            _unpin(layout, victims)
            pages = sum(len(v.pages) for v in victims)
            if running:
                grace = settings("grace").grace
                status.update(f"readers of running servers have {grace:g} s")
                time.sleep(grace)
            status.update("freeing space")
            after = reclaim(layout, index)
    if as_json:
        document = {
            "pages": pages,
            "before_bytes": before,
            "after_bytes": after,
            "dry_run": dry_run,
            "running_writers": running,
        }
        print(json.dumps(document, indent=2))
        return
    verb = "Would forget" if dry_run else "Forgot"
    out.print(
        f"{verb} {count(pages)} pages; {format_size(after)} on disk, {format_size(before)} before.",
        highlight=False,
    )
    if running and pages and not dry_run:
        out.print(
            marked(
                "yellow",
                "A server is running:",
                " it does not offer again what it holds in memory, so later turns of these "
                "sessions are not stored until it has forgotten them: send it POST /flush_cache "
                "once it is idle.",
            )
        )


def _unpin(layout: Layout, victims: Sequence[Victims]) -> None:
    pins = pinned(layout)
    for v in victims:
        gone = {v.chains.keys[page].tobytes() for page in v.pages.tolist()}
        for key in gone.intersection(pins.get(v.chains.namespace, ())):
            unpin(layout, v.chains.namespace, key)


def _choose(found: list[Chains], session: str, namespace: str) -> Sequence[Victims]:
    none = np.zeros(0, np.int64)
    if session:
        c, leaf = find_session(found, session)
        return [Victims(c, c.own(leaf), none)]
    mine = [c for c in found if c.namespace.hex().startswith(namespace.lower())]
    if namespace and len(mine) != 1:
        raise StoreError(
            f"{none_or(len(mine))} namespaces with pages have an id that begins with "
            f"{namespace!r}: take one from `kvtier inspect`{', with more digits' if mine else ''}."
        )
    return [Victims(c, np.arange(len(c)), none) for c in mine]
