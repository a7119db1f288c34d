"""What commands share: finding the store, and how numbers are shown."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.status import Status
from rich.text import Text

from kvtier import place
from kvtier.backends.local import disk_usage
from kvtier.chains import Chains
from kvtier.collection import collect
from kvtier.config import PREFIX, Config
from kvtier.errors import ConfigError, StoreError
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.limits import Cap, LimitsFile, Space
from kvtier.sizes import check_unit, format_size

Root = Annotated[
    Path | None,
    typer.Argument(
        metavar="ROOT",
        show_default="KVTIER_ROOT, else /mnt/scratch, else the user's cache directory",
        help="The store, or the mount that holds it in kvtier/.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document for machines.")]
Yes = Annotated[bool, typer.Option("--yes", help="Don't ask.")]

_SHARE_LOST = 4
"""One part in so many of what is stored goes without a question."""


def plain(text: object) -> str:
    """What came from outside, on one line and without a say over the terminal: what cannot be
    printed (control characters, half of a surrogate pair, marks of direction) as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def marked(style: str, text: object, rest: object = "") -> Text:
    """`text` in a style, and `rest` after it without one."""
    return Text.assemble((plain(text), style), plain(rest))


class _Status(Status):
    def update(self, status: RenderableType | None = None, **more: Any) -> None:
        super().update(Text(plain(status)) if isinstance(status, str) else status, **more)


class _Console(Console):
    """Shows every string as it is, in tables too: brackets are no markup. Styles: `marked`."""

    def __init__(self, **more: Any) -> None:
        super().__init__(markup=False, emoji=False, **more)

    def render_str(self, text: str, **more: Any) -> Text:
        return super().render_str(plain(text), **more)

    def status(self, status: RenderableType, **more: Any) -> Status:
        text = Text(plain(status)) if isinstance(status, str) else status
        return _Status(text, console=self, **more)


out = _Console()
progress = _Console(stderr=True)
"""Progress goes to standard error, so that output can be piped."""


def settings(*names: str) -> Config:
    """The settings of these names from the environment, the others as they are without it."""
    variables = {PREFIX + name.upper() for name in names}
    return Config.load(None, {k: v for k, v in os.environ.items() if k in variables})


def cap_of(layout: Layout, used: int) -> Cap:
    """What a store that takes `used` bytes may take: by its own limits and the environment's."""
    limits = settings("limit", "min_free").limits
    return LimitsFile(layout, limits).current().cap(used, Space.of(layout.path))


def agree(what: str) -> None:
    """Go on only if a person at the terminal agrees to `what`; StoreError where there is none."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise StoreError(f"{what} Nothing is changed: give --yes if that is meant.")
    if not typer.confirm(f"{what} Go on?", err=True):
        raise typer.Abort


def agree_on_unit(option: str, text: str) -> None:
    """Ask about a number whose unit was left out."""
    try:
        check_unit(text)
    except ConfigError as error:
        agree(f"{option}: {error}")


def agree_on_loss(layout: Layout, limit: int) -> None:
    """Ask about a limit in bytes under which much of what is stored goes, or a pinned session."""
    if disk_usage(layout.path) <= limit:
        return
    with progress.status(f"reading {layout.path}"):
        config = settings("grace", "tails_per_chain")
        index = Index(layout, readonly=True)
        lost = collect(
            layout,
            index,
            limit,
            grace=config.grace,
            tails_per_chain=config.tails_per_chain,
            dry_run=True,
        )
    if lost.pinned or lost.lost * _SHARE_LOST > lost.stored:
        many = "" if lost.pinned == 1 else "s"
        pins = f", {count(lost.pinned)} pinned session{many} among it" if lost.pinned else ""
        agree(
            f"With a limit of {format_size(limit)}, {format_size(lost.lost)} of the "
            f"{format_size(lost.stored)} that is stored goes for good{pins}."
        )


def find_session(found: list[Chains], key: str) -> tuple[Chains, int]:
    """The one session whose leaf's key begins so, and its leaf; StoreError for none or more."""
    hits = [
        (c, leaf)
        for c in found
        for leaf in c.leaves().tolist()
        if c.keys[leaf].tobytes().hex().startswith(key.lower())
    ]
    if len(hits) != 1:
        raise StoreError(
            f"{none_or(len(hits))} sessions have a key that begins with {key!r}: "
            f"take one from the table of `kvtier inspect`{', with more digits' if hits else ''}."
        )
    return hits[0]


def none_or(number: int) -> str:
    """A number at the beginning of a sentence."""
    return str(number) if number else "No"


def find_store(root: Path | None) -> Layout:
    """The store that `root`, or the default place, names; StoreError if there is none."""
    return Layout.open(place.find_store(root), create=False)


def age(time_ns: int) -> str:
    """How long ago, in the largest unit that gives at least 1."""
    if not time_ns:
        return "never"
    seconds = max(0.0, time.time() - time_ns / 1e9)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def stamp(time_ns: int) -> str:
    """UTC time in ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_ns / 1e9))


def count(number: int | None) -> str:
    """A number with thousands separated; a dash if unknown."""
    return "-" if number is None else f"{number:,}"
