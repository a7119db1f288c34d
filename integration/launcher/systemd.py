"""`kvtier launch --write-systemd`: a unit that starts the same server with the machine."""

from __future__ import annotations

import getpass
import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template

TEMPLATE = Path(__file__).parents[1] / "deploy" / "kvtier.service"


def unit(program: Path, words: Sequence[str], *, description: str, mounts: Sequence[Path]) -> str:
    """The text of a unit that runs `program` with `words` once `mounts` are there."""
    return Template(TEMPLATE.read_text()).substitute(
        description=description.replace("%", "%%"),
        # Only commands have variables.
        command=" ".join(_quoted(w) for w in [str(program), *words]).replace("$", "$$"),
        mounts=" ".join(_quoted(str(path)) for path in mounts),
        user=getpass.getuser(),
    )


def _quoted(word: str) -> str:
    """systemd expands %, and reads quotes and backslashes in its own way."""
    escaped = word.replace("\\", "\\\\").replace("%", "%%")
    if shlex.quote(word) == word:
        return escaped
    return '"' + escaped.replace('"', '\\"') + '"'
