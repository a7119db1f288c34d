"""The machine file: what this machine was when somebody last looked, and what it always needs.

```
[environment]            # by hand: set for every profile
NCCL_P2P_LEVEL = "PHB"

[facts]                  # by the first launch that serves, and by kvtier launch --save-machine
cards = ["NVIDIA RTX PRO 6000 95.6 GiB at 0000:01:00.0", ...]
```
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.integration.launcher.machine import Machine

SYSTEM = Path("/etc/kvtier/machine.toml")

Fact = str | int | list[str]


@dataclass(frozen=True)
class Saved:
    """A machine file as it was read; empty if there is none."""

    path: Path
    facts: Mapping[str, Fact] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def place() -> Path:
    """The system's file if it is there, else the user's; root's is the system's, too, unless
    XDG_CONFIG_HOME is set."""
    home = os.environ.get("XDG_CONFIG_HOME")
    if SYSTEM.exists() or (os.geteuid() == 0 and not home):
        return SYSTEM
    return (Path(home) if home else Path.home() / ".config") / "kvtier" / "machine.toml"


def load(path: Path) -> Saved:
    """Read the file. ConfigError if it is no TOML or has another form."""
    try:
        document = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return Saved(path)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML file ({error}): mend or remove it.") from None
    facts, environment = document.get("facts", {}), document.get("environment", {})
    if not isinstance(facts, dict) or not isinstance(environment, dict):
        raise ConfigError(f"{path}: facts and environment must be tables: mend or remove it.")
    return Saved(path, facts, {name: str(value) for name, value in environment.items()})


def save(saved: Saved, machine: Machine) -> None:
    """Write the facts of `machine`, and the environment as it was."""
    lines = ["# What `kvtier launch` found here; differences at a later start are warnings.", ""]
    lines += ["[environment]", *(f"{k} = {_toml(v)}" for k, v in saved.environment.items()), ""]
    lines += ["[facts]", *(f"{k} = {_toml(v)}" for k, v in facts(machine).items()), ""]
    saved.path.parent.mkdir(parents=True, exist_ok=True)
    scratch = saved.path.with_suffix(".new")
    scratch.write_text("\n".join(lines))
    scratch.replace(saved.path)


def facts(machine: Machine) -> dict[str, Fact]:
    """The facts as a file holds them. The store's drive is not one: it is the profile's."""
    return {
        "cards": [f"{card.name} {card.gib:g} GiB at {card.bus}" for card in machine.cards],
        "link": machine.link,
        "cards_on_bus": machine.cards_on_bus,
        "small_bars": list(machine.bar_too_small),
        "kernel": list(machine.kernel),
        "aspm": machine.aspm,
        "memory": machine.memory,
        "locked_memory": machine.locked_memory,
        "shared_huge_pages": machine.shared_huge_pages,
    }


def differences(saved: Saved, machine: Machine) -> list[str]:
    """What is not as the file says, in words; nothing if there is no file."""
    found = facts(machine)
    return [
        f"{name} was {_toml(before)} and is {_toml(found[name])}"
        for name, before in saved.facts.items()
        if name in found and found[name] != before
    ]


def _toml(value: Fact) -> str:
    return json.dumps(value, ensure_ascii=False)  # for these types TOML is written as JSON
