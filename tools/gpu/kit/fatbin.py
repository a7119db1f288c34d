"""Empty the GPU code in a shared library that a given card would never load.

    fatbin.py IN OUT [--arch 90] [--sources REGEX]

A CUDA library holds its kernels once per architecture, in "fat binaries": a header (magic
0xBA55ED50, version 1) and entries of machine code (kind 2) or PTX (kind 1), each with its
architecture. Payloads that are not needed are overwritten with zeros: size and layout of the file
stay, and the zeros compress to nothing. PTX is kept only where no machine code for the card is.

With --sources, an entry also goes if the CUDA source files it was compiled from (nvcc leaves their
names in its symbols) match the regular expression nowhere; entries that name none stay.
"""

from __future__ import annotations

import argparse
import mmap
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zstandard

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER = struct.Struct("<IHHQ")  # magic, version, header bytes, bytes that follow
ENTRY = struct.Struct("<HHIQ")  # kind, -, header bytes, payload bytes
ARCH_AT = 28
PTX, MACHINE_CODE = 1, 2
SOURCE = re.compile(rb"_INTERNAL_[0-9a-f]+_\d+_(\w+?)_cu_[0-9a-f]+")


class Entry(NamedTuple):
    kind: int
    arch: int
    start: int
    size: int


def sections(path: Path, name: str) -> list[tuple[int, int]]:
    """(offset, size) in the file of each ELF section whose name contains `name`."""
    table = subprocess.run(["readelf", "-SW", path], capture_output=True, text=True, check=True)
    rows = (line.replace("[ ", "[").split() for line in table.stdout.splitlines())
    return [
        (int(row[4], 16), int(row[5], 16))
        for row in rows
        if len(row) > 5 and row[0].startswith("[") and name in row[1]
    ]


def fat_binaries(data: mmap.mmap, start: int, end: int) -> Iterator[list[Entry]]:
    """The entries of each fat binary between two offsets."""
    at = start
    while (at := data.find(MAGIC, at, end)) >= 0:
        _, version, header, size = HEADER.unpack_from(data, at)
        if version != 1 or header != HEADER.size or at + header + size > end:
            at += len(MAGIC)  # four bytes of code that look like a header
            continue
        entries = []
        at, stop = at + header, at + header + size
        while at + 64 <= stop:
            kind, _, entry_header, payload = ENTRY.unpack_from(data, at)
            (arch,) = struct.unpack_from("<I", data, at + ARCH_AT)
            if not 32 <= entry_header <= stop - at - payload:
                break
            entries.append(Entry(kind, arch, at + entry_header, payload))
            at += entry_header + payload
        yield entries
        at = stop


def wanted(entries: list[Entry], arch: int) -> set[Entry]:
    """What a card of this architecture loads: its machine code, else the newest PTX it can take."""
    code = {entry for entry in entries if entry.kind == MACHINE_CODE and entry.arch == arch}
    other = {entry for entry in entries if entry.kind not in (PTX, MACHINE_CODE)}
    texts = [entry for entry in entries if entry.kind == PTX and entry.arch <= arch]
    if code or not texts:
        return code | other
    return {max(texts, key=lambda entry: entry.arch)} | other


def from_sources(payload: bytes, sources: re.Pattern[bytes]) -> bool:
    if payload.startswith(b"\x28\xb5\x2f\xfd"):  # compressed with zstd
        payload = zstandard.ZstdDecompressor().decompressobj().decompress(payload)
    names = set(SOURCE.findall(payload))
    return not names or any(sources.search(name) for name in names)


def prune(path: Path, arch: int, sources: re.Pattern[bytes] | None) -> tuple[int, int]:
    """Empty what is not wanted, in place. Bytes kept and emptied."""
    kept = emptied = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for start, size in sections(path, "__nv_relfatbin"):
            data[start : start + size] = bytes(size)  # left over from linking device code
            emptied += size
        for start, size in sections(path, ".nv_fatbin"):
            for entries in fat_binaries(data, start, start + size):
                keep = wanted(entries, arch)
                for entry in entries:
                    place = slice(entry.start, entry.start + entry.size)
                    if entry in keep and (sources is None or from_sources(data[place], sources)):
                        kept += entry.size
                    else:
                        data[place] = bytes(entry.size)
                        emptied += entry.size
    return kept, emptied


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--sources", type=lambda text: re.compile(text.encode()))
    options = parser.parse_args()
    shutil.copyfile(options.source, options.target)
    kept, emptied = prune(options.target, options.arch, options.sources)
    print(f"{options.source.name}: kept {kept / 1e6:.1f} MB, emptied {emptied / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
