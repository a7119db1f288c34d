"""The scheme of patches: what turns one on, what stops a start, and what `kvtier patches` says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pools import STACKS  # noqa: F401 - loads the plugins, before anything of SGLang is imported

from kvtier.config import Config
from kvtier.errors import ConfigError, KvtierError
from kvtier.integration import patches, plugin
from kvtier.integration.patches.scheme import Hook, HookType, Patch
from kvtier.patches import PATCHES, VARIABLES, choices

NAMES = [patch.name for patch in PATCHES]


def _on(**variables: str) -> dict[str, str]:
    return {
        choice.patch.name: choice.value
        for choice in choices({f"KVTIER_{name}": text for name, text in variables.items()})
        if choice.on and not choice.patch.always
    }


def test_off_unless_turned_on() -> None:
    assert _on() == {}
    assert _on(PATCHES="", EXPERT_SPLIT=" ") == {}


def test_names_and_values_turn_patches_on() -> None:
    assert _on(PATCHES="clients, inline_system") == {"clients": "", "inline_system": ""}
    assert _on(EXPERT_SPLIT="3,1") == {"expert_split": "3,1"}
    assert _on(PATCHES="expert_split") == {"expert_split": "auto"}
    assert _on(PATCHES="expert_split", EXPERT_SPLIT="3,1") == {"expert_split": "3,1"}


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean inline_system"):
        _on(PATCHES="inline_sytem")
    with pytest.raises(ConfigError, match="known are replay_boundary, expert_split"):
        _on(PATCHES="zzz")


def test_their_variables_are_no_settings_of_a_store() -> None:
    assert Config.load(None, dict.fromkeys(VARIABLES, "1")) == Config()
    with pytest.raises(ConfigError, match="did you mean KVTIER_EXPERT_SPLIT"):
        Config.load(None, {"KVTIER_EXPERTS_SPLIT": "1"})


@pytest.mark.parametrize("name", NAMES)
def test_this_sglang_has_what_each_patch_needs(name) -> None:
    assert plugin.patch_problems(name) == []
    assert patches.code(name).hooks or patches.code(name).relies_on


@pytest.mark.parametrize(
    ("name", "hook"),
    [(name, hook) for name in NAMES for hook in patches.code(name).hooks],
    ids=lambda value: value if isinstance(value, str) else value.target.rsplit(".", 1)[1],
)
def test_each_target_that_is_gone_is_named(name, hook, monkeypatch) -> None:
    owner, attribute = hook.target.rsplit(".", 1)
    monkeypatch.delattr(plugin.pkgutil.resolve_name(owner), attribute)
    assert any(problem.startswith(f"{hook.target} (") for problem in plugin.patch_problems(name))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [(name, wanted) for name in NAMES for wanted in patches.code(name).relies_on],
)
def test_each_thing_relied_on_that_is_gone_is_named(name, wanted, monkeypatch) -> None:
    dotted = wanted.partition("(")[0]
    owner, attribute = dotted.rsplit(".", 1)
    monkeypatch.delattr(plugin.pkgutil.resolve_name(owner), attribute)
    assert any(problem.startswith(f"{dotted} (") for problem in plugin.patch_problems(name))


def _turn_on(monkeypatch, patch: Patch, name: str = "clients") -> None:
    [choice] = [one for one in choices({"KVTIER_PATCHES": name}) if one.patch.name == name]
    monkeypatch.setattr(plugin, "patches_on", lambda: ((choice, patch),))
    monkeypatch.setattr(patches, "code", lambda wanted: patch)


def test_a_patch_that_has_not_taken_stops_the_start_with_its_name(monkeypatch) -> None:
    hook = Hook(
        "sglang.srt.server_args.ServerArgs.resolve_once", HookType.BEFORE, lambda: None, ("self",)
    )
    _turn_on(monkeypatch, Patch((hook,)))
    with pytest.raises(KvtierError, match=r"turns on clients.*has not taken.*take clients out"):
        plugin.refuse_patches(SimpleNamespace())


def test_a_patch_that_lacks_something_stops_the_start(monkeypatch) -> None:
    _turn_on(monkeypatch, Patch(relies_on=("sglang.version.no_such_name",)))
    with pytest.raises(KvtierError, match=r"lacks sglang.version.no_such_name \(not there\)"):
        plugin.refuse_patches(SimpleNamespace())


def test_a_server_that_cannot_have_a_patch_does_not_start(monkeypatch) -> None:
    _turn_on(monkeypatch, Patch(refusal=lambda args: f"{args.model} is no model for it"))
    with pytest.raises(KvtierError, match="turns on clients, and m is no model for it"):
        plugin.refuse_patches(SimpleNamespace(model="m"))


def _run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}
    return subprocess.run(
        [sys.executable, *command],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"KVTIER_PATCHES": "cleints"}, "did you mean clients"),
        ({"KVTIER_INDEXER_BUDGET_MIB": "tiny"}, "KVTIER_INDEXER_BUDGET_MIB is tiny"),
        ({"KVTIER_EXPERT_SPLIT": "3,1"}, "KVTIER_EXPERT_SPLIT turns on expert_split, and"),
    ],
)
def test_the_launcher_ends_in_one_line(variables, reason) -> None:
    """Without any storage backend: patches are not only for servers that store."""
    ended = _run("-m", "sglang.launch_server", "--model-path", "dummy", **variables)
    assert ended.returncode == 1
    assert reason in ended.stderr.splitlines()[-1]


def test_the_command_lists_every_patch_and_looks_at_sglang() -> None:
    done = _run(
        "-c",
        "from kvtier.cli import main; main()",
        "patches",
        "--check",
        "--json",
        KVTIER_PATCHES="inline_system",
    )
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 0, done.stderr
    assert list(rows) == NAMES
    assert [name for name in rows if rows[name]["on"]] == ["replay_boundary", "inline_system"]
    assert all(row["missing"] == [] for row in rows.values())


def test_the_launcher_can_split_experts_where_there_is_no_sglang() -> None:
    code = (
        "import sys; sys.modules.update(sglang=None, torch=None);"
        "from kvtier.integration.patches.split import derive_split;"
        "print(*derive_split([95.6, 83.6, 83.6, 83.6], 384))"
    )
    assert _run("-c", code).stdout.split() == ["108", "92", "92", "92"]


def test_the_document_has_a_row_for_each() -> None:
    document = Path(__file__).parents[2] / "docs" / "patches.md"
    rows = [line.split("`")[1] for line in document.read_text().splitlines() if line[:3] == "| `"]
    assert rows == NAMES
