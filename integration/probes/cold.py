"""A long prompt that no cache knows: time to its first token, needles in it, least free memory."""

from __future__ import annotations

import random
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvtier.integration.probes.client import Chat, Client, ProbeError, Progress
from kvtier.integration.probes.watch import Card, Watch

CITIES = ("Lisbon", "Nairobi", "Oslo", "Lima", "Hanoi", "Perth", "Quito", "Turin", "Kyoto", "Cairo")

_WORDS = (
    *("amber", "barge", "cedar", "delta", "ember", "fjord", "grain", "haven", "inlet", "joist"),
    *("kiosk", "lathe", "maple", "north", "ochre", "plank", "quarry", "ridge", "slate", "timber"),
)

_SAMPLE = 200
"""Lines that are counted in tokens, to know how many make the prompt."""


@dataclass(frozen=True)
class Needle:
    """A code hidden at a depth, 0 (the beginning) to 1."""

    depth: float
    city: str
    code: str
    found: bool = False


@dataclass(frozen=True)
class Cold:
    chat: Chat
    needles: tuple[Needle, ...]
    cards: tuple[Card, ...]
    """Of this machine, if the server runs here and NVML can be read."""

    @property
    def found(self) -> int:
        return sum(needle.found for needle in self.needles)

    @property
    def sound(self) -> bool:
        """Whether nothing was cached and every needle was found."""
        return self.chat.cached == 0 and self.found == len(self.needles)

    @property
    def prefill_rate(self) -> float:
        """Tokens of the prompt a second, until the first token."""
        return self.chat.prompt_tokens / self.chat.first_token

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first; 0 without a second."""
        seconds = self.chat.seconds - self.chat.first_token
        more = self.chat.output_tokens - 1
        return more / seconds if seconds > 0 and more > 0 else 0.0


def measure(client: Client, tokens: int, needles: int, progress: Progress) -> Cold:
    """Ask about a new prompt of about `tokens` tokens. Empties the server's caches before."""
    if not client.info().get("enable_cache_report"):
        raise ProbeError(
            "The server does not say what was cached: start it with kvtier launch, or with "
            "--enable-cache-report."
        )
    chance = random.Random(secrets.token_hex(8))
    hidden = [
        Needle((number + 0.5) / needles, CITIES[number], str(chance.randrange(10**6, 10**7)))
        for number in range(needles)
    ]
    progress("making the prompt")
    question = _question(hidden)
    sample = "".join(_line(chance, 0) for _ in range(_SAMPLE))
    room = tokens - client.count_tokens(question)
    text = _haystack(chance, max(1, room * _SAMPLE // client.count_tokens(sample)), hidden)
    progress("emptying the caches")
    client.flush()
    with ExitStack() as stack:
        cards = _watch(client, stack)
        progress(f"a new prompt of about {tokens:,} tokens")
        chat = client.chat([{"role": "user", "content": text + question}], max_tokens=512)
    said = chat.text + chat.reasoning
    asked = tuple(
        Needle(needle.depth, needle.city, needle.code, needle.code in said.replace(",", ""))
        for needle in hidden
    )
    return Cold(chat, asked, tuple(cards))


def _haystack(chance: random.Random, lines: int, needles: list[Needle]) -> str:
    """Numbered lines of words in random order, with the needles at their depths. It begins with a
    number that no other prompt has."""
    text = [f"Log {chance.getrandbits(64):016x}.\n"]
    text += [_line(chance, number) for number in range(lines)]
    for needle in reversed(needles):
        place = 1 + round(needle.depth * lines)
        text.insert(place, f"The code of {needle.city} is {needle.code}.\n")
    return "".join(text)


def _line(chance: random.Random, number: int) -> str:
    return f"{number}: {' '.join(chance.choices(_WORDS, k=12))}.\n"


def _question(needles: list[Needle]) -> str:
    if not needles:
        return "\nSay in one sentence what the lines above are."
    cities = ", ".join(needle.city for needle in needles)
    return (
        "\nSome lines above say what the code of a city is. What are the codes of these cities: "
        f"{cities}? Answer with one line for each, as City: code, and nothing else."
    )


def _watch(client: Client, stack: ExitStack) -> list[Card]:
    """The cards of the server, watched until the stack is left; none if it runs elsewhere."""
    if urlsplit(client.url).hostname not in ("127.0.0.1", "::1", "localhost"):
        return []
    try:
        return stack.enter_context(Watch()).cards
    except ProbeError:
        return []
