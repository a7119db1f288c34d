"""Every tool says what it does when it is asked for --help, and does nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"

SCRIPTS = [
    [str(path)]
    for path in sorted(TOOLS.glob("*.py"))
    # The study needs lmdb, which nothing else does.
    if "__main__" in path.read_text() and path.stem != "study_lmdb"
]
MODULES = [["-m", name] for name in ("powercut", "retention_sim", "retention_sim.ondisk")]


@pytest.mark.parametrize("words", SCRIPTS + MODULES, ids=lambda words: Path(words[-1]).stem)
def test_help_is_no_run(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *words, "--help"],
        capture_output=True,
        text=True,
        check=False,
        cwd=TOOLS if "-m" in words else tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ") and "--help" in done.stdout
    assert list(tmp_path.iterdir()) == []
