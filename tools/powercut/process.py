"""Writers and verifiers as processes of their own, forked, that speak over a pipe."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from powercut.workload import Message, delete_nothing_unasked


class Child:
    """A forked process that runs `work(send)`; what it sends is heard by the oracle.

    `answers`: the child waits after each message until it was heard.
    """

    def __init__(
        self, work: Callable[[Callable[[Message], None]], None], *, answers: bool = False
    ) -> None:
        self._reader, writer = os.pipe()
        reply_reader, self._reply = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reader)
            os.close(self._reply)
            _die_with_parent()
            delete_nothing_unasked()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            logging.getLogger("kvtier").addHandler(logging.NullHandler())
            logging.getLogger("kvtier").propagate = False
            _run(work, writer, reply_reader if answers else -1)
        os.close(writer)
        os.close(reply_reader)
        os.set_blocking(self._reader, False)
        self._answers = answers
        self._rest = b""
        self.ended = False
        """The pipe's other end is closed."""
        self.status: int | None = None
        self.errors: list[str] = []
        """Tracebacks of exceptions that left `work`."""

    def listen(self, seconds: float, hear: Callable[[Message], Any]) -> None:
        """Hear what the child says for so long, or until it has ended."""
        deadline = time.monotonic() + seconds
        while not self.ended:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._reader], [], [], max(0.0, left))
            if ready:
                self._take(hear)
            elif left <= 0:
                return

    def _take(self, hear: Callable[[Message], Any]) -> None:
        data = os.read(self._reader, 1 << 16)
        if not data:
            self.ended = True
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message["say"] == "error":
                self.errors.append(message["text"])
            else:
                hear(message)
            if self._answers:
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._reply, b".")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, hear: Callable[[Message], Any] = lambda message: None) -> int:
        """Hear the rest, reap it, and say how it ended."""
        if self.status is None:
            self.listen(300, hear)
            if not self.ended:
                self.errors.append("a process hung for 300 s")
                self.kill()
            self.status = os.waitpid(self.pid, 0)[1]
            os.close(self._reader)
            os.close(self._reply)
        return self.status


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _run(work: Callable[[Callable[[Message], None]], None], pipe: int, reply: int) -> None:
    def send(message: Message) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(pipe, data) :]
        if reply >= 0:
            os.read(reply, 1)

    status = 0
    try:
        work(send)
    except BaseException:
        status = 1
        with contextlib.suppress(BaseException):
            send({"say": "error", "text": traceback.format_exc()})
    finally:
        os._exit(status)


def checked(work: Callable[[], tuple[list[str], int]]) -> tuple[list[str], int]:
    """Run a verification in a process of its own: (what is wrong, parts that are there)."""
    said: list[Message] = []

    def tell(send: Callable[[Message], None]) -> None:
        wrong, parts = work()
        send({"say": "verified", "wrong": wrong[:50], "parts": parts})

    child = Child(tell)
    status = child.wait(said.append)
    if not said:
        why = child.errors or [f"the verifying process ended with status {status}"]
        return [f"opening or reading failed: {text}" for text in why], 0
    return said[0]["wrong"], said[0]["parts"]


def hear_all(children: list[Child], seconds: float, hear: Callable[[Message], Any]) -> None:
    """Hear several children for so long, in turns."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(child.ended for child in children):
        for child in children:
            child.listen(min(0.002, max(0.0, deadline - time.monotonic())), hear)


def hear_some(children: list[Child], rng: random.Random, hear: Callable[[Message], Any]) -> None:
    """Hear several children up to a random moment, counted in messages, so that a busy machine
    gets as far as an idle one, and then in milliseconds."""
    wanted = rng.choice((0, 1, 5, 10, 20, 40, 80))
    heard = 0

    def count(message: Message) -> None:
        nonlocal heard
        heard += 1
        hear(message)

    deadline = time.monotonic() + 10
    while heard < wanted and time.monotonic() < deadline:
        if all(child.ended for child in children):
            break
        hear_all(children, 0.002, count)
    hear_all(children, rng.uniform(0.0, 0.02), hear)
