"""Keep one server running: restart after a crash, stop cleanly on SIGTERM, say when it is ready."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from kvtier.errors import KvtierError
from kvtier.index import Index
from kvtier.integration.launcher.address import Address
from kvtier.integration.launcher.load_watch import LoadWatch
from kvtier.layout import Layout
from kvtier.report import report

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Seconds before a restart; doubled after each crash."""

STABLE = 600.0
"""Seconds of serving after which the next crash counts as the first again."""

DRAIN = 60.0
"""Seconds that SGLang gets to answer what it has begun."""

COMMIT = 20.0
"""Seconds after that for its processes to commit (integration/shutdown.py) and end."""

_REFUSED = 2
"""Exit status of SGLang for a command line that it doesn't take."""

_PR_SET_PDEATHSIG = 1


class Supervisor:
    """Runs `sglang serve` in a process group of its own until it is told to stop.

    `program` and `arguments` are executed with `environment`. `address` is where SGLang listens,
    `store` where its pages go, or None for a server without. `check` raises KvtierError if a start
    would fail or do harm now, and is asked before each; `on_ready` is called at each readiness.
    Output is inherited.
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        address: Address,
        store: Path | None,
        model: str,
        check: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._command = [program, *arguments]
        self._environment = dict(environment)
        self._address = address
        self._store = store
        self._model = model
        self._check = check
        self._on_ready = on_ready
        self._signals = 0
        self._pause = FIRST_PAUSE
        self._served = False

    def run(self) -> int:
        """Serve until stopped by a signal; the exit status for this process."""
        before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            while not self._signals:
                try:
                    self._check()
                except KvtierError as error:
                    self._wait(f"{error} Next try")
                    continue
                reason, seconds, status = self._serve_once()
                if self._signals:
                    break
                if reason is None:
                    say("SGLang was stopped by somebody else")
                    break
                if status == _REFUSED and not self._served:
                    say("SGLang refuses the command line; its message is above.")
                    return _REFUSED
                self._wait_before_restart(reason, seconds)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        say("stopped")
        return 0

    def _serve_once(self) -> tuple[str | None, float, int]:
        """One life of the server: why it ended (None if somebody stopped it), how many seconds it
        served, its exit status."""
        began = time.monotonic()
        watch = LoadWatch()
        process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509  no threads here
        )
        say(f"starting, process {process.pid}")
        ready = 0.0
        while process.poll() is None and not self._signals:
            if not ready and self._answers() and self._is_ours(process):
                ready = time.monotonic()
                self._served = True
                self._say_ready(ready - began, watch)
            elif not ready:
                watch.look()
            _sleep(process, 1.0)
        if self._signals:
            self._stop(process)
        _end_group(process)
        print(file=sys.stderr)  # SGLang's last words end in the middle of a line
        seconds = time.monotonic() - ready if ready else 0.0
        if process.returncode == 0:
            return None, seconds, 0
        return _reason(process.returncode), seconds, process.returncode

    def _say_ready(self, seconds: float, watch: LoadWatch) -> None:
        self._on_ready()
        for finding in watch.findings():
            say(f"warning: {finding}")
        text = f"ready after {seconds:.1f} s at {self._address.url}"
        if self._store is not None:
            text += f"; {restorable(self._store, self._model)}"
        say(text)
        _notify("READY=1")

    def _answers(self) -> bool:
        try:
            # The certificate, if any, names the server's public host and not this loopback.
            trusting = ssl._create_unverified_context()
            address = f"{self._address.url}/health"
            with urllib.request.urlopen(address, timeout=5, context=trusting) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):  # refused, 503: not there yet
            return False

    def _is_ours(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether it was this server that answered: another one may have taken the port while
        this one loads its weights."""
        return not self._address.is_anothers(process.pid) and process.poll() is None

    def _wait_before_restart(self, reason: str, seconds: float) -> None:
        if seconds >= STABLE:
            self._pause = FIRST_PAUSE
        served = f"after {seconds:.0f} s of serving" if seconds else "before it was ready"
        self._wait(f"SGLang {reason} {served}; restart")

    def _wait(self, text: str) -> None:
        """Say `text` and in how many seconds, and wait; the next wait is longer."""
        say(f"{text} in {self._pause:g} s")
        until = time.monotonic() + self._pause
        while time.monotonic() < until and not self._signals:
            time.sleep(min(0.2, self._pause))
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """Let SGLang answer what it has begun and end; then commit and end; then kill."""
        seen = self._signals
        say(f"stopping: up to {DRAIN:.0f} s for running requests; a second signal kills")
        _notify("STOPPING=1")
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        for seconds, number in ((DRAIN, signal.SIGTERM), (COMMIT, signal.SIGKILL)):
            until = time.monotonic() + seconds
            while time.monotonic() < until and self._signals == seen:
                if process.poll() is not None:
                    return
                _sleep(process, 0.2)
            if self._signals != seen:
                say("killed by a second signal")
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def restorable(store: Path, model: str) -> str:
    """What of a model's sessions the store can give back, for the line at readiness."""
    try:
        layout = Layout.open(store, create=False)
        found = report(layout, Index(layout, readonly=True))
    except (KvtierError, OSError) as error:
        return f"the store cannot be read ({error})"
    same = [n for n in found.namespaces if n.identity and _is_of(n.identity.about, model)]
    sessions = sum(1 for n in same for session in n.sessions if session.restorable)
    tokens = sum(n.tokens(n.restorable) or 0 for n in same)
    served = f"sessions restorable: {sessions:,}, tokens: {tokens:,}, in {store}"
    return served if found.health.live_writers else f"{served}; THE TIER IS OFF, see the log above"


def _is_of(about: Mapping[str, object], model: str) -> bool:
    named = str(about.get("model_path", ""))
    return named == model or (bool(named) and Path(named).absolute() == Path(model).absolute())


def say(text: str) -> None:
    """One line of the launcher, told from the server's by its beginning."""
    print(f"kvtier launch: {text}", file=sys.stderr, flush=True)


def _reason(status: int) -> str:
    if status >= 0:
        return f"ended with status {status} (its last lines are above)"
    name = signal.Signals(-status).name
    more = " (kill -9, or out of memory: see dmesg)" if -status == signal.SIGKILL else ""
    return f"was ended by {name}{more}"


def _sleep(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Until the process ends or the time is over."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _end_with_parent() -> None:
    """In the child: SIGTERM when this launcher is killed, so that no server is left alone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a server, and wait until its memory, ports and locks are free."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        while True:
            # As process 1 of a container this process inherits what the server has left.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-process.pid, os.WNOHANG)
            os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.1)


def _notify(state: str) -> None:
    """Tell systemd, if it started this (sd_notify)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.sendto(state.encode(), address.replace("@", "\0", 1))


def find_program(environ: Mapping[str, str]) -> tuple[str, str]:
    """SGLang's command and the PATH it needs: it lies beside this interpreter, as ninja does, which
    builds HiCache's page hash."""
    beside = str(Path(sys.executable).parent)
    path = environ.get("PATH", os.defpath)
    if beside not in path.split(os.pathsep):
        path = f"{beside}{os.pathsep}{path}"
    return shutil.which("sglang", path=path) or "sglang", path


def check_program(environ: Mapping[str, str]) -> None:
    """KvtierError if SGLang's command is not there."""
    program, path = find_program(environ)
    if shutil.which(program, path=path) is None:
        raise KvtierError(
            f"There is no sglang beside {sys.executable} or on PATH: install SGLang there, or use "
            "the kvtier of the environment that has it."
        )
