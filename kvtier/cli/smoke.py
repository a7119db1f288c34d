"""`kvtier smoke`: whether a served model answers right."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from kvtier.cli.common import AsJson, marked, out, progress
from kvtier.cli.served import DEFAULT_URL, Key, Url
from kvtier.integration.probes.client import Client
from kvtier.integration.probes.smoke import Check, checks

LONGEST_SHOWN = 300
"""Characters of a wrong answer."""


def smoke(
    url: Url = DEFAULT_URL,
    *,
    image: Annotated[bool, typer.Option("--image", help="Also show it an image.")] = False,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Ask a running server a few questions whose answers are known.

    Arithmetic, JSON by a schema, twelve round trips with a tool, a conversation of four turns.
    Exit status 1 if an answer is wrong.

    Examples:

    * `kvtier smoke`
    * `kvtier smoke http://127.0.0.1:8000 --image --json`
    """
    client = Client(url, key)
    done = []
    with progress.status("asking the server"):
        for check in checks(client, image):
            done.append(check)
            if not as_json:
                _show(check)
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in done], indent=2))
    if not all(check.ok for check in done):
        raise typer.Exit(1)


def _show(check: Check) -> None:
    if check.ok:
        text = marked("green", "ok", f"     {check.name} ({check.seconds:.1f} s)")
    else:
        got = " ".join(check.got.split())
        got = got if len(got) <= LONGEST_SHOWN else got[:LONGEST_SHOWN] + " ..."
        text = marked(
            "red",
            "failed",
            f" {check.name} ({check.seconds:.1f} s): expected {check.expected}, "
            f"got {got or 'nothing'}",
        )
    out.print(text, highlight=False, soft_wrap=True)
