"""One cap for a store: what is granted, measured and refused, on real files."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from quotas import PATIENCE, Clock, M, Make, crash, fill, layout, make
from spender import write

from kvtier import ledger, quota
from kvtier.backends.local import disk_usage
from kvtier.layout import Layout
from kvtier.ledger import Account
from kvtier.limits import Amount, write_limits
from kvtier.quota import margin

__all__ = ["layout", "make"]


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


def test_a_full_store_is_walked_a_twentieth_of_the_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    one = make(clock=clock)
    fill(one, M)
    ticks = itertools.count()
    monkeypatch.setattr(quota, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    one.measure()  # it takes a second
    seen = one.measurements
    for _ in range(19):
        clock.now += 1
        assert not one.reserve(M)
    assert one.measurements <= seen + 1, "the one that is due after 10 s"
    for _ in range(82):
        clock.now += 1
        assert not one.reserve(M)
    assert 4 <= one.measurements - seen <= 10


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


def test_a_lower_limit_counts_at_once(layout: Layout, make: Make) -> None:
    """Otherwise a store that is below it when it is lowered would pass it."""
    one = make(64 * M, clock=Clock())
    assert one.reserve(M)
    assert one._spare > M
    write_limits(layout, {"limit": Amount(M)})
    assert not one.reserve(4096)
    assert one.reason.endswith("of 1.05 MB (limit)")
    assert one._spare == 0, "what it had ahead went back"
    write_limits(layout, {})
    assert one.reserve(4096)


def test_a_limit_that_is_lowered_while_a_grant_is_under_way(
    layout: Layout, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(64 * M, clock=Clock())
    locked = one._ledger.locked

    @contextlib.contextmanager
    def lowered() -> Iterator[Account]:
        with locked() as account:
            write_limits(layout, {"limit": Amount(8 * M)})
            yield account

    monkeypatch.setattr(one._ledger, "locked", lowered)
    assert not one.reserve(16 * M)
    assert one.reason.endswith("of 8.39 MB (limit)")
    assert one.reserve(4 * M)


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
