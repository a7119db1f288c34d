"""A session over kill -9: a server is started, filled, killed, started again, and asked again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier import place
from kvtier.errors import KvtierError
from kvtier.integration.probes.client import Client, ProbeError, Progress
from kvtier.integration.probes.selfcheck import (
    Report,
    Result,
    control,
    kv_copies,
    passage,
    require_restored,
    require_sense,
    require_store,
    served,
)

START_TIMEOUT = 3600.0
"""Seconds until a server must answer: a large model is read from a drive first."""

STOP_TIMEOUT = 120.0
"""Seconds for a server to answer what it has begun, commit and end."""

GONE_TIMEOUT = 60.0
"""Seconds for killed processes to be gone."""

_ERROR = re.compile(r"(error|kvtier|\w*Error): ")

WARM_UP_TOKENS = 1024
"""Of a prompt that is sent first: what a process does once is not the session's time."""


@dataclass(frozen=True)
class Restore:
    """Times in seconds, sizes in bytes."""

    report: Report
    """Of the one session."""
    first_start: float
    second_start: float
    forgotten: int
    """Files of the store and of the model whose page cache was dropped between the two."""
    read_bytes: float
    """What kvtier read for the session, all ranks together."""
    load_back: float
    """Of copying it from host memory to the device; 0 where SGLang does not say."""

    @property
    def result(self) -> Result:
        return self.report.results[0]


@dataclass(frozen=True)
class Process:
    pid: int
    started: str
    """As the kernel counts: another process may get the same pid later."""

    @property
    def lives(self) -> bool:
        try:
            fields = _fields(Path(f"/proc/{self.pid}/stat"))
        except OSError:
            return False
        return fields[19] == self.started and fields[0] not in "ZX"

    def kill(self) -> None:
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Child:
    """A server that `command` starts and keeps in the foreground, with all its processes."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        handle, name = tempfile.mkstemp(prefix="kvtier-bench-", suffix=".log")
        os.close(handle)
        self.log = Path(name)

    def start(self, client: Client, progress: Progress) -> float:
        """Start it and wait until it answers; the seconds that took."""
        began = time.monotonic()
        with self.log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self.log.unlink()
                raise ProbeError(
                    f"{self._command[0]} cannot be run ({error.strerror}): after -- comes the "
                    "command that starts the server."
                ) from None
        while not client.healthy():
            seconds = time.monotonic() - began
            if self._process.poll() is not None:
                raise ProbeError(f"The server ended while starting; {self._last_words()}")
            if seconds > START_TIMEOUT:
                raise ProbeError(
                    f"Nothing answers at {client.url} after {seconds:.0f} s: give --url, if the "
                    f"server is elsewhere; {self._last_words()}"
                )
            progress(f"starting the server: {seconds:.0f} s")
            time.sleep(0.25)
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL to all its processes, so that none of them can commit or end in order."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                # A launcher that stands still cannot start a server again.
                self._process.send_signal(signal.SIGSTOP)
            self._end(descendants(self._process.pid))

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to what is left."""
        if self._process is not None:
            family = descendants(self._process.pid)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT)
            self._end(family)

    def _end(self, family: Sequence[Process]) -> None:
        """SIGKILL to what lives; returns when all of it is gone."""
        assert self._process is not None
        for process in family:
            process.kill()
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # what lost its parent before
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process = None
        until = time.monotonic() + GONE_TIMEOUT
        while any(process.lives for process in family):
            if time.monotonic() > until:
                raise ProbeError("Processes of the killed server are still there: see dmesg.")
            time.sleep(0.05)

    def _last_words(self) -> str:
        """The last error of its log, or else its last line."""
        text = self.log.read_text(errors="replace")
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        if not lines:
            self.log.unlink()
            return "it said nothing: run the command by itself."
        errors = [line for line in lines if _ERROR.match(line)]
        return f"it said last: {(errors or lines)[-1][:300]} (all of it is in {self.log})"


def measure(
    client: Client, command: Sequence[str], tokens: int, tolerance: float, progress: Progress
) -> Restore:
    """Run it all with a session of about `tokens` tokens. The server is gone afterwards."""
    if client.healthy():
        raise ProbeError(
            f"A server answers at {client.url} already: stop it, for this command starts one and "
            "kills it."
        )
    nonce = secrets.token_hex(8)
    child = Child(command)
    try:
        first_start = child.start(client, progress)
        info = client.info()
        require_store(info)
        session = passage(info, tokens, nonce)
        _warm_up(client, info, (nonce, 1), progress)
        progress("the session, computed, and again from the device")
        answers = served(client, session)
        client.settle(progress)
        progress("kill -9")
        child.kill()
        forgotten = sum(map(forget, _places(info)))
        second_start = child.start(client, progress)
        _warm_up(client, info, (nonce, 2), progress)
        progress("the session, from the store")
        before = client.metrics()
        restored = require_restored(session.ask(client), session)
        after = client.metrics()
        report = Report(
            (Result(*answers, restored),),
            tolerance,
            control(client, session, info, answers[0]),
            kv_copies(after),
        )
        require_sense(report)
        progress("stopping the server")
        child.stop()
    finally:
        child.kill()
    child.log.unlink()
    return Restore(
        report,
        first_start,
        second_start,
        forgotten,
        _grown(before, after, "kvtier_read_bytes_total"),
        _grown(before, after, "sglang:load_back_duration_seconds_sum"),
    )


def _warm_up(client: Client, info: dict[str, Any], seed: object, progress: Progress) -> None:
    """Another prompt, computed and then cached."""
    progress("a first prompt, to warm up")
    other = passage(info, WARM_UP_TOKENS, seed)
    for _ in range(2):
        other.ask(client)
    client.settle(progress)


def _grown(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


def _places(info: dict[str, Any]) -> Iterator[Path]:
    """Folders of the store and of the model, as far as they are on this machine."""
    try:
        config = json.loads(info.get("hicache_storage_backend_extra_config") or "{}")
        yield place.find_store(Path(config["root"]) if "root" in config else None)
    except (ValueError, KvtierError):
        pass  # a file of settings, or no such place here: it is said that nothing was dropped
    yield Path(str(info.get("model_path", "")))


def forget(folder: Path) -> int:
    """Drop the page cache of all files in a folder, so that the next read is the drive's; how many
    files. What is not on the drive yet stays. 0 if there is no such folder."""
    if not folder.is_dir():
        return 0
    done = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                file = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(file)
                done += 1
    return done


def descendants(pid: int) -> list[Process]:
    """All processes below one, children before grandchildren."""
    children: dict[int, list[Process]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            fields = _fields(stat)
            process = Process(int(stat.parent.name), fields[19])
            children.setdefault(int(fields[1]), []).append(process)
    found = list(children.get(pid, ()))
    for process in found:
        found += children.get(process.pid, ())
    return found


def _fields(stat: Path) -> list[str]:
    """State, parent and so on (proc(5)), after the name, which may hold anything."""
    return stat.read_text().rpartition(")")[2].split()
