"""The settings of a store: one frozen object, from SGLang's extra config and the environment."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.errors import ConfigError
from kvtier.limits import Amount, Limits, parse_amount
from kvtier.patches import VARIABLES as PATCH_VARIABLES
from kvtier.sizes import check_unit, exact_size, parse_size
from kvtier.tails import TAILS_PER_CHAIN

PREFIX = "KVTIER_"
"""Every setting is also an environment variable: `commit_size` is KVTIER_COMMIT_SIZE."""

SGLANG_KEYS = frozenset(
    {
        "backend_name",
        "class_name",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
"""Keys that SGLang 0.5.23 itself takes from the same JSON (cache_controller.py:664 and 777,
hybrid_cache_controller.py:404-409, backend_factory.py); kvtier accepts and ignores them."""

# A Kubernetes service named kvtier or kvtier-something puts such variables into every container
# of its cluster namespace; they are nobody's spelling mistakes.
_SERVICE_LINK = re.compile(
    r"KVTIER_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40


class _Setting(NamedTuple):
    """How one field is read and checked: its kind, inclusive range or choices, and meaning."""

    kind: str
    meaning: str
    low: float = 0
    high: float = 0
    choices: tuple[str, ...] = ()
    optional: bool = False
    """None is a value: nothing of the kind."""


class ConfigRow(NamedTuple):
    """One line of the table of settings."""

    name: str
    variable: str
    default: str
    allowed: str
    meaning: str


def _setting(default: Any, kind: str, meaning: str, **limits: Any) -> Any:
    return field(default=default, metadata={"setting": _Setting(kind, meaning, **limits)})


def _size(default: int | None, low: int, high: int, meaning: str) -> Any:
    return _setting(default, "size", meaning, low=low, high=high, optional=default is None)


def _seconds(default: float, low: float, high: float, meaning: str) -> Any:
    return _setting(default, "seconds", meaning, low=low, high=high)


def _count(default: int, low: int, high: int, meaning: str) -> Any:
    return _setting(default, "count", meaning, low=low, high=high)


def _switch(default: bool, meaning: str) -> Any:
    return _setting(default, "switch", meaning)


def _choice(default: str, choices: tuple[str, ...], meaning: str) -> Any:
    return _setting(default, "choice", meaning, choices=choices)


_LIMIT = _Setting(
    "amount",
    "What the directory may take; `kvtier limit` changes it while servers run",
    optional=True,
)
_MIN_FREE = _Setting("amount", "What is left free on the file system, whoever fills it")


@dataclass(frozen=True)
class Config:
    """All settings, checked. Sizes are bytes, times are seconds.

    Raises ConfigError, naming the field, for a value of the wrong type or out of its range.
    """

    root: Path | None = field(
        default=None,
        metadata={"setting": _Setting("path", "The store, or the mount that holds it in kvtier/")},
    )
    fingerprint: str = _choice(
        "sampled", ("sampled", "full"), "How the weights are recognised: docs/identity.md"
    )
    limit: Amount | None = field(default=None, metadata={"setting": _LIMIT})
    min_free: Amount = field(default=Amount(percent=5.0), metadata={"setting": _MIN_FREE})
    daily_writes: int | None = _size(
        None, 0, 1024 * TIB, "What may be written in a day (UTC); once spent, puts are refused"
    )
    commit_interval: float = _seconds(
        0.2, 0.0, 60.0, "Longest time a stored page waits to become durable and visible"
    )
    commit_size: int = _size(
        64 * MIB, 4 * KIB, 16 * GIB, "A commit starts early once so many bytes wait"
    )
    segment_size: int = _size(
        GIB, 64 * KIB, 1024 * GIB, "A data file is closed and the next begun at this size"
    )
    staging_size: int = _size(
        256 * MIB, 64 * KIB, 256 * GIB, "Memory per process that pages pass through on their way"
    )
    read_threads: int = _count(4, 1, 64, "Reads of the drive in flight per process")
    # Below the 10 s in which SGLang's storage threads must end when it is flushed or detached, or
    # the server ends (cache_controller.py, _stop_storage_threads).
    read_deadline: float = _seconds(
        8.0,
        0.001,
        3600.0,
        "A get gives what it has read by then; a drive that gave nothing for so long is left alone",
    )
    put_deadline: float = _seconds(
        8.0, 0.001, 3600.0, "A put that finds no room in staging by then is refused"
    )
    direct_io: bool = _switch(True, "Pass by the page cache where the file system can (O_DIRECT)")
    grace: float = _seconds(
        5.0, 0.0, 3600.0, "Time in which pages that are about to be deleted can still be read"
    )
    tails_per_chain: int = _count(
        TAILS_PER_CHAIN,
        1,
        10_000,
        "Most boundaries kept per chain, of pools that are needed at boundaries only (SWA)",
    )

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            object.__setattr__(self, name, _checked(name, setting, getattr(self, name)))
        # Twice: a slice is up to a quarter of staging, and as much may be skipped at its end. With
        # less, staging could be full before a commit is due.
        for larger, times in (("segment_size", 1), ("staging_size", 2)):
            if times * self.commit_size > getattr(self, larger):
                raise ConfigError(
                    f"commit_size is {exact_size(self.commit_size)} and {larger} is only "
                    f"{exact_size(getattr(self, larger))}: raise {larger}"
                    f"{' to twice that' if times == 2 else ''} or lower commit_size."
                )

    @property
    def limits(self) -> Limits:
        """What the store may take and write, as far as these settings say."""
        return Limits(self.limit, self.min_free, self.daily_writes)

    @classmethod
    def load(cls, extra: Mapping[str, Any] | None, environ: Mapping[str, str]) -> Config:
        """The settings of `extra` (SGLang's extra config), then of `environ`, then the defaults.

        A value of null in `extra` and an empty variable count as not given. Raises ConfigError
        for an unknown key of `extra`, an unknown KVTIER_ variable, or a bad value.
        """
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            if not variable.startswith(PREFIX) or _SERVICE_LINK.fullmatch(variable):
                continue
            name = _known(variable, _VARIABLES, "environment variable")
            if name and text.strip():
                values[name] = _given(variable, name, text)
        for key, value in (extra or {}).items():
            if key in SGLANG_KEYS:
                continue
            name = _known(key, {name: name for name in SETTINGS}, "extra config key")
            if value is not None:
                values[name] = _given(key, name, value)
        return cls(**values)


SETTINGS: dict[str, _Setting] = {f.name: f.metadata["setting"] for f in fields(Config)}
_LIMITS = {f.name for f in fields(Limits)}
"""Settings in which a unit that is left out costs what is stored."""
_VARIABLES = {PREFIX + name.upper(): name for name in SETTINGS}
_VARIABLES |= dict.fromkeys(PATCH_VARIABLES, "")  # no settings of a store


def describe() -> list[ConfigRow]:
    """The table of settings in the order of the fields; the README has it."""
    return [
        ConfigRow(
            name=f.name,
            variable=PREFIX + f.name.upper(),
            default=_spelled(SETTINGS[f.name].kind, f.default),
            allowed=_allowed(SETTINGS[f.name]),
            meaning=SETTINGS[f.name].meaning,
        )
        for f in fields(Config)
    ]


def _known(name: object, valid: Mapping[str, str], what: str) -> str:
    """The setting that `name` stands for; ConfigError with the nearest valid name otherwise."""
    if isinstance(name, str) and name in valid:
        return valid[name]
    near = difflib.get_close_matches(str(name), list(valid), n=1)
    remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(valid))}."
    raise ConfigError(f"Unknown {what} {name}: {remedy}")


def _given(label: str, name: str, value: object) -> Any:
    """`value` as a person gave it for the setting `name`; ConfigError names `label`."""
    parsed = _checked(label, SETTINGS[name], value)
    if name in _LIMITS:
        try:
            check_unit(value)
        except ConfigError as error:
            raise ConfigError(f"{label}: {error}") from None
    return parsed


def _checked(name: str, setting: _Setting, value: object) -> Any:
    """`value` as its setting's type. Raises ConfigError naming `name`, the value and the range."""
    if value is None and setting.optional:
        return None
    try:
        parsed = _PARSERS[setting.kind](value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except (ValueError, OverflowError):
        raise ConfigError(f"{name} is {value!r}: give {_allowed(setting)}.") from None
    outside = setting.high and not setting.low <= parsed <= setting.high
    if outside or (setting.choices and parsed not in setting.choices):
        raise ConfigError(f"{name} is {value!r}: give {_allowed(setting)}.")
    return parsed


def _allowed(setting: _Setting) -> str:
    low, high = _spelled(setting.kind, setting.low), _spelled(setting.kind, setting.high)
    return {
        "size": f"a size from {low} to {high}",
        "amount": "a size, or a share of the file system like 80%",
        "seconds": f"seconds from {low} to {high}",
        "count": f"a whole number from {low} to {high}",
        "path": "a path",
        "switch": "true or false",
        "choice": " or ".join(setting.choices),
    }[setting.kind]


def _spelled(kind: str, value: Any) -> str:
    if value is None:
        return ""
    if kind == "size":
        return exact_size(int(value))
    if kind == "switch":
        return str(value).lower()
    return f"{value:g}" if kind in ("seconds", "count") else str(value)


def _parse_path(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError(value)
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(f"{value!r} starts with the home of nobody known: give a path.") from None


def _parse_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(value)
    seconds = float(value.strip().removesuffix("s") if isinstance(value, str) else value)
    if not math.isfinite(seconds):
        raise ValueError(value)
    return seconds


def _parse_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(value)
    return int(value)


def _parse_switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ValueError(value)


def _parse_size(value: object) -> int:
    return parse_size(value)  # type: ignore[arg-type]  # parse_size refuses other types itself


def _parse_choice(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value.strip().lower()


_PARSERS: dict[str, Callable[[object], Any]] = {
    "path": _parse_path,
    "size": _parse_size,
    "amount": parse_amount,
    "seconds": _parse_seconds,
    "count": _parse_count,
    "switch": _parse_switch,
    "choice": _parse_choice,
}
