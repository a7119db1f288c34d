"""Nothing that was committed is lost, and no byte is wrong, whatever happens: the short form."""

from __future__ import annotations

import pytest
from lab import results


@pytest.mark.needs_root
def test_power_cuts_below_a_file_system() -> None:
    for found in results("cuts", 25, seed=1):
        assert found["figures"]["parts acknowledged"] > 1000
        assert found["figures"]["cuts with a promise"] >= 10


@pytest.mark.needs_root
def test_torn_and_reordered_writes_below_a_drive() -> None:
    for found in results("replay", 16, seed=1):
        assert found["figures"]["with torn and reordered writes"] >= 8
        assert found["figures"]["parts required"]


def test_kills() -> None:
    for found in results("kills", 10, seed=1):
        assert found["figures"]["processes killed"] >= 10
        assert found["figures"]["parts acknowledged"]


def test_bit_rot() -> None:
    files, mutations = results("rot", 20, seed=1)
    assert files["figures"]["parts found exact"] > 1000
    assert mutations["runs"] == 20_000 and mutations["figures"]["decoded"]


def test_faults_of_file_calls() -> None:
    [found] = results("faults", 1, seed=1)
    assert found["runs"] >= 35


@pytest.mark.needs_root
def test_faults_below_a_store() -> None:
    systems, drives, syncs, memory = results("drives", 1, seed=1)
    assert min(found["runs"] for found in (systems, drives, syncs)) >= 3
    assert memory["runs"] or "not run" in memory["figures"]


def test_late_reads() -> None:
    results("late", 1, seed=1)
