"""Profiles: what they may hold, how they extend each other, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.integration.launcher import profiles
from kvtier.integration.launcher.command import Wanted, build
from kvtier.integration.launcher.machine import Machine

NOWHERE = Machine((), "", 0, (), (), "", 0, -1, "", None)


def test_the_profiles_that_come_with_kvtier() -> None:
    wanted = {"generic", "rtxpro-mixed", "rtxpro-4x96", "rtxpro-2x96", "h200-4x", "b200-4x"}
    assert set(profiles.names()) == wanted
    for name in wanted:
        profile = profiles.load(name)
        assert profile.summary and profile.state
        tier = {s.name: s.value for s in profile.settings if s.kind == "sglang"}
        assert tier["hicache-storage-backend"] == "kvtier"
        assert (tier["hicache-ratio"], tier["hicache-write-policy"]) == (2, "write_through")
        assert tier["hicache-storage-prefetch-policy"] == "wait_complete"
        assert tier["host"] == "127.0.0.1"
        assert "enable-encoder-swa-bounded-replay" not in tier


def test_the_reference_rig_s_settings() -> None:
    profile = profiles.load("rtxpro-mixed")
    value = {(s.kind, s.name): s.value for s in profile.settings}
    assert profile.gib == [95.6, 83.6, 83.6, 83.6]
    for flag, wanted in {
        "tp-size": 4,
        "ep-size": 4,
        "chunked-prefill-size": 2048,
        "max-running-requests": 3,
        "max-total-tokens": 3_150_000,
        "mem-fraction-static": 0.942,
        "swa-prefix-tails": 32,
        "speculative-algorithm": "DSPARK",
        "speculative-dspark-block-size": 5,
        "kv-cache-dtype": "fp8_e4m3",
    }.items():
        assert value["sglang", flag] == wanted
    assert value["patches", "indexer_budget"] == "256"
    assert value["environment", "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE"] == "1"
    assert value["environment", "SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT"] == "shared"
    # Only where cards differ may SGLang's own check be off.
    assert value["environment", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"
    for name in set(profiles.names()) - {"rtxpro-mixed"}:
        other = profiles.load(name)
        assert other.get("environment", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK") is None
        assert other.get("patches", "expert_split") is None


def test_a_profile_of_one_s_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'extends = "rtxpro-4x96"\nsummary = "mine"\n'
        "[sglang.max-running-requests]\nvalue = 2\n"
        '[sglang.log-level]\nvalue = "info"\nwhy = "I want it."\n'
    )
    profile = profiles.load(str(file))
    slots = profile.get("sglang", "max-running-requests")
    assert profile.name == "mine" and slots is not None
    assert (slots.value, slots.source) == (2, str(file))
    assert slots.why.startswith("Three sessions")  # the reason is that of what it extends
    assert "--log-level info" in build(profile, Wanted("/m", Path("/s")), NOWHERE).shell()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "rtxpro-4x69"', "There is no profile rtxpro-4x69: did you mean rtxpro-4x96?"),
        ("[sglang.tp-size]\nvalue = 2", "say why it is there"),
        ("[sglang]\ntp-size = 2", r"write \[sglang.tp-size\] with value = and why = below it"),
        ("[flags.tp-size]\nvalue = 2", "unknown table 'flags'"),
        ('[patches.expert_spilt]\nwhy = "x"', "no such patch"),
        ('[sglang.tp-size]\nvalue = [2]\nwhy = "x"', "give a text, a number or true"),
        ('[sglang.tp-size]\nvalues = 2\nwhy = "x"', "unexpected keyword argument 'values'"),
        ("[sglang", "is no TOML file"),
    ],
)
def test_what_is_wrong_with_a_profile_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        profiles.load(str(file))


def test_a_profile_cannot_extend_itself(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'extends = "{file}"')
    with pytest.raises(ConfigError, match="extends itself"):
        profiles.load(str(file))


def test_settings_can_be_left_out() -> None:
    profile = profiles.load("rtxpro-mixed", ["speculative", "--disable-custom-all-reduce"])
    names = {s.name for s in profile.settings}
    assert not {n for n in names if n.startswith("speculative")}
    assert "disable-custom-all-reduce" not in names and "tp-size" in names
    with pytest.raises(ConfigError, match="has no such setting"):
        profiles.load("generic", ["tp-size"])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('[store.limits]\nvalue = "1G"', "did you mean limit"),
        ('[patches.clients]\nvalue = "yes"', "takes no value"),
    ],
)
def test_settings_that_nobody_knows_end_the_launch(
    tmp_path: Path, table: str, message: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'extends = "generic"\n{table}\nwhy = "x"\n')
    with pytest.raises(ConfigError, match=message):
        build(profiles.load(str(file)), Wanted("/m", Path("/s")), NOWHERE)
