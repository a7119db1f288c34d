"""Nothing that was committed is lost, and no byte is wrong, whatever happens: the short form."""

from __future__ import annotations

from lab import results


def test_power_cuts_below_a_file_system() -> None:
    for found in results("cuts", 25, seed=1):
        assert found["figures"]["parts acknowledged"] > 1000
        assert found["figures"]["cuts with a promise"] >= 10


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
