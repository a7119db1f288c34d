"""`kvtier launch`: its commands in SGLang's own parser, and a supervised server on the CPU."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from kvtier_test_platform.committed import committed_pages, kv_pages, wait_until
from kvtier_test_platform.server import PAGE_SIZE, Server, free_port, gone, prompt_tokens
from servers import MODELS, PROMPT, assert_all_from_storage
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

from kvtier.integration.launcher import profiles
from kvtier.integration.launcher.command import ALIASES, Wanted, build
from kvtier.integration.launcher.machine import Machine
from kvtier.integration.launcher.machine_file import SYSTEM
from kvtier.layout import Layout
from kvtier.place import store_path
from kvtier.status import statuses

NOWHERE = Machine((), "", 0, (), (), "", 0, -1, "", None)

WHOLE_PAGES = len(PROMPT) // PAGE_SIZE

LAST = prompt_tokens(3, 20 * PAGE_SIZE)

CPU = {
    "device": "cpu",
    "dtype": "bfloat16",
    "attention-backend": "torch_native",
    "page-size": PAGE_SIZE,
    "max-total-tokens": 4096,
    "mem-fraction-static": 0.05,
    "max-running-requests": 4,
    "chunked-prefill-size": 512,
}
SWITCHES = ["--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """SGLang's own, with what plugins add to it."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


@pytest.mark.parametrize("name", profiles.names())
def test_sglang_parses_the_command_of_every_profile(
    name: str, parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    profile = profiles.load(name)
    keys = tmp_path / "keys.yaml"
    wanted = Wanted("/models/some", Path("/mnt/nvme/kvtier"), keys, ("--log-level", "info"))
    arguments = build(profile, wanted, NOWHERE).arguments
    keys.write_text("api-key: secret\n")
    merged = ConfigArgumentMerger(parser=parser).merge_config_with_args(arguments)
    parsed, unknown = parser.parse_known_args(merged)
    assert unknown == []
    assert parsed.api_key == "secret" and "secret" not in arguments
    assert parsed.hicache_storage_backend == "kvtier"
    assert parsed.hicache_storage_prefetch_policy == "wait_complete"
    assert (parsed.hicache_ratio, parsed.host) == (2.0, "127.0.0.1")
    for setting in profile.settings:
        if setting.kind == "sglang":
            value = getattr(parsed, _dest(parser, setting.name))
            assert value == (True if setting.value is True else type(value)(setting.value))


def test_other_names_of_flags_are_sglang_s(parser: argparse.ArgumentParser) -> None:
    used = {s.name for name in profiles.names() for s in profiles.load(name).settings} | {
        "model-path"
    }
    names = {
        other.removeprefix("--"): name
        for action in parser._actions
        for name in used
        if f"--{name}" in action.option_strings
        for other in action.option_strings
        if other.startswith("--") and other != f"--{name}"
    }
    assert names == ALIASES


def _dest(parser: argparse.ArgumentParser, name: str) -> str:
    return next(a.dest for a in parser._actions if f"--{name}" in a.option_strings)


class Launched:
    """A running `kvtier launch`, whose lines and whose server's log are in one file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, client: Server) -> None:
        self.process = process
        self.log = log
        self.client = client

    def lines(self, beginning: str) -> list[str]:
        found = re.findall(r"^kvtier launch: (.*)$", self.log.read_text(errors="replace"), re.M)
        return [line for line in found if line.startswith(beginning)]

    def wait_ready(self, times: int) -> str:
        def ready() -> bool:
            assert self.process.poll() is None, self.client.log_tail()
            return len(self.lines("ready after")) >= times

        wait_until(ready, f"ready line number {times}\n{self.client.log_tail()}", timeout=600)
        return self.lines("ready after")[-1]

    def engine(self) -> int:
        return int(self.lines("starting")[-1].rsplit(" ", 1)[1])


@contextmanager
def launched(directory: Path, *flags: str, **environment: str) -> Iterator[Launched]:
    """Run the command; whatever it has started is gone afterwards."""
    port = free_port()
    client = Server(MODELS / "llama", directory / "launch.log")
    client.port = port
    words = [sys.executable, "-c", "from kvtier.cli import main; main()", "launch", "generic"]
    words += ["--model", str(MODELS / "llama"), "--store", str(directory), "--"]
    words += [word for k, v in CPU.items() for word in (f"--{k}", str(v))]
    words += [*SWITCHES, "--port", str(port), *flags]
    with client.log.open("ab") as log:
        process = subprocess.Popen(
            words,
            env=os.environ
            | client._platform_environment()
            | {"XDG_CONFIG_HOME": str(directory / "config")}
            | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Launched(process, client.log, client)
    finally:
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()


def test_a_killed_server_comes_back_with_its_prompt_and_a_stop_commits(tmp_path: Path) -> None:
    with launched(tmp_path, KVTIER_COMMIT_INTERVAL="60") as launch:
        first = launch.wait_ready(1)
        own = tmp_path / "config" / "kvtier" / "machine.toml"
        assert own.exists() or SYSTEM.exists()  # a machine that has its file keeps it
        assert "; sessions restorable: 0, tokens: 0," in first and "OFF" not in first
        cold = launch.client.generate(PROMPT)
        assert cold.cached_tokens == 0
        wait_until(lambda: kv_pages(committed_pages(tmp_path)) >= WHOLE_PAGES, "committed pages")

        os.kill(launch.engine(), signal.SIGKILL)
        again = launch.wait_ready(2)
        [crash] = launch.lines("SGLang was ended by SIGKILL")
        assert crash.endswith("restart in 1 s")
        assert f"; sessions restorable: 1, tokens: {WHOLE_PAGES * PAGE_SIZE:,}," in again
        warm = launch.client.generate(PROMPT)
        assert_all_from_storage(warm, PROMPT)
        assert warm.output_ids == cold.output_ids

        # What was computed a moment before a stop is not due for a minute yet.
        engine = psutil.Process(launch.engine())
        family = [engine.pid, *(child.pid for child in engine.children(recursive=True))]
        launch.client.generate(LAST)
        wait_until(lambda: _waiting(tmp_path) >= len(LAST), "pages that wait for a commit")
        launch.process.terminate()
        assert launch.process.wait(120) == 0
        assert gone(*family)
        assert launch.lines("stopped") == ["stopped"]
        assert kv_pages(committed_pages(tmp_path)) == WHOLE_PAGES + len(LAST) // PAGE_SIZE


def _waiting(root: Path) -> int:
    """Tokens that the server has put and not committed."""
    layout = Layout.open(store_path(root), create=False)
    return sum(status.uncommitted_tokens for status in statuses(layout))


def test_a_refused_command_line_is_not_tried_again(tmp_path: Path) -> None:
    with launched(tmp_path, "--no-such-flag") as launch:
        assert launch.process.wait(500) == 2
        assert launch.lines("SGLang refuses the command line")
        assert len(launch.lines("starting")) == 1
