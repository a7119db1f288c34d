"""The supervisor, with real processes in the engine's place: what ends, restarts, stops, kills."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "core"))

from kvtier_test_platform.server import gone
from making import contents, keys, opened, put

from kvtier.identity import Identity
from kvtier.integration.launcher import supervisor
from kvtier.integration.launcher.address import Address
from kvtier.integration.launcher.supervisor import restorable

TIMEOUT = 300

# An engine: answers /health, has a child of its own, and does what the words say.
ENGINE = """
import http.server, os, signal, subprocess, sys, threading, time
mode, port, log = sys.argv[1], int(sys.argv[2]), sys.argv[3]
gate = log + ".gate"
while mode == "loads" and not os.path.exists(gate):
    time.sleep(0.05)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
with open(log, "a") as file:
    print("begin", os.getpid(), child.pid, file=file)
if mode == "refuses":
    sys.exit(2)
if mode == "fails":
    sys.exit(5)
def term(number, frame):
    with open(log, "a") as file:
        print("term", os.getpid(), file=file)
    if mode != "hangs":
        sys.exit(0)
signal.signal(signal.SIGTERM, term)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *words):
        pass
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    time.sleep(0.1)
"""

LAUNCHER = """
import json, os, sys
from kvtier.errors import KvtierError
from kvtier.integration.launcher import supervisor
from kvtier.integration.launcher.address import Address
given = json.loads(sys.argv[1])
for name, value in given["constants"].items():
    setattr(supervisor, name, value)
address = Address("127.0.0.1", given["port"])
made = supervisor.Supervisor(
    sys.executable,
    given["arguments"],
    os.environ,
    address=address,
    store=None,
    model="m",
    check=address.check_free,
    on_ready=lambda: print("kvtier launch: told of it", file=sys.stderr, flush=True),
)
assert "torch" not in sys.modules and "sglang" not in sys.modules
sys.exit(made.run())
"""


class Running:
    """A supervisor in a process of its own, what it said, and what its engines wrote."""

    def __init__(self, process: subprocess.Popen[bytes], said: Path, log: Path, port: int) -> None:
        self.process, self._said, self._log, self.port = process, said, log, port

    def said(self, pattern: str) -> list[str]:
        return re.findall(f"^kvtier launch: ({pattern}.*)$", self._said.read_text(), re.M)

    def engines(self) -> list[tuple[int, int]]:
        """Process ids of each engine and its child."""
        text = self._log.read_text() if self._log.exists() else ""
        return [(int(a), int(b)) for a, b in re.findall(r"^begin (\d+) (\d+)$", text, re.M)]

    def terms(self) -> int:
        return self._log.read_text().count("term")

    def until(self, condition: object, what: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline, f"no {what}\n{self._said.read_text()}"
            time.sleep(0.05)


@contextmanager
def supervised(
    tmp_path: Path,
    mode: str,
    environment: dict[str, str] | None = None,
    port: int = 0,
    **constants: float,
) -> Iterator[Running]:
    if not port:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    said, log = tmp_path / "said", tmp_path / "log"
    given = {
        "arguments": ["-c", ENGINE, mode, str(port), str(log)],
        "port": port,
        "constants": constants,
    }
    with said.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, json.dumps(given)],
            stderr=file,
            env=os.environ | (environment or {}),
        )
    running = Running(process, said, log, port)
    try:
        yield running
    finally:
        process.kill()
        process.wait()
        for pids in running.engines():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_killed_engine_is_restarted_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    with supervised(tmp_path, "serves", FIRST_PAUSE=0.1) as running:
        running.until(lambda: running.said("ready after"), "ready line")
        assert running.said("told of it")
        [(engine, child)] = running.engines()
        os.kill(engine, signal.SIGKILL)
        running.until(lambda: len(running.said("ready after")) == 2, "second ready line")
        assert gone(engine, child)
        [why] = running.said("SGLang was ended by SIGKILL")
        assert "kill -9, or out of memory" in why
        running.process.terminate()
        assert running.process.wait(TIMEOUT) == 0
        assert running.terms() == 1 and len(running.engines()) == 2
        assert gone(*running.engines()[1])


def test_pauses_double_up_to_a_bound_and_it_never_gives_up(tmp_path: Path) -> None:
    with supervised(tmp_path, "fails", LONGEST_PAUSE=0.4, FIRST_PAUSE=0.1) as running:
        running.until(lambda: len(running.said("SGLang ended with status 5")) >= 4, "fourth crash")
        pauses = [line.rsplit("in ", 1)[1] for line in running.said("SGLang ended")]
        assert pauses[:4] == ["0.1 s", "0.2 s", "0.4 s", "0.4 s"]
        running.process.terminate()
        assert running.process.wait(TIMEOUT) == 0


def test_a_long_service_makes_the_next_crash_the_first_again(tmp_path: Path) -> None:
    with supervised(tmp_path, "serves", FIRST_PAUSE=0.1, STABLE=0.0) as running:
        for number in range(1, 4):
            running.until(lambda n=number: len(running.said("ready")) == n, f"ready {number}")
            os.kill(running.engines()[-1][0], signal.SIGKILL)
            running.until(lambda n=number: len(running.said("SGLang was")) == n, f"crash {number}")
        assert all(line.endswith("restart in 0.1 s") for line in running.said("SGLang was"))


def test_a_refused_command_line_is_tried_once(tmp_path: Path) -> None:
    with supervised(tmp_path, "refuses") as running:
        assert running.process.wait(TIMEOUT) == 2
        assert len(running.engines()) == 1


@contextmanager
def another_server(port: int = 0) -> Iterator[tuple[int, list[str]]]:
    """One that answers /health, in this process; its port and the paths it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1], asked
    finally:
        server.shutdown()
        server.server_close()


def test_nothing_is_started_while_another_server_has_the_port(tmp_path: Path) -> None:
    with (
        another_server() as (port, asked),
        supervised(tmp_path, "serves", port=port, FIRST_PAUSE=0.1) as running,
    ):
        running.until(lambda: len(running.said("Another process has port")) >= 2, "refusals")
        assert not running.engines() and not running.said("ready") and not asked
        running.process.terminate()
        assert running.process.wait(TIMEOUT) == 0


def test_an_answer_of_another_server_is_no_readiness(tmp_path: Path) -> None:
    """The port is taken while the engine loads its weights: then it cannot have answered."""
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(address))
        systemd.setblocking(False)
        environment = {"NOTIFY_SOCKET": str(address)}
        with supervised(tmp_path, "loads", environment, FIRST_PAUSE=0.1) as running:
            running.until(lambda: running.said("starting"), "start")
            with another_server(running.port) as (_, asked):
                running.until(lambda: len(asked) >= 2, "answers of the other server")
                (tmp_path / "log.gate").touch()
                running.until(lambda: running.said("SGLang ended.*before it was ready"), "end")
                running.until(lambda: running.said("Another process has port"), "refusal")
                assert not running.said("ready") and not running.said("told of it")
                with pytest.raises(BlockingIOError):
                    systemd.recv(100)
            running.until(lambda: running.said("ready after"), "ready line of its own")
            systemd.settimeout(TIMEOUT)
            assert systemd.recv(100) == b"READY=1"


def test_a_second_signal_kills(tmp_path: Path) -> None:
    with supervised(tmp_path, "hangs") as running:
        running.until(lambda: running.said("ready"), "ready line")
        running.process.send_signal(signal.SIGINT)
        running.until(lambda: running.terms() == 1, "SIGTERM in the engine")
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(TIMEOUT) == 0
        assert running.said("killed by a second signal")
        assert gone(*running.engines()[0])


def test_a_second_signal_while_the_first_is_passed_on_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "DRAIN", 2.0)
    one = supervisor.Supervisor(
        "", [], {}, address=Address("127.0.0.1", 1), store=None, model="", check=int, on_ready=int
    )
    one._on_signal(signal.SIGINT, None)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        monkeypatch.setattr(process, "terminate", lambda: one._on_signal(signal.SIGINT, None))
        try:
            one._stop(process)
        finally:
            process.kill()
    assert "killed by a second signal" in capsys.readouterr().err


def test_an_engine_that_does_not_end_is_told_again_and_then_killed(tmp_path: Path) -> None:
    with supervised(tmp_path, "hangs", DRAIN=5.0, COMMIT=5.0) as running:
        running.until(lambda: running.said("ready"), "ready line")
        running.process.terminate()
        assert running.process.wait(TIMEOUT) == 0
        assert running.terms() == 2  # to the engine, then to all of its group
        assert gone(*running.engines()[0])


def test_a_stop_between_two_starts(tmp_path: Path) -> None:
    with supervised(tmp_path, "fails", FIRST_PAUSE=1000.0) as running:
        running.until(lambda: running.said("SGLang ended"), "crash")
        running.process.terminate()
        assert running.process.wait(TIMEOUT) == 0
        assert len(running.engines()) == 1


def test_no_engine_outlives_its_launcher(tmp_path: Path) -> None:
    with supervised(tmp_path, "serves") as running:
        running.until(lambda: running.said("ready"), "ready line")
        running.process.kill()
        running.until(lambda: running.terms() == 1, "SIGTERM in the engine")
        running.until(lambda: gone(running.engines()[0][0]), "end of the engine")


def test_systemd_hears_of_readiness_and_of_the_stop(tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(address))
        systemd.settimeout(TIMEOUT)
        with supervised(tmp_path, "serves", {"NOTIFY_SOCKET": str(address)}) as running:
            assert systemd.recv(100) == b"READY=1"
            running.process.terminate()
            assert systemd.recv(100) == b"STOPPING=1"


# --- what the store can give back ---------------------------------------------------------------


def test_restorable_sessions_of_this_model_are_counted(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, _):
        for model, pages in (("/models/a", 10), ("/models/b", 5)):
            namespace = store.namespace(
                Identity.of({"page_tokens": 16, "model": model}, {"model_path": model})
            )
            chain = keys(model, pages)
            put(namespace, chain, contents(chain, 1000))
        assert store.flush(60)
        place = tmp_path / "kvtier"
        assert restorable(place, "/models/a") == f"sessions restorable: 1, tokens: 160, in {place}"
        assert restorable(place, "/models/c").startswith("sessions restorable: 0, tokens: 0")
    assert "THE TIER IS OFF" in restorable(place, "/models/a")
    assert "cannot be read" in restorable(tmp_path / "none", "/models/a")
