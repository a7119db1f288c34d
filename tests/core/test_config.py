"""Settings: where they come from, and how wrong ones are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import SGLANG_KEYS, Config, describe
from kvtier.errors import ConfigError


def test_defaults() -> None:
    assert Config.load(None, {}) == Config.load({}, {}) == Config()
    config = Config()
    assert config.root is None
    assert config.fingerprint == "sampled"
    assert (config.commit_interval, config.commit_size) == (0.2, 64 << 20)
    assert (config.segment_size, config.staging_size) == (1 << 30, 256 << 20)
    assert (config.read_threads, config.read_deadline, config.put_deadline) == (4, 8.0, 8.0)
    assert (config.direct_io, config.grace) == (True, 5.0)


def test_extra_config_wins_over_the_environment_and_that_over_defaults() -> None:
    environ = {"KVTIER_GRACE": "7", "KVTIER_READ_THREADS": "2", "HOME": "/root"}
    config = Config.load({"grace": 9}, environ)
    assert config.grace == 9.0
    assert config.read_threads == 2
    assert config.commit_interval == 0.2


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("root", "/mnt/scratch", Path("/mnt/scratch")),
        ("root", "~/cache", Path.home() / "cache"),
        ("root", "relative", Path.cwd() / "relative"),
        ("fingerprint", "full", "full"),
        ("fingerprint", " Full ", "full"),
        ("commit_interval", "0", 0.0),
        ("commit_interval", "0.5", 0.5),
        ("commit_interval", "0.5s", 0.5),
        ("commit_size", "1Mi", 1 << 20),
        ("segment_size", "2G", 2 * 10**9),
        ("read_threads", "16", 16),
        ("direct_io", "false", False),
        ("direct_io", "1", True),
    ],
)
def test_each_kind_of_value_as_text_from_both_places(name: str, given: str, value: object) -> None:
    for config in (
        Config.load({name: given}, {}),
        Config.load(None, {f"KVTIER_{name.upper()}": given}),
    ):
        assert getattr(config, name) == value
        assert type(getattr(config, name)) is type(value)


def test_json_values_keep_their_types() -> None:
    extra: dict[str, Any] = {"grace": 1, "direct_io": False, "commit_size": 8192, "root": None}
    config = Config.load(extra, {"KVTIER_ROOT": ""})
    assert config == Config(grace=1.0, direct_io=False, commit_size=8192)
    assert type(config.grace) is float


def test_sglang_s_own_keys_are_accepted_and_ignored() -> None:
    assert Config.load(dict.fromkeys(SGLANG_KEYS, "anything"), {}) == Config()
    assert {"prefetch_threshold", "hicache_storage_pass_prefix_keys", "module_path"} <= SGLANG_KEYS
    assert SGLANG_KEYS.isdisjoint(row.name for row in describe())


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="comit_size: did you mean commit_size"):
        Config.load({"comit_size": 1}, {})
    with pytest.raises(ConfigError, match="KVTIER_REED_THREADS: did you mean KVTIER_READ_THREADS"):
        Config.load({}, {"KVTIER_REED_THREADS": "1"})
    with pytest.raises(ConfigError, match=r"known are commit_interval, .*staging_size"):
        Config.load({"zzz": 1}, {})
    with pytest.raises(ConfigError, match="Unknown extra config key"):
        Config.load({"KVTIER_ROOT": "/x"}, {})
    with pytest.raises(ConfigError, match="Unknown extra config key"):
        Config.load({1: "x"}, {})  # type: ignore[dict-item]


def test_variables_of_a_kubernetes_service_are_no_mistakes() -> None:
    environ = {
        "KVTIER_SERVICE_HOST": "10.0.0.1",
        "KVTIER_SERVICE_PORT": "80",
        "KVTIER_SERVICE_PORT_HTTP": "80",
        "KVTIER_PORT": "tcp://10.0.0.1:80",
        "KVTIER_PORT_80_TCP": "tcp://10.0.0.1:80",
        "KVTIER_PORT_80_TCP_ADDR": "10.0.0.1",
        "KVTIER_METRICS_SERVICE_HOST": "10.0.0.1",
    }
    assert Config.load(None, environ) == Config()


@pytest.mark.parametrize(
    ("name", "value", "range_"),
    [
        ("root", "", "a path"),
        ("root", 5, "a path"),
        ("root", "a\0b", "a path"),
        ("fingerprint", "fast", "sampled or full"),
        ("fingerprint", 1, "sampled or full"),
        ("commit_interval", -0.1, "seconds from 0 to 60"),
        ("commit_interval", 61, "seconds from 0 to 60"),
        ("commit_interval", "soon", "seconds from 0 to 60"),
        ("commit_interval", "nan", "seconds from 0 to 60"),
        ("commit_interval", True, "seconds from 0 to 60"),
        ("commit_interval", 10**400, "seconds from 0 to 60"),
        ("commit_interval", [], "seconds from 0 to 60"),
        ("commit_size", 0, "a size from 4KiB to 16GiB"),
        ("commit_size", "1T", "a size from 4KiB to 16GiB"),
        ("read_threads", 0, "a whole number from 1 to 64"),
        ("read_threads", 1.5, "a whole number from 1 to 64"),
        ("read_threads", "x", "a whole number from 1 to 64"),
        ("read_threads", False, "a whole number from 1 to 64"),
        ("read_deadline", 0, "seconds from 0.001 to 3600"),
        ("direct_io", "maybe", "true or false"),
        ("direct_io", 2, "true or false"),
        ("direct_io", None, "true or false"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(name: str, value: Any, range_: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**{name: value})
    message = str(caught.value)
    assert message == f"{name} is {value!r}: give {range_}."
    if value is not None:
        with pytest.raises(ConfigError, match=f"^{name} is"):
            Config.load({name: value}, {})


def test_a_bad_variable_is_named_as_the_user_knows_it() -> None:
    with pytest.raises(ConfigError, match=r"^KVTIER_GRACE is 'x': give seconds from 0 to 3600\.$"):
        Config.load(None, {"KVTIER_GRACE": "x"})
    with pytest.raises(ConfigError, match=r"^KVTIER_COMMIT_SIZE: '1Q' has the unknown unit 'Q'"):
        Config.load(None, {"KVTIER_COMMIT_SIZE": "1Q"})


def test_sizes_that_cannot_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="commit_size is 1GiB and staging_size is only 256MiB"):
        Config(commit_size=1 << 30)
    with pytest.raises(ConfigError, match="raise segment_size or lower commit_size"):
        Config(segment_size=1 << 20)
    assert Config(commit_size=1 << 20, segment_size=1 << 20).segment_size == 1 << 20


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().grace = 1.0  # type: ignore[misc]


def test_the_table_names_every_setting_and_its_defaults_can_be_typed() -> None:
    rows = describe()
    assert [row.name for row in rows] == [field.name for field in dataclasses.fields(Config)]
    assert Config.load({row.name: row.default for row in rows if row.default}, {}) == Config()
    assert Config.load(None, {row.variable: row.default for row in rows}) == Config()
    for row in rows:
        assert row.meaning
        assert row.allowed
