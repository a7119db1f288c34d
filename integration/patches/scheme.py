"""What a patch is: hooks on functions of SGLang, and what they rely on."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookType


class Hook(NamedTuple):
    """A function of ours on one of SGLang's, and the parameters of the latter that it relies on."""

    target: str
    type: HookType
    function: Callable[..., Any]
    parameters: tuple[str, ...]


class Patch(NamedTuple):
    """The code of one of kvtier.patches.PATCHES: PATCH in the module of that name."""

    hooks: tuple[Hook, ...] = ()
    relies_on: tuple[str, ...] = ()
    """Dotted names of SGLang that must be there; "name(a, b)" must take these parameters."""
    install: Callable[[str], None] = lambda value: None
    """Called once in every process, with the value, before the hooks are applied. Raises
    ConfigError for a value that makes no sense."""
    refusal: Callable[[Any], str | None] = lambda server_args: None
    """Why a server of these arguments can't have the patch, as the end of a sentence."""


def lost(patch: Patch) -> list[str]:
    """What `relies_on` names and isn't there, in words."""
    return [problem for name in patch.relies_on if (problem := _lost(name))]


def _lost(wanted: str) -> str | None:
    name, _, listed = wanted.partition("(")
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return f"{name} (not there)"
    if not listed:
        return None
    there = inspect.signature(found).parameters
    missing = [p for p in listed.rstrip(")").split(", ") if p not in there]
    return f"{name} (without {', '.join(missing)})" if missing else None


def refuse_without_plugins(server_args: Any) -> str | None:
    """The refusal of patches to what serves HTTP: not every process of that kind loads plugins."""
    from sglang.srt.environ import envs

    if server_args.tokenizer_worker_num > 1:
        return "--tokenizer-worker-num above 1 starts processes that load no plugins"
    if envs.SGLANG_RUST_SERVER.get():
        return "SGLANG_RUST_SERVER serves HTTP without Python"
    return None
