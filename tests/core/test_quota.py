"""One cap over all processes: real files, real processes, kill -9, damage, and a model."""

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
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spender import write

from kvtier import ledger, quota
from kvtier.backends.local import disk_usage
from kvtier.layout import Layout
from kvtier.limits import Amount, Limits, write_limits
from kvtier.quota import Quota, margin

M = 1 << 20
PATIENCE = 120.0


class Clock:
    """Seconds since 1970 that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 20_000 * 86400.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """An empty store."""
    return Layout.open(tmp_path / "store", create=True)


@pytest.fixture
def make(layout: Layout) -> Iterator[Callable[..., Quota]]:
    """Opens quotas of the store, which are closed at the end."""
    opened = []

    def _make(limit: int = 64 * M, *, daily: int | None = None, clock: object = None) -> Quota:
        limits = Limits(Amount(limit), Amount(0), daily)
        opened.append(Quota(layout, limits, clock=clock or time.time))  # type: ignore[arg-type]
        return opened[-1]

    yield _make
    for one in opened:
        one.close()


Make = Callable[..., Quota]


def fill(one: Quota, size: int) -> int:
    """Reserve pieces until refused; bytes reserved."""
    total = 0
    while one.reserve(size):
        total += size
    return total


def crash(one: Quota) -> None:
    """What is left of a process after kill -9: nothing."""
    one._ledger.forget()
    one._closed = True


# Alone


def test_what_is_granted_and_what_is_refused(layout: Layout, make: Make) -> None:
    one = make(10 * M)
    before = disk_usage(layout.path)
    assert one.headroom() == 10 * M - margin(10 * M) - before
    total = fill(one, 64 << 10)
    assert 10 * M - margin(10 * M) - before - (64 << 10) < total <= 10 * M - margin(10 * M) - before
    assert one.reason == "the store takes 10.3 MB of 10.5 MB (limit)"
    assert one.headroom() < 64 << 10
    assert one.reserve(4096)
    assert one.reason == ""
    assert not one.reserve(20 * M)


def test_what_was_spent_is_measured_and_what_was_given_back_serves_again(
    layout: Layout, make: Make
) -> None:
    clock = Clock()
    one = make(10 * M, clock=clock)
    assert one.reserve(4 * M)
    write(layout.segments / "a", 4 * M)
    one.spend(4 * M)
    standing = one.measure()
    assert 4 * M < standing.used == disk_usage(layout.path)
    assert standing.taken == standing.used + one._spare
    assert one.reserve(5 * M)
    assert not one.reserve(3 * M)
    one.give_back(5 * M)
    assert one.reserve(5 * M), "without a measurement: it was spare"
    (layout.segments / "a").unlink()
    assert not one.reserve(4 * M), "it was measured within this second"
    clock.now += 1.1
    assert one.reserve(4 * M)


def test_no_more_is_spent_or_given_back_than_was_reserved(make: Make) -> None:
    one = make(10 * M)
    for end in (one.give_back, one.spend):
        assert one.reserve(M)
        ahead = one._spare
        end(5 * M)
        assert one._spare == one._ledger.held == ahead + (M if end == one.give_back else 0)


def test_a_failed_write_may_have_left_something(layout: Layout, make: Make) -> None:
    """Spent, though only a part is on the drive: counted in full until it is measured."""
    one = make(10 * M)
    assert one.reserve(8 * M)
    write(layout.segments / "part", 2 * M)
    one.spend(8 * M)
    taken = one.standing().taken
    assert taken >= 8 * M
    assert one.measure().taken <= taken - 6 * M


def test_close_gives_back_what_is_ahead(make: Make) -> None:
    one, two = make(), make()
    room = two.headroom()
    assert one.reserve(4096)
    assert two.headroom() < room - M, "it took more ahead"
    one.close()
    one.close()
    assert two.headroom() == room - 4096
    assert two.measure().room > room - 4096
    assert not one.reserve(1)
    assert one.reason == "the store is closed"
    assert one.measure() == one.standing()


def test_measurements_are_rare(make: Make) -> None:
    clock = Clock()
    one, two = make(clock=clock), make(clock=clock)
    assert (one.measurements, two.measurements) == (1, 1)
    for _ in range(1000):
        assert one.reserve(4096)
    assert one.measurements == 1
    fill(one, M)
    assert one.measurements == 1, "one began within this second"
    for _ in range(50):
        clock.now += 0.1
        assert not one.reserve(M)
        assert not two.reserve(M)
    assert 3 <= one.measurements + two.measurements - 2 <= 5
    seen = one.measurements + two.measurements
    for _ in range(100):
        clock.now += 1
        one.reserve(0)
        two.reserve(0)
    assert 9 <= one.measurements + two.measurements - seen <= 11, "one of them every 10 s"
    clock.now -= 1000
    seen = one.measurements
    one.reserve(0)
    assert one.measurements == seen + 1, "a clock that was set back"


def test_measuring_in_one_thread_delays_no_other(
    layout: Layout, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make()
    assert one.reserve(4096)
    walking, go_on = threading.Event(), threading.Event()

    def _walk(path: Path) -> int:
        walking.set()
        assert go_on.wait(PATIENCE)
        return disk_usage(path)

    monkeypatch.setattr(quota, "disk_usage", _walk)
    thread = threading.Thread(target=one.measure)
    thread.start()
    assert walking.wait(PATIENCE)
    assert one.reserve(4096) and one.reserve(8 * M)
    one.spend(8 * M)
    assert one.headroom() > 0
    go_on.set()
    thread.join(PATIENCE)
    assert one.standing().taken >= 8 * M, "granted during the walk"


def test_the_newest_measurement_counts(
    layout: Layout, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make(), make()

    def _walk(path: Path) -> int:
        monkeypatch.undo()
        used = disk_usage(path)
        write(layout.path / "foreign", 4 * M)
        assert two.measure().used > 4 * M
        return used

    monkeypatch.setattr(quota, "disk_usage", _walk)
    assert one.measure().used > 4 * M


# Limits


def test_a_lower_limit_counts_within_a_second(layout: Layout, make: Make) -> None:
    clock = Clock()
    one = make(64 * M, clock=clock)
    assert one.reserve(M)
    assert one._spare > M
    write_limits(layout, {"limit": Amount(M)})
    clock.now += 1
    assert not one.reserve(4096)
    assert one.reason.endswith("of 1.05 MB (limit)")
    assert one._spare == 0, "what it had ahead went back"
    write_limits(layout, {})
    clock.now += 1
    assert one.reserve(4096)


def test_min_free_counts_what_others_put_on_the_file_system(
    layout: Layout, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = [quota.Space(1000 * M, 200 * M)]
    monkeypatch.setattr(quota.Space, "of", lambda path: space[0])
    write_limits(layout, {"min_free": Amount(percent=10.0)})
    one = make(900 * M)
    assert one.standing().limit == "min_free"
    assert 97 * M < one.headroom() < 100 * M
    assert one.reserve(50 * M)
    space[0] = quota.Space(1000 * M, 120 * M)
    assert not one.reserve(40 * M)
    assert one.reason == ("only 126 MB of the file system are free (min_free is 105 MB)"), (
        "without a measurement"
    )
    space[0] = quota.Space(1000 * M, 60 * M)
    one.measure()
    assert one.headroom() < 0
    assert not one.reserve(1)


def test_a_store_above_its_cap_at_start_and_foreign_files(layout: Layout, make: Make) -> None:
    write(layout.path / "foreign", 8 * M)
    one = make(4 * M, clock=(clock := Clock()))
    assert not one.reserve(1)
    assert one.headroom() < -4 * M
    (layout.path / "foreign").unlink()
    clock.now += 2
    assert one.reserve(M)
    (layout.namespaces / "deep").mkdir()
    write(layout.namespaces / "deep" / "foreign", 3 * M)
    clock.now += 11
    assert not one.reserve(4096), "seen within 10 s, though it had some ahead"


# A day


def test_what_is_written_in_a_day(layout: Layout, make: Make) -> None:
    clock = Clock()
    one = make(daily=8 * M, clock=clock)
    for _ in range(8):
        assert one.reserve(M)
        one.spend(M)
    assert not one.reserve(4096)
    assert one.reason == "daily_writes of 8.39 MB are spent until 00:00 UTC"
    assert one.headroom() > 50 * M, "no reason to collect"
    one.close()
    two = make(daily=8 * M, clock=clock)
    assert not two.reserve(4096), "after a restart"
    assert ledger.written_on(layout, 20_000) == 8 * M
    clock.now += 86399
    assert not two.reserve(4096), "a second before midnight"
    clock.now += 1
    assert two.reserve(8 * M), "a new day"
    assert not two.reserve(4096)
    assert ledger.written_on(layout, 20_000) == 0


def test_a_day_s_writes_are_those_of_all_processes(layout: Layout, make: Make) -> None:
    clock = Clock()
    one, two = (make(daily=16 * M, clock=clock) for _ in range(2))
    assert one.reserve(6 * M) and two.reserve(6 * M)
    assert not one.reserve(6 * M)
    two.close()
    assert one.reserve(2 * M), "closed in time, so what it had ahead was not written"
    crash(one)
    three = make(daily=16 * M, clock=clock)
    assert not three.reserve(4 * M), "who knows what it wrote"


def test_what_was_ahead_at_midnight_is_of_the_next_day(layout: Layout, make: Make) -> None:
    clock = Clock()
    one = make(daily=32 * M, clock=clock)
    assert one.reserve(4096) and one._spare > M
    clock.now += 86400
    assert fill(one, M) == 32 * M
    assert ledger.written_on(layout, 20_001) == 32 * M


# Several


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
    """Six processes fill and empty a store, two are killed and replaced, for 10 s; with damage, a
    bit of the ledger flips every 20 ms."""
    limit = 24 * M
    source = random.Random(1)
    with contextlib.ExitStack() as stack:
        sampler = stack.enter_context(_process("sampler.py", layout.path, 100))
        arguments = (layout.path, limit, 512 << 10)
        started = [stack.enter_context(_process("spender.py", *arguments, n, "")) for n in range(6)]
        for process in started:
            _wait_for(process, "refused")
        for n in range(2):
            started[n].kill()
            started.append(stack.enter_context(_process("spender.py", *arguments, 6 + n, "")))
        while sampler.poll() is None:
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
    """From two seconds after the change on (one to notice, one to make room), it holds."""
    with contextlib.ExitStack() as stack:
        for n in range(3):
            arguments = (layout.path, 32 * M, 512 << 10, n, "")
            _wait_for(stack.enter_context(_process("spender.py", *arguments)), "refused")
        write_limits(layout, {"limit": Amount(12 * M)})
        end = time.monotonic() + PATIENCE
        while disk_usage(layout.path) > 12 * M and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(2)
        samples = _samples(stack.enter_context(_process("sampler.py", layout.path, 30)))
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
    monkeypatch.setattr(ledger, "_PATIENCE", 0.1)
    one, two = make(), make()
    with one._ledger.locked():
        begun = time.monotonic()
        assert not two.reserve(M)
        assert "stuck" in two.reason
        assert [two.reserve(M) for _ in range(20)] == [False] * 20
        assert time.monotonic() - begun < 60, "none of them waits again"
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


# A model


Steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["reserve"] * 4
            + ["write"] * 4
            + ["partly", "give_back", "measure", "delete", "crash", "close", "foreign", "wait"]
        ),
        st.integers(0, 2),
        st.integers(1, 24),
    ),
    max_size=60,
)


class Model:
    """Three processes on one store. What is on the drive and what each may yet write is known
    here from what the test itself did; the quota must never let their sum pass the cap."""

    LIMIT = 1 * M

    def __init__(self, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layout = layout
        self.clock = Clock()
        self.number = 0
        self.reserved = [0, 0, 0]
        self.foreign = 0
        self.during: list[tuple[str, int, int]] = []
        """Steps that happen while a directory is walked, between its two halves."""
        monkeypatch.setattr(quota, "disk_usage", self.walk)
        self.quotas = [self.start() for _ in range(3)]

    def start(self) -> Quota:
        return Quota(self.layout, Limits(Amount(self.LIMIT), Amount(0)), clock=self.clock)

    def walk(self, path: Path) -> int:
        steps, self.during = self.during, []
        first = disk_usage(self.layout.segments)
        for step in steps:
            self.do(*step)
        return first + disk_usage(path) - disk_usage(self.layout.segments)

    def do(self, what: str, who: int, blocks: int) -> None:
        one, size = self.quotas[who], blocks * 4096
        if what == "reserve":
            if one.reserve(size):
                self.reserved[who] += size
        elif what == "write":
            size = min(size, self.reserved[who])
            self.put("segments", size)
            one.spend(size)
            self.reserved[who] -= size
        elif what == "partly":  # a write that failed
            size = min(size, self.reserved[who])
            self.put("segments", size // 2)
            one.spend(size)
            self.reserved[who] -= size
        elif what == "give_back":
            size = min(size, self.reserved[who])
            one.give_back(size)
            self.reserved[who] -= size
        elif what == "measure":
            one.measure()
        elif what == "delete":
            for path in sorted(self.layout.segments.iterdir())[:blocks]:
                path.unlink()
        elif what in ("crash", "close"):
            self.put("segments", min(size, self.reserved[who]) if what == "crash" else 0)
            crash(one) if what == "crash" else one.close()
            self.reserved[who] = 0
            self.quotas[who] = self.start()
        elif what == "wait":
            self.clock.now += blocks / 2
        elif self.taken() + size <= self.LIMIT - margin(self.LIMIT):
            # Foreign files, where there is room: no quota can undo what others do.
            self.put("namespaces", size)
            one.measure()

    def put(self, folder: str, size: int) -> None:
        if size:
            self.number += 1
            write(self.layout.path / folder / f"{self.number:04}", size)

    def taken(self) -> int:
        return disk_usage(self.layout.path) + sum(one._ledger.held for one in self.quotas)

    def close(self) -> None:
        for one in self.quotas:
            one.close()


@settings(max_examples=150)
@given(steps=Steps, during=Steps)
def test_the_sum_of_all_never_passes_the_cap(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int, int]],
    during: list[tuple[str, int, int]],
) -> None:
    layout = Layout.open(tmp_path_factory.mktemp("model") / "store", create=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        model = Model(layout, monkeypatch)
        for number, (what, who, blocks) in enumerate(steps):
            # Nothing that waits for the thread that walks: one process measures once at a time.
            model.during = [
                step
                for step in during[number : number + 4]
                if step[1] != who and step[0] not in ("measure", "foreign", "crash", "close")
            ]
            model.do(what, who, blocks)
            assert model.taken() <= model.LIMIT
            for index, one in enumerate(model.quotas):
                assert one._ledger.held == model.reserved[index] + one._spare
        model.close()
        final = model.start().measure()
        assert final.taken == final.used == disk_usage(layout.path)
