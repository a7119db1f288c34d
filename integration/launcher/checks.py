"""The preflight: what of a machine would make a start fail, be slow or be unsafe, in words."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.errors import ConfigError, KvtierError
from kvtier.integration.launcher import allreduce, keys, plan
from kvtier.integration.launcher.address import Address
from kvtier.integration.launcher.command import Command, Wanted, fits
from kvtier.integration.launcher.drive import measure
from kvtier.integration.launcher.machine import UNLIMITED, Machine
from kvtier.integration.launcher.profiles import Profile
from kvtier.integration.launcher.supervisor import check_program
from kvtier.sizes import format_size


@dataclass(frozen=True)
class Finding:
    """One line of the preflight."""

    level: str
    """"error": the start would fail or do harm; "warning"; "note"."""
    text: str


def preflight(
    profile: Profile, command: Command, wanted: Wanted, machine: Machine
) -> list[Finding]:
    """All findings, errors first. Reads and writes 64 MiB of the store's drive."""
    found = [
        *_cards(profile, machine),
        *_memory(profile, command, machine),
        *_accelerator(profile, command, machine),
        *_model(wanted.model),
        *_keys(wanted),
        *_raised(lambda: check_program(os.environ)),
        *_raised(lambda: Address.of(command).check_free()),
        *_store(profile, command, wanted, machine),
        *_kernel(machine),
    ]
    return sorted(found, key=lambda finding: ("error", "warning", "note").index(finding.level))


def effective(profile: Profile, command: Command) -> Profile:
    """The profile with the settings that the command has in the end."""
    return replace(profile, settings=tuple(command.settings))


def _cards(profile: Profile, machine: Machine) -> Iterator[Finding]:
    if not profile.cards:
        return
    wanted = ", ".join(map(str, profile.cards))
    if len(machine.cards) < sum(cards.count for cards in profile.cards):
        yield Finding(
            "error",
            f"{profile.name} needs {wanted}; nvidia-smi shows {len(machine.cards)} cards: choose "
            "another profile (kvtier launch --list).",
        )
    elif not fits(profile, machine):
        sizes = ", ".join(f"{card.gib:g}" for card in machine.cards)
        yield Finding(
            "warning", f"{profile.name} is for {wanted}; the cards here have {sizes} GiB."
        )
    if machine.cards_on_bus > len(machine.cards):
        yield Finding(
            "warning",
            f"{machine.cards_on_bus} cards are on the PCIe bus and nvidia-smi shows "
            f"{len(machine.cards)}: one has not come up (power, riser, pci=realloc).",
        )
    if machine.link in ("NODE", "SYS"):
        yield Finding(
            "warning",
            f"Cards are {machine.link} apart (nvidia-smi topo -m): NCCL goes through host memory "
            "between them. Put all cards of a server below one CPU.",
        )
    elif machine.link:
        yield Finding("note", f"The farthest cards are {machine.link} apart.")
    nodes = sorted({card.numa for card in machine.cards} - {None, -1})  # type: ignore[type-var]
    if len(nodes) > 1:
        yield Finding(
            "warning",
            f"The cards are on NUMA nodes {', '.join(map(str, nodes))}: what they share in host "
            "memory (Engram) lies on one of them.",
        )
    for bus in machine.bar_too_small:
        yield Finding(
            "warning", f"{bus}: BAR 1 is smaller than the card can: turn on Resizable BAR."
        )


def _accelerator(profile: Profile, command: Command, machine: Machine) -> Iterator[Finding]:
    other = command.value("device") not in (None, "cuda") or any(
        name in command.environment for name in ("SGLANG_USE_CPU_ENGINE", "SGLANG_PLATFORM")
    )
    if not (profile.cards or machine.cards or machine.cards_on_bus or other):
        yield Finding(
            "warning",
            "nvidia-smi and lspci show no card: without another accelerator SGLang cannot start, "
            "but on a CPU with SGLANG_USE_CPU_ENGINE=1 and -- --device cpu.",
        )


def _memory(profile: Profile, command: Command, machine: Machine) -> Iterator[Finding]:
    if profile.model is None:
        return
    cards = [card.gib for card in machine.cards] if fits(profile, machine) else profile.gib
    planned = plan.plan(effective(profile, command), cards)
    if not planned.row.fits:
        yield Finding(
            "error",
            f"{planned.slots} slots leave {format_size(min(planned.row.free))} free on a card, "
            f"less than {format_size(plan.LEAST_FREE)}: a long prompt would run out of memory. "
            f"kvtier plan {profile.name} shows what fits.",
        )
    if machine.memory and machine.memory < planned.host:
        yield Finding(
            "error",
            f"Host memory is {format_size(machine.memory)}; {format_size(planned.engram)} of "
            f"Engram tables, the host tier of {profile.model.ranks} ranks and a margin need "
            f"{format_size(planned.host)}: lower --hicache-ratio or --max-total-tokens.",
        )
    if not planned.engram:
        return
    if machine.locked_memory not in (UNLIMITED, 0) and machine.locked_memory < planned.host:
        yield Finding(
            "warning",
            f"A process may lock only {format_size(machine.locked_memory)} (ulimit -l): raise it "
            "to unlimited, as the unit of --write-systemd does.",
        )
    if machine.shared_huge_pages not in ("", "always", "advise", "within_size", "force"):
        yield Finding(
            "warning",
            "Shared memory gets no huge pages, and Engram lookups are about ten times slower: "
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled.",
        )


def _raised(check: Callable[[], None]) -> Iterator[Finding]:
    try:
        check()
    except KvtierError as error:
        yield Finding("error", str(error))


_ON_A_HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+|(/[^/\s]+)+\.gguf)?")
"""owner/name; for GGUF files also owner/name:kind and owner/name/file (SGLang 0.5.23)."""

_CONFIGS = ("config.json", "params.json")
"""Transformers' and Mistral's own."""


def _model(model: str) -> Iterator[Finding]:
    folder = Path(model).expanduser()
    if "://" in model:
        return
    if folder.is_dir():
        if not any((folder / name).exists() for name in _CONFIGS):
            yield Finding(
                "error",
                f"{folder} has no config.json and is no model: give a model's own folder to "
                "--model.",
            )
    elif folder.exists():
        if folder.suffix != ".gguf":
            yield Finding("error", f"--model {model} is a file: give the model's folder.")
    elif model.startswith(("/", ".", "~")):
        yield Finding("error", f"There is no model at {model}: give its folder to --model.")
    elif _ON_A_HUB.fullmatch(model):
        yield Finding("note", f"There is no folder {model} here: SGLang takes it from the hub.")
    else:
        yield Finding(
            "error",
            f"There is no folder {model} here, and a name on the hub is OWNER/NAME: mend --model.",
        )


def _keys(wanted: Wanted) -> Iterator[Finding]:
    if wanted.keys is None:
        return
    try:
        keys.check(wanted.keys)
        mode = stat.S_IMODE(wanted.keys.stat().st_mode)
    except ConfigError as error:
        yield Finding("error", str(error))
        return
    if mode & 0o077:
        yield Finding(
            "error", f"Others can read the keys in {wanted.keys}: chmod 600 {wanted.keys}."
        )


def _store(
    profile: Profile, command: Command, wanted: Wanted, machine: Machine
) -> Iterator[Finding]:
    drive = machine.drive
    if drive is None or command.value("hicache-storage-backend") is None:
        return
    on = f"The store {wanted.store} is on {drive.file_system or 'an unknown file system'}"
    if drive.file_system in ("tmpfs", "ramfs", "overlay"):
        yield Finding(
            "warning", f"{on}, which does not outlive the machine or the container: --store."
        )
    if drive.raid == "raid0":
        yield Finding("note", f"{on}, RAID0 ({drive.device}): losing one drive loses the store.")
    if drive.write_cache == "write back":
        yield Finding(
            "note",
            f"{drive.device} has a write cache; each commit flushes it (measured below). Drives "
            "with power-loss protection flush at once.",
        )
    try:
        speed = measure(wanted.store)
    except KvtierError as error:
        yield Finding("warning", f"{error} The server starts without the tier.")
        return
    text = (
        f"{on}, {drive.options}: {format_size(speed.free)} free, read {speed.read / 1e9:.1f} "
        f"GB/s{'' if speed.direct else ' (no O_DIRECT)'}, sync {speed.sync * 1e3:.1f} ms"
    )
    if profile.model is not None:
        planned = plan.plan(effective(profile, command), profile.gib, drive_rate=speed.read)
        longest = planned.sessions[-1]
        text += f"; a session of {longest.tokens:,} tokens is back in about {longest.seconds:.1f} s"
    yield Finding("note", f"{text}.")


def _kernel(machine: Machine) -> Iterator[Finding]:
    if not machine.cards:
        return
    flags = " ".join(machine.kernel) or "none of iommu, pcie_aspm, pci"
    yield Finding("note", f"Kernel flags: {flags}; ASPM {machine.aspm or 'unknown'}.")
    if machine.link == "PHB" and not {"amd_iommu=off", "iommu=pt"} & set(machine.kernel):
        yield Finding(
            "note",
            "The reference rig runs with amd_iommu=off iommu=pt pcie_aspm=off pci=realloc: with "
            "an IOMMU between them cards may not reach each other directly.",
        )


LEAST_SHARE = 0.25
"""Of a card's PCIe link, in an all-reduce. The reference rig: 3.83 GB/s when its cards went
through host memory and 19.57 GB/s directly, on links of 31.5 GB/s: 12 and 62 %."""


def all_reduce(command: Command, machine: Machine, environment: Mapping[str, str]) -> list[Finding]:
    """Whether the cards reach each other as fast as their links allow. Takes about 20 s."""
    if len(machine.cards) < 2:
        return []
    rate = allreduce.measure(len(machine.cards), {**environment, **command.environment})
    if not rate:
        return [
            Finding("warning", "An all-reduce over all cards could not be run: is torch there?")
        ]
    link = min(card.link for card in machine.cards)
    text = f"All-reduce over {len(machine.cards)} cards: {rate / 1e9:.1f} GB/s"
    level = command.environment.get("NCCL_P2P_LEVEL", "not set")
    if rate < LEAST_SHARE * link:
        slow = (
            f"{text}, of links of {link / 1e9:.1f} GB/s, with NCCL_P2P_LEVEL {level}: cards go "
            "through host memory. Look at nvidia-smi topo -m, the IOMMU and ACS."
        )
        return [Finding("error", slow)]
    return [Finding("note", f"{text}, with NCCL_P2P_LEVEL {level}.")]
