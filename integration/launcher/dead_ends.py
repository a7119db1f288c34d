"""Settings that somebody has tried already, and what came of it: warnings, never refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.integration.launcher import keys
from kvtier.integration.launcher.command import CALLER, Command
from kvtier.integration.launcher.profiles import Profile


@dataclass(frozen=True)
class DeadEnd:
    """A setting, when it is one, and what happened."""

    kind: str
    name: str
    happens: Callable[[str, float, Profile], bool]
    """Of the value ("" for a flag without one), the profile's own as a number, the profile."""
    what: str


def _always(value: str, usual: float, profile: Profile) -> bool:
    return True


def _more(value: str, usual: float, profile: Profile) -> bool:
    return bool(usual) and _number(value) > usual


def _v4(value: str, usual: float, profile: Profile) -> bool:
    return profile.model is not None


def _other_than(*values: str) -> Callable[[str, float, Profile], bool]:
    return lambda value, usual, profile: value not in values


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return 0.0


DEAD_ENDS = (
    DeadEnd(
        "sglang",
        "chunked-prefill-size",
        lambda value, usual, profile: _v4(value, usual, profile) and _more(value, usual, profile),
        "larger chunks are faster on short prompts and collapse on long ones: with 4,096 the "
        "reference rig's indexer scratch grew into the free memory. Measure a cold prompt of "
        "500,000 tokens or more.",
    ),
    DeadEnd(
        "sglang",
        "max-running-requests",
        _more,
        "the reference rig's fourth slot ran out of memory by 124 MiB (2.50 GB free after the "
        "start were too little). kvtier plan shows how many fit.",
    ),
    DeadEnd(
        "environment",
        "KVTIER_INDEXER_BUDGET_MIB",
        lambda value, usual, profile: _number(value) > 256,
        "with 1,024 MiB the reference rig had 39 failed allocations; 256 is what fits.",
    ),
    DeadEnd(
        "sglang",
        "warmups",
        _always,
        "SGLang 0.5.23 has no serving_coverage; where it exists it ran out of memory. The first "
        "request warms up what it needs.",
    ),
    DeadEnd(
        "environment",
        "PYTORCH_CUDA_ALLOC_CONF",
        _other_than("expandable_segments:True"),
        "expandable_segments:True is needed with this engine and was harmful with the older one: "
        "it belongs to the engine, not to the machine.",
    ),
    DeadEnd(
        "sglang",
        "hicache-size",
        _v4,
        "DeepSeek V4 refuses --hicache-size, and no --hicache-ratio at all: give a ratio.",
    ),
    DeadEnd(
        "sglang",
        "hicache-ratio",
        lambda value, usual, profile: 0 < _number(value) < 2,
        "half of host memory reads from the store at a time: below 2 a session of the card's whole "
        "size is restored in part.",
    ),
    DeadEnd(
        "sglang",
        "hicache-storage-backend",
        _other_than("kvtier"),
        "file is not safe against power loss, serves flipped bytes and evicts the heads of "
        "sessions; dynamic is only for an SGLang whose plugins cannot be loaded.",
    ),
    DeadEnd(
        "sglang",
        "hicache-write-policy",
        _other_than("write_through"),
        "write_back loses what was not evicted when the server dies; write_through_selective "
        "stores only what was used twice.",
    ),
    DeadEnd(
        "sglang",
        "hicache-storage-prefetch-policy",
        _other_than("wait_complete"),
        "best_effort and timeout begin to compute before a long session has been read.",
    ),
    DeadEnd(
        "sglang",
        "swa-full-tokens-ratio",
        _v4,
        "it sizes the windows' pool by the tokens, and swa-prefix-tails is ignored.",
    ),
    DeadEnd(
        "sglang",
        "enable-encoder-swa-bounded-replay",
        _always,
        "an approximation by design: restored answers may differ from computed ones. Tails are "
        "then not stored and swa-prefix-tails has no effect; every page can be restored.",
    ),
    DeadEnd(
        "sglang",
        "page-size",
        lambda value, usual, profile: _v4(value, usual, profile) and value != "256",
        "SGLang forces 256 for DeepSeek V4.",
    ),
    DeadEnd(
        "sglang",
        "tokenizer-worker-num",
        lambda value, usual, profile: _number(value) > 1,
        "SGLang loads no plugins in further HTTP workers: patches for clients are missing there.",
    ),
    DeadEnd(
        "sglang",
        "enable-dp-attention",
        _always,
        "chunked-prefill-size is divided by dp_size: 2,048 becomes 512 on four.",
    ),
    DeadEnd(
        "sglang", "dcp-size", _other_than("1"), "SGLang stores no pages with it: the start ends."
    ),
    DeadEnd(
        "sglang",
        "enable-nccl-nvls",
        lambda value, usual, profile: any("RTX" in cards.name for cards in profile.cards),
        "these cards have PCIe only: multicast over NVLink and symmetric memory cannot be used.",
    ),
    DeadEnd(
        "sglang",
        "disable-cuda-graph",
        _always,
        "deprecated: give --cuda-graph-backend-decode disabled, and the same for prefill.",
    ),
)


def warnings(profile: Profile, command: Command) -> list[str]:
    """What is known of settings that are not the profile's own, and of a server open to others."""
    found = []
    for end in DEAD_ENDS:
        value = _value(end, command)
        own = profile.get(end.kind, end.name)
        if value is None or (own is not None and value == _spelled(own.value)):
            continue
        usual = _number(_spelled(own.value)) if own else 0.0
        if end.happens(value, usual, profile):
            shown = f"{end.name}={value}" if end.kind == "environment" else f"--{end.name} {value}"
            found.append(f"{shown.strip()}: {end.what}")
    return found + _open(command) + _from_the_shell(profile, command)


def _value(end: DeadEnd, command: Command) -> str | None:
    return (
        command.environment.get(end.name) if end.kind == "environment" else command.value(end.name)
    )


def _spelled(value: object) -> str:
    return "" if value is True else str(value)


def _open(command: Command) -> list[str]:
    host = command.value("host")
    if host in (None, "127.0.0.1", "localhost", "::1") or _has_key(command):
        return []
    return [f"--host {host}: anybody who reaches it may use the server. Give --keys FILE."]


def _has_key(command: Command) -> bool:
    """Whether SGLang gets an API key; reads the file of --config, which need not have one."""
    key, file = command.value("api-key"), command.value("config")
    if key is not None or not file:
        return bool(key)
    try:
        keys.check(Path(file))
    except ConfigError:
        return False
    return True


def _from_the_shell(profile: Profile, command: Command) -> list[str]:
    """Variables of the caller's environment that win over the profile's."""
    found = []
    for setting in command.settings:
        own = profile.get("environment", setting.name)
        if setting.source == CALLER and own is not None:
            found.append(
                f"{setting.name}={setting.value}: your environment has it, the profile has "
                f"{own.value}: {own.why}"
            )
    return found
