"""docs/launcher.md and docs/deployment.md say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from kvtier.cli.launch import launch
from kvtier.integration.launcher import profiles
from kvtier.integration.launcher.dead_ends import DEAD_ENDS
from kvtier.integration.launcher.plan import GB, GIB, plan
from kvtier.integration.launcher.systemd import TEMPLATE

DOCS = Path(__file__).parents[2] / "docs"
LAUNCHER = (DOCS / "launcher.md").read_text()
DEPLOYMENT = (DOCS / "deployment.md").read_text()


def _rows(document: str, header: str) -> list[str]:
    """The first cell of each row of the table under a heading."""
    table = document.partition(f"\n{header}\n")[2].partition("\n|")[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ", 1)[0] for line in table.splitlines()[2:]]


def test_profiles_and_dead_ends_are_listed() -> None:
    listed = {row.strip("`") for row in _rows(LAUNCHER, "## Profiles")}
    assert listed == set(profiles.names())
    rows = _rows(LAUNCHER, "## Dead ends")
    named = {match for row in rows for match in re.findall(r"`-*([\w-]+)`", row)}
    assert named == {end.name for end in DEAD_ENDS} | {"host"}


def test_options_are_listed() -> None:
    app = typer.Typer()
    app.command()(launch)
    command = typer.main.get_command(app)
    options = {name for parameter in command.params for name in parameter.opts}
    rows = LAUNCHER.partition("\n## Profiles\n")[0]
    shown = set(re.findall(r"^\| `(--[\w-]+)", rows, re.MULTILINE))
    unlisted = {"--model", "--store", "--help", "--install-completion", "--show-completion"}
    assert shown == {option for option in options if option.startswith("--")} - unlisted


def test_the_plan_s_column_is_the_plan_s() -> None:
    profile = profiles.load("rtxpro-mixed")
    found = plan(profile, profile.gib)
    free = {row.slots: f"{min(row.free) / GB:.2f} GB" for row in found.rows}
    assert f"| weights on a card of 84 GiB | {found.weights[1] / GIB:.2f} GiB |" in LAUNCHER
    assert f"| free there with 2 slots | {free[2]} |" in LAUNCHER
    assert f"| 3 slots | {free[3]} |" in LAUNCHER
    assert f"| 4 slots | {free[4]}, does not fit |" in LAUNCHER
    [session] = [s for s in found.sessions if s.tokens == 777_000]
    assert f"777,000 tokens are {session.restored / GB:.2f} GB" in DEPLOYMENT
    assert f"40 windows kept, {session.stored / GB:.2f} GB" in DEPLOYMENT


def test_lines_of_the_unit_that_are_explained_are_there() -> None:
    unit = TEMPLATE.read_text()
    for row in _rows(DEPLOYMENT, "## 5. A service"):
        for line in re.findall(r"`([^`]+)`", row):
            assert f"\n{line}" in unit, line
