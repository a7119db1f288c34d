"""`python -m powercut`: run techniques of the lab, print what they found, write it to a file.

Exit status 0: no violation. 1: violations, which are printed. 2: the lab cannot work here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from powercut.filesystem import LabError

TECHNIQUES = {
    # name: (runs in the short form, runs in the long form), each for every kind of its own
    "cuts": (25, 500),
    "replay": (16, 500),
    "kills": (10, 300),
    "rot": (20, 1000),
    "faults": (1, 3),
    "drives": (1, 5),
    "late": (1, 20),
    "server": (0, 1),
}


def main() -> int:
    """Run what the command line says."""
    options = _options()
    if options.one:
        return _one(options.one, options.runs, options.seed)
    lines = []
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    for name in options.techniques or list(TECHNIQUES):
        runs = options.runs or TECHNIQUES[name][options.form == "long"]
        if not runs:
            continue
        # A process each: some mount, some load a library, some limit themselves.
        command = [sys.executable, "-m", "powercut", "--one", name]
        command += ["--runs", str(runs), "--seed", str(options.seed)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return done.returncode
        for line in done.stdout.splitlines():
            found = json.loads(line)
            lines.append(found)
            _show(found)
    violations = sum(len(found["violations"]) for found in lines)
    if options.output:
        document = {
            "date": began,
            "kernel": platform.release(),
            "machine": platform.machine(),
            "seed": options.seed,
            "form": options.form,
            "techniques": lines,
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=2) + "\n")
    print(f"\n{table(lines)}\n\n{violations} violations")
    return 1 if violations else 0


def table(lines: list[dict]) -> str:
    """The results as a table in Markdown."""
    rows = ["| technique | runs | violations | found | minutes |", "|---|---:|---:|---|---:|"]
    for found in lines:
        figures = ", ".join(f"{value:,} {name}" for name, value in found["figures"].items())
        rows.append(
            f"| {found['technique']} | {found['runs']:,} | {len(found['violations'])} "
            f"| {figures} | {found['seconds'] / 60:.1f} |"
        )
    return "\n".join(rows)


def _one(name: str, runs: int, seed: int) -> int:
    """Run one technique in this process and print its results as JSON lines."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unmount and remove, then end
    try:
        results = importlib.import_module(f"powercut.{name}").run(runs, seed)
    except LabError as error:
        print(f"powercut: {error}", file=sys.stderr)
        return 2
    for result in results:
        print(json.dumps(result.document()))
    return 0


def _show(found: dict) -> None:
    count = len(found["violations"])
    print(f"{found['technique']}: {found['runs']} runs, {count} violations, {found['seconds']} s")
    for text in found["violations"][:20]:
        print(f"  {text}")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m powercut", description=__doc__)
    parser.add_argument("techniques", nargs="*", help=f"of {', '.join(TECHNIQUES)}; all by default")
    parser.add_argument("--form", choices=("short", "long"), default="short")
    parser.add_argument("--runs", type=int, default=0, help="instead of the form's number")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--output", type=Path, help="write a JSON document there")
    parser.add_argument("--one", choices=list(TECHNIQUES), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
