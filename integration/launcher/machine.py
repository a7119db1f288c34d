"""What a machine is: cards, how they reach each other, kernel, memory, the store's drive.

Read anew at every start, from text that tools and the kernel give. What cannot be read is left
empty: a fact is never a reason not to start.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

LINKS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
"""How two cards reach each other, from near to far: NVLink, one PCIe switch, several switches, the
PCIe host bridge, several bridges of a NUMA node, between NUMA nodes (nvidia-smi topo -m)."""

KERNEL_FLAGS = ("amd_iommu", "intel_iommu", "iommu", "pcie_aspm", "pci")

UNLIMITED = -1

_QUERY = "--query-gpu=name,memory.total,pci.bus_id,pcie.link.gen.max,pcie.link.width.max"

_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
"""Bytes a second of one PCIe lane by generation."""

Run = Callable[..., str]


@dataclass(frozen=True)
class Card:
    """One card, in the order of its PCI address."""

    name: str
    gib: float
    bus: str
    """PCI address as sysfs writes it: 0000:01:00.0."""
    numa: int | None
    """NUMA node, -1 where the firmware names none, None if it cannot be read."""
    link: float = 0.0
    """What its PCIe link can carry, bytes a second; 0 if not known."""


@dataclass(frozen=True)
class Drive:
    """Where the store lies."""

    file_system: str
    options: str
    device: str
    """Name of the block device, empty if there is none (tmpfs, overlay, network)."""
    raid: str
    write_cache: str
    """What the kernel says: "write back" or "write through"."""


@dataclass(frozen=True)
class Machine:
    """Facts. Sizes in bytes, 0 or empty if not known."""

    cards: tuple[Card, ...]
    link: str
    """The farthest of LINKS between two of the cards; empty for one card."""
    cards_on_bus: int
    """Display controllers of NVIDIA that lspci lists."""
    bar_too_small: tuple[str, ...]
    """Addresses of cards whose BAR 1 is smaller than they support."""
    kernel: tuple[str, ...]
    aspm: str
    memory: int
    locked_memory: int
    """Bytes a process may lock (ulimit -l), UNLIMITED for any."""
    shared_huge_pages: str
    """transparent_hugepage/shmem_enabled: always, advise, never, ..."""
    drive: Drive | None


def read(store: Path | None = None, *, top: Path = Path("/"), run: Run | None = None) -> Machine:
    """The facts of this machine; of another one for tests, below `top` and by what `run` answers.

    `store` need not exist.
    """
    run = run or run_tool
    cards = parse_cards(run("nvidia-smi", _QUERY, "--format=csv,noheader"))
    devices = run("lspci", "-vv", "-d", "10de:")
    return Machine(
        cards=tuple(replace(card, numa=_numa(top, card.bus)) for card in cards),
        link=farthest(parse_topology(run("nvidia-smi", "topo", "-m"))),
        cards_on_bus=len(parse_devices(devices)),
        bar_too_small=tuple(
            bus for bus, (now, best) in parse_devices(devices).items() if now < best
        ),
        kernel=tuple(
            word
            for word in _text(top / "proc/cmdline").split()
            if word.partition("=")[0] in KERNEL_FLAGS
        ),
        aspm=chosen(_text(top / "sys/module/pcie_aspm/parameters/policy")),
        memory=parse_memory(_text(top / "proc/meminfo")),
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shared_huge_pages=chosen(_text(top / "sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        drive=_drive(store, top) if store else None,
    )


# --- text ---------------------------------------------------------------------------------------


def parse_cards(text: str) -> list[Card]:
    """The cards of nvidia-smi's csv for _QUERY, in the order of their addresses, without NUMA."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        memory = re.match(r"\d+", cells[1]) if len(cells) == 5 else None
        if memory:  # "[N/A]" on cards that share the host's memory
            # nvidia-smi writes 8 digits of PCI domain, sysfs 4.
            bus = cells[2].lower().removeprefix("0000")
            known = cells[3].isdigit() and cells[4].isdigit()
            rate = _LANE.get(int(cells[3]), 0.0) * int(cells[4]) if known else 0.0
            found.append(Card(cells[0], round(int(memory[0]) / 1024, 1), bus, None, rate))
    return sorted(found, key=lambda card: card.bus)


def parse_topology(text: str) -> list[str]:
    """The link of every pair of cards in the matrix of nvidia-smi topo -m, one of LINKS."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]  # else it is the line of column titles
    pairs = []
    for number, row in enumerate(rows):
        cells = row[1 : 1 + len(rows)]
        pairs += [re.sub(r"\d+$", "", cell) for cell in cells[number + 1 :]]
    return [pair for pair in pairs if pair in LINKS]


def farthest(pairs: list[str]) -> str:
    """The farthest link of all pairs."""
    return max(pairs, key=LINKS.index, default="")


def p2p_level(link: str) -> str | None:
    """NCCL_P2P_LEVEL for cards whose farthest link this is; None leaves NCCL's own choice.

    NCCL by itself uses direct transfers only up to PXB. Beyond a host bridge they are no gain.
    """
    return "PHB" if link == "PHB" else None


def parse_devices(text: str) -> dict[str, tuple[int, int]]:
    """Address of each display controller of lspci -vv, with the size of BAR 1 and the largest one
    supported in MiB, both 0 where lspci doesn't say."""
    found: dict[str, tuple[int, int]] = {}
    for block in re.split(r"\n(?=\S)", text):
        head = re.match(r"(\S+) (?:VGA compatible controller|3D controller|Display)", block)
        if head:
            bar = re.search(r"BAR 1: current size: (\S+), supported: (.+)", block)
            sizes = [_mib(bar[1]), max(map(_mib, bar[2].split()))] if bar else [0, 0]
            found[head[1]] = (sizes[0], sizes[1])
    return found


def _mib(text: str) -> int:
    match = re.match(r"(\d+)(MB|GB|TB)", text)
    return int(match[1]) * {"MB": 1, "GB": 2**10, "TB": 2**20}[match[2]] if match else 0


def parse_memory(text: str) -> int:
    """Bytes of memory, of /proc/meminfo."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def chosen(text: str) -> str:
    """The word in brackets of a kernel file such as "always [advise] never"."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def parse_mount(text: str, path: Path) -> tuple[str, str, str]:
    """File system, options and device number of the mount of /proc/self/mountinfo that holds
    `path`."""
    best, found = -1, ("", "", "")
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, system = left.split(), right.split()
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[4])
        # A later mount on the same place hides the earlier one.
        if path.is_relative_to(point) and len(point) >= best:
            best, found = len(point), (system[0], fields[5], fields[2])
    return found


# --- files and tools ----------------------------------------------------------------------------


def _drive(store: Path, top: Path) -> Drive:
    place = store.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    kind, options, number = parse_mount(_text(top / "proc/self/mountinfo"), place.resolve())
    block = (top / "sys/dev/block" / number).resolve() if number else top
    if not (block / "queue").is_dir() and (block.parent / "queue").is_dir():
        block = block.parent  # of a partition
    known = (block / "queue").is_dir()
    return Drive(
        file_system=kind,
        options=options,
        device=block.name if known else "",
        raid=_text(block / "md/level").strip(),
        write_cache=_text(block / "queue/write_cache").strip(),
    )


def _numa(top: Path, bus: str) -> int | None:
    text = _text(top / "sys/bus/pci/devices" / bus / "numa_node").strip()
    return int(text) if text else None


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def run_tool(*command: str) -> str:
    """What a tool prints; nothing if it isn't there, fails, or takes more than half a minute."""
    if shutil.which(command[0]) is None:
        return ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        environment = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False, env=environment
        )
        return done.stdout if done.returncode == 0 else ""
    return ""
