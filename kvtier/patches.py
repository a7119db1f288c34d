"""The patches of SGLang that kvtier has, and which of them the environment turns on.

Names and meanings only: integration/patches/ has one module a patch, which says what SGLang does
and what changes. docs/patches.md is the table for people.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import NamedTuple

from kvtier.errors import ConfigError

VARIABLE = "KVTIER_PATCHES"
"""Names of patches to turn on, with commas between."""


class PatchName(NamedTuple):
    """A patch of SGLang. `variable` takes its value and turns it on; `value` is the value of one
    that is only named. One that is `always` on acts in servers with kvtier's storage alone."""

    name: str
    meaning: str
    variable: str = ""
    value: str = ""
    always: bool = False


PATCHES = (
    PatchName(
        "replay_boundary",
        "A restored prompt of DeepSeek V4.1 ends where it may match",
        always=True,
    ),
    PatchName(
        "expert_split",
        "Unlike numbers of experts on cards of unlike memory",
        variable="KVTIER_EXPERT_SPLIT",
        value="auto",
    ),
    PatchName(
        "indexer_budget",
        "MiB that DeepSeek V4.1's indexer may use for scores in prefill",
        variable="KVTIER_INDEXER_BUDGET_MIB",
        value="256",
    ),
    PatchName("inline_system", "DeepSeek: system messages within a conversation stay in place"),
    PatchName("prompt_too_long", "/v1/messages: Anthropic's words for a prompt that is too long"),
    PatchName("clients", "What coding agents send and SGLang refuses: documents, effort off, ..."),
    PatchName("repetition_guard", "An answer that repeats itself without end is ended"),
    PatchName("reoffer", "After a cleared or lately attached store, pages are stored again"),
)

VARIABLES = frozenset({VARIABLE} | {patch.variable for patch in PATCHES if patch.variable})
"""Environment variables that are no settings of a store (kvtier/config.py)."""


class Choice(NamedTuple):
    """Whether a patch is on, its value ("" if it takes none), and what decided that."""

    patch: PatchName
    on: bool
    value: str
    source: str


def choices(environ: Mapping[str, str]) -> list[Choice]:
    """The state of every patch. Raises ConfigError for a name in KVTIER_PATCHES that is none."""
    names = [patch.name for patch in PATCHES]
    named = [name.strip() for name in environ.get(VARIABLE, "").split(",") if name.strip()]
    for name in named:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}."
            raise ConfigError(f"{VARIABLE} names an unknown patch {name}: {remedy}")
    return [_choice(patch, named, environ) for patch in PATCHES]


def _choice(patch: PatchName, named: list[str], environ: Mapping[str, str]) -> Choice:
    given = environ.get(patch.variable, "").strip() if patch.variable else ""
    if given:
        return Choice(patch, True, given, patch.variable)
    if patch.name in named:
        return Choice(patch, True, patch.value, VARIABLE)
    return Choice(patch, patch.always, "", "")
