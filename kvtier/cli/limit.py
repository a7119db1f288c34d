"""`kvtier limit`: show what a store may take and write, or change it while servers run."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Annotated, Any, cast

import typer
from rich.table import Table

from kvtier.backends.local import disk_usage
from kvtier.cli.common import (
    AsJson,
    Root,
    Yes,
    agree_on_loss,
    agree_on_unit,
    find_store,
    marked,
    out,
    settings,
)
from kvtier.config import PREFIX
from kvtier.errors import ConfigError, StoreError
from kvtier.layout import Layout
from kvtier.ledger import written_on
from kvtier.limits import (
    FILE,
    Limits,
    LimitsFile,
    Named,
    Space,
    parse_amount,
    read_limits,
    write_limits,
)
from kvtier.sizes import format_size, parse_size
from kvtier.status import statuses

_NAMES = ("limit", "min_free", "daily_writes")


def limit(
    root: Root = None,
    *,
    set_: Annotated[
        str,
        typer.Option("--set", metavar="SIZE", help="What it may take: 800G, 1.5Ti, 80%."),
    ] = "",
    min_free: Annotated[
        str,
        typer.Option(metavar="SIZE", help="What is left free on the file system: 50G, 5%."),
    ] = "",
    daily_writes: Annotated[
        str, typer.Option(metavar="SIZE", help="What may be written in a day (UTC): 500G.")
    ] = "",
    clear: Annotated[
        bool, typer.Option("--clear", help="Forget the store's own limits; settings count again.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show what a store may take and write, or change it while servers run.

    What is set here is kept in the store and wins over the settings of every server on it. They
    go by it with the next page; what is stored beyond a lower limit goes as `kvtier gc` would
    choose, and a change under which more than a quarter goes, or a pinned session, is asked about.
    A percentage is of the file system. K, M, G, T are powers of 1000; Ki, Mi, Gi, Ti of 1024.

    Examples:

    * `kvtier limit /mnt/nvme`
    * `kvtier limit --set 800G --min-free 50G /mnt/nvme`
    * `kvtier limit --set 80% --daily-writes 500G`
    * `kvtier limit --clear`
    """
    given = (
        ("limit", "--set", set_, parse_amount),
        ("min_free", "--min-free", min_free, parse_amount),
        ("daily_writes", "--daily-writes", daily_writes, parse_size),
    )
    named: Named = {}
    for name, option, text, parse in given:
        try:
            if text:
                named[name] = parse(text)
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from None
    if clear and named:
        raise StoreError("Either set limits or --clear them, not both.")
    layout = find_store(root)
    if named or clear:
        changed = {} if clear else _kept(layout) | named
        if not yes:
            for _, option, text, _ in given:
                agree_on_unit(option, text)
            _agree(layout, changed)
        write_limits(layout, changed)
    document = _document(layout)
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        _show(layout, document)


def _agree(layout: Layout, changed: Named) -> None:
    """Ask if much would go with these limits that does not go with those of now."""
    own = settings(*_NAMES).limits
    used, space = disk_usage(layout.path), Space.of(layout.path)
    before, after = (
        replace(own, **named).cap(used, space)  # type: ignore[arg-type]  # parsed by name
        for named in (_kept(layout), changed)
    )
    if after.bytes < before.bytes:
        agree_on_loss(layout, after.bytes)


def _kept(layout: Layout) -> Named:
    """What the file says already; a damaged one is replaced."""
    try:
        return read_limits(layout)
    except ConfigError:
        return {}


def _document(layout: Layout) -> dict[str, object]:
    names = [PREFIX + name.upper() for name in _NAMES]
    own = settings(*_NAMES).limits
    limits = LimitsFile(layout, own).current()
    named = _kept(layout)
    sources = {
        name: FILE
        if name in named
        else variable
        if getattr(own, name) != getattr(Limits(), name)
        else "default"
        for name, variable in zip(_NAMES, names, strict=True)
    }
    space, used = Space.of(layout.path), disk_usage(layout.path)
    cap = limits.cap(used, space)
    return {
        "limit": None if limits.limit is None else str(limits.limit),
        "limit_bytes": None if limits.limit is None else limits.limit.of(space.size),
        "limit_from": sources["limit"],
        "min_free": str(limits.min_free),
        "min_free_bytes": limits.min_free.of(space.size),
        "min_free_from": sources["min_free"],
        "daily_writes_bytes": limits.daily_writes,
        "daily_writes_from": sources["daily_writes"],
        "cap_bytes": cap.bytes,
        "cap_by": cap.name,
        "used_bytes": used,
        "file_system_bytes": space.size,
        "file_system_free_bytes": space.free,
        "processes": [
            {"pid": s.pid, "host": s.host, "cap_bytes": s.cap_bytes, "cap_by": s.cap_by}
            for s in statuses(layout)
            if s.cap_bytes is not None
        ],
        "written_today_bytes": written_on(layout, int(time.time() // 86400)),
    }


def _show(layout: Layout, document: dict[str, object]) -> None:
    def size(name: str) -> str:
        value = document[name]
        return format_size(value) if isinstance(value, int) else "none"

    share = {
        name: f" ({document[name]})" if "%" in str(document[name]) else ""
        for name in ("limit", "min_free")
    }
    rows = (
        ("takes", size("used_bytes"), f"of {size('cap_bytes')}, by {document['cap_by']}"),
        ("limit", size("limit_bytes") + share["limit"], document["limit_from"]),
        ("min_free", size("min_free_bytes") + share["min_free"], document["min_free_from"]),
        ("free", size("file_system_free_bytes"), f"of {size('file_system_bytes')}"),
        ("daily_writes", size("daily_writes_bytes"), document["daily_writes_from"]),
        ("written today", size("written_today_bytes"), "UTC, or reserved by servers for it"),
    )
    table = Table(title=str(layout.path), title_justify="left", show_header=False, box=None)
    for row in rows:
        table.add_row(*map(str, row))
    for process in cast(list[dict[str, Any]], document["processes"]):
        cap = format_size(int(process["cap_bytes"]))
        by = f"is its cap, by {process['cap_by']}"
        table.add_row(f"process {process['pid']}", cap, by)
    out.print(table, highlight=False)
    over = int(str(document["used_bytes"])) - int(str(document["cap_bytes"]))
    if over > 0:
        above = f"{format_size(over)} above what it may take:"
        out.print(marked("yellow", above, " see `kvtier gc`."))
    if any(document[f"{name}_from"] != FILE for name in _NAMES):
        out.print(f"Where {FILE} names nothing, each server's own settings count.")
