"""The plan against the reference rig's own figures, within 3 %."""

from __future__ import annotations

import dataclasses

import pytest

from kvtier.errors import ConfigError
from kvtier.integration.launcher import profiles
from kvtier.integration.launcher.plan import GB, GIB, expert_split, plan
from kvtier.integration.launcher.profiles import Setting

RIG = profiles.load("rtxpro-mixed")
MODEL = RIG.model
assert MODEL is not None
CLOSE = 0.03


@pytest.mark.parametrize(("slots", "free"), [(2, 5.97), (3, 4.23), (4, 2.50)])
def test_free_memory_of_an_84_gib_card(slots: int, free: float) -> None:
    """nvidia-smi reports 85,651 MiB for it."""
    found = plan(RIG, RIG.gib, slots)
    assert found.row.pool_tokens == slots * 1_050_000
    assert found.row.free[1] / GB == pytest.approx(free, rel=CLOSE)
    assert found.row.fits == (slots < 4)


def test_weights_and_experts() -> None:
    found = plan(RIG, RIG.gib)
    assert found.split == (108, 92, 92, 92)
    assert found.weights[1] / GIB == pytest.approx(69.97, rel=CLOSE)
    assert MODEL.expert_bytes / GIB == pytest.approx(0.70, rel=CLOSE)
    assert MODEL.expert_bytes == int(3 * 5120 * 2304 * (0.5 + 1 / 32)) * 40
    even = plan(profiles.load("rtxpro-4x96"), [95.6] * 4)
    assert even.split == (96,) * 4
    assert even.weights[0] / GIB == pytest.approx(72.63, rel=CLOSE)


def test_a_slot() -> None:
    assert plan(RIG, RIG.gib).slot / GB == pytest.approx(1.7, rel=CLOSE)
    # The pool of sliding windows, 0.51 GB, is the rest of the pool.
    windows = plan(RIG, RIG.gib).row.pool - 3 * plan(RIG, RIG.gib).slot
    assert windows / GB == pytest.approx(0.51, rel=CLOSE)


def test_the_split_follows_the_cards_wherever_they_are() -> None:
    assert expert_split(RIG, [84, 84, 95.6, 84]) == (92, 92, 108, 92)
    assert expert_split(RIG, [140.4] * 4) == (96,) * 4
    assert expert_split(profiles.load("rtxpro-4x96"), [84, 84, 95.6, 84]) is None
    for cards in ([95.6, 80, 84, 90], [84, 96, 96, 96]):
        assert sum(expert_split(RIG, cards) or ()) == MODEL.experts
        free = plan(RIG, cards).row.free
        assert sum(free) / len(free) - min(free) <= MODEL.expert_bytes


@pytest.mark.parametrize(
    ("cards", "split"),
    [
        ([97887, 85651, 85651, 85651], (108, 92, 92, 92)),
        ([85651, 85655, 97887, 85649], (92, 92, 108, 92)),
        ([85651, 85651, 97887, 97887], (87, 87, 105, 105)),
        ([97887] * 4, (96,) * 4),
    ],
)
def test_equal_cards_hold_the_same(cards: list[int], split: tuple[int, ...]) -> None:
    """MiB as nvidia-smi reports them; some cards of a kind report a few more or less."""
    found = plan(RIG, [mib / 1024 for mib in cards])
    assert found.split == split and found.row.fits


def test_a_given_split_is_what_the_plan_uses() -> None:
    assert plan(RIG, RIG.gib, split_given="120,88,88,88").split == (120, 88, 88, 88)
    given = Setting("environment", "KVTIER_EXPERT_SPLIT", "111,91,91,91")
    passed = dataclasses.replace(RIG, settings=(*RIG.settings, given))
    assert plan(passed, RIG.gib).split == (111, 91, 91, 91)
    for wrong in ("108,92,92", "108,92,92,93"):
        with pytest.raises(ConfigError, match="384 experts on 4 cards"):
            plan(RIG, RIG.gib, split_given=wrong)


def test_host_memory_and_sessions() -> None:
    found = plan(RIG, RIG.gib)
    assert found.host_tokens == 6_300_000
    # 9.6 GiB a rank of KV, and about 1 GB of windows.
    assert found.host_rank / GIB == pytest.approx(9.6 + 1.02 / 1.0737, rel=CLOSE)
    assert found.host == found.engram + 4 * found.host_rank + 16 * GB
    sizes = {s.tokens: s.restored / GB for s in found.sessions}
    assert sizes[339_000] == pytest.approx(0.560, rel=CLOSE)
    assert sizes[777_000] == pytest.approx(1.275, rel=CLOSE)
    assert sizes[988_000] == pytest.approx(1.619, rel=CLOSE)
    assert found.sessions[-1].seconds > found.sessions[0].seconds > 0
    slow = plan(RIG, RIG.gib, drive_rate=GB)
    assert slow.sessions[-1].seconds > 3 * found.sessions[-1].seconds


def test_what_is_not_known_is_not_computed() -> None:
    found = plan(profiles.load("rtxpro-2x96"), [95.6, 95.6])
    assert found.weights == found.row.free == ()
    assert found.row.pool_tokens == 801_536
    assert found.row.pool / GB == pytest.approx(801_536 * 8187 / GB, rel=CLOSE)
    with pytest.raises(ValueError):
        plan(profiles.load("generic"), [])


def test_more_tails_and_larger_chunks_take_more() -> None:
    more = [
        dataclasses.replace(s, value=64) if s.name == "swa-prefix-tails" else s
        for s in RIG.settings
    ]
    tails = plan(dataclasses.replace(RIG, settings=tuple(more)), RIG.gib)
    assert tails.row.pool - plan(RIG, RIG.gib).row.pool == 32 * 384 // 256 * 6_439_680
