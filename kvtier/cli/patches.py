"""`kvtier patches`: what kvtier can change in SGLang, and whether it is on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Annotated

import typer
from rich.table import Table

from kvtier.cli.common import AsJson, out, progress
from kvtier.errors import KvtierError
from kvtier.patches import Choice, choices


def patches(
    check: Annotated[
        bool,
        typer.Option("--check", help="Also look whether SGLang has what each needs."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the patches of SGLang, their state, and what turned them on.

    KVTIER_PATCHES turns patches on by name (`KVTIER_PATCHES=clients,inline_system`); those that
    take a value have a variable of their own, which turns them on as well. With --check, exit
    status 1 if one that is on cannot be applied.

    Examples:

    * `kvtier patches`
    * `KVTIER_EXPERT_SPLIT=108,92,92,92 kvtier patches --check`
    """
    found = choices(os.environ)
    lacking = _lacking() if check else {}
    rows = [_row(choice, lacking if check else None) for choice in found]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _show(rows, check)
    if any(row["on"] and row.get("missing") for row in rows):
        raise typer.Exit(1)


def _row(choice: Choice, lacking: dict[str, list[str]] | None) -> dict[str, object]:
    row: dict[str, object] = {
        "name": choice.patch.name,
        "on": choice.on,
        "value": choice.value,
        "turned_on_by": choice.source,
        "variable": choice.patch.variable,
        "always": choice.patch.always,
        "meaning": choice.patch.meaning,
    }
    if lacking is not None:
        row["missing"] = lacking[choice.patch.name]
    return row


def _lacking() -> dict[str, list[str]]:
    """What each patch needs and SGLang lacks. In a process of its own, which may import SGLang."""
    if importlib.util.find_spec("sglang") is None:
        raise KvtierError("There is no SGLang in this environment: install kvtier beside it.")
    with progress.status("looking at SGLang"):
        looked = subprocess.run(
            [sys.executable, "-m", "kvtier.integration.patches"],
            capture_output=True,
            text=True,
            check=False,
        )
    if looked.returncode:
        reason = (looked.stderr.strip() or "it said nothing").splitlines()[-1]
        raise KvtierError(f"SGLang cannot be looked at: {reason}")
    lacking: dict[str, list[str]] = json.loads(looked.stdout.splitlines()[-1])
    return lacking


def _show(rows: list[dict[str, object]], check: bool) -> None:
    table = Table("patch", "state", "turned on by", "what it changes", box=None)
    if check:
        table.add_column("missing in SGLang")
    for row in rows:
        state = f"on ({row['value']})" if row["value"] else "on" if row["on"] else "off"
        by = row["turned_on_by"] or ("always" if row["always"] else row["variable"] or "")
        cells = [row["name"], state, by if row["on"] else "", row["meaning"]]
        if check:
            cells.append("; ".join(row["missing"]) or "nothing")  # type: ignore[arg-type]
        table.add_row(*map(str, cells))
    out.print(table, highlight=False)
