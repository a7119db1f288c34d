"""Limits of a store: how they are written, which of them counts, and what they allow."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier import limits
from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.layout import Layout
from kvtier.limits import (
    FILE,
    Amount,
    Cap,
    Limits,
    LimitsFile,
    Space,
    parse_amount,
    read_limits,
    write_limits,
)

G = 10**9


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """An empty store."""
    return Layout.open(tmp_path / "store", create=True)


@pytest.mark.parametrize(
    ("given", "bytes_", "spelled"),
    [
        ("1000G", 1000 * G, "1T"),
        ("64Mi", 64 << 20, "64MiB"),
        (4097, 4097, "4097"),
        ("0", 0, "0"),
        ("80%", 160 * G, "80%"),
        (" 12.5 % ", 25 * G, "12.5%"),
        (".5%", G, "0.5%"),
        ("0%", 0, "0%"),
        ("100%", 200 * G, "100%"),
    ],
)
def test_amounts(given: str | int, bytes_: int, spelled: str) -> None:
    amount = parse_amount(given)
    assert amount.of(200 * G) == bytes_
    assert str(amount) == spelled
    assert parse_amount(spelled) == parse_amount(amount) == amount


@pytest.mark.parametrize("given", ["101%", "-1%", "%", "1e1%", "80%%", "nan%", "80 G%"])
def test_bad_shares_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="is not a share: give 0% to 100%"):
        parse_amount(given)


@pytest.mark.parametrize("given", ["80%", "0.5%", "0.00001%", "100%"])
def test_a_share_is_spelled_as_it_is_given(given: str) -> None:
    assert str(parse_amount(given)) == given


@pytest.mark.parametrize("given", ["", "8x", -1, True, 1.5, None, [], "1000G 80"])
def test_other_amounts_are_refused_with_both_ways_to_write_them(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"A share of the file system is written 80%\.$"):
        parse_amount(given)


def test_settings_have_limits() -> None:
    assert Config().limits == Limits(None, Amount(percent=5.0), None) == Limits()
    config = Config.load(
        {"limit": "80%", "min_free": None}, {"KVTIER_MIN_FREE": "1G", "KVTIER_DAILY_WRITES": "500G"}
    )
    assert config.limits == Limits(Amount(percent=80.0), Amount(G), 500 * G)
    assert Config.load({"limit": None, "daily_writes": None}, {}) == Config()
    with pytest.raises(ConfigError, match=r"^min_free: None is not a size"):
        Config(min_free=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^KVTIER_LIMIT: '120%' is not a share"):
        Config.load(None, {"KVTIER_LIMIT": "120%"})
    with pytest.raises(ConfigError, match=r"^daily_writes is '2000Ti': give a size from 0 to"):
        Config.load({"daily_writes": "2000Ti"}, {})


@pytest.mark.parametrize("given", ["800", 800, "1048575", " 50 "])
@pytest.mark.parametrize("name", ["limit", "min_free", "daily_writes"])
def test_a_setting_without_its_unit_is_refused(name: str, given: str | int) -> None:
    number = str(given).strip()
    with pytest.raises(ConfigError, match=f"^{name}: .*did you mean {number}G.* write {number}B"):
        Config.load({name: given}, {})
    variable = f"KVTIER_{name.upper()}"
    with pytest.raises(ConfigError, match=f"^{variable}: .*did you mean {number}G"):
        Config.load({}, {variable: str(given)})
    meant = getattr(Config.load({name: f"{number}B"}, {}), name)
    assert meant == (int(number) if name == "daily_writes" else Amount(int(number)))


@pytest.mark.parametrize("given", ["0", 0, "1048576", 1 << 20, "800B", "1K", "1%"])
def test_other_numbers_need_no_unit(given: str | int) -> None:
    assert Config.load({"limit": given}, {}).limit == parse_amount(given)


@pytest.mark.parametrize(
    ("limits", "used", "free", "expected"),
    [
        (Limits(), 0, 100, Cap(90, "min_free")),
        (Limits(), 50, 100, Cap(140, "min_free")),
        (Limits(Amount(70)), 50, 100, Cap(70, "limit")),
        (Limits(Amount(percent=50.0)), 50, 100, Cap(100, "limit")),
        (Limits(Amount(150)), 50, 100, Cap(140, "min_free")),
        (Limits(Amount(70)), 90, 100, Cap(70, "limit")),  # already over it
        (Limits(), 5, 0, Cap(0, "min_free")),  # filled by others beyond min_free
        (Limits(), 50, 0, Cap(40, "min_free")),
        (Limits(None, Amount(0)), 50, 100, Cap(150, "min_free")),
        (Limits(Amount(0), Amount(0)), 50, 100, Cap(0, "limit")),
        (Limits(None, Amount(1000)), 50, 100, Cap(0, "min_free")),
    ],
)
def test_the_cap_is_the_least_of_what_the_limits_allow(
    limits: Limits, used: int, free: int, expected: Cap
) -> None:
    assert limits.cap(used, Space(200, free)) == expected


def test_space_is_that_of_the_file_system(tmp_path: Path) -> None:
    space = Space.of(tmp_path)
    status = os.statvfs(tmp_path)
    assert space.size == status.f_blocks * status.f_frsize
    assert 0 < space.free <= space.size


def test_the_file_s_limits_win_at_once_and_only_where_they_say_something(layout: Layout) -> None:
    settings = Limits(Amount(100 * G), Amount(percent=5.0), 7 * G)
    file = LimitsFile(layout, settings)
    assert file.current() == settings
    write_limits(layout, {"limit": Amount(percent=40.0)})
    assert file.current() == Limits(Amount(percent=40.0), Amount(percent=5.0), 7 * G)
    write_limits(layout, {"limit": Amount(80 * G), "min_free": Amount(G), "daily_writes": 0})
    assert file.current() == Limits(Amount(80 * G), Amount(G), 0)
    assert read_limits(layout) == {
        "limit": Amount(80 * G),
        "min_free": Amount(G),
        "daily_writes": 0,
    }
    write_limits(layout, {})
    assert not (layout.path / FILE).exists()
    assert file.current() == settings
    write_limits(layout, {})


def test_the_file_is_private_and_readable_by_people(layout: Layout) -> None:
    write_limits(layout, {"limit": Amount(800 * G), "daily_writes": 64 << 20})
    path = layout.path / FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == {"limit": "800G", "daily_writes": "64MiB"}
    assert [p.name for p in layout.path.iterdir() if p.name.endswith(".tmp")] == []


def test_an_unchanged_file_is_not_read_again(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_limits(layout, {"limit": Amount(G)})
    file = LimitsFile(layout, Limits())
    first = file.current()
    monkeypatch.setattr("kvtier.limits.read_limits", lambda layout: pytest.fail("read again"))
    assert file.current() is first


DAMAGED = [
    b"",
    b"{",
    b"[]",
    b"12",
    b"null",
    b'{"limit": "8x"}',
    b'{"limit": null}',
    b'{"limit": 1.5}',
    b'{"limt": "1G"}',
    b'{"daily_writes": "80%"}',
    b"\xff\xfe",
    b"[" * 60_000,
    b'{"limit": ' + b"9" * 60_000 + b"}",
]


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_one_complaint_and_changes_nothing(
    layout: Layout, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Limits(Amount(5 * G))
    file = LimitsFile(layout, settings)
    (layout.path / FILE).write_bytes(data)
    with pytest.raises(ConfigError, match="damaged and changes nothing for servers"):
        read_limits(layout)
    with caplog.at_level(logging.ERROR, "kvtier"):
        assert [file.current() for _ in range(3)] == [settings] * 3
    assert len(caplog.records) == 1
    assert "kvtier limit --set SIZE" in caplog.text
    write_limits(layout, {"limit": Amount(G)})
    assert file.current().limit == Amount(G)
    (layout.path / FILE).write_bytes(data)  # as an editor that is about to write the rest
    assert file.current().limit == Amount(G)


def test_a_file_that_cannot_be_read_is_tried_again(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = LimitsFile(layout, settings := Limits(Amount(5 * G)))
    write_limits(layout, {"limit": Amount(G)})

    def refuse(layout: Layout) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(limits, "read_limits", refuse)
        assert [file.current() for _ in range(3)] == [settings] * 3
    assert len(caplog.records) == 1
    assert file.current().limit == Amount(G)


def test_a_change_that_hides_its_time_is_seen(layout: Layout) -> None:
    path = layout.path / FILE
    write_limits(layout, {"limit": Amount(G)})
    file = LimitsFile(layout, Limits())
    assert file.current().limit == Amount(G)
    before = path.stat()
    time.sleep(0.05)  # times of files are coarse
    path.write_text(path.read_text().replace("1G", "2G"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.current().limit == Amount(2 * G)


def test_what_is_no_file_is_never_followed(layout: Layout) -> None:
    file = LimitsFile(layout, Limits())
    (layout.path / FILE).symlink_to("/dev/zero")
    assert file.current() == Limits()
    (layout.path / FILE).unlink()
    os.mkfifo(layout.path / FILE)  # it must not be waited for
    assert file.current() == Limits()
    writer = os.open(layout.path / FILE, os.O_RDWR | os.O_NONBLOCK)
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_limits(layout)
    os.close(writer)
    (layout.path / FILE).unlink()
    (layout.path / FILE).mkdir()
    assert file.current() == Limits()
    opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert str(layout.path / FILE) not in opened
