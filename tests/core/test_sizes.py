"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.sizes import exact_size, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("512B", 512),
        ("1K", 1000),
        ("1k", 1000),
        ("1Ki", 1024),
        ("1KiB", 1024),
        ("64MiB", 64 << 20),
        ("64 MiB", 64 << 20),
        ("64MB", 64_000_000),
        ("1000G", 10**12),
        ("1.5T", 1_500_000_000_000),
        ("1.5Ti", 3 << 39),
        (".5G", 500_000_000),
        ("2.K", 2000),
        (" 7M\n", 7_000_000),
        ("1.0001K", 1000),
        ("0.1K", 100),
        ("8.0", 8),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", " ", "G", "B", "ten", "1,5G", "1e9", "0x10", "-1", "-1G", -1, "+1", "1G2", "1 0G",
     "\uff11G", "1.2.3K", ".", "inf", True, None, 1.5, b"1G", "1\0"],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_the_units(text: object) -> None:
    with pytest.raises(ConfigError, match=r"K, M, G, T .*Ki, Mi, Gi, Ti") as caught:
        parse_size(text)  # type: ignore[arg-type]
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("unit", ["Q", "Kb i", "GG", "iB", "Bi", "KBi", "GiBB", "bytes", "E", "Pi"])
def test_an_unknown_unit_is_refused(unit: str) -> None:
    with pytest.raises(ConfigError, match="K, M, G, T"):
        parse_size(f"1{unit}")


def test_the_unknown_unit_is_named_as_written() -> None:
    with pytest.raises(ConfigError, match="'12Q' has the unknown unit 'Q'"):
        parse_size("12Q")


def test_fractions_of_a_byte_and_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="fraction of a byte"):
        parse_size("1.5")
    with pytest.raises(ConfigError, match="lower it"):
        parse_size("9223372036854775808")
    with pytest.raises(ConfigError, match="lower it"):
        parse_size("9" * 10_000 + "T")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (417_920, "418 KB"),
        (9_994, "9.99 KB"),
        (9_996, "10.0 KB"),
        (99_940, "99.9 KB"),
        (99_960, "100 KB"),
        (999_499, "999 KB"),
        (999_500, "1.00 MB"),
        (1_613_000_000, "1.61 GB"),
        (10**12, "1.00 TB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, 2**62))
def test_what_is_shown_can_be_typed(size: int) -> None:
    assert parse_size(exact_size(size)) == size
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.006)


@given(st.integers(1, 99_999), st.sampled_from(["K", "M", "G", "T", "KiB", "MiB", "GiB", "TiB"]))
def test_exact_sizes_are_short(number: int, unit: str) -> None:
    text = f"{number}{unit}"
    assert parse_size(exact_size(parse_size(text))) == parse_size(text)
    assert len(exact_size(parse_size(text))) <= max(len(text), 8)


def test_exact_sizes_prefer_binary_units() -> None:
    assert exact_size(64 << 20) == "64MiB"
    assert exact_size(10**12) == "1T"
    assert exact_size(4097) == "4097"
