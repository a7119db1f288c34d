"""One cap over all processes: real ones, kill -9, forks, and damage of what they share."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
from making import until
from quotas import PATIENCE, Clock, M, Make, crash, fill, layout, make, within
from spender import write

from kvtier import ledger, quota
from kvtier.backends.local import disk_usage
from kvtier.layout import Layout
from kvtier.limits import Amount, write_limits

__all__ = ["layout", "make"]


def test_two_descriptors_in_one_process_share_the_cap(layout: Layout, make: Make) -> None:
    """As two containers do that know each other's process as their own id."""
    one, two = make(32 * M), make(32 * M)
    for _ in range(15):
        assert one.reserve(M) and two.reserve(M)
    assert not one.reserve(2 * M) and not two.reserve(2 * M)
    assert one.measure().taken >= 30 * M
    crash(one)
    two.measure()
    assert fill(two, M) >= 15 * M


def test_places_are_used_again(make: Make) -> None:
    many = [make() for _ in range(20)]
    assert sorted(one._ledger._start // ledger.SPAN for one in many) == list(range(1, 21))
    for one in many:
        assert one.reserve(4096)
    assert many[0]._ledger.others() == sum(one._ledger.held for one in many[1:])
    for one in many[:10]:
        crash(one)
    assert many[10]._ledger.others() == sum(one._ledger.held for one in many[11:])
    assert make()._ledger._start == ledger.SPAN


@contextlib.contextmanager
def _process(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _wait_for(process: subprocess.Popen[str], word: str) -> None:
    lines: IO[str] | None = process.stdout
    assert lines is not None
    for line in lines:
        if line.strip() == word:
            return
    raise AssertionError(f"it ended without {word}: status {process.wait(PATIENCE)}")


def _samples(process: subprocess.Popen[str]) -> list[int]:
    output, _ = process.communicate(timeout=PATIENCE)
    found: list[int] = json.loads(output)
    return found


@pytest.mark.parametrize("damage", [False, True], ids=["sound", "damaged"])
def test_the_cap_holds_at_every_sample_under_load(layout: Layout, damage: bool) -> None:
    """Six processes fill and empty a store, two are killed and replaced; with damage, a bit of the
    ledger flips every 20 ms."""
    limit = 24 * M
    source = random.Random(1)
    with contextlib.ExitStack() as stack:
        sampler = stack.enter_context(_process("sampler.py", layout.path))
        arguments = (layout.path, limit, 512 << 10)
        started = [stack.enter_context(_process("spender.py", *arguments, n, "")) for n in range(6)]
        for process in started:
            _wait_for(process, "refused")
        for n in range(2):
            started[n].kill()
            started.append(stack.enter_context(_process("spender.py", *arguments, 6 + n, "")))
        for _ in range(500):
            if damage:
                _flip(layout, source)
            time.sleep(0.02)
        assert [process.poll() for process in started[2:]] == [None] * 6
        samples = _samples(sampler)
    assert max(samples) <= limit
    assert max(samples) > limit // 2, "the load was no load"


def _flip(layout: Layout, source: random.Random) -> None:
    path = layout.index / ledger.FILE
    with path.open("r+b") as file:
        data = bytearray(file.read())
        if data:
            place = source.randrange(len(data))
            file.seek(place)
            file.write(bytes([data[place] ^ 1 << source.randrange(8)]))


def test_a_lower_limit_under_load(layout: Layout) -> None:
    """As soon as it is reached, it holds, and what is written goes on."""
    with contextlib.ExitStack() as stack:
        spenders = []
        for n in range(3):
            arguments = (layout.path, 32 * M, 512 << 10, n, "")
            spenders.append(stack.enter_context(_process("spender.py", *arguments)))
            _wait_for(spenders[-1], "refused")
        write_limits(layout, {"limit": Amount(12 * M)})
        until(lambda: within(layout, 12 * M), "the lower limit was never reached")
        before = {path.name for path in layout.segments.iterdir()}
        samples: list[int] = []

        def written() -> bool:
            samples.append(disk_usage(layout.path))
            now = {path.name for path in layout.segments.iterdir()}
            return len(samples) >= 60 and not now <= before

        until(written, "nothing is written any more")
        assert [process.poll() for process in spenders] == [None] * 3
    assert max(samples) <= 12 * M


def test_a_killed_process_gives_back_what_it_held(layout: Layout, make: Make) -> None:
    one = make(32 * M)
    with _process("spender.py", layout.path, 32 * M, 16 * M, 0, "hold") as process:
        _wait_for(process, "held")
        standing = one.measure()
        assert standing.taken >= standing.used + 16 * M
        assert not one.reserve(16 * M)
        process.kill()
        process.wait(PATIENCE)
        standing = one.measure()
        assert standing.taken == standing.used + one._spare
        assert 8 * M <= standing.used < 9 * M
        assert one.reserve(16 * M)


def test_a_stopped_process_costs_puts_and_not_time(
    layout: Layout, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped just while it held the record."""
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    monkeypatch.setattr(ledger, "time", clock)
    one, two = make(), make()
    with one._ledger.locked():
        assert not two.reserve(M)
        assert "stuck" in two.reason and len(slept) > 1
        slept.clear()
        assert [two.reserve(M) for _ in range(20)] == [False] * 20
        assert len(slept) <= 20, "none of them waits again"
        three = make()
        assert not three.reserve(M), "nor does one take what it cannot account for"
        assert two.measure() == two.standing()
    assert two.reserve(M)
    assert three.reserve(M)


def test_a_fork_has_no_share_and_keeps_none_alive(layout: Layout, make: Make) -> None:
    one, two = make(32 * M), make(32 * M)
    assert one.reserve(16 * M)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        refused = not one.reserve(1) and one.headroom() is not None
        os.write(writing, b"y" if refused else b"n")
        time.sleep(PATIENCE)
        os._exit(0)
    try:
        assert os.read(reading, 1) == b"y"
        assert two._ledger.others() == one._ledger.held
        crash(one)
        assert two._ledger.others() == 0, "though the child lives"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


# Damage


@pytest.mark.parametrize("seed", range(40))
def test_damage_of_the_ledger_never_lets_the_cap_pass(
    layout: Layout, make: Make, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = random.Random(seed)
    limit = 8 * M
    clock = Clock()
    several = [make(limit, clock=clock) for _ in range(3)]
    path = layout.index / ledger.FILE
    number = granted = 0
    for _ in range(150):
        clock.now += 0.3
        one = source.choice(several)
        size = source.randrange(1, 64) * 4096
        if one.reserve(size):
            granted += 1
            write(layout.segments / str(number), size)
            one.spend(size)
            number += 1
        elif number:
            for name in layout.segments.iterdir():
                if source.random() < 0.3:
                    name.unlink()
            source.choice(several).measure()
        if source.random() < 0.2:
            data = bytearray(path.read_bytes())
            how = source.randrange(4)
            if how == 0:
                data[source.randrange(len(data))] ^= 1 << source.randrange(8)
            elif how == 1:
                del data[source.randrange(len(data)) :]
            elif how == 2:
                data = bytearray(source.randbytes(source.randrange(300)))
            else:
                data = bytearray(len(data))
            path.write_bytes(data or b"?")
        assert disk_usage(layout.path) <= limit
    assert granted > 50


def test_a_ledger_that_went_is_made_anew(layout: Layout, make: Make) -> None:
    one, two = make(32 * M), make(32 * M)
    assert one.reserve(16 * M)
    (layout.index / ledger.FILE).unlink()
    assert one.headroom() > 0
    three = make(32 * M)
    assert three.standing().taken >= 16 * M
    assert not three.reserve(16 * M)
    assert two.reserve(M)
    assert len({q._ledger._start for q in (one, two, three)}) == 3


def test_what_is_held_moves_to_the_new_file(layout: Layout, make: Make) -> None:
    one = make(32 * M)
    assert one.reserve(16 * M)
    (layout.index / ledger.FILE).unlink()
    two = make(32 * M)
    assert two.standing().taken < 16 * M, "it cannot know"
    one.headroom()
    assert two.standing().taken >= 16 * M, "without a measurement"


def test_a_ledger_of_another_version_and_what_it_says(
    layout: Layout, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    one = make(daily=8 * M, clock=clock)
    assert fill(one, M) == 8 * M
    path = layout.index / ledger.FILE
    data = bytearray(path.read_bytes())
    data[4] += 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING, "kvtier"):
        assert not one.reserve(64 * M)
        assert one.reserve(M), "today's writes are not known any more"
    assert "is damaged or of another version" in caplog.text
    assert "daily_writes counts from zero" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("noticed", [False, True])
def test_a_measurement_begun_before_the_ledger_was_damaged_is_not_believed(
    layout: Layout, make: Make, monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    one, two = make(32 * M), make(32 * M)
    for number in range(8):
        assert two.reserve(2 * M)
        write(layout.segments / str(number), 2 * M)
        two.spend(2 * M)

    def _walk(path: Path) -> int:
        monkeypatch.undo()
        used = disk_usage(path)
        (layout.index / ledger.FILE).write_bytes(b"damage")
        if noticed:
            two.measure()
        return used

    monkeypatch.setattr(quota, "disk_usage", _walk)
    one.measure()
    assert two.reserve(M)
    assert two.standing().taken >= disk_usage(layout.path) + two._ledger.held


@pytest.mark.parametrize("fault", ["no locks", "no file", "directory"])
def test_where_there_is_no_ledger_the_cap_holds_for_this_process(
    layout: Layout,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    clock = Clock()
    if fault == "no locks":
        monkeypatch.setattr(fcntl, "F_OFD_SETLK", 9999)
    elif fault == "no file":
        (layout.index / ledger.FILE).symlink_to(layout.path / "elsewhere")
    else:
        (layout.index / ledger.FILE).mkdir()
    with caplog.at_level(logging.WARNING, "kvtier"):
        one = make(8 * M, clock=clock)
        for number in range(100):
            clock.now += 0.3
            if one.reserve(256 << 10):
                write(layout.segments / str(number), 256 << 10)
                one.spend(256 << 10)
            assert disk_usage(layout.path) <= 8 * M
    assert disk_usage(layout.path) > 7 * M
    warnings = [r for r in caplog.records if "holds for this process alone" in r.getMessage()]
    assert len(warnings) == 1
    monkeypatch.undo()
    if fault == "directory":
        (layout.index / ledger.FILE).rmdir()
    elif fault == "no file":
        (layout.index / ledger.FILE).unlink()
    one.measure()
    assert ledger.decode((layout.index / ledger.FILE).read_bytes()) is not None, "used again"


def test_a_directory_that_cannot_be_measured_takes_nothing(
    layout: Layout,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def _fail(path: Path) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(quota, "disk_usage", _fail)
    one = make()
    assert not one.reserve(1)
    assert one.reason == "the store's directory could not be measured"
    assert "Input/output error" in caplog.text
    monkeypatch.undo()
    assert one.reserve(1)


def test_the_file_is_private_and_documented(layout: Layout, make: Make) -> None:
    make()
    path = layout.index / ledger.FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == ledger.LEDGER.size
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    table = text.partition("### Record: `LEDGER`")[2].partition("\n\n###")[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \|", table, re.MULTILINE)
    sizes = [int(size) for _, size in rows]
    assert [int(offset) for offset, _ in rows] == [sum(sizes[:n]) for n in range(len(sizes))]
    assert sizes == [4, 4] + [8] * 11 and sum(sizes) == ledger.LEDGER.size
