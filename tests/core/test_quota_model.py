"""Random interleavings of three processes against a plain model of what is on the drive."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quotas import Clock, M, crash
from spender import write

from kvtier import quota
from kvtier.backends.local import disk_usage
from kvtier.layout import Layout
from kvtier.limits import Amount, Limits, write_limits
from kvtier.quota import Quota, margin

Steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["reserve"] * 4
            + ["write"] * 4
            + ["partly", "give_back", "measure", "delete", "crash", "close", "foreign", "wait"]
            + ["limit"] * 3
        ),
        st.integers(0, 2),
        st.integers(1, 24),
    ),
    max_size=60,
)


class Model:
    """Three processes on one store. What is on the drive and what each may yet write is known
    here from what the test itself did; the quota must never let their sum pass the cap."""

    MOST = 1 * M

    def __init__(self, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layout = layout
        self.clock = Clock()
        self.number = 0
        self.reserved = [0, 0, 0]
        self.foreign = 0
        self.during: list[tuple[str, int, int]] = []
        """Steps that happen while a directory is walked, between its two halves."""
        monkeypatch.setattr(quota, "disk_usage", self.walk)
        self.quotas: list[Quota] = []
        self.change(self.MOST)
        self.quotas = [self.start() for _ in range(3)]

    def start(self) -> Quota:
        return Quota(self.layout, Limits(Amount(self.MOST), Amount(0)), clock=self.clock)

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
        elif what == "limit":
            self.change(self.MOST // (1 + blocks % 4))
        elif self.taken() + size <= self.limit - margin(self.limit):
            # Foreign files, where there is room: no quota can undo what others do.
            self.put("namespaces", size)
            one.measure()

    def change(self, limit: int) -> None:
        write_limits(self.layout, {"limit": Amount(limit)})
        self.limit = limit
        self.most = max(limit, self.taken() + margin(self.MOST))

    def check(self) -> None:
        """What was granted before a limit was lowered may be written, and no more is granted until
        there is room."""
        assert self.taken() <= self.most
        self.most = max(self.limit, min(self.most, self.taken() + margin(self.MOST)))

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
            model.check()
            for index, one in enumerate(model.quotas):
                assert one._ledger.held == model.reserved[index] + one._spare
        model.close()
        final = model.start().measure()
        assert final.taken == final.used == disk_usage(layout.path)
