"""What is measured with one server: restores after a restart, and a stream beside one."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cases.server import Answer, Logprobs, Server, ServerError
from cases.store import forget, settle
from kvtier.integration.probes.client import prompt

Result = dict[str, Any]
"""Figures of one case, as they go into the JSON file."""

PAGE = 256
"""Tokens a page of the DeepSeek models, to which `remainders` refer."""

WINDOW = 128
"""Tokens of their sliding window: SGLang may match a prompt up to so many before its end."""

LOAD_SESSIONS, LOAD_OUTPUT = 4, 192

RESTORES = 3
"""Of each long prompt from the drive: after the kill, then with the caches emptied."""


def warm_up(server: Server, seed: str) -> None:
    """What a process does once, such as compiling kernels, is not the prompts' time: those of a
    prompt that is computed, and those of one that is cached."""
    for _ in range(2):
        server.ask(prompt(seed, server.case.medium))


def difference(one: Logprobs, other: Logprobs) -> float:
    """Largest difference of log probabilities, up to where the outputs part; inf if at once."""
    pairs = list(zip(one, other, strict=True))
    same = list(itertools.takewhile(lambda pair: pair[0][0] == pair[1][0], pairs))
    return max((abs(a[1] - b[1]) for a, b in same), default=math.inf)


def compared(answer: Answer, reference: Answer) -> Result:
    return {
        "logprob": difference(answer.logprobs, reference.logprobs),
        "same_tokens": [t for t, _ in answer.logprobs] == [t for t, _ in reference.logprobs],
    }


# --- before and after the restart ---------------------------------------------------------------


class Restart:
    """One case over a restart. Call `fill`, kill the server and start it again, then `restore`."""

    def __init__(self, server: Server, result: Result) -> None:
        self.server = server
        self.case = server.case
        self.result = result
        self.cold: dict[int, Answer] = {}
        self.device: dict[int, Answer] = {}
        self.turns: dict[int, Answer] = {}

    @property
    def lengths(self) -> list[int]:
        """Of the prompts to restore."""
        return [] if self.case.tier is None else [*self.case.tokens, *self.beside_pages]

    @property
    def beside_pages(self) -> list[int]:
        """Lengths of whole pages and some tokens more."""
        whole = self.case.medium // PAGE * PAGE
        return [whole + remainder for remainder in self.case.remainders]

    def fill(self) -> None:
        server, result = self.server, self.result
        warm_up(server, "first warm-up")
        if self.case.pages:
            result["pages"] = {"load": check_pages_under_load(server, "load")}
            with server.asking("slow"):
                result["pages"]["load, slow copies"] = check_pages_under_load(server, "slow")
        for length in self.lengths:
            tokens = prompt(f"session {length}", length)
            self.cold[length] = server.ask(tokens)
            if any(self.cold[length].cached.values()):
                raise ServerError(f"{server.store} had this prompt before: give another --work")
            first, self.device[length], again = self.hits(tokens)
            result.setdefault("prompts", {})[length] = {
                "cold": self.cold[length].row(),
                "first_hit": first.row(),
                "device": self.device[length].row(),
                "device_to_cold": compared(self.device[length], self.cold[length]),
                "device_to_device": compared(again, self.device[length]),
            }
        if self.lengths:
            result["control"] = self.control(min(self.lengths))
            self.fill_turns()
        else:
            self.recompute()
        held, seconds = settle(server.store)
        result["stored"] = {**held._asdict(), "written_for_s": round(seconds, 2)}

    def fill_turns(self) -> None:
        """Prompts whose beginning was a prompt before, which ended after the last page up to which
        the longer one may match: the device keeps the window there that was stored."""
        for length in self.beside_pages:
            tokens = prompt(f"turns {length}", length)
            self.server.ask(tokens[: (length - WINDOW) // PAGE * PAGE + 200])
            _, self.turns[length], again = self.hits(tokens)
            self.result.setdefault("turns", {})[length] = {
                "device": self.turns[length].row(),
                "device_to_device": compared(again, self.turns[length]),
            }

    def recompute(self) -> None:
        """How far the same prompt, computed twice, is from itself."""
        for length in self.case.tokens:
            tokens = prompt(f"session {length}", length)
            first = self.server.ask(tokens)
            self.server.flush()
            again = compared(self.server.ask(tokens), first)
            self.result.setdefault("computed_again", {})[length] = again

    def hits(self, tokens: Sequence[int]) -> tuple[Answer, Answer, Answer]:
        """The first answer from the device's cache, and the first two of the same, longest hit:
        where the window's tokens are computed again, the first hit can be shorter."""
        first = answer = self.server.ask(tokens)
        while True:
            answer, before = self.server.ask(tokens), answer
            if answer.cached["device"] <= before.cached["device"]:
                return first, before, answer

    def control(self, length: int) -> Result:
        """How far another beginning moves the log probabilities: what a wrong page would do."""
        tokens = prompt(f"session {length}", length)
        tokens[:PAGE] = prompt("another beginning", PAGE)
        return compared(self.server.ask(tokens), self.cold[length])

    def restore(self) -> None:
        server = self.server
        if not self.lengths:
            return
        warm_up(server, "second warm-up")
        for length in self.lengths:
            row = self.result["prompts"][length]
            tokens = prompt(f"session {length}", length)
            forget(server.store)
            restored = server.ask(tokens)
            row["restored"] = restored.row()
            row["restored_to_device"] = compared(restored, self.device[length])
            row["restored_to_cold"] = compared(restored, self.cold[length])
            if length not in self.case.tokens:
                row["without_patch"] = self.without_patch(tokens)
                row["next_turn"] = server.ask(tokens + prompt("next turn", 300)).row()
        for length, device in self.turns.items():
            forget(server.store)
            restored = server.ask(prompt(f"turns {length}", length))
            self.result["turns"][length]["restored"] = restored.row()
            self.result["turns"][length]["restored_to_device"] = compared(restored, device)
        server.flush()
        for length in self.case.tokens:
            again = server.ask(prompt(f"session {length}", length))
            self.result["prompts"][length]["restored_again"] = again.row()
        if self.case.pages:
            self.result["pages"]["restored"] = server.check_pages()
        self.restore_more()
        if self.case.pages:
            self.store_early()

    def restore_more(self) -> None:
        for _ in range(RESTORES - 1):
            for length in self.case.tokens:
                self.server.flush()
                forget(self.server.store)
                again = self.server.ask(prompt(f"session {length}", length))
                self.result["prompts"][length].setdefault("restored_more", []).append(again.row())

    def store_early(self) -> None:
        """The control of the comparison. What it leaves in the store is wrong, and is not asked
        for again."""
        with self.server.asking("slow"), self.server.asking("early"):
            self.result["pages"]["control: stored early"] = check_pages_under_load(
                self.server, "early"
            )

    def without_patch(self, tokens: Sequence[int]) -> Result:
        """The same prompt restored as SGLang would without kvtier's patch of its prefetch."""
        server = self.server
        server.flush()
        forget(server.store)
        with server.asking("unpatched"):
            return server.ask(tokens).row()


def check_pages_under_load(server: Server, seed: str) -> list[Result]:
    """Prefill, decode and backups at once; then stored pages against those on the device."""
    server.flush()
    prompts = [prompt(f"{seed} {number}", server.case.medium) for number in range(LOAD_SESSIONS)]
    with ThreadPoolExecutor(LOAD_SESSIONS) as pool:
        list(pool.map(lambda tokens: server.ask(tokens, LOAD_OUTPUT), prompts))
    settle(server.store)
    return server.check_pages()


def stream_beside_restore(server: Server) -> Result:
    """Inter-token times of a stream while a new session is computed and backed up, and then an
    old one is restored; without a tier the old one is computed again."""
    server.flush()
    forget(server.store)
    old_tokens = max(server.case.tokens)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        began = time.perf_counter()
        stream = pool.submit(server.ask, prompt("stream", 500), 16_000, stop)
        try:
            time.sleep(2.5)
            marks = [time.perf_counter() - began]
            new = server.ask(prompt("new session", server.case.medium), 1)
            marks.append(time.perf_counter() - began)
            old = server.ask(prompt(f"session {old_tokens}", old_tokens), 1)
            marks.append(time.perf_counter() - began)
            time.sleep(1.0)
        finally:
            stop.set()
        arrivals = stream.result().arrivals
    windows = {
        "alone": (1.0, marks[0]),
        "beside_new": (marks[0], marks[1]),
        "beside_old_and_backup": (marks[1], marks[2]),
    }
    return {
        "new": new.row(),
        "old": old.row(),
        **{name: gaps(arrivals, *window) for name, window in windows.items()},
    }


def gaps(arrivals: Sequence[float], start: float, end: float) -> Result:
    """Milliseconds between tokens, of the gaps that begin in a window."""
    found = sorted(
        (later - earlier) * 1e3
        for earlier, later in itertools.pairwise(arrivals)
        if start <= earlier < end
    )
    if not found:
        return {"tokens": 0}
    return {
        "tokens": len(found),
        "seconds": round(end - start, 3),
        "median_ms": round(statistics.median(found), 2),
        "p99_ms": round(found[min(len(found) - 1, len(found) * 99 // 100)], 2),
        "max_ms": round(found[-1], 2),
    }
