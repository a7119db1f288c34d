"""Is a restored prompt the one that was computed? Log probabilities tell, to the last bit.

A prompt is computed, then served from the device's cache; the caches are emptied and it comes from
the store. What the two caches hold gives the same log probabilities bit for bit: the same kernels
then compute the same tokens. Against the first, computed answer they may differ a little, since the
last tokens are then computed together with others. A prompt with another beginning shows that a
wrong page would be seen.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.integration.probes.client import OUTPUT_TOKENS, Answer, Client, ProbeError, Progress
from kvtier.integration.probes.client import prompt as make_prompt

PROMPTS = 3

LONGEST_REST = 200
"""Tokens past the last whole page: more than the window that decoder replay computes again."""


@dataclass(frozen=True)
class Passage:
    """A prompt of whole pages, `prefix` tokens, and a rest, which is what is scored."""

    tokens: tuple[int, ...]
    prefix: int

    def ask(self, client: Client) -> Answer:
        return client.generate(self.tokens, self.prefix)


@dataclass(frozen=True)
class Result:
    """One prompt: computed, from the device's cache (twice), and from the store."""

    computed: Answer
    held: Answer
    again: Answer
    restored: Answer

    @property
    def error(self) -> float:
        """How far the restored answer is from the one of the device's cache."""
        return difference(self.restored, self.held)

    @property
    def noise(self) -> float:
        """How far the device's cache is from itself."""
        return difference(self.again, self.held)


@dataclass(frozen=True)
class Report:
    results: tuple[Result, ...]
    tolerance: float
    control: float
    """How far another beginning moves the first prompt's log probabilities."""
    copies: int
    """Ranks that compute the same pages, of which one stores them."""

    @property
    def same(self) -> bool:
        return all(result.error <= self.tolerance for result in self.results)

    @property
    def undecided(self) -> bool:
        """Whether a difference may be rounding: each of several ranks computed the pages for
        itself, and all got back the first one's. With a tolerance it is decided."""
        return not self.same and self.copies > 1 and not self.tolerance


def passage(info: dict[str, Any], tokens: int, seed: object) -> Passage:
    """A prompt of about `tokens` tokens for a server with these settings."""
    page = int(info["page_size"])
    rest = max(1, min(LONGEST_REST, page - 1))
    prefix = max(1, tokens // page) * page
    longest = min(
        info.get("max_req_input_len") or math.inf,
        info.get("max_total_num_tokens") or math.inf,
    )
    if prefix + rest + OUTPUT_TOKENS > longest:
        raise ProbeError(
            f"The server takes prompts of {longest:,.0f} tokens at most: "
            f"give --tokens below {longest - rest - OUTPUT_TOKENS:,.0f}."
        )
    return Passage(tuple(make_prompt(seed, prefix + rest)), prefix)


def require_store(info: dict[str, Any]) -> None:
    """ProbeError unless the server keeps its pages with kvtier."""
    backend = info.get("hicache_storage_backend")
    if backend not in ("kvtier", "dynamic"):
        raise ProbeError(
            f"The server's storage is {backend or 'off'}: start it with kvtier launch, or with "
            "--enable-hierarchical-cache --hicache-storage-backend kvtier."
        )


def check(client: Client, tokens: int, tolerance: float, progress: Progress) -> Report:
    """Compare PROMPTS new prompts of about `tokens` tokens. Empties the server's caches."""
    info = client.info()
    require_store(info)
    nonce = secrets.token_hex(8)
    passages = [passage(info, tokens, (nonce, number)) for number in range(PROMPTS)]
    before = []
    for number, one in enumerate(passages, 1):
        progress(f"prompt {number} of {PROMPTS}: computed, and again from the device")
        before.append(served(client, one))
    client.settle(progress)
    progress("emptying the caches")
    client.flush()
    results = []
    for number, (one, answers) in enumerate(zip(passages, before, strict=True), 1):
        progress(f"prompt {number} of {PROMPTS}: from the store")
        results.append(Result(*answers, require_restored(one.ask(client), one)))
    progress("a prompt with another beginning")
    moved = control(client, passages[0], info, before[0][0])
    report = Report(tuple(results), tolerance, moved, kv_copies(client.metrics()))
    require_sense(report)
    return report


def served(client: Client, passage: Passage) -> tuple[Answer, Answer, Answer]:
    """A new prompt computed, then twice from the device's cache."""
    computed = passage.ask(client)
    if computed.cached:
        raise ProbeError(
            f"{computed.cached:,} tokens of a prompt that no server has seen came from a cache: "
            "the server's figures cannot be trusted."
        )
    passage.ask(client)  # the first hit may be shorter: the next one has what it computed
    held, again = passage.ask(client), passage.ask(client)
    if held.device == 0:
        raise ProbeError(
            "A prompt sent again did not come from the device's cache: start the server without "
            "--disable-radix-cache, and check it while no other requests run."
        )
    return computed, held, again


def require_restored(answer: Answer, passage: Passage) -> Answer:
    """The answer, if the store gave it all whole pages; ProbeError otherwise."""
    if answer.device or answer.host:
        raise ProbeError(
            f"{answer.device + answer.host:,} tokens were still in the caches after they were "
            "emptied: check the server while no other requests run."
        )
    if answer.storage == 0:
        raise ProbeError(
            "Nothing came from the store: see that the server has --hicache-write-policy "
            "write_through, and what its log and kvtier inspect say."
        )
    if answer.storage < passage.prefix:
        raise ProbeError(
            f"{answer.storage:,} of {passage.prefix:,} tokens came from the store, so the answers "
            "cannot be compared: give fewer --tokens, or the server a larger --hicache-ratio."
        )
    return answer


def difference(one: Answer, other: Answer) -> float:
    """Largest difference of two answers' log probabilities: of the prompt's, and of the output's up
    to where it parts. Infinite if it parts at once or without one, or if one is not a number."""
    output = list(zip(one.tokens, other.tokens, strict=False))
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], output))
    pairs = list(zip(one.prompt_logprobs, other.prompt_logprobs, strict=False))
    pairs += zip(one.logprobs[: same + 1], other.logprobs[: same + 1], strict=False)
    found = [abs(a - b) for a, b in pairs]
    if not same or any(map(math.isnan, found)):
        return math.inf
    return max(found) if any(found) or same == len(output) else math.inf


def control(client: Client, passage: Passage, info: dict[str, Any], computed: Answer) -> float:
    """How far another first page moves the log probabilities: what a wrong page would do."""
    page = int(info["page_size"])
    tokens = (*reversed(passage.tokens[:page]), *passage.tokens[page:])
    return difference(Passage(tokens, passage.prefix).ask(client), computed)


def kv_copies(metrics: Mapping[str, float]) -> int:
    """Ranks that compute the same pages, as a server's metrics say; 1 if they don't."""
    return int(metrics.get("kvtier_kv_copies", 1))


def require_sense(report: Report) -> None:
    """ProbeError if equal log probabilities would mean nothing, or cannot be expected."""
    if report.control <= report.tolerance:
        raise ProbeError(
            f"Another beginning moves the log probabilities by {report.control:g} only: this "
            "model's answers cannot tell a wrong page from a right one; a longer prompt or a "
            "smaller tolerance may."
        )
    noise = max(result.noise for result in report.results)
    if noise > report.tolerance:
        raise ProbeError(
            f"The same prompt from the device's cache, twice, is {noise:g} apart: no restore can "
            "be nearer; check while no other requests run, or give a --tolerance above that."
        )
