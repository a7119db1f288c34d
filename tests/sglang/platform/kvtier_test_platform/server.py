"""A whole SGLang server on the test platform: start it, ask it, kill it.

with Server(model, storage_backend="kvtier", extra_config={"root": "/tmp/store"}) as server:
    answer = server.generate(tokens)
    server.kill9()
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kvtier_test_platform import PLATFORM

PAGE_SIZE = 16
"""Tokens a page: small, so that short prompts have many pages."""

START_TIMEOUT = 900.0
"""Seconds until a server must be ready. Two idle cores need 20 to 55."""

ANSWER_TIMEOUT = 900.0

ADMIN_KEY = "kvtier-tests"
"""SGLang attaches and detaches a storage only for callers with an administrator's key."""


class ServerError(Exception):
    """The server did not start, died, or refused a call; the message ends with its log."""


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt: output, time, and where its cached tokens came from."""

    output_ids: list[int]
    seconds: float
    cached_tokens: int
    device: int
    host: int
    storage: int


@dataclass
class Server:
    """One SGLang server with HiCache, in a process group of its own.

    `storage_backend`: value of --hicache-storage-backend, None for a server without storage.
    `extra_config`: its JSON. `arguments` are added to the command line and win over `settings`.
    `environment` is added to this process's. An answer that takes longer than `answer_timeout`
    seconds is an error. The log goes to `log`, appended over restarts.
    """

    model: Path
    log: Path
    storage_backend: str | None = None
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    tp: int = 1
    max_total_tokens: int = 4096
    write_policy: str = "write_through"
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    answer_timeout: float = ANSWER_TIMEOUT

    port: int = field(init=False, default=0)
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)

    # Life

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until it answers. Raises ServerError with the end of the log."""
        if self._process is not None:
            raise ServerError("the server is already running")
        self.port = free_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                env=os.environ | self._platform_environment() | dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill9()
            raise

    def command(self) -> list[str]:
        """The command line. It dies with the process that started it, even if that is killed."""
        settings = {
            "model-path": self.model,
            "host": "127.0.0.1",
            "port": self.port,
            "tp-size": self.tp,
            "device": "cpu",
            "dtype": "bfloat16",
            "attention-backend": "torch_native",
            "page-size": PAGE_SIZE,
            "max-total-tokens": self.max_total_tokens,
            "mem-fraction-static": 0.05,
            "max-running-requests": 4,
            "chunked-prefill-size": 512,
            "hicache-ratio": 2,
            "hicache-write-policy": self.write_policy,
            "hicache-storage-prefetch-policy": "wait_complete",
            "admin-api-key": ADMIN_KEY,
        }
        if self.storage_backend is not None:
            settings["hicache-storage-backend"] = self.storage_backend
            settings["hicache-storage-backend-extra-config"] = json.dumps(self.extra_config)
        switches = (
            "--disable-overlap-schedule",
            "--skip-server-warmup",
            "--enable-hierarchical-cache",
            "--enable-cache-report",
            "--sleep-on-idle",  # else an idle server takes a whole core
        )
        return [
            *("setpriv", "--pdeathsig", "KILL", "--"),
            *(sys.executable, "-m", "sglang.launch_server"),
            *(text for key, value in settings.items() for text in (f"--{key}", str(value))),
            *switches,
            *self.arguments,
        ]

    def _platform_environment(self) -> dict[str, str]:
        cores = sorted(os.sched_getaffinity(0))
        ranks = [str(cores[rank % len(cores)]) for rank in range(self.tp)]
        return {
            "SGLANG_PLATFORM": PLATFORM,
            "SGLANG_CPU_OMP_THREADS_BIND": "all" if self.tp == 1 else "|".join(ranks),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            # ninja, which builds HiCache's page hash, lies beside this interpreter.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if not self.running:
                raise ServerError(f"the server ended while starting\n{self.log_tail()}")
            with contextlib.suppress(OSError):  # refused or 503: not there yet
                self._call("GET", "/health", timeout=10)
                return
            time.sleep(0.25)
        raise ServerError(f"not ready after {START_TIMEOUT:.0f} s\n{self.log_tail()}")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill9(self) -> None:
        """SIGKILL to every process of the server at once, as the kernel's OOM killer or a
        power-cycled container would; returns when all are gone."""
        if self._process is None:
            return
        family = self._family()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=60)
        self._process = None

    def stop(self, timeout: float = 60) -> None:
        """SIGTERM, and SIGKILL to whatever is left after `timeout` seconds."""
        if self._process is None:
            return
        family = self._family()
        self._process.terminate()
        psutil.wait_procs(family, timeout=timeout)
        self.kill9()

    def _family(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def rank_pid(self, rank: int) -> int:
        """Process id of a tensor parallel rank's scheduler (it names itself so in scheduler.py)."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if " ".join(process.cmdline()).strip() == f"sglang::scheduler_TP{rank}":
                    return process.pid
        raise ServerError(f"there is no rank {rank}\n{self.log_tail()}")

    def log_tail(self, lines: int = 60) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])

    # Calls

    def generate(self, tokens: Sequence[int], max_new_tokens: int = 8) -> Answer:
        """Greedy continuation of a prompt of token ids."""
        body = {
            "input_ids": list(tokens),
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        began = time.perf_counter()
        answer = json.loads(self._request("POST", "/generate", body))
        seconds = time.perf_counter() - began
        meta = answer["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return Answer(
            output_ids=answer["output_ids"],
            seconds=seconds,
            cached_tokens=meta["cached_tokens"],
            device=details.get("device", 0),
            host=details.get("host", 0),
            storage=details.get("storage", 0),
        )

    def flush_cache(self) -> None:
        """Empty the caches on device and in host memory."""
        self._request("POST", "/flush_cache?timeout=60")

    def clear_storage(self) -> None:
        self._request("POST", "/hicache/storage-backend/clear")

    def detach_storage(self) -> None:
        self._request("DELETE", "/hicache/storage-backend")

    def attach_storage(
        self,
        backend: str | None = None,
        extra_config: Mapping[str, Any] | None = None,
        prefetch_policy: str = "wait_complete",
    ) -> None:
        """Attach a storage backend, the one the server was made with unless another is given."""
        config = self.extra_config if extra_config is None else extra_config
        body = {
            "hicache_storage_backend": backend or self.storage_backend,
            "hicache_storage_backend_extra_config_json": json.dumps(config),
            "hicache_storage_prefetch_policy": prefetch_policy,
            "hicache_write_policy": self.write_policy,
        }
        self._request("PUT", "/hicache/storage-backend", body)

    def _request(self, method: str, path: str, body: object = None) -> bytes:
        try:
            return self._call(method, path, body)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace").strip()
            raise ServerError(f"{method} {path}: {error.code} {said}\n{self.log_tail()}") from error
        except OSError as error:
            raise ServerError(f"{method} {path}: {error}\n{self.log_tail()}") from error

    def _call(
        self, method: str, path: str, body: object = None, timeout: float | None = None
    ) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "content-type": "application/json",
                "authorization": f"Bearer {ADMIN_KEY}",
            },
        )
        with urllib.request.urlopen(request, timeout=timeout or self.answer_timeout) as response:
            return response.read()


def free_port() -> int:
    """A TCP port on the loopback interface that the system just found free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def prompt_tokens(seed: int, count: int) -> list[int]:
    """A prompt of `count` token ids of the tiny models, the same for the same seed."""
    return [8 + (seed + 7 * i * i + i) % 500 for i in range(count)]


def cacheable_tokens(count: int) -> int:
    """How much of a prompt of `count` tokens SGLang can take from its caches: whole pages, and
    never the last token, from which the first output token is computed."""
    return (count - 1) // PAGE_SIZE * PAGE_SIZE


def gone(*pids: int) -> bool:
    """Whether none of these processes runs any more; zombies don't."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
    return True
