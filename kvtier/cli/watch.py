"""`kvtier watch`: the lowest free memory of each card while something else runs."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from kvtier.cli.common import AsJson, out, progress
from kvtier.integration.probes.watch import Card, Watch
from kvtier.sizes import format_size


def watch(
    seconds: Annotated[
        float, typer.Argument(metavar="[SECONDS]", min=0, show_default="until Ctrl-C")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Show the lowest free memory of each NVIDIA card, sampled every 100 ms, until Ctrl-C.

    Start it, then the work whose peak is to be known: a long prompt, several sessions at once.

    Examples:

    * `kvtier watch`
    * `kvtier watch 600 --json`
    """
    until = time.monotonic() + seconds
    with Watch() as watching:
        try:
            with progress.status("") as status:
                while not seconds or time.monotonic() < until:
                    free = ", ".join(format_size(card.least_free) for card in watching.cards)
                    status.update(f"least free so far: {free}; Ctrl-C ends")
                    time.sleep(min(0.5, max(0.0, until - time.monotonic())) if seconds else 0.5)
        except KeyboardInterrupt:
            pass
    if as_json:
        print(json.dumps([dataclasses.asdict(card) for card in watching.cards], indent=2))
    else:
        out.print(table(watching.cards), highlight=False)


def table(cards: Sequence[Card]) -> Table:
    """A row for each card."""
    found = Table("card", "name", "memory", "least free", "after", box=None)
    for card in cards:
        found.add_row(
            str(card.number),
            card.name,
            format_size(card.total),
            format_size(card.least_free),
            f"{card.least_at:.1f} s",
        )
    return found
