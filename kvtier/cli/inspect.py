"""`kvtier inspect`: what is in a store, whether it is well, what a session would get back."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvtier.chains import Session
from kvtier.cli.common import (
    AsJson,
    Root,
    age,
    count,
    find_store,
    marked,
    none_or,
    out,
    plain,
    progress,
    stamp,
)
from kvtier.errors import StoreError
from kvtier.identity import diff, stored_identity
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.report import NamespaceReport, StoreReport, report
from kvtier.sizes import format_size

_SESSIONS = 20
"""Sessions of a namespace in the table; --json has them all."""


def inspect(
    root: Root = None,
    as_json: AsJson = False,
    session: Annotated[
        str, typer.Option(metavar="KEY", help="Only the session with this key, or its beginning.")
    ] = "",
    difference: Annotated[
        tuple[str, str] | None,
        typer.Option("--diff", metavar="A B", help="Fields in which two namespaces differ."),
    ] = None,
) -> None:
    """Show what a store holds. Works beside a running server and changes nothing.

    Examples:

    * `kvtier inspect /mnt/nvme`
    * `kvtier inspect --json | jq .namespaces[0]`
    * `kvtier inspect --session 3fa9`
    * `kvtier inspect --diff 8c1f 90ab`
    """
    layout = find_store(root)
    if difference:
        _show_difference(layout, *difference, as_json=as_json)
        return
    with progress.status(f"reading {layout.path}"):
        found = report(layout, Index(layout, readonly=True))
    if session:
        _show_session(found, session.lower(), as_json=as_json)
    elif as_json:
        print(json.dumps(_store_document(found), indent=2))
    else:
        _show_store(found)


def _show_store(found: StoreReport) -> None:
    out.print(marked("bold", found.path, f"  store {found.store_id[:8]}"))
    out.print(
        f"{format_size(found.disk)} on disk, {format_size(found.free)} free; "
        f"{count(found.health.segments)} segments, {count(found.health.live_writers)} running "
        f"{'writer' if found.health.live_writers == 1 else 'writers'}",
        highlight=False,
    )
    for line in _health_lines(found):
        out.print(line, highlight=False)
    if not found.namespaces:
        more = "" if found.processes else ": start a server with --hicache-storage-backend kvtier"
        out.print(f"No pages yet{more}.")
    for namespace in found.namespaces:
        _show_namespace(namespace)


def _health_lines(found: StoreReport) -> list[str | Text]:
    lines: list[str | Text] = []
    if found.uncommitted:
        lines.append(f"uncommitted: {format_size(found.uncommitted)} of payload no manifest names")
    for name, places in found.health.damaged.items():
        text = f"damaged: {places} torn or broken frames skipped in {name}.kvm"
        lines.append(marked("yellow", text))
    for name, why in found.health.unreadable.items():
        lines.append(marked("red", f"unreadable: {name}.kvm: {why}"))
    if found.foreign:
        shown = ", ".join(found.foreign[:3]) + (" ..." if len(found.foreign) > 3 else "")
        text = f"foreign: {len(found.foreign)} files kvtier did not make: {shown}"
        lines.append(marked("yellow", text))
    for status in found.processes:
        if status.uncommitted_tokens or status.uncommitted_bytes:
            lines.append(
                f"process {status.pid}: {count(status.uncommitted_tokens)} tokens, "
                f"{format_size(status.uncommitted_bytes)} not durable yet, "
                f"oldest {status.uncommitted_seconds:.1f} s"
            )
        for side, why in (("reads", status.reads_stopped), ("writes", status.writes_stopped)):
            if why:
                lines.append(marked("red", f"process {status.pid}: no {side} for now: {why}"))
    well = marked("green", "healthy", ": no torn frames, no damage, nothing uncommitted")
    return lines or [well]


def _show_namespace(namespace: NamespaceReport) -> None:
    out.print()
    out.print(
        Text.assemble(marked("bold", f"namespace {namespace.id}", "  "), _headline(namespace))
    )
    pools = sorted({column["pool"] for column in namespace.columns})
    shards = sorted({column["shard"] for column in namespace.columns if column["shard"]})
    out.print(
        f"pools {', '.join(pools) or '-'}" + (f"; shards {', '.join(shards)}" if shards else ""),
        highlight=False,
    )
    out.print(
        f"{count(namespace.pages)} pages ({count(namespace.tokens(namespace.pages))} tokens, "
        f"{format_size(namespace.bytes)}); restorable {count(namespace.restorable)} pages, "
        f"{format_size(namespace.restorable_bytes)}; "
        f"incomplete families {count(namespace.pages - namespace.complete)}; "
        f"tails {count(namespace.tails)}",
        highlight=False,
    )
    if not namespace.sessions:
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("session")
    for title in ("tokens", "restorable", "tails", "size", "own size"):
        table.add_column(title, justify="right")
    table.add_column("last use")
    for session in namespace.sessions[:_SESSIONS]:
        table.add_row(
            session.key.hex()[:16],
            count(namespace.tokens(session.pages)),
            count(namespace.tokens(session.restorable)),
            count(session.tails),
            format_size(session.bytes),
            format_size(session.own_bytes),
            age(session.used_ns) + (", pinned" if session.key in namespace.pins else ""),
        )
    out.print(table)
    if len(namespace.sessions) > _SESSIONS:
        out.print(f"... and {len(namespace.sessions) - _SESSIONS} older sessions: see --json")


def _headline(namespace: NamespaceReport) -> Text:
    if namespace.identity is None:
        return marked("yellow", "(identity document missing or damaged)")
    about, document = namespace.identity.about, namespace.identity.document
    model = about.get("model_path", "model unknown")
    dtype, tokens = document.get("kv_dtype", "dtype unknown"), namespace.page_tokens
    return Text(plain(f"{model}  {dtype}" + (f", {tokens} tokens a page" if tokens else "")))


def _show_session(found: StoreReport, wanted: str, *, as_json: bool) -> None:
    hits = [
        (namespace, session)
        for namespace in found.namespaces
        for session in namespace.sessions
        if session.key.hex().startswith(wanted)
    ]
    if len(hits) != 1:
        raise StoreError(
            f"{none_or(len(hits))} sessions have a key that begins with {wanted!r}: "
            f"take one from the table of `kvtier inspect`{', with more digits' if hits else ''}."
        )
    namespace, session = hits[0]
    document = _session_document(namespace, session)
    if as_json:
        print(json.dumps(document, indent=2))
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in document.items():
        table.add_row(name, count(value) if isinstance(value, int) else str(value))
    out.print(table)


def _show_difference(layout: Layout, first: str, second: str, *, as_json: bool) -> None:
    a, b = (stored_identity(layout.namespaces, _full_id(layout, name)) for name in (first, second))
    rows = diff(a, b)
    if as_json:
        document = [{"field": row.path, "a": _plain(row.a), "b": _plain(row.b)} for row in rows]
        print(json.dumps(document, indent=2))
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("field", first, second):
        table.add_column(title)
    for row in rows:
        table.add_row(row.path, str(row.a), str(row.b))
    out.print(table if rows else "The two namespaces are the same.")


def _full_id(layout: Layout, beginning: str) -> str:
    names = [p.stem for p in layout.namespaces.glob("*.json") if p.stem.startswith(beginning)]
    if len(names) != 1:
        raise StoreError(
            f"{len(names)} namespaces have an id that begins with {beginning!r}: "
            "take one from `kvtier inspect`, with more digits."
        )
    return names[0]


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | bool | list | dict | None) else str(value)


def _store_document(found: StoreReport) -> dict[str, Any]:
    return {
        "path": str(found.path),
        "store": found.store_id,
        "disk_bytes": found.disk,
        "free_bytes": found.free,
        "uncommitted_bytes": found.uncommitted,
        "foreign_files": found.foreign,
        "segments": found.health.segments,
        "live_writers": found.health.live_writers,
        "damaged": found.health.damaged,
        "unreadable": found.health.unreadable,
        "processes": [vars(status) for status in found.processes],
        "namespaces": [
            {
                "id": n.id,
                "about": dict(n.identity.about) if n.identity else None,
                "identity": n.identity.document if n.identity else None,
                "columns": n.columns,
                "pages": n.pages,
                "tokens": n.tokens(n.pages),
                "bytes": n.bytes,
                "complete_pages": n.complete,
                "restorable_pages": n.restorable,
                "restorable_bytes": n.restorable_bytes,
                "tails": n.tails,
                "sessions": [_session_document(n, session) for session in n.sessions],
            }
            for n in found.namespaces
        ],
    }


def _session_document(namespace: NamespaceReport, session: Session) -> dict[str, Any]:
    return {
        "key": session.key.hex(),
        "namespace": namespace.id,
        "pages": session.pages,
        "tokens": namespace.tokens(session.pages),
        "restorable_pages": session.restorable,
        "restorable_tokens": namespace.tokens(session.restorable),
        "tails": session.tails,
        "bytes": session.bytes,
        "own_bytes": session.own_bytes,
        "last_use": stamp(session.used_ns),
        "pinned": session.key in namespace.pins,
    }
