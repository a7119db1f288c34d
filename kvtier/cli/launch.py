"""`kvtier launch`: one command from a profile to a served model."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperCommand

from kvtier import place
from kvtier.cli.common import marked, out, progress
from kvtier.errors import ConfigError, KvtierError

if TYPE_CHECKING:
    from kvtier.integration.launcher.command import Command, Wanted
    from kvtier.integration.launcher.machine import Machine
    from kvtier.integration.launcher.profiles import Profile


class Launch(TyperCommand):
    """Says where an option belongs that is not of kvtier."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # By its name: typer has its own copy of click's in newer versions.
            if type(error).__name__ != "NoSuchOption":
                raise
            name = getattr(error, "option_name", "")
            raise ConfigError(
                f"No such option: {name}. SGLang's own options go after --, as in -- {name}."
            ) from None


def launch(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="[PROFILE]", help="A name of --list, or a TOML file.")
    ] = "",
    *,
    model: Annotated[str, typer.Option(metavar="PATH", help="Folder of the model.")] = "",
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="ROOT",
            help="The store, or the mount that holds it in kvtier/.",
            show_default="KVTIER_ROOT, else /mnt/scratch, else the user's cache directory",
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML with api-key and admin-api-key, mode 0600."),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="SETTING", help="Leave a setting of the profile out; repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print environment and command, and start nothing.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why each setting is there and what it gave.")
    ] = False,
    preflight: Annotated[
        bool,
        typer.Option(
            "--preflight", help="Check the machine and its all-reduce, and start nothing."
        ),
    ] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Start although the preflight finds errors.")
    ] = False,
    save_machine: Annotated[
        bool, typer.Option("--save-machine", help="Write the machine's facts to its file.")
    ] = False,
    write_systemd: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a systemd unit for this launch; - prints it."),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Show the profiles and what they need.")
    ] = False,
) -> None:
    """Serve a model with SGLang and kvtier below it, and keep it served.

    Without a profile, proposes one for the cards it finds. What follows `--` goes to SGLang and
    wins. SIGTERM ends requests, commits, and stops; a second one kills.

    Examples:

    * `kvtier launch --list`
    * `kvtier launch rtxpro-mixed --model /models/DeepSeek-V4.1-Flash --store /mnt/nvme`
    * `kvtier launch generic --model /models/llama --dry-run -- --tp-size 2`
    * `kvtier launch h200-4x --model /models/DeepSeek-V4.1-Flash --explain`
    """
    from kvtier.integration.launcher import machine, profiles
    from kvtier.integration.launcher.command import Wanted
    from kvtier.integration.launcher.keys import check as check_keys

    if show_list:
        _list()
        return
    if not name:
        _propose(machine.read())
    profile = profiles.load(name, without or ())
    if not model and not (explain or save_machine):
        raise ConfigError("Say which model to serve: --model PATH.")
    wanted = Wanted(
        model=_absolute(model) or "PATH",
        store=_store(store or _given_root(context.args)),
        keys=_whole(keys) if keys else None,
        flags=tuple(context.args),
    )
    if wanted.keys:
        check_keys(wanted.keys)
    here = machine.read(wanted.store)
    command = _command(profile, wanted, here, save_machine=save_machine)
    if explain:
        _explain(profile, command)
    elif write_systemd:
        _write_unit(write_systemd, name, wanted, without or [])
    elif dry_run:
        from kvtier.integration.launcher.supervisor import find_program

        print(command.shell(find_program(os.environ)[0]))
    elif not save_machine or preflight:
        sound = _preflight(profile, command, wanted, here, thorough=preflight)
        if preflight or not (sound or anyway):
            raise typer.Exit(0 if sound else 1)
        raise typer.Exit(_serve(command, wanted, here))


def _command(profile: Profile, wanted: Wanted, here: Machine, *, save_machine: bool) -> Command:
    """The command of the profile on this machine, with a warning for all that is odd."""
    from kvtier.integration.launcher import dead_ends, machine_file
    from kvtier.integration.launcher.command import build

    saved = machine_file.load(machine_file.place())
    command = build(
        profile, wanted, here, machine_environment=saved.environment, environ=os.environ
    )
    for warning in dead_ends.warnings(profile, command):
        _warn(warning)
    if save_machine:
        machine_file.save(saved, here)
        out.print(f"Saved to {saved.path}", highlight=False)
    else:
        for difference in machine_file.differences(saved, here):
            _warn(f"{difference}, says {saved.path}; kvtier launch --save-machine takes it over")
    return command


def _remember(here: Machine) -> None:
    """The first launch that served on a machine writes its file, if it may."""
    from kvtier.integration.launcher import machine_file

    with contextlib.suppress(OSError, ConfigError):  # it serves already
        saved = machine_file.load(machine_file.place())
        if not saved.facts:
            machine_file.save(saved, here)
            progress.print(f"note: this machine's facts are in {saved.path}", highlight=False)


def _preflight(
    profile: Profile, command: Command, wanted: Wanted, here: Machine, *, thorough: bool
) -> bool:
    """Show what the checks find; whether none is an error. `thorough` also uses the cards."""
    from kvtier.integration.launcher.checks import all_reduce, preflight

    findings = preflight(profile, command, wanted, here)
    if thorough:
        findings += all_reduce(command, here, os.environ)
    for finding in findings:
        colour = {"error": "red", "warning": "yellow"}.get(finding.level, "dim")
        progress.print(marked(colour, f"{finding.level}:", f" {finding.text}"), soft_wrap=True)
    return all(finding.level != "error" for finding in findings)


def _serve(command: Command, wanted: Wanted, here: Machine) -> int:
    from kvtier.integration.launcher import keys
    from kvtier.integration.launcher.address import Address
    from kvtier.integration.launcher.supervisor import Supervisor, check_program, find_program

    check_program(os.environ)
    program, path = find_program(os.environ)
    address = Address.of(command)

    def check() -> None:
        if wanted.keys:
            keys.check(wanted.keys)
        address.check_free()

    return Supervisor(
        program,
        ["serve", *command.arguments],
        {**os.environ, "PATH": path, **command.environment},
        address=address,
        store=wanted.store if command.value("hicache-storage-backend") is not None else None,
        model=wanted.model,
        check=check,
        on_ready=lambda: _remember(here),
    ).run()


def _list() -> None:
    from kvtier.integration.launcher import plan, profiles

    table = Table("profile", "for", "needs", "state", box=None)
    for name in profiles.names():
        profile = profiles.load(name)
        needs = ", ".join(map(str, profile.cards)) or "nothing in particular"
        if profile.model is not None:
            host = plan.plan(profile, profile.gib).host
            needs += f"; {host / plan.GB:,.0f} GB of host memory"
        table.add_row(name, profile.summary, needs, profile.state)
    out.print(table, highlight=False)


def _propose(here: Machine) -> None:
    """End with the profile for the cards that are here."""
    from kvtier.integration.launcher import profiles
    from kvtier.integration.launcher.command import fits

    found = ", ".join(f"{card.name} ({card.gib:g} GiB)" for card in here.cards) or "no cards"
    for name in profiles.names():
        profile = profiles.load(name)
        kinds = [cards.name for cards in profile.cards]
        if (
            kinds
            and fits(profile, here)
            and all(any(kind in card.name for kind in kinds) for card in here.cards)
        ):
            raise KvtierError(
                f"Name a profile: for {found} there is {name} ({profile.summary}): "
                f"kvtier launch {name} --model PATH."
            )
    raise KvtierError(
        f"Name a profile: for {found} only generic fits, kvtier launch generic --model PATH; "
        "kvtier launch --list shows the others."
    )


def _explain(profile: Profile, command: Command) -> None:
    state = f"{profile.state[:1].upper()}{profile.state[1:]}"
    out.print(f"{profile.name}: {profile.summary}. {state}.", highlight=False)
    for kind in ("environment", "patches", "store", "sglang"):
        for setting in (s for s in command.settings if s.kind == kind):
            dashes, equals = ("--", " ") if kind == "sglang" else ("", "=")
            value = "" if setting.value is True else f"{equals}{setting.value}"
            out.print()
            out.print(marked("bold", f"{dashes}{setting.name}{value}"), soft_wrap=True)
            about = f"{setting.why} [{setting.source}]"
            out.print(f"    {about}", highlight=False, soft_wrap=True)
            if setting.measured:
                measured = f"    Measured: {setting.measured}"
                out.print(measured, highlight=False, soft_wrap=True)


def _write_unit(file: Path, name: str, wanted: Wanted, without: list[str]) -> None:
    from kvtier.integration.launcher import profiles, systemd

    own = str(Path(name).expanduser().absolute()) if profiles.is_path(name) else name
    words = ["launch", own]
    words += ["--model", wanted.model, "--store", str(wanted.store)]
    words += ["--keys", str(wanted.keys)] if wanted.keys else []
    words += [word for setting in without for word in ("--without", setting)]
    words += ["--", *wanted.flags] if wanted.flags else []
    mounts = [wanted.store, *([Path(wanted.model)] if wanted.model.startswith("/") else [])]
    program = Path(sys.executable).parent / "kvtier"
    description = f"kvtier: {Path(wanted.model).name} with profile {name}"
    text = systemd.unit(program, words, description=description, mounts=mounts)
    if str(file) == "-":
        print(text, end="")
        return
    file.write_text(text)
    out.print(
        f"Wrote {file}. Then: systemctl daemon-reload && systemctl enable --now {file.name}",
        highlight=False,
    )


def _given_root(flags: list[str]) -> Path | None:
    """The store that SGLang's own flag names, after `--`."""
    from kvtier.integration.launcher.command import given_extra

    root = (given_extra(flags) or {}).get("root")
    return None if root is None else Path(str(root))


def _store(given: Path | None) -> Path:
    """The store, which need not be there yet. ConfigError if a file is in its way."""
    root = place.find_store(_whole(given) if given else None)
    there = next(path for path in (root, *root.parents) if path.exists())
    if not there.is_dir():
        named = f"--store {given}" if given else f"The store {root}"
        file = "" if given and _whole(given) == there else f": {there}"
        raise ConfigError(f"{named}{file} is a file: give a directory.")
    return root


def _absolute(model: str) -> str:
    """A folder by its whole path, for a unit runs elsewhere; a name of a hub as it is."""
    path = Path(model).expanduser()
    return str(_whole(path)) if model[:1] in ("/", ".", "~") or path.is_dir() else model


def _whole(path: Path) -> Path:
    """The path from the root, without "..", which a link before it gives another meaning."""
    path = path.expanduser().absolute()
    return path.resolve() if ".." in path.parts else path


def _warn(text: str) -> None:
    progress.print(marked("yellow", "warning:", f" {text}"), soft_wrap=True)
