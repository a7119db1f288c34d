"""Quotas under test: how they are opened, filled and killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier import quota
from kvtier.layout import Layout
from kvtier.ledger import Account, Busy, Ledger
from kvtier.limits import Amount, Limits
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
def make(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Quota]]:
    """Opens quotas of the store, which are closed at the end. They find that walks take no time:
    how often they measure does not depend on the machine."""
    monkeypatch.setattr(quota, "time", SimpleNamespace(monotonic=lambda: 0.0))
    opened = []

    def _make(limit: int = 64 * M, *, daily: int | None = None, clock: object = None) -> Quota:
        limits = Limits(Amount(limit), Amount(0), daily)
        opened.append(Quota(layout, limits, clock=clock or time.time))  # type: ignore[arg-type]
        return opened[-1]

    yield _make
    for one in opened:
        one.close()


Make = Callable[..., Quota]


def within(layout: Layout, cap: int) -> bool:
    """Whether what the store takes and its processes may yet write leaves this cap its margin. If
    that is the store's limit, it stays so, whatever was granted before."""
    account = accounted(layout)
    return account.measured > 0 and account.taken <= cap - margin(cap)


def accounted(layout: Layout) -> Account:
    """The store's record; an empty one while somebody else has it."""
    ledger = Ledger(layout)
    try:
        with ledger.locked() as account:
            return account
    except Busy:
        return Account()
    finally:
        ledger.forget()


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
