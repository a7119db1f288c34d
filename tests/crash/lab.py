"""Runs a technique of tools/powercut as `make crash` does, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parents[2] / "tools"


def results(technique: str, runs: int, seed: int) -> list[dict[str, Any]]:
    """What it found, without a violation."""
    command = [sys.executable, "-m", "powercut", "--one", technique]
    command += ["--runs", str(runs), "--seed", str(seed)]
    done = subprocess.run(command, cwd=TOOLS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for one in found:
        assert not one["violations"], one["violations"][:10]
    return found
