"""Profiles: TOML files with every setting of a launch, why it is there, and what it gave.

`profiles/` has those that come with kvtier; a name with a path or `.toml` in it is a file of the
user's. `extends` names another profile whose settings are taken over, one by one. Files whose
names begin with an underscore are there to be extended.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.patches import PATCHES

FOLDER = Path(__file__).parent / "profiles"

KINDS = ("environment", "patches", "store", "sglang")
"""Variables of the environment; patches of SGLang (kvtier/patches.py); settings of the store
(kvtier/config.py); flags of SGLang without their dashes."""

Value = str | int | float | bool


@dataclass(frozen=True)
class Setting:
    """One setting. A flag of value True has no argument; a patch of value True takes none."""

    kind: str
    name: str
    value: Value
    why: str = ""
    measured: str = ""
    source: str = ""
    """The profile that gives the value, or what else decided it."""


@dataclass(frozen=True)
class Cards:
    """Cards that a profile is for: how many, a part of nvidia-smi's name, memory of one in GiB."""

    count: int
    name: str
    gib: float

    def __str__(self) -> str:
        return f"{self.count}x {self.name} ({self.gib:g} GiB)"


@dataclass(frozen=True)
class Model:
    """What `kvtier plan` computes with; profiles/_deepseek-v4.1-flash.toml says where from.

    Sizes in bytes unless the name says otherwise; gb is 10^9. 0 is unknown or none.
    """

    name: str
    ranks: int
    page_tokens: int
    page_bytes: int
    slot_tokens: int
    tail_bytes: int = 0
    window: int = 0
    draft_tokens: int = 1
    weights_gib: float = 0.0
    experts: int = 0
    expert_bytes: int = 0
    engram_gb: float = 0.0
    runtime_gb: float = 0.0


@dataclass(frozen=True)
class Profile:
    """One profile, with what it extends."""

    name: str
    summary: str
    state: str
    cards: tuple[Cards, ...]
    model: Model | None
    settings: tuple[Setting, ...]

    def get(self, kind: str, name: str) -> Setting | None:
        """The setting of that kind and name."""
        return next((s for s in self.settings if (s.kind, s.name) == (kind, name)), None)

    def number(self, flag: str, default: float = 0) -> float:
        """The value of a flag of SGLang that is a number."""
        found = self.get("sglang", flag)
        return float(found.value) if found else default

    @property
    def gib(self) -> list[float]:
        """Memory of each card it is for."""
        return [cards.gib for cards in self.cards for _ in range(cards.count)]


def names() -> list[str]:
    """The profiles that come with kvtier."""
    found = sorted(path.stem for path in FOLDER.glob("[!_]*.toml"))
    return sorted(found, key="generic".__eq__)


def load(name: str, without: Iterable[str] = ()) -> Profile:
    """The profile of that name or file, less the settings that `without` names.

    Raises ConfigError for an unknown profile, a file that is none, and a name in `without` that
    no setting has.
    """
    document = _document(name, ())
    try:
        settings = [
            Setting(kind, key, **entry)
            for kind in KINDS
            for key, entry in document.get(kind, {}).items()
        ]
        cards = tuple(Cards(**entry) for entry in document.get("cards", []))
        model = Model(**document["model"]) if "model" in document else None
    except TypeError as error:
        raise ConfigError(f"Profile {name}: {error}.") from None
    for setting in settings:
        _check(name, setting)
    return Profile(
        name=Path(name).stem if is_path(name) else name,
        summary=str(document.get("summary", "")),
        state=str(document.get("state", "")),
        cards=cards,
        model=model,
        settings=tuple(_left(settings, without)),
    )


def _document(name: str, extended_by: Sequence[str]) -> dict[str, Any]:
    """The tables of a profile file, with what it extends below them."""
    if name in extended_by:
        raise ConfigError(f"Profile {name} extends itself.")
    path = Path(name).expanduser() if is_path(name) else FOLDER / f"{name}.toml"
    try:
        own = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"There is no profile {name}: {_remedy(name)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML file: {error}.") from None
    unknown = set(own) - {"extends", "summary", "state", "cards", "model", *KINDS}
    if unknown:
        raise ConfigError(
            f"{path} has the unknown table {sorted(unknown)[0]!r}: known are {', '.join(KINDS)}, "
            "cards, model."
        )
    document = _document(own["extends"], (*extended_by, name)) if "extends" in own else {}
    for key, value in own.items():
        if key in KINDS:
            document.setdefault(key, {})
            for setting, entry in value.items():
                if not isinstance(entry, dict):
                    raise ConfigError(
                        f"{path}: write [{key}.{setting}] with value = and why = below it."
                    )
                before = document[key].get(setting, {})
                document[key][setting] = {"value": True} | before | entry | {"source": name}
        else:
            document[key] = value
    return document


def is_path(name: str) -> bool:
    """Whether a profile is named by its file."""
    return "/" in name or name.endswith(".toml")


def _remedy(name: str) -> str:
    if is_path(name):
        return "give the path of a TOML file, or a name of kvtier launch --list."
    near = difflib.get_close_matches(name, names(), n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(names())}."


def _check(profile: str, setting: Setting) -> None:
    where = f"Profile {profile}, [{setting.kind}.{setting.name}]"
    if not setting.why:
        raise ConfigError(f"{where}: say why it is there.")
    if not isinstance(setting.value, str | int | float):
        raise ConfigError(f"{where}: value is {setting.value!r}: give a text, a number or true.")
    known = [patch.name for patch in PATCHES]
    if setting.kind == "patches" and setting.name not in known:
        raise ConfigError(f"{where}: no such patch; known are {', '.join(known)}.")


def _left(settings: list[Setting], without: Iterable[str]) -> list[Setting]:
    """`speculative` leaves out all of speculative-algorithm, speculative-dspark-block-size."""
    for name in without:
        plain = name.removeprefix("--")
        kept = [s for s in settings if s.name != plain and not s.name.startswith(f"{plain}-")]
        if len(kept) == len(settings):
            raise ConfigError(
                f"--without {name}: the profile has no such setting; --explain lists them."
            )
        settings = kept
    return settings
