"""Agent traffic from a seed: requests as chains of pages, and restarts of the engine.

Six agents of three kinds work on one long session each. A session is the kind's prompt with its
tools, a task, and turns of a user; in a turn the model reasons, calls a tool, reads the result, and
goes on until it answers. At the next message of the user the reasoning is left out of the history,
so that each turn leaves a dead end. Now and then a turn sends out sub-agents, on a fork of the
history or on a prompt of their own; the user takes turns back; a session that gets too long is
replaced by its head and a summary. Between bursts of turns a session rests, some for days.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from retention_sim.geometry import PAGE_TOKENS
from retention_sim.tiers import Ints, Tiers

HOUR = 3600.0

START_TOKENS = (140_000, 295_000, 388_000, 777_000, 480_000, 620_000)
"""Sessions as the store finds them: 2.7M tokens in all."""

REST_HOURS = (4, 7, 12, 20, 48, 72)
"""Median rest of each agent between two bursts of turns."""

KINDS = 3
PROMPT_TOKENS = 20_000
"""System prompt and tools: one for each kind of agent, and one for sub-agents."""

HEAD_TOKENS = 4_000
"""First message of a session, which a compaction keeps."""

COMPACT_TOKENS = 800_000

RESTART_HOURS = (8, 32)
"""Least and most time between restarts of the engine."""

Text = tuple[int, int]
"""Number of a text, and its length in tokens."""


@dataclass
class History:
    """Tokens as pages, and what is left over behind the last full page."""

    pages: list[int] = field(default_factory=list)
    rest: tuple[tuple[int, int, int], ...] = ()
    """Pieces behind the last full page: (text, first token, tokens)."""

    @property
    def tokens(self) -> int:
        """Length."""
        return len(self.pages) * PAGE_TOKENS + sum(piece[2] for piece in self.rest)

    def copy(self) -> History:
        """The same history, to be gone on with in another way."""
        return History(list(self.pages), self.rest)


@dataclass(frozen=True)
class Request:
    """A prompt and its answer."""

    time: float
    """Seconds since the start."""
    pages: Ints
    """Full pages of prompt and answer, (n,)."""
    prompt: int
    """Full pages of the prompt."""
    matchable: int
    """Longest prefix in pages that may come from a cache: a token at least is computed."""
    held: int
    """Longest prefix in pages that GPU or host memory can go on from."""


@dataclass(frozen=True)
class Restart:
    """The engine starts anew: GPU and host memory are empty."""

    time: float


@dataclass(frozen=True)
class Trace:
    """Everything that happens, in the order of time."""

    seed: int
    events: list[Request | Restart]
    parent: Ints
    """The page before each page, (pages,); -1 at the start of a sequence. Parents come first."""
    live_pages: list[int]
    """Pages of all six histories, shared ones counted once, at every 20th request."""


@dataclass(frozen=True)
class _Turn:
    """A turn of the user as the next one sees it: without reasoning."""

    before: History
    said: list[Text]


@dataclass(frozen=True)
class _Asked:
    time: float
    pages: list[int]
    prompt_tokens: int


class _World:
    """What all agents share: random numbers, texts, pages, the requests so far."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.parent: list[int] = []
        self.asked: list[_Asked] = []
        self._pages: dict[tuple[int, tuple[tuple[int, int, int], ...]], int] = {}
        self._texts = KINDS  # those below are the prompts of the kinds, this one of sub-agents

    def text(self, median: float, spread: float, least: int, most: int) -> Text:
        """A text that nobody has written before, of log-normal length within bounds."""
        self._texts += 1
        drawn = int(median * self.random.lognormvariate(0, spread))
        return self._texts, max(least, min(most, drawn))

    def extend(self, history: History, text: Text) -> None:
        """Put a text behind a history. The same content behind the same page is the same page."""
        number, tokens = text
        at = 0
        while at < tokens:
            room = PAGE_TOKENS - sum(piece[2] for piece in history.rest)
            taken = min(room, tokens - at)
            history.rest += ((number, at, taken),)
            at += taken
            if taken == room:
                before = history.pages[-1] if history.pages else -1
                page = self._pages.setdefault((before, history.rest), len(self.parent))
                if page == len(self.parent):
                    self.parent.append(before)
                history.pages.append(page)
                history.rest = ()

    def ask(self, time: float, history: History, answer: list[Text]) -> None:
        """The model answers the history, and the answer is put behind it."""
        tokens = history.tokens
        for text in answer:
            self.extend(history, text)
        self.asked.append(_Asked(time, list(history.pages), tokens))


class _Agent:
    """One agent and its session."""

    def __init__(self, world: _World, number: int) -> None:
        self.world = world
        self.kind = number % KINDS
        self.rest = REST_HOURS[number] * HOUR
        self.now = world.random.uniform(0, 6) * HOUR
        self.task = world.text(HEAD_TOKENS, 0, HEAD_TOKENS, HEAD_TOKENS)
        self.history = self._head()
        self.turns: list[_Turn] = []
        left = START_TOKENS[number] - self.history.tokens
        world.extend(self.history, world.text(left, 0, left, left))

    def _head(self) -> History:
        history = History()
        self.world.extend(history, (self.kind, PROMPT_TOKENS))
        self.world.extend(history, self.task)
        return history

    def live(self) -> Iterator[float]:
        """Bursts of turns for ever. Yields the time of each request before it is made."""
        chance = self.world.random
        while True:
            for _ in range(chance.randint(2, 7)):
                yield from self._turn()
                self.now += 90 * chance.lognormvariate(0, 1)
            self.now += self.rest * chance.lognormvariate(0, 0.6)

    def _turn(self) -> Iterator[float]:
        chance, world = self.world.random, self.world
        if len(self.turns) > 3 and chance.random() < 0.04:  # the user takes turns back
            back = chance.randint(1, 3)
            self.history = self.turns[-back].before.copy()
            del self.turns[-back:]
        elif self.turns:
            self.history = self.turns[-1].before.copy()
            for text in self.turns[-1].said:
                world.extend(self.history, text)
        if self.history.tokens > COMPACT_TOKENS:
            yield from self._compact()
        turn = _Turn(self.history.copy(), [])
        self.turns.append(turn)
        self._say(turn, world.text(400, 1.0, 30, 4000))
        for _ in range(min(24, int(chance.expovariate(1 / 5)))):
            yield from self._step(turn, world.text(150, 0.7, 30, 2000))
            if chance.random() < 0.03:
                for _ in range(chance.randint(1, 3)):
                    yield from self._send_out()
            self._say(turn, world.text(2500, 0.7, 1000, 8000))  # what the tool said
        yield from self._step(turn, world.text(500, 0.8, 50, 4000))

    def _step(self, turn: _Turn, said: Text) -> Iterator[float]:
        """The model reasons, and says something: a call of a tool, or what the user reads."""
        self.now += 4 + 15 * self.world.random.lognormvariate(0, 1)
        yield self.now
        self.world.ask(self.now, self.history, [self._reasoning(), said])
        turn.said.append(said)

    def _say(self, turn: _Turn, text: Text) -> None:
        """The user or a tool says something."""
        self.world.extend(self.history, text)
        turn.said.append(text)

    def _reasoning(self) -> Text:
        return self.world.text(500, 0.9, 40, 6000)

    def _send_out(self) -> Iterator[float]:
        """A sub-agent: on a fork of the history, or with a prompt of its own."""
        chance, world = self.world.random, self.world
        history = History()
        if chance.random() < 0.4:
            history = self.history.copy()
        else:
            world.extend(history, (KINDS, PROMPT_TOKENS))
        world.extend(history, world.text(1500, 0.6, 200, 6000))
        for _ in range(chance.randint(3, 15)):
            self.now += 4 + 10 * chance.lognormvariate(0, 1)
            yield self.now
            answer = [self._reasoning(), world.text(150, 0.7, 30, 2000)]
            world.ask(self.now, history, answer)
            world.extend(history, world.text(2500, 0.7, 1000, 8000))

    def _compact(self) -> Iterator[float]:
        """The model sums the session up, which goes on with its head and the summary."""
        world = self.world
        world.extend(self.history, world.text(300, 0, 300, 300))
        summary = world.text(6000, 0.4, 2000, 15_000)
        self.now += 60
        yield self.now
        world.ask(self.now, self.history, [self._reasoning(), summary])
        self.history = self._head()
        world.extend(self.history, summary)
        self.turns.clear()


def generate(seed: int, days: float) -> Trace:
    """The traffic of so many days."""
    world = _World(seed)
    agents = [_Agent(world, number) for number in range(len(START_TOKENS))]
    lives = [agent.live() for agent in agents]
    due = [(next(life), number) for number, life in enumerate(lives)]
    heapq.heapify(due)
    live_pages = []
    while due[0][0] < days * 24 * HOUR:
        number = due[0][1]
        heapq.heapreplace(due, (next(lives[number]), number))
        if len(world.asked) % 20 == 0:
            pages = [np.array(agent.history.pages) for agent in agents]
            live_pages.append(len(np.unique(np.concatenate(pages))))
    parent = _only_asked(world)
    restarts = []
    time = world.random.uniform(*RESTART_HOURS) * HOUR
    while time < days * 24 * HOUR:
        restarts.append(Restart(time))
        time += world.random.uniform(*RESTART_HOURS) * HOUR
    return Trace(seed, _above_the_store(world.asked, restarts, parent), parent, live_pages)


def _only_asked(world: _World) -> Ints:
    """Number the pages that were in a request anew, and leave the others out; their parents."""
    parent = np.array(world.parent, np.int64)
    asked = np.zeros(len(parent), np.bool_)
    for request in world.asked:
        asked[request.pages] = True
    number = np.append(np.cumsum(asked) - 1, -1)
    for request in world.asked:
        request.pages[:] = number[request.pages].tolist()
    return number[parent[asked]]


def _above_the_store(
    asked: list[_Asked], restarts: list[Restart], parent: Ints
) -> list[Request | Restart]:
    """The requests and restarts in order, with what GPU and host memory hold at each request."""
    depth = np.zeros(len(parent), np.int64)
    for page, before in enumerate(parent.tolist()):
        depth[page] = 1 if before < 0 else depth[before] + 1
    tiers = Tiers(depth)
    events: list[Request | Restart] = []
    for event in sorted([*asked, *restarts], key=lambda event: event.time):
        if isinstance(event, Restart):
            tiers.restart()
            events.append(event)
            continue
        pages = np.array(event.pages, np.int64)
        prompt = event.prompt_tokens // PAGE_TOKENS
        matchable = (event.prompt_tokens - 1) // PAGE_TOKENS
        held = tiers.request(pages, prompt, matchable)
        events.append(Request(event.time, pages, prompt, matchable, held))
    return events
