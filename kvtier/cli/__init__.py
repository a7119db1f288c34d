"""The command line: one file a command. Exit status 2 is a mistake the message says how to mend."""

from __future__ import annotations

import sys

import typer

from kvtier import __version__
from kvtier.cli.bench import bench
from kvtier.cli.common import plain
from kvtier.cli.fsck import fsck
from kvtier.cli.gc import gc
from kvtier.cli.inspect import inspect
from kvtier.cli.launch import Launch, launch
from kvtier.cli.limit import limit
from kvtier.cli.patches import patches
from kvtier.cli.pin import pin, unpin
from kvtier.cli.plan import plan
from kvtier.cli.selfcheck import selfcheck
from kvtier.cli.smoke import smoke
from kvtier.cli.watch import watch
from kvtier.cli.wipe import wipe
from kvtier.errors import KvtierError

app = typer.Typer(
    name="kvtier",
    help="Serve models with their KV cache on a drive, and look after that store.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command()(inspect)
app.command()(gc)
app.command()(limit)
app.command()(pin)
app.command()(unpin)
app.command()(wipe)
app.command()(fsck)
app.command()(patches)
app.command(cls=Launch, context_settings={"allow_extra_args": True})(launch)
app.command()(plan)
app.command()(smoke)
app.command()(selfcheck)
app.add_typer(bench, name="bench")
app.command()(watch)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        print(f"kvtier {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of `kvtier`."""
    try:
        app()
    except KvtierError as error:
        print(f"kvtier: {plain(error)}", file=sys.stderr)
        sys.exit(2)
    except PermissionError as error:
        print(
            f"kvtier: {plain(error.filename or 'the store')}: {error.strerror}; "
            "run it as the store's owner or as root.",
            file=sys.stderr,
        )
        sys.exit(2)
    except OSError as error:
        print(
            f"kvtier: {plain(error.filename or 'the store')}: {plain(error.strerror or error)}.",
            file=sys.stderr,
        )
        sys.exit(2)
