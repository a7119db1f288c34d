"""A store that serves while something is wrong with its drive, and a look at it afterwards."""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier import breaker
from kvtier.store import Store
from powercut.process import Child, checked
from powercut.result import Result
from powercut.workload import (
    IDENTITY,
    KV,
    POOLS,
    Oracle,
    Send,
    get,
    put_family,
    settings,
    tell,
    verify,
)

DEADLINE = 0.25
"""Read and put deadline of the stores here, in seconds."""

PATIENCE = 30.0
"""No call may take so long: the deadline, and all that a busy machine may add."""


class Bench:
    """A store that serves while something is wrong with its drive."""

    def __init__(self, root: Path, send: Send, seed: int, **changes: Any) -> None:
        self.root, self.send = root, send
        self.rng = random.Random(seed)
        self.oracle = Oracle(seed)
        values: dict[str, Any] = {"read_deadline": DEADLINE, "put_deadline": DEADLINE}
        self.config = settings(root, **(values | changes))
        self.wrong: list[str] = []
        self.log: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = self.log.append  # type: ignore[method-assign]
        logging.getLogger("kvtier").addHandler(handler)
        logging.getLogger("kvtier").propagate = False
        breaker.FIRST_PAUSE = 0.2  # not what is tested here, and there are many scenarios
        self.open()

    def open(self) -> None:
        self.store = Store.open(self.config)
        self.pages = self.store.namespace(IDENTITY, KV.column(0))

    def timed(self, call: Callable[[], Any], what: str) -> Any:
        """The call's answer; what it raised, and a hang, is a violation."""
        began = time.monotonic()
        try:
            return call()
        except Exception as error:  # nothing may leave a call: the engine is not at fault
            self.wrong.append(f"{what} raised {type(error).__name__}: {error}")
        finally:
            took = time.monotonic() - began
            if took > PATIENCE:
                self.wrong.append(f"{what} took {took:.1f} s")

    def put(self, pages: int = 12) -> int:
        """Put a new chain; its number."""
        number = len(self.oracle.chains)
        plan = {"say": "put", "chain": number, "stem": 0, "fork": 0, "start": 0, "end": pages}
        self.send(plan)
        self.oracle.hear(plan)
        self.timed(lambda: put_family(self.pages, 0, self.oracle, plan), "put")
        return number

    def look(self, number: int) -> None:
        """Look a chain up, promise what is shown, and read it."""
        keys = self.oracle.keys(number)

        def say(message: dict[str, Any]) -> None:
            self.send(message)
            self.oracle.hear(message)

        at = time.monotonic_ns()
        self.timed(lambda: tell(self.pages, self.oracle, number, say, at=at), "a lookup")
        for pool in POOLS:
            answer = self.timed(functools.partial(get, self.pages, 0, pool, keys), "a get")
            if answer is not None:
                self.wrong += answer[1]

    def fill(self) -> None:
        """Chains that are committed before anything goes wrong."""
        for _ in range(3):
            self.put()
        if not self.store.flush(60):
            self.wrong.append("nothing was committed before the fault")
        for number in range(3):
            self.look(number)
        self.log.clear()

    def serve(self, rounds: int = 3) -> None:
        """What an engine does meanwhile."""
        for _ in range(rounds):
            number = self.put()
            self.timed(lambda: self.store.flush(DEADLINE), "a flush")
            self.look(number)
            self.look(self.rng.randrange(3))

    def resumed(self) -> None:
        """The fault has gone: soon a new chain is stored and read, and old ones are there."""
        deadline = time.monotonic() + 60
        while True:
            number = self.put()
            self.store.flush(5)
            keys = self.oracle.keys(number)
            there = all(
                self.pages.contains(pool.column(0), keys)[-1:].all()
                and get(self.pages, 0, pool, keys[-1:])[0].all()
                for pool in POOLS
            )
            if there:
                break
            if time.monotonic() > deadline:
                self.wrong.append("the service did not resume within 60 s")
                break
            time.sleep(0.1)
        self.look(number)

    def logged(self, *, most: int = 12) -> None:
        """The fault was said, in lines a person can read, and not over and over."""
        lines = [record for record in self.log if record.levelno >= logging.WARNING]
        if not lines:
            self.wrong.append("nothing was logged")
        if len(lines) > most:
            texts = [record.getMessage() for record in lines]
            self.wrong.append(f"{len(lines)} lines were logged: {texts[:3]}")
        for record in lines:
            if record.exc_info:
                self.wrong.append(f"a traceback was logged: {record.exc_info[1]!r}")

    def close(self) -> None:
        self.timed(lambda: self.store.close(10), "close")


Scenario = Callable[[Bench], None]


def play(
    scenario: Scenario,
    root: Path,
    seed: int,
    name: str,
    result: Result,
    *,
    between: Callable[[], None] | None = None,
) -> None:
    """Play a scenario in a process of its own, and look at the store from a fresh one.

    `between`: what happens after the first process has ended, such as a power cut. Without it the
    store is closed in good order.
    """
    oracle = Oracle(seed)
    said: list[dict[str, Any]] = []

    def hear(message: dict[str, Any]) -> None:
        (said.append if message["say"] == "played" else oracle.hear)(message)

    def work(send: Send) -> None:
        bench = Bench(root, send, seed)
        scenario(bench)
        if between is None:
            bench.close()
        send({"say": "played", "wrong": bench.wrong})

    child = Child(work)
    status = child.wait(hear)
    result.runs += 1
    if said:
        result.fail(name, said[0]["wrong"])
    else:
        result.fail(name, [f"the process ended with status {status}: {child.errors}"])
    oracle.settled()
    if between is not None:
        between()
    wrong, parts = checked(lambda: verify(settings(root), oracle))
    result.fail(f"{name}, afterwards", wrong)
    result.count("parts found exact", parts)
