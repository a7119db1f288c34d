"""An engine's traffic over one store: what is restored, what is computed and offered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from retention_sim.geometry import CHUNK_PAGES, KV_BYTES, OFFERED_TAILS, PAGE_TOKENS, TAIL_BYTES
from retention_sim.stores import Contents, Store
from retention_sim.tiers import Ints
from retention_sim.traffic import Request, Restart, Trace

SAMPLE_EVERY = 50
"""Requests between two looks at what is restorable."""


@dataclass
class Outcome:
    """What came of a trace over one store."""

    restored_tokens: int = 0
    stored: list[int] = field(default_factory=list)
    """Bytes in the store at each look."""
    restorable: list[float] = field(default_factory=list)
    """Share of them that some restore can use, at each look."""
    restorable_tokens: int = 0
    """At the end."""
    written: int = 0
    """Bytes."""


def replay(trace: Trace, store: Store, *, look: bool = True) -> Outcome:
    """Send the trace over a store, and `look` now and then at what is restorable."""
    outcome = Outcome()
    requests = 0
    for event in trace.events:
        if isinstance(event, Restart):
            store.restart()
            continue
        outcome.restored_tokens += _serve(event, store) * PAGE_TOKENS
        requests += 1
        if look and requests % SAMPLE_EVERY == 0:
            _look(trace.parent, store.contents, outcome)
    if look:
        _look(trace.parent, store.contents, outcome)
    outcome.written = store.contents.written
    return outcome


def _serve(request: Request, store: Store) -> int:
    """One request; pages restored from the store."""
    pages, held = request.pages, request.held
    start = longest(store.contents, pages[: request.matchable], held)
    if start > held:
        store.read(pages[:start], held, request.time)
    for first in range(start, request.prompt, CHUNK_PAGES):
        end = min(first + CHUNK_PAGES, request.prompt)
        store.offer(pages[:end], first, min(OFFERED_TAILS, end - first), request.time)
    answered = len(pages) - request.prompt
    if answered:
        store.offer(pages, request.prompt, min(OFFERED_TAILS, answered), request.time)
    return start - held


def longest(contents: Contents, pages: Ints, held: int) -> int:
    """Longest prefix in pages that the store restores behind the `held` ones; `held` if none."""
    asked = pages[held:]
    there = contents.families(asked)
    reach = len(there) if there.all() else int(there.argmin())
    boundaries = np.flatnonzero(contents.tails(asked[:reach]))
    return held + int(boundaries[-1]) + 1 if len(boundaries) else held


def _look(parent: Ints, contents: Contents, outcome: Outcome) -> None:
    useful, tails = restorable(parent, contents)
    size = useful * KV_BYTES + tails * TAIL_BYTES
    outcome.stored.append(contents.stored)
    outcome.restorable.append(size / contents.stored if contents.stored else 1.0)
    outcome.restorable_tokens = useful * PAGE_TOKENS


def restorable(parent: Ints, contents: Contents) -> tuple[int, int]:
    """Pages that lie before a legal boundary, and tails at one, with the store alone."""
    present = np.flatnonzero(contents.families()).tolist()
    reached: set[int] = set()
    for page in present:  # parents come first
        before = int(parent[page])
        if before < 0 or before in reached:
            reached.add(page)
    ends = [page for page in np.flatnonzero(contents.tails()).tolist() if page in reached]
    useful: set[int] = set()
    for end in ends:
        page = end
        while page >= 0 and page not in useful:
            useful.add(page)
            page = int(parent[page])
    return len(useful), len(ends)
