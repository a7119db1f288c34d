"""Run plans of cases on this machine's cards; one JSON file and a short table come out.

    python3 -m cases PLAN... --cards 0,1 --out FOLDER [--work FOLDER] [--limit SECONDS]

All servers of the given plans start side by side, are measured one after the other, are killed
with -9, start again on their stores, and are measured again. What is done is written at once, so
a call that is cut off loses only what was under way.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cases.measure import Restart, Result, stream_beside_restore
from cases.plan import ENGINE, PLANS, Case
from cases.report import table
from cases.server import Server, ServerError


class Run:
    def __init__(self, cases: list[Case], options: argparse.Namespace) -> None:
        self.options = options
        self.began = time.monotonic()
        engine = options.engine.split() if options.engine is not None else ENGINE
        self.results: dict[str, Result] = {case.name: {} for case in cases}
        servers = [
            Server(case, options.work / case.name, engine, options.patience) for case in cases
        ]
        self.restarts = [Restart(server, self.results[server.case.name]) for server in servers]

    def run(self) -> None:
        try:
            self.start_all()
            self.each("fill", lambda restart: restart.fill())
            self.each("stream", lambda r: self.stream(r, restarted=False))
            if self.options.flush:
                self.each("flush", lambda r: r.server.flush())
            else:
                self.kill_all()
                self.start_all(again=True)
            self.each("restore", lambda restart: restart.restore())
            self.each("stream", lambda r: self.stream(r, restarted=True))
        finally:
            self.kill_all()
            self.save()

    def stream(self, restart: Restart, restarted: bool) -> None:
        """Beside a restore if there is something to restore, else without a restart."""
        if restart.case.decode and bool(restart.lengths) == restarted:
            restart.result["stream"] = stream_beside_restore(restart.server)

    # Servers

    def alive(self) -> list[Restart]:
        return [restart for restart in self.restarts if "error" not in restart.result]

    def start_all(self, again: bool = False) -> None:
        started = [r for r in self.alive() if r.lengths or not again]
        if again and self.over:
            for restart in started:
                restart.result.setdefault("left_out", []).append("restart")
            return
        for restart in started:
            restart.server.launch()
        with ThreadPoolExecutor(len(started) or 1) as pool:
            list(pool.map(self.wait, started))
        self.save()

    def wait(self, restart: Restart) -> None:
        self.guard(restart, "start", lambda r: r.server.wait(self.options.start_timeout))
        restart.result.setdefault("start_s", []).append(round(restart.server.start_seconds, 1))

    def kill_all(self) -> None:
        for restart in self.restarts:
            restart.server.kill9()

    # Measuring

    @property
    def over(self) -> bool:
        return time.monotonic() - self.began > self.options.limit

    def each(self, step: str, function: Callable[[Restart], None]) -> None:
        for restart in self.alive():
            if not restart.server.running:
                continue
            if self.over:
                restart.result.setdefault("left_out", []).append(step)
                continue
            self.guard(restart, step, function)
            self.save()

    def guard(self, restart: Restart, step: str, function: Callable[[Restart], None]) -> None:
        """A case that fails is noted and goes; the others go on."""
        began = time.monotonic()
        try:
            function(restart)
        except Exception as error:  # also what the measuring itself gets wrong: a call is dear
            restart.result["error"] = f"{step}: {error}"
            if not isinstance(error, ServerError):
                restart.result["traceback"] = traceback.format_exc()
            restart.server.kill9()
        seconds = time.monotonic() - began
        note = restart.result.get("error", "done")
        print(f"[{time.monotonic() - self.began:5.0f} s] {restart.case.name} {step} "
              f"{seconds:.1f} s: {note[:600]}", flush=True)  # fmt: skip

    def save(self) -> None:
        report = {"machine": machine(), "cases": self.results}
        self.options.out.mkdir(parents=True, exist_ok=True)
        (self.options.out / "results.json").write_text(json.dumps(report, indent=1))


def machine() -> dict[str, Any]:
    names = ("sglang", "torch", "sglang-kernel", "flashinfer-python", "tilelang", "kvtier")
    try:
        cards = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=True,
        ).stdout.split("\n")  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        cards = []
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "cards": [card for card in cards if card],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in names},
    }


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plans", nargs="+", choices=PLANS)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="of the plans' cases")
    parser.add_argument("--cards", default="0", help="their numbers, with commas")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("work"), help="stores and logs")
    parser.add_argument("--limit", type=float, default=540, help="begin nothing after so long (s)")
    parser.add_argument("--start-timeout", type=float, default=240)
    parser.add_argument("--patience", type=float, default=180, help="for one answer (s)")
    parser.add_argument("--flush", action="store_true",
                        help="empty the caches instead of a restart: half the time")  # fmt: skip
    parser.add_argument("--engine", help="SGLang's options instead of those for GPUs")
    options = parser.parse_args()
    cards = tuple(int(card) for card in options.cards.split(","))
    cases = [case for plan in options.plans for case in PLANS[plan](cards)]
    names = [case.name for case in cases]
    if unknown := set(options.only or ()) - set(names):
        parser.error(f"no case is called {' or '.join(sorted(unknown))}, but {', '.join(names)}")
    run = Run([case for case in cases if case.name in (options.only or names)], options)
    signal.signal(signal.SIGTERM, lambda *_: (run.kill_all(), sys.exit(143)))
    run.run()
    print(table(run.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
