"""Byte sizes as people write them: `1000G` is decimal, `64Mi` is binary."""

from __future__ import annotations

import re
from decimal import Decimal

from kvtier.errors import ConfigError

UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
"""Bytes of each unit; case does not matter and a trailing B may follow."""

_LARGEST = 2**63 - 1
"""The largest file offset of the operating system."""

_SIZE = re.compile(r"(?P<number>\d+(\.\d*)?|\.\d+)\s*(?P<unit>[A-Za-z]*)", re.ASCII)
_HELP = "write a number with K, M, G, T (powers of 1000) or Ki, Mi, Gi, Ti (powers of 1024)"


def parse_size(text: str | int) -> int:
    """Bytes of `text`, such as "1000G", "64MiB", "1.5T" or a plain number of bytes.

    A fraction of a byte is dropped where a unit is given ("1.0001K" is 1000 bytes) and refused
    where none is. Raises ConfigError for anything else, including negative sizes.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ConfigError(f"{text!r} is not a size: {_HELP}, for example 1000G.")
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size: {_HELP}, for example 1000G.")
    unit = match["unit"].lower().removesuffix("b")
    if unit not in UNITS:
        raise ConfigError(f"{text!r} has the unknown unit {match['unit']!r}: {_HELP}.")
    exact = Decimal(match["number"]) * UNITS[unit]
    if not unit and exact != int(exact):
        raise ConfigError(f"{text!r} is a fraction of a byte: {_HELP}, for example 1.5T.")
    if exact > _LARGEST:
        raise ConfigError(f"{text!r} is more than a file system can hold (8 Ei): lower it.")
    return int(exact)


def check_unit(value: object) -> None:
    """ConfigError if `value` is a number without a unit below 1 MiB: a unit was left out, or else
    "800B" says that bytes are meant. 0 is the same in all units, and what is no size passes."""
    match = None if isinstance(value, bool) else _SIZE.fullmatch(str(value).strip())
    if match and not match["unit"] and 0 < Decimal(match["number"]) < UNITS["mi"]:
        number = match["number"]
        raise ConfigError(
            f"{value!r} is {number} bytes: did you mean {number}G? "
            f"If bytes are meant, write {number}B."
        )


def format_size(size: int) -> str:
    """`size` bytes for a person: three digits and a decimal unit, such as "418 KB"."""
    if size < 1000:
        return f"{size} B"
    scale, unit = 1000, "KB"
    for larger, name in ((10**6, "MB"), (10**9, "GB"), (10**12, "TB")):
        # From 999.5 on, three digits would show "1000" of the smaller unit.
        if size >= larger - larger // 2000:
            scale, unit = larger, name
    value = size / scale
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def exact_size(size: int) -> str:
    """`size` bytes in the largest unit that divides it: "64MiB", "1000G", "4097"."""
    for name in ("Ti", "Gi", "Mi", "Ki", "T", "G", "M", "K"):
        unit = UNITS[name.lower()]
        if size and size % unit == 0 and size // unit < 10**5:
            return f"{size // unit}{name}B" if name.endswith("i") else f"{size // unit}{name}"
    return str(size)
