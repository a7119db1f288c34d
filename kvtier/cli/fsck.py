"""`kvtier fsck`: check a store, rebuild its index, forget pages whose bytes are damaged."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvtier.check import Findings, check
from kvtier.cli.common import AsJson, Root, count, find_store, marked, out, progress
from kvtier.deletion import bury
from kvtier.index import Index
from kvtier.layout import segment_name_of
from kvtier.sizes import format_size


def fsck(
    root: Root = None,
    verify_payload: Annotated[
        bool, typer.Option("--verify-payload", help="Read every stored byte and check it.")
    ] = False,
    rebuild_index: Annotated[
        bool, typer.Option("--rebuild-index", help="Make the index anew from the manifests.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a store, beside running servers or without any.

    Pages whose bytes are damaged are forgotten, so that the engine computes them again; they were
    never served. Exit status 0: nothing is damaged; 1: damage was found, and said; 2: the store
    cannot be opened. Torn ends of manifests and foreign files are reported and are no damage.

    Examples:

    * `kvtier fsck /mnt/nvme`
    * `kvtier fsck --verify-payload --json`
    """
    layout = find_store(root)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=progress, transient=True) as bar:
        task = bar.add_task("reading manifests", total=None)
        index = Index(layout, readonly=not rebuild_index)
        if rebuild_index:
            index.rebuild(lambda done, total: bar.update(task, completed=done, total=total))
            index.save()
        bar.update(task, description="verifying payload" if verify_payload else "checking")
        found = check(
            layout,
            index,
            payload=verify_payload,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if found.damaged:
        with layout.lock():
            bury(layout, found.damaged)
    if as_json:
        print(json.dumps(_document(found), indent=2))
    else:
        _show(found, verified=verify_payload, rebuilt=rebuild_index)
    if not found.clean:
        raise typer.Exit(1)


def _show(found: Findings, *, verified: bool, rebuilt: bool) -> None:
    text = f"{count(found.pages)} pages in {count(found.parts)} parts"
    if verified:
        text += f"; {format_size(found.verified)} of payload is exactly what was stored"
    if rebuilt:
        text += "; index rebuilt from the manifests"
    out.print(text, highlight=False)
    for name, places in found.manifests.items():
        out.print(f"skipped: {places} places in {name}.kvm hold no frame", highlight=False)
    for name in found.foreign:
        out.print(f"foreign: {name}", highlight=False)
    for grave in found.damaged:
        out.print(
            marked(
                "red",
                "damaged:",
                f" {segment_name_of(grave.segment_id)}.kvs, page {grave.first} of the run at "
                f"{grave.frame_offset} in its manifest; forgotten",
            )
        )
    for name in found.truncated:
        out.print(
            marked("red", "truncated:", f" {name}.kvs is shorter than its manifest says or missing")
        )
    for name, why in found.unreadable.items():
        out.print(marked("red", "unreadable:", f" {name}: {why}"))
    for line in found.identities:
        out.print(marked("red", "identity:", f" {line}"))
    out.print(marked("green", "clean") if found.clean else marked("red", "damage found"))


def _document(found: Findings) -> dict[str, Any]:
    return {
        "clean": found.clean,
        "pages": found.pages,
        "parts": found.parts,
        "verified_bytes": found.verified,
        "damaged": [
            {
                "segment": segment_name_of(grave.segment_id),
                "manifest_offset": grave.frame_offset,
                "page": grave.first,
            }
            for grave in found.damaged
        ],
        "truncated": found.truncated,
        "unreadable": found.unreadable,
        "manifests_skipped": found.manifests,
        "identities": found.identities,
        "foreign": found.foreign,
    }
