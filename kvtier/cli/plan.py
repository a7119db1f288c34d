"""`kvtier plan`: what a profile needs and leaves free, before anything is bought or started."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvtier.cli.common import AsJson, count, out
from kvtier.errors import ConfigError
from kvtier.sizes import format_size, parse_size

if TYPE_CHECKING:
    from kvtier.integration.launcher.plan import Plan

SLOWEST = 1_000_000
"""Bytes a second below which a rate is a slip of the pen."""


def plan(
    name: Annotated[str, typer.Argument(metavar="PROFILE", help="A name of launch --list.")],
    slots: Annotated[int | None, typer.Option(min=1, help="Instead of the profile's.")] = None,
    drive: Annotated[
        str, typer.Option(metavar="RATE", help="What the store's drive reads in a second.")
    ] = "5G",
    as_json: AsJson = False,
) -> None:
    """Show what a profile puts on each card, in host memory and on the drive.

    kvtier launch --preflight measures the drive; its rate goes into --drive. Exit status 1 if the
    slots don't fit.

    Examples:

    * `kvtier plan rtxpro-mixed`
    * `kvtier plan rtxpro-mixed --slots 4`
    * `kvtier plan h200-4x --drive 12G --json`
    """
    from kvtier.integration.launcher import machine, profiles
    from kvtier.integration.launcher.command import fits
    from kvtier.integration.launcher.plan import plan as planned

    rate = parse_size(drive.removesuffix("/s"))
    if rate < SLOWEST:
        raise ConfigError(f"--drive {drive} is no drive's rate: give bytes a second, such as 5G.")
    profile = profiles.load(name)
    if profile.model is None:
        raise ConfigError(
            f"{name} is for any model, so nothing can be computed: take a profile with a model, "
            "from kvtier launch --list."
        )
    here = machine.read()
    cards = [card.gib for card in here.cards] if fits(profile, here) else profile.gib
    split = os.environ.get("KVTIER_EXPERT_SPLIT", "")
    found = planned(profile, cards, slots, rate, split)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        out.print(f"{profile.name}: {profile.summary}", highlight=False)
        out.print(profile.state, highlight=False)
        _show(found, rate)
    if not found.row.fits:
        raise typer.Exit(1)


def _show(found: Plan, rate: int) -> None:
    cards = Table("card", "memory", "experts", "weights", "pool", "free", box=None)
    for number, gib in enumerate(found.cards):
        known = bool(found.weights)
        cards.add_row(
            str(number),
            f"{gib:g} GiB",
            str(found.split[number]) if known else "-",
            f"{found.weights[number] / 2**30:.2f} GiB" if known else "not known",
            format_size(found.row.pool),
            format_size(found.row.free[number]) if known else "not known",
        )
    out.print()
    out.print(cards, highlight=False)
    slots = Table("slots", "pool tokens", "pool on each card", "least free", "", box=None)
    for row in found.rows:
        least = format_size(min(row.free)) if row.free else "not known"
        fits = "" if row.fits else "does not fit"
        mark = "this plan" if row.slots == found.slots else ""
        about = ", ".join(filter(None, (mark, fits)))
        slots.add_row(str(row.slots), count(row.pool_tokens), format_size(row.pool), least, about)
    out.print()
    out.print(slots, highlight=False)
    out.print(f"A slot's KV is {format_size(found.slot)} on each card.", highlight=False)
    out.print()
    ranks = found.model.ranks
    out.print(
        f"Host memory {format_size(found.host)}: Engram tables {format_size(found.engram)}, "
        f"{ranks} ranks with {format_size(found.host_rank)} each ({count(found.host_tokens)} "
        "tokens and their windows), and a margin.",
        highlight=False,
    )
    sessions = Table("session", "on the drive", "a restore reads", "in", box=None)
    for session in found.sessions:
        sessions.add_row(
            f"{session.tokens:,} tokens",
            format_size(session.stored),
            format_size(session.restored),
            f"{session.seconds:.1f} s",
        )
    out.print()
    out.print(sessions, highlight=False)
    out.print(
        f"Restore: {ranks} ranks read the session at {format_size(rate)}/s and copy it to their "
        "cards; the time to compute the first token comes on top.",
        highlight=False,
    )
