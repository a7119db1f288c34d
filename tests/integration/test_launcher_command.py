"""The exact command: golden dry-runs, what is stronger than what, dead ends, the checks."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, KvtierError
from kvtier.integration.launcher import allreduce, checks, dead_ends, keys, machine_file, profiles
from kvtier.integration.launcher.command import Wanted, build, split_flags
from kvtier.integration.launcher.drive import measure
from kvtier.integration.launcher.machine import Card, Drive, Machine

GOLDEN = Path(__file__).parent / "launcher"

MODEL = Path(__file__).parents[1] / "models" / "llama"

NOWHERE = Machine((), "", 0, (), (), "", 0, -1, "", None)

RIG = Machine(
    cards=(
        Card("NVIDIA RTX 6000D", 83.6, "0000:01:00.0", 0),
        Card("NVIDIA RTX 6000D", 83.6, "0000:02:00.0", 0),
        Card("NVIDIA RTX PRO 6000", 95.6, "0000:41:00.0", 0),
        Card("NVIDIA RTX 6000D", 83.6, "0000:42:00.0", 0),
    ),
    link="PHB",
    cards_on_bus=4,
    bar_too_small=(),
    kernel=("amd_iommu=off", "iommu=pt"),
    aspm="performance",
    memory=540 * 10**9,
    locked_memory=-1,
    shared_huge_pages="advise",
    drive=Drive("xfs", "rw,noatime", "md0", "raid0", "write back"),
)

WANTED = Wanted("/models/some", Path("/mnt/nvme/kvtier"))


def kvtier(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command where no variable of this shell reaches it, and no tool of this machine."""
    clean = {k: v for k, v in os.environ.items() if "_" not in k or k == "LC_ALL"}
    clean |= {"PATH": "/nonexistent", "COLUMNS": "300", "XDG_CONFIG_HOME": "/nonexistent"}
    return subprocess.run(
        [sys.executable, "-c", "from kvtier.cli import main; main()", *words],
        capture_output=True,
        text=True,
        check=False,
        env=clean | environment,
    )


@pytest.mark.parametrize("name", profiles.names())
def test_golden_dry_runs(name: str) -> None:
    done = kvtier(*("launch", name, "--model", "/models/some", "--store", "/mnt/nvme", "--dry-run"))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    command = done.stdout.replace(f"{Path(sys.executable).parent}/", "")
    assert command == (GOLDEN / f"{name}.txt").read_text()


def test_a_dry_run_can_be_pasted(tmp_path: Path) -> None:
    """The shell gets back exactly the environment and the words that a launch would run."""
    (tmp_path / "sglang").write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    (tmp_path / "sglang").chmod(0o755)
    wanted = dataclasses.replace(WANTED, flags=("--served-model-name", "it's $HOME & more"))
    command = build(profiles.load("rtxpro-mixed"), wanted, NOWHERE)
    done = subprocess.run(
        ["sh", "-c", command.shell(str(tmp_path / "sglang"))],
        capture_output=True,
        text=True,
        check=True,
    )
    words, environment = json.loads(done.stdout)
    assert words == ["serve", *command.arguments]
    assert command.environment.items() <= environment.items()
    assert command.environment["KVTIER_EXPERT_SPLIT"] == "108,92,92,92"


def test_the_split_and_the_link_are_those_of_the_machine() -> None:
    command = build(profiles.load("rtxpro-mixed"), WANTED, RIG)
    assert command.environment["KVTIER_EXPERT_SPLIT"] == "92,92,108,92"
    assert command.environment["NCCL_P2P_LEVEL"] == "PHB"
    nvlink = dataclasses.replace(RIG, link="NV")
    assert "NCCL_P2P_LEVEL" not in build(profiles.load("rtxpro-mixed"), WANTED, nvlink).environment
    assert build(profiles.load("generic"), WANTED, RIG).environment["NCCL_P2P_LEVEL"] == "PHB"
    virtual = tuple(dataclasses.replace(card, numa=-1) for card in RIG.cards)
    virtual_rig = dataclasses.replace(RIG, cards=virtual)
    command = build(profiles.load("generic"), WANTED, virtual_rig)
    assert command.environment["SGLANG_AUTO_NUMA_BIND"] == "0"


EXTRA = "--hicache-storage-backend-extra-config"


def _extra(*words: str) -> dict[str, object]:
    """The settings of the store in a dry run's command, which has them once."""
    done = kvtier("launch", "h200-4x", "--model", "/models/some", "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    [found] = [line for line in done.stdout.splitlines() if EXTRA in line]
    return json.loads(found.split("'")[1])


def test_settings_of_the_store_after_the_dashes_are_merged(tmp_path: Path) -> None:
    usual = _extra("--store", "/mnt/nvme")
    more = {"limit": "2G", "prefetch_threshold": 512}
    file = tmp_path / "extra.toml"
    file.write_text('limit = "2G"\nprefetch_threshold = 512\n')
    for words in ([EXTRA, json.dumps(more)], [f"{EXTRA}={json.dumps(more)}"], [EXTRA, f"@{file}"]):
        found = _extra("--store", "/mnt/nvme", "--", *words, "--page-size", "64")
        assert found == {**usual, **more}
    elsewhere = json.dumps({"root": "/mnt/other"})
    assert _extra("--", EXTRA, elsewhere)["root"] == "/mnt/other/kvtier"
    both = kvtier(
        *("launch", "h200-4x", "--model", "/m", "--store", "/mnt/nvme", "--dry-run"),
        *("--", EXTRA, elsewhere),
    )
    assert both.returncode == 2 and "/mnt/nvme/kvtier by --store and /mnt/other" in both.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"limt": "2G"}', "limit"),
        ('{"limit": 2', "give a JSON object"),
        ("[1]", "no JSON object"),
        ("@/nonexistent.json", "cannot be read"),
        ("@/nonexistent.yaml", ".json and .toml only"),
    ],
)
def test_settings_of_the_store_that_cannot_be_read_end_the_launch(text: str, said: str) -> None:
    words = ("--model", "/m", "--store", "/mnt/nvme", "--dry-run", "--", EXTRA, text)
    done = kvtier("launch", "h200-4x", *words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_settings_of_another_backend_stay_as_they_are() -> None:
    words = ("--hicache-storage-backend", "file", EXTRA, '{"tp_lcm_size": 8}')
    wanted = dataclasses.replace(WANTED, flags=words)
    command = build(profiles.load("generic"), wanted, NOWHERE)
    assert command.value("hicache-storage-backend-extra-config") == '{"tp_lcm_size": 8}'


def test_what_is_stronger_comes_later() -> None:
    profile = profiles.load("rtxpro-mixed")
    level = {"NCCL_P2P_LEVEL": "SYS"}
    command = build(profile, WANTED, RIG, machine_environment=level)
    assert command.environment["NCCL_P2P_LEVEL"] == "SYS"
    command = build(
        profile, WANTED, RIG, machine_environment=level, environ={"NCCL_P2P_LEVEL": "PXB", "A": "b"}
    )
    assert command.environment["NCCL_P2P_LEVEL"] == "PXB" and "A" not in command.environment
    flags = ("--tensor-parallel-size=2", "--host", "0.0.0.0", "--enable-mixed-chunk")
    command = build(profile, dataclasses.replace(WANTED, flags=flags), RIG)
    assert command.arguments[-4:] == list(flags)
    assert "--tp-size" not in command.arguments and "127.0.0.1" not in command.arguments
    assert (command.value("tp-size"), command.value("enable-mixed-chunk")) == ("2", "")
    assert command.value("no-such-flag") is None


def test_keys_and_a_config_of_one_s_own() -> None:
    wanted = dataclasses.replace(WANTED, keys=Path("/k.yaml"), flags=("--config", "mine.yaml"))
    with pytest.raises(ConfigError, match="put the keys into your own"):
        build(profiles.load("generic"), wanted, NOWHERE)


BAD_KEYS = {
    "": "has no api-key, and anybody could use the server",
    "apikey: secret\n": "has no api-key",
    "nonsense\n": "has no api-key",
    "- api-key\n": "has no api-key",
    "admin-api-key: secret\n": "has no api-key",
    "api-key:\n": "has no api-key",
    "api-key: ' '\n": "has no api-key",
    "api-key: 0123\n": "put it in quotes",
    "api-key: [secret]\n": "put it in quotes",
    'a: 1\napi-key: "secret\n': "is no YAML, line",
    "api-key: \x00secret\n": "is no YAML",
}


@pytest.mark.parametrize("text", BAD_KEYS)
def test_keys_that_would_open_the_server_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        keys.check(file)
    assert str(file) in str(refused.value) and BAD_KEYS[text] in str(refused.value)
    assert "secret" not in str(refused.value) and "\n" not in str(refused.value)
    flags = ("--host", "0.0.0.0", "--config", str(file))
    command = build(profiles.load("generic"), dataclasses.replace(WANTED, flags=flags), NOWHERE)
    assert "anybody who reaches it" in dead_ends.warnings(profiles.load("generic"), command)[0]


@pytest.mark.parametrize("what", [(), ("--dry-run",), ("--preflight",), ("--anyway",)])
def test_no_launch_takes_keys_without_a_key(what: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    words = ("launch", "generic", "--model", str(tmp_path), "--keys", str(file), *what)
    for text, said in ((None, "No such file"), ("apikey: x\n", "has no api-key")):
        if text is not None:
            file.write_text(text)
            file.chmod(0o600)
        done = kvtier(*words, "--", "--host", "0.0.0.0")
        assert done.returncode == 2 and done.stdout == ""
        [line] = done.stderr.splitlines()
        assert line.startswith(f"kvtier: --keys {file}") and said in line


def test_sglang_refuses_other_endings_of_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        keys.check(tmp_path / "keys")
    (tmp_path / "keys").write_text("api-key: secret\n")
    with pytest.raises(ConfigError, match=r"only .yaml and .yml"):
        keys.check(tmp_path / "keys")


def test_a_key_is_what_closes_an_open_host(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("api-key: secret\n")

    def warnings(own: Path | None, *flags: str) -> int:
        wanted = dataclasses.replace(WANTED, keys=own, flags=("--host", "0.0.0.0", *flags))
        profile = profiles.load("generic")
        return len(dead_ends.warnings(profile, build(profile, wanted, NOWHERE)))

    assert warnings(file) == warnings(None, "--config", str(file)) == 0
    assert warnings(None, "--api-key", "secret") == 0
    assert warnings(None, "--api-key=") == warnings(file, "--api-key", "") == 1


def test_a_path_is_shown_without_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    done = kvtier("launch", "generic", "--model", "/m", "--dry-run", "--keys", "../keys.yaml")
    assert f"--keys {tmp_path.resolve()}/keys.yaml: No such file" in done.stderr


def test_what_the_machine_file_sets_is_no_mistake() -> None:
    profile = profiles.load("rtxpro-mixed")
    command = build(profile, WANTED, RIG, machine_environment={"NCCL_P2P_LEVEL": "SYS"})
    assert dead_ends.warnings(profile, command) == []


@pytest.mark.skipif(machine_file.SYSTEM.exists(), reason="this machine has a file of its own")
def test_every_launch_reads_the_machine_file(tmp_path: Path) -> None:
    file = tmp_path / "kvtier" / "machine.toml"
    file.parent.mkdir()
    file.write_text('[environment]\nNCCL_DEBUG = "WARN"\n[facts]\nmemory = 1\n')
    words = ("launch", "generic", "--model", "/m", "--dry-run")
    done = kvtier(*words, XDG_CONFIG_HOME=str(tmp_path))
    assert done.stdout.startswith("CUDA_DEVICE_ORDER=PCI_BUS_ID \\\nNCCL_DEBUG=WARN \\\n")
    assert "warning: memory was 1 and is " in done.stderr and "--save-machine" in done.stderr
    done = kvtier("launch", "generic", "--save-machine", XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 0 and f"Saved to {file}" in done.stdout
    assert kvtier(*words, XDG_CONFIG_HOME=str(tmp_path)).stderr == ""
    assert 'NCCL_DEBUG = "WARN"' in file.read_text()


def test_flags_as_people_write_them() -> None:
    assert split_flags(["--a=b c", "--model", "x", "--list", "1", "2", "--flag", "-1"]) == [
        ("a", "b c"),
        ("model-path", "x"),
        ("list", "1 2"),
        ("flag", "-1"),
    ]


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("rtxpro-mixed", "--chunked-prefill-size 4096", "collapse on long ones"),
        ("rtxpro-mixed", "--max-running-requests 4", "124 MiB"),
        ("rtxpro-mixed", "--warmups serving_coverage", "has no serving_coverage"),
        ("rtxpro-mixed", "--hicache-size 100", "give a ratio"),
        ("rtxpro-mixed", "--hicache-ratio 1.5", "restored in part"),
        ("rtxpro-mixed", "--hicache-storage-backend file", "not safe against power loss"),
        ("rtxpro-mixed", "--hicache-write-policy write_back", "loses what was not evicted"),
        ("generic", "--hicache-storage-prefetch-policy timeout", "before a long session"),
        ("rtxpro-mixed", "--enable-encoder-swa-bounded-replay", "approximation by design"),
        ("rtxpro-mixed", "--swa-full-tokens-ratio 0.1", "swa-prefix-tails is ignored"),
        ("rtxpro-mixed", "--enable-nccl-nvls", "PCIe only"),
        ("generic", "--host 0.0.0.0", "Give --keys FILE"),
        ("generic", "--tokenizer-worker-num 4", "no plugins in further HTTP workers"),
    ],
)
def test_dead_ends_are_named(name: str, flags: str, said: str) -> None:
    profile = profiles.load(name)
    assert dead_ends.warnings(profile, build(profile, WANTED, NOWHERE)) == []
    command = build(profile, dataclasses.replace(WANTED, flags=flags.split()), NOWHERE)
    [warning] = dead_ends.warnings(profile, command)
    assert said in warning and warning.startswith(flags.split(maxsplit=1)[0])
    assert command.arguments[-len(flags.split()) :] == flags.split()  # a warning, and it wins


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("KVTIER_INDEXER_BUDGET_MIB", "1024", "39 failed allocations"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", "belongs to the engine"),
        ("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "1", "the profile has 0"),
    ],
)
def test_dead_ends_of_the_environment(variable: str, value: str, said: str) -> None:
    profile = profiles.load("rtxpro-mixed")
    command = build(profile, WANTED, NOWHERE, environ={variable: value})
    assert command.environment[variable] == value
    assert any(said in warning for warning in dead_ends.warnings(profile, command))


@pytest.mark.parametrize(
    ("flags", "silent"),
    [
        ("--chunked-prefill-size 1024", "rtxpro-mixed"),
        ("--chunked-prefill-size 4096", "generic"),
        ("--max-running-requests 2", "rtxpro-mixed"),
        ("--hicache-ratio 3", "rtxpro-mixed"),
    ],
)
def test_what_is_no_dead_end_is_not_warned_of(flags: str, silent: str) -> None:
    profile = profiles.load(silent)
    command = build(profile, dataclasses.replace(WANTED, flags=flags.split()), NOWHERE)
    assert dead_ends.warnings(profile, command) == []


def test_every_setting_is_explained() -> None:
    done = kvtier("launch", "rtxpro-mixed", "--explain")
    assert done.returncode == 0, done.stderr
    profile = profiles.load("rtxpro-mixed")
    for setting in profile.settings:
        assert setting.why in done.stdout and setting.measured in done.stdout
    heading, *lines = done.stdout.splitlines()
    assert heading.endswith(f". {profile.state[:1].upper()}{profile.state[1:]}.")
    measured = [line.partition("Measured: ")[2] for line in lines if "Measured: " in line]
    assert measured == [setting.measured for setting in profile.settings if setting.measured]
    assert "--max-total-tokens 3150000" in done.stdout
    assert "expert_split=108,92,92,92" in done.stdout


def test_the_list_and_the_proposal_need_no_cards() -> None:
    done = kvtier("launch", "--list")
    assert done.returncode == 0
    assert all(name in done.stdout for name in profiles.names())
    assert "264 GB of host memory" in done.stdout
    done = kvtier("launch")
    assert done.returncode == 2 and "only generic fits" in done.stderr


def test_a_plan_without_cards() -> None:
    done = kvtier("plan", "rtxpro-mixed")
    assert done.returncode == 0
    for shown in ("108", "69.83 GiB", "3,150,000", "4.23 GB", "does not fit", "264 GB"):
        assert shown in done.stdout
    assert kvtier("plan", "rtxpro-mixed", "--slots", "4").returncode == 1
    found = json.loads(kvtier("plan", "h200-4x", "--json", "--drive", "12G").stdout)
    assert found["slots"] == 8 and len(found["sessions"]) == 4
    done = kvtier("plan", "generic")
    assert done.returncode == 2 and "any model" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("rtxpro-mixd", "--model", "/m"), "did you mean rtxpro-mixed?"),
        (("generic",), "Say which model to serve"),
        (("generic", "--tp-size", "2"), "SGLang's own options go after --, as in -- --tp-size"),
        (("generic", "--model", "/m", "--without", "tp"), "--without tp"),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], said: str) -> None:
    done = kvtier("launch", *words)
    assert done.returncode == 2 and said in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""


# --- the checks ---------------------------------------------------------------------------------


def _found(machine: Machine, tmp_path: Path, name: str = "rtxpro-mixed", *flags: str) -> list[str]:
    profile = profiles.load(name)
    wanted = Wanted(str(MODEL), tmp_path / "kvtier", flags=(*_own_port(), *flags))
    command = build(profile, wanted, machine)
    findings = checks.preflight(profile, command, wanted, machine)
    return [f"{finding.level}: {finding.text}" for finding in findings]


def _own_port() -> tuple[str, str]:
    """Another server may be at the usual one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "--port", str(probe.getsockname()[1])


def _errors(found: list[str]) -> list[str]:
    return [line for line in found if line.startswith("error")]


def test_the_reference_rig_is_fit(tmp_path: Path) -> None:
    found = _found(RIG, tmp_path)
    assert not [line for line in found if not line.startswith("note")]
    [store] = [line for line in found if "GB/s" in line]
    assert "a session of 988,000 tokens is back in about" in store
    assert not list(tmp_path.iterdir())  # the measurement leaves nothing


def test_a_fourth_slot_is_refused(tmp_path: Path) -> None:
    flags = ("--max-running-requests", "4", "--max-total-tokens", "4200000")
    [error] = _errors(_found(RIG, tmp_path, "rtxpro-mixed", *flags))
    assert "4 slots leave 2.48 GB free" in error


@pytest.mark.parametrize(
    ("change", "level", "said"),
    [
        ({"cards": RIG.cards[:2]}, "error", "nvidia-smi shows 2 cards"),
        ({"memory": 200 * 10**9}, "error", "need 264 GB"),
        ({"locked_memory": 8 * 2**20}, "warning", "ulimit -l"),
        ({"shared_huge_pages": "never"}, "warning", "ten times slower"),
        ({"cards_on_bus": 5}, "warning", "one has not come up"),
        ({"link": "SYS"}, "warning", "below one CPU"),
        (
            {"cards": (*RIG.cards[:3], dataclasses.replace(RIG.cards[3], numa=1))},
            "warning",
            "NUMA nodes 0, 1",
        ),
        ({"bar_too_small": ("41:00.0",)}, "warning", "Resizable BAR"),
        ({"drive": Drive("tmpfs", "rw", "", "", "")}, "warning", "does not outlive the machine"),
        ({"kernel": ()}, "note", "amd_iommu=off"),
    ],
)
def test_what_is_wrong_with_a_machine(
    tmp_path: Path, change: dict[str, object], level: str, said: str
) -> None:
    found = _found(dataclasses.replace(RIG, **change), tmp_path)  # type: ignore[arg-type]
    assert any(line.startswith(level) and said in line for line in found), found


def test_other_cards_than_the_profile_s(tmp_path: Path) -> None:
    cards = tuple(dataclasses.replace(card, gib=140.4) for card in RIG.cards)
    machine = dataclasses.replace(RIG, cards=cards)
    assert any("the cards here have 140.4" in line for line in _found(machine, tmp_path))


def test_generic_needs_no_card(tmp_path: Path) -> None:
    assert not _errors(_found(NOWHERE, tmp_path, "generic"))


def test_model_and_keys_are_looked_at(tmp_path: Path) -> None:
    profile, file = profiles.load("generic"), tmp_path / "keys.yaml"
    wanted = Wanted(str(tmp_path / "none"), tmp_path, file, _own_port())
    command = build(profile, wanted, NOWHERE)
    assert command.value("config") == str(file)
    errors = _errors([f"{f.level}: {f.text}" for f in _preflight(profile, command, wanted)])
    assert len(errors) == 2 and "There is no model" in errors[0]
    file.write_text("api-key: secret\n")
    file.chmod(0o640)
    found = [f.text for f in _preflight(profile, command, wanted)]
    assert any(f"chmod 600 {file}" in text for text in found)
    file.chmod(0o600)
    assert not any(str(file) in f.text for f in _preflight(profile, command, wanted))
    assert "secret" not in command.shell()


@pytest.mark.parametrize(
    ("model", "level", "said"),
    [
        ("{here}", "error", "{here} has no config.json and is no model"),
        ("{here}/none", "error", "There is no model at {here}/none"),
        ("{here}/notes.md", "error", "--model {here}/notes.md is a file: give the model's folder"),
        ("llama", "error", "There is no folder llama here, and a name on the hub is OWNER/NAME"),
        ("a/b/c", "error", "a name on the hub is OWNER/NAME"),
        ("own er/llama", "error", "a name on the hub is OWNER/NAME"),
        ("owner/llama", "note", "There is no folder owner/llama here: SGLang takes it from the"),
        ("owner/llama:Q4_K_M", "note", "SGLang takes it from the hub"),
        ("owner/llama/files/one.gguf", "note", "SGLang takes it from the hub"),
        ("{here}/one.gguf", None, ""),
        ("s3://bucket/llama", None, ""),
        (str(MODEL), None, ""),
    ],
)
def test_what_is_no_model(tmp_path: Path, model: str, level: str | None, said: str) -> None:
    for name in ("notes.md", "one.gguf"):
        (tmp_path / name).touch()
    profile = profiles.load("generic")
    wanted = Wanted(model.format(here=tmp_path), tmp_path, flags=_own_port())
    found = _preflight(profile, build(profile, wanted, NOWHERE), wanted)
    about = [f for f in found if "model" in f.text or "hub" in f.text]
    assert [f.level for f in about] == ([level] if level else [])
    assert all(said.format(here=tmp_path) in f.text for f in about)


def test_a_machine_without_sglang_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not _errors(_found(RIG, tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    [error] = _errors(_found(RIG, tmp_path))
    assert f"There is no sglang beside {tmp_path}/python or on PATH: install" in error


def test_a_machine_without_cards_is_told_unless_it_should_be_so(tmp_path: Path) -> None:
    def warned(machine: Machine, name: str, *flags: str) -> bool:
        found = _found(machine, tmp_path, name, *flags)
        return any("show no card" in line and line.startswith("warning") for line in found)

    assert warned(NOWHERE, "generic") and warned(NOWHERE, "generic", "--device", "cuda")
    assert not warned(NOWHERE, "generic", "--device", "cpu")
    assert not warned(RIG, "generic")
    assert not warned(dataclasses.replace(NOWHERE, cards_on_bus=1), "generic")
    assert not warned(NOWHERE, "rtxpro-mixed")  # an error of its own


def test_a_store_that_is_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.md").touch()
    monkeypatch.chdir(tmp_path)
    words = ("launch", "generic", "--model", str(MODEL), "--preflight")

    def refusal(*more: str, **environment: str) -> str:
        done = kvtier(*words, *more, **environment)
        assert done.returncode == 2 and done.stdout == ""
        [line] = done.stderr.splitlines()
        return line

    here = tmp_path.resolve()
    assert refusal("--store", "notes.md") == (
        "kvtier: --store notes.md is a file: give a directory."
    )
    assert refusal("--store", "notes.md/a/b") == (
        f"kvtier: --store notes.md/a/b: {here}/notes.md is a file: give a directory."
    )
    assert refusal(KVTIER_ROOT="notes.md") == (
        f"kvtier: The store {here}/notes.md/kvtier: {here}/notes.md is a file: give a directory."
    )
    with pytest.raises(KvtierError, match="Not a directory"):
        measure(Path("notes.md/kvtier"))


def test_a_launch_that_never_served_leaves_no_machine_file(tmp_path: Path) -> None:
    engine = tmp_path / "sglang"
    engine.write_text(f"#!{sys.executable}\nraise SystemExit(2)\n")
    engine.chmod(0o755)
    words = ("launch", "generic", "--model", str(MODEL), "--store", str(tmp_path), "--")
    path = f"{tmp_path}{os.pathsep}{Path(sys.executable).parent}"
    done = kvtier(*words, *_own_port(), PATH=path, XDG_CONFIG_HOME=str(tmp_path / "config"))
    assert done.returncode == 2 and "SGLang refuses the command line" in done.stderr
    assert not (tmp_path / "config").exists()


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("127.0.0.1", None, "Another process has port {port} of 127.0.0.1: stop it, or give"),
        ("0.0.0.0", None, "Another process has port {port} of 0.0.0.0"),
        ("localhost", None, "Another process has port {port} of localhost"),
        ("203.0.113.7", "30000", "no address of this machine"),
        ("no such host", "30000", "no address of this machine"),
        ("127.0.0.1", "many", "from 1 to 65535"),
        ("127.0.0.1", "65536", "from 1 to 65535"),
    ],
)
def test_an_address_that_cannot_be_used(
    tmp_path: Path, host: str, port: str | None, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = port or str(other.getsockname()[1])
        found = _found(NOWHERE, tmp_path, "generic", "--host", host, "--port", port)
        [error] = _errors(found)
        assert said.format(port=port) in error
    if "Another" in said:  # an address in TIME_WAIT or free is none
        assert not _errors(_found(NOWHERE, tmp_path, "generic", "--host", host, "--port", port))


def _preflight(profile, command, wanted):  # type: ignore[no-untyped-def]
    return checks.preflight(profile, command, wanted, NOWHERE)


def test_the_drive_is_measured(tmp_path: Path) -> None:
    speed = measure(tmp_path / "not" / "there")
    assert speed.read > 0 and speed.sync > 0 and speed.free > 0
    assert not list(tmp_path.iterdir())


def test_an_all_reduce_is_measured_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = allreduce.measure(2, os.environ, device="cpu", size=2**20)
    assert rate > 0
    cards = tuple(dataclasses.replace(card, link=31.5e9) for card in RIG.cards)
    machine = dataclasses.replace(RIG, cards=cards)
    command = build(profiles.load("rtxpro-mixed"), WANTED, machine)
    found = {}
    for measured in (3.83e9, 19.57e9, 0.0):
        monkeypatch.setattr(allreduce, "measure", lambda *_, measured=measured: measured)
        [finding] = checks.all_reduce(command, machine, {})
        found[measured] = (finding.level, finding.text)
    assert found[3.83e9][0] == "error" and "through host memory" in found[3.83e9][1]
    assert found[19.57e9] == (
        "note",
        "All-reduce over 4 cards: 19.6 GB/s, with NCCL_P2P_LEVEL PHB.",
    )
    assert found[0.0][0] == "warning"
    assert checks.all_reduce(command, NOWHERE, {}) == []
