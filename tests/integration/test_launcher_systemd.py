"""The unit of `kvtier launch --write-systemd`, as systemd itself reads it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.integration.launcher import systemd


def _written(tmp_path: Path, *words: str) -> Path:
    file = tmp_path / "kvtier.service"
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from kvtier.cli import main; main()"),
            *("launch", "rtxpro-mixed", "--model", str(tmp_path), "--store", str(tmp_path)),
            *("--without", "speculative", "--write-systemd", str(file), *words),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "enable --now kvtier.service" in done.stdout, done.stderr
    return file


def test_the_unit_starts_the_same_launch_after_the_mounts(tmp_path: Path) -> None:
    text = _written(tmp_path, "--", "--port", "8000").read_text()
    lines = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    program = Path(sys.executable).parent / "kvtier"
    assert lines["ExecStart"] == (
        f"{program} launch rtxpro-mixed --model {tmp_path} --store {tmp_path}/kvtier "
        "--without speculative -- --port 8000"
    )
    assert lines["RequiresMountsFor"] == f"{tmp_path}/kvtier {tmp_path}"
    assert (lines["Restart"], lines["LimitMEMLOCK"]) == ("always", "infinity")
    assert (lines["Type"], lines["KillMode"]) == ("notify", "mixed")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    file = _written(tmp_path)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and file.name not in done.stderr, done.stderr


def test_words_with_signs_that_systemd_reads_are_quoted() -> None:
    words = ["launch", "it's 100 % of $HOME", 'a"b\\c']
    text = systemd.unit(Path("/bin/kvtier"), words, description="d", mounts=[Path("/a b")])
    assert 'ExecStart=/bin/kvtier launch "it\'s 100 %% of $$HOME" "a\\"b\\\\c"\n' in text
    assert 'RequiresMountsFor="/a b"\n' in text
