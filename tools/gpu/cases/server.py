"""One SGLang server of a case: start it, ask it, kill it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cases.plan import Case

OUTPUT_TOKENS = 16

LOOPBACK = "127.0.0.1"

Logprobs = list[tuple[int, float]]
"""Of each output token: its id and its log probability."""


class ServerError(Exception):
    """The server did not start, died or refused a call; says what its log says."""


@dataclass
class Answer:
    """One prompt's answer. Times in seconds from sending; `arrivals` of each output token."""

    prompt_tokens: int
    first_token: float
    seconds: float
    cached: dict[str, int]
    logprobs: Logprobs
    arrivals: list[float] = field(repr=False, default_factory=list)

    def row(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "first_token_s": round(self.first_token, 4),
            "cached": self.cached,
        }


class Server:
    """`folder` holds the store and the logs, and outlives the server. `engine` are SGLang's options
    for all servers; `patience` is how many seconds an answer may take."""

    def __init__(self, case: Case, folder: Path, engine: Sequence[str], patience: float) -> None:
        self.case = case
        self.folder = folder
        self.engine = list(engine)
        self.patience = patience
        self.store = folder / "store"
        self.log = folder / "server.log"
        self.port = 0
        self.starts = 0
        self.start_seconds = 0.0
        self._began = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    # Life

    def command(self) -> list[str]:
        case = self.case
        options: dict[str, object] = {
            "model-path": case.model,
            "load-format": "dummy",
            "dtype": "bfloat16",
            "tp-size": case.tp,
            "host": LOOPBACK,
            "port": self.port,
            "random-seed": 7,
            "max-running-requests": 8,
            "stream-interval": 1,
        }
        if case.tier is not None:
            options |= {
                "hicache-ratio": 2,
                "hicache-write-policy": "write_through",
                "hicache-storage-backend": case.tier,
                "hicache-storage-prefetch-policy": "wait_complete",
            }
        if case.tier == "kvtier":
            settings = {"root": str(self.store), **case.store}
            options["hicache-storage-backend-extra-config"] = json.dumps(settings)
        switches = ["--skip-tokenizer-init", "--skip-server-warmup", "--enable-cache-report"]
        if case.tier is not None:
            switches.append("--enable-hierarchical-cache")
        pairs = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        return [sys.executable, "-m", "sglang.launch_server", *pairs, *switches, *self.engine,
                *case.arguments]  # fmt: skip

    def launch(self) -> None:
        """Start without waiting."""
        self.store.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        self.log = self.folder / f"server{self.starts}.log"
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            self.port = probe.getsockname()[1]
        environment = os.environ | {
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.store),
            "GPU_PROBE": str(self.folder / "probe"),
            **self.case.environment,
        }
        if self.case.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.case.gpus))
        self._began = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout: float) -> None:
        """Wait until the server answers, `timeout` seconds from its launch at most."""
        while self.running:
            with contextlib.suppress(OSError, http.client.HTTPException):
                self._open("GET", "/health", timeout=5).close()
                self.start_seconds = time.monotonic() - self._began
                return
            if time.monotonic() - self._began > timeout:
                raise ServerError(f"not ready after {timeout:.0f} s: {self.error()}")
            time.sleep(0.25)
        raise ServerError(f"ended while starting: {self.error()}")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill9(self) -> None:
        """SIGKILL to all of its processes at once; returns when they are gone."""
        if self._process is None:
            return
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self._process.pid)
            family = [first, *first.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family, timeout=30)
        self._process.wait()
        self._process = None

    def error(self) -> str:
        """The most telling lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        telling = re.compile(r"^([\w.]*(Error|Exception)\b|kvtier: |\s*assert |.* error: )")
        found = [line.strip() for line in lines if telling.search(line)]
        # Every server without a warm-up logs that it could not reach itself for /freeze_gc.
        noise = ("requests.", "urllib3.", "ConnectionRefusedError")
        found = [line for line in found if not line.startswith(noise)]
        return " | ".join(dict.fromkeys(found[-4:])) or " | ".join(lines[-4:])

    # Calls

    def ask(
        self,
        prompt: Sequence[int],
        output_tokens: int = OUTPUT_TOKENS,
        stop: threading.Event | None = None,
    ) -> Answer:
        """Send a prompt of token ids; the greedy answer with the tokens' log probabilities.

        Once `stop` is set the answer ends with what has come so far.
        """
        body = {
            "input_ids": list(prompt),
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": -1,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": output_tokens,
                "ignore_eos": True,
            },
        }
        began = time.perf_counter()
        arrivals, last = [], None
        try:
            with self._open("POST", "/generate", body) as response:
                for line in response:
                    if line.startswith(b"data: {"):
                        arrivals.append(time.perf_counter() - began)
                        last = json.loads(line[6:])
                    if stop is not None and stop.is_set():
                        break
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{error}: {self.error()}") from error
        if last is None or "error" in last or "meta_info" not in last:
            raise ServerError(f"{last}: {self.error()}")
        meta = last["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return Answer(
            prompt_tokens=meta["prompt_tokens"],
            first_token=arrivals[0],
            seconds=arrivals[-1],
            cached={key: details.get(key, 0) for key in ("device", "host", "storage")},
            logprobs=[(row[1], row[0]) for row in meta["output_token_logprobs"]],
            arrivals=arrivals,
        )

    def flush(self) -> None:
        """Empty the caches on the device and in host memory."""
        self._open("POST", "/flush_cache?timeout=30").close()

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """While the probe plugin is to do something: copy from the device `slow`ly, store `early`,
        prefetch `unpatched`, compare `pages`."""
        marker = self.folder / f"probe.{what}"
        marker.touch()
        try:
            yield
        finally:
            marker.unlink()

    def check_pages(self) -> list[dict[str, Any]]:
        """Have every rank compare the pages on its device with the stored ones (probe plugin)."""
        files = [self.folder / f"probe.{rank}.json" for rank in range(self.case.tp)]
        for file in files:
            file.unlink(missing_ok=True)
        until = time.monotonic() + self.patience
        with self.asking("pages"):
            self._open("GET", "/server_info", timeout=self.patience).close()
            while not all(file.exists() for file in files):
                if time.monotonic() > until:
                    raise ServerError(f"not every rank compared its pages: {self.error()}")
                time.sleep(0.05)
        ranks = [json.loads(file.read_text()) for file in files]
        if wrong := [rank for rank in ranks if rank.keys() <= {"rank", "error"}]:
            raise ServerError(f"no pages were compared: {wrong}")
        return ranks

    def _open(
        self, method: str, path: str, body: object = None, timeout: float | None = None
    ) -> http.client.HTTPResponse:
        request = urllib.request.Request(
            f"http://{LOOPBACK}:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=timeout or self.patience)
