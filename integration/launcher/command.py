"""From a profile to the exact environment and command line that are run."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.integration.launcher import plan
from kvtier.integration.launcher.machine import Machine, p2p_level
from kvtier.integration.launcher.profiles import Profile, Setting
from kvtier.patches import PATCHES, VARIABLE
from kvtier.place import find_store

ALIASES = {
    "enable-hicache": "enable-hierarchical-cache",
    "ep": "ep-size",
    "expert-parallel-size": "ep-size",
    "model": "model-path",
    "tensor-parallel-size": "tp-size",
}
"""Other names that SGLang 0.5.23 has for flags of the profiles (a test compares them)."""


CALLER = "your environment"
"""Source of a setting that was an environment variable before the launch."""

_PASSED = ("CUDA_", "KVTIER_", "NCCL_", "PYTORCH_", "SGLANG_")
"""Variables of the caller that reach SGLang and so belong to the exact command."""


@dataclass(frozen=True)
class Wanted:
    """What a person asked for beside the profile."""

    model: str
    store: Path
    keys: Path | None = None
    """File of SGLang's --config with the API keys, so that no key is in the process list."""
    flags: Sequence[str] = ()
    """What follows `--`."""


@dataclass(frozen=True)
class Command:
    """What is run. `settings` are all that went into it, with the reasons, in order."""

    environment: dict[str, str]
    arguments: list[str]
    """Of `sglang serve`."""
    settings: list[Setting]

    def value(self, flag: str) -> str | None:
        """The value that a flag has in the end, "" for one without; None if it isn't there."""
        found: str | None = None
        for name, value in split_flags(self.arguments):
            if name == flag:
                found = value or ""
        return found

    def shell(self, program: str = "sglang") -> str:
        """Environment and command, ready to paste into a shell."""
        lines = [f"{k}={shlex.quote(v)}" for k, v in self.environment.items()]
        lines += [f"{shlex.quote(program)} serve"]
        words: list[str] = []
        for word in self.arguments:
            if word.startswith("--") or not words:
                words.append(shlex.quote(word))
            else:
                words[-1] += f" {shlex.quote(word)}"
        return " \\\n".join(lines + [f"    {word}" for word in words])


def build(
    profile: Profile,
    wanted: Wanted,
    machine: Machine,
    *,
    machine_environment: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Command:
    """The command of a profile on a machine.

    What is stronger comes later: the profile, what is derived from the machine, the machine file,
    variables that are set already (`environ`), flags after `--`.
    """
    settings = _derived(_resolved(list(profile.settings), profile, machine), machine)
    for name, value in (machine_environment or {}).items():
        why = "The machine file sets it."
        new = Setting("environment", name, value, why, source="machine file")
        settings = _with(settings, new)
    given = {name for name, _ in split_flags(wanted.flags)}
    extra = given_extra(wanted.flags)
    settings = _model_and_store(settings, wanted, extra or {})
    environment = _environment(settings)
    for name, value in (environ or {}).items():
        if name.startswith(_PASSED) and environment.get(name) != value:
            environment[name] = value
            new = Setting("environment", name, value, "Your shell has it.", source=CALLER)
            settings = _with(settings, new)
    if wanted.keys and "config" in given:
        raise ConfigError(
            "--keys FILE is SGLang's --config, which it takes once: put the keys into your own."
        )
    merged = {EXTRA} if extra is not None and any(s.name == EXTRA for s in settings) else set()
    own = [s for s in settings if s.kind == "sglang" and s.name not in given - merged]
    arguments = [word for setting in own for word in _words(setting)]
    shown = [s for s in settings if s.kind != "sglang"] + own
    shown += [
        Setting("sglang", name, value or True, "You gave it after --.", source="command line")
        for name, value in split_flags(wanted.flags)
        if name not in merged
    ]
    flags = _without(wanted.flags, EXTRA) if merged else list(wanted.flags)
    return Command(environment, arguments + flags, shown)


EXTRA = "hicache-storage-backend-extra-config"


def given_extra(flags: Sequence[str]) -> dict[str, Any] | None:
    """The store's settings that a person gave after `--` in SGLang's own flag; None if there are
    none, or if they are for another backend. ConfigError if they cannot be read.

    SGLang takes JSON, or @FILE with JSON, TOML or YAML.
    """
    found = dict(split_flags(flags))
    if EXTRA not in found or found.get("hicache-storage-backend", "kvtier") != "kvtier":
        return None
    text = found[EXTRA] or ""
    parse: Callable[[str], Any] = json.loads
    if text.startswith("@"):
        file = Path(text[1:])
        kinds = {".json": json.loads, ".toml": tomllib.loads}
        if file.suffix.lower() not in kinds:
            raise ConfigError(f"--{EXTRA} {text}: the launcher merges .json and .toml only.")
        parse = kinds[file.suffix.lower()]
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--{EXTRA} {text} cannot be read ({error}).") from None
    try:
        extra = parse(text)
    except ValueError as error:
        raise ConfigError(f"--{EXTRA} cannot be read ({error}): give a JSON object.") from None
    if not isinstance(extra, dict):
        raise ConfigError(f'--{EXTRA} is no JSON object: write it as \'{{"limit": "1000G"}}\'.')
    return extra


def _without(flags: Sequence[str], name: str) -> list[str]:
    """The words of a command line's flags but for those of one flag."""
    kept, dropped = [], False
    for word in flags:
        if re.match(r"--[a-zA-Z]", word):
            dropped = word[2:].partition("=")[0] == name
        if not dropped:
            kept.append(word)
    return kept


def split_flags(words: Sequence[str]) -> list[tuple[str, str | None]]:
    """Names without dashes, aliases resolved, and values of a command line's flags."""
    found: list[tuple[str, str | None]] = []
    for word in words:
        if re.match(r"--[a-zA-Z]", word):
            name, equals, value = word[2:].partition("=")
            found.append((ALIASES.get(name, name), value if equals else None))
        elif found:
            name, before = found[-1]
            found[-1] = (name, word if before is None else f"{before} {word}")
    return found


def _resolved(settings: list[Setting], profile: Profile, machine: Machine) -> list[Setting]:
    """An expert split of "auto" becomes numbers, by the cards that are there."""
    split = profile.get("patches", "expert_split")
    if split is None or split.value != "auto" or profile.model is None:
        return settings
    cards = [card.gib for card in machine.cards]
    source = "computed from the cards found"
    if not fits(profile, machine):
        cards, source = profile.gib, "computed from the profile's cards"
    counts = plan.expert_split(profile, cards) or ()
    resolved = replace(split, value=",".join(map(str, counts)), source=source)
    return [resolved if s is split else s for s in settings]


def fits(profile: Profile, machine: Machine) -> bool:
    """Whether the machine's cards are those of the profile, in whatever order."""
    found, wanted = sorted(card.gib for card in machine.cards), sorted(profile.gib)
    return len(found) == len(wanted) and all(
        abs(a - b) <= 0.03 * b for a, b in zip(found, wanted, strict=True)
    )


def _derived(settings: list[Setting], machine: Machine) -> list[Setting]:
    """What follows from the machine, where its facts could be read."""
    if machine.link:
        kept = [s for s in settings if s.name != "NCCL_P2P_LEVEL"]
        level = p2p_level(machine.link)
        if level is None:
            settings = kept
        else:
            why = (
                "nvidia-smi topo -m has pairs of cards at a host bridge (PHB) and none farther: "
                "they talk to each other directly and not through host memory."
            )
            measured = "All-reduce 3.83 -> 19.57 GB/s on the reference rig."
            derived = Setting("environment", "NCCL_P2P_LEVEL", level, why, measured, "derived")
            settings = [*kept, derived]
    if any(card.numa == -1 for card in machine.cards):
        why = "The firmware names no NUMA node for a card (usual in virtual machines)."
        new = Setting("environment", "SGLANG_AUTO_NUMA_BIND", "0", why, source="derived")
        settings = _with(settings, new)
    return settings


def _model_and_store(
    settings: list[Setting], wanted: Wanted, given: Mapping[str, Any]
) -> list[Setting]:
    """`given`: settings of the store after `--`; each wins over the profile's."""
    root = given.get("root")
    if root is not None and find_store(Path(str(root))) != wanted.store:
        raise ConfigError(
            f"The store is {wanted.store} by --store and {root} by --{EXTRA}: give it once."
        )
    extra = {s.name: s.value for s in settings if s.kind == "store"}
    extra = {**extra, **given, "root": str(wanted.store)}
    first = Setting("sglang", "model-path", wanted.model, "You gave it.", source="command line")
    Config.load(extra, {})  # a wrong setting of the store ends here and not after minutes
    settings = [first, *settings]
    if any((s.kind, s.name) == ("sglang", "enable-hierarchical-cache") for s in settings):
        why = "Where the store is, and its settings (docs: README, Settings)."
        text = json.dumps(extra)
        source = "--store, the profile and the command line" if given else "--store and the profile"
        settings = _with(settings, Setting("sglang", EXTRA, text, why, source=source))
    if wanted.keys:
        why = "API keys come from a file of yours and are never in the process list."
        new = Setting("sglang", "config", str(wanted.keys), why, source="command line")
        settings = _with(settings, new)
    return settings


def _with(settings: list[Setting], new: Setting) -> list[Setting]:
    """`new` in the place of one of its name."""
    kept = [s for s in settings if (s.kind, s.name) != (new.kind, new.name)]
    return [*kept, new]


def _environment(settings: list[Setting]) -> dict[str, str]:
    variables = {s.name: str(s.value) for s in settings if s.kind == "environment"}
    named, by_name = [], {patch.name: patch for patch in PATCHES}
    for setting in settings:
        if setting.kind != "patches":
            continue
        variable = by_name[setting.name].variable
        if setting.value is True:
            named.append(setting.name)
        elif variable:
            variables[variable] = str(setting.value)
        else:
            raise ConfigError(f"The patch {setting.name} takes no value: leave value out.")
    if named:
        variables[VARIABLE] = ",".join(named)
    return variables


def _words(setting: Setting) -> list[str]:
    if setting.value is True:
        return [f"--{setting.name}"]
    return [] if setting.value is False else [f"--{setting.name}", str(setting.value)]
