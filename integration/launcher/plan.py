"""What a profile needs and leaves free, computed before anything is started.

Sizes in bytes. "GB" is 10^9 and "GiB" 2^30: the reference rig's free memory is in GB, its weights
and cards are in GiB; the tests hold both to its figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.integration.launcher.profiles import Model, Profile
from kvtier.integration.patches.split import derive_split, parse_split

GB, GIB = 10**9, 2**30

LEAST_FREE = 4 * GB
"""Less free memory after the start than this and long prompts fail: with 2.50 GB the reference rig
ran out by 124 MiB, with 4.23 GB it works."""

LINK_RATE = 25 * GB
"""Bytes a second from host memory to cards that share one PCIe 5.0 x16 uplink, half its nominal
rate. An assumption."""

MARGIN = 16 * GB
"""Host memory for the system, the engine's own processes and file caches."""

_SWA_EVICTION_INTERVAL = 128  # SGLANG_SWA_EVICTION_INTERVAL (environ.py:730)


@dataclass(frozen=True)
class Row:
    """The cards with so many slots."""

    slots: int
    pool_tokens: int
    pool: int
    """Bytes on each card: KV of the slots and the pool of sliding windows."""
    free: tuple[int, ...]
    """After the start, of each card; empty if the weights are not known."""

    @property
    def fits(self) -> bool:
        """Whether every card keeps enough free."""
        return not self.free or min(self.free) >= LEAST_FREE


@dataclass(frozen=True)
class Session:
    """One session in the store. The restore is read by every rank, each for itself."""

    tokens: int
    stored: int
    """KV and the tails that kvtier keeps of it (tails_per_chain)."""
    restored: int
    """KV and one tail: what a restore reads."""
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What `kvtier plan` shows."""

    model: Model
    cards: tuple[float, ...]
    """GiB of each."""
    split: tuple[int, ...]
    weights: tuple[int, ...]
    """Bytes on each card; empty if not known."""
    slot: int
    """Bytes of one slot on each card."""
    rows: tuple[Row, ...]
    slots: int
    """Of the profile."""
    host_tokens: int
    host_rank: int
    engram: int
    host: int
    """All of host memory: tier of all ranks, Engram, margin."""
    sessions: tuple[Session, ...]

    @property
    def row(self) -> Row:
        """The profile's own."""
        return next(row for row in self.rows if row.slots == self.slots)


def plan(
    profile: Profile,
    cards: Sequence[float],
    slots: int | None = None,
    drive_rate: float = 5 * GB,
    split_given: str = "",
) -> Plan:
    """The plan of a profile with a model, for cards of so many GiB and a drive of so many bytes a
    second. `split_given`: KVTIER_EXPERT_SPLIT, if that is set. Raises ValueError for a profile
    without a model, ConfigError for a split that is none of it."""
    if profile.model is None:
        raise ValueError(profile.name)
    model = profile.model
    tokens = int(profile.number("max-total-tokens"))
    usual = max(1, round(tokens / model.slot_tokens))
    slots = slots or usual
    split = expert_split(profile, cards, split_given) or _even(model, len(cards))
    rows = tuple(_row(profile, model, cards, split, n) for n in range(1, max(slots, usual) + 2))
    pool = next(row for row in rows if row.slots == slots)
    host_tokens = int(profile.number("hicache-ratio") * pool.pool_tokens)
    host_rank = host_tokens * model.page_bytes // model.page_tokens
    host_rank += int(profile.number("hicache-ratio")) * _windows(profile, model, slots)
    engram = int(model.engram_gb * GB)
    kept = profile.get("store", "tails_per_chain")
    tails = int(kept.value) if kept else Config().tails_per_chain
    return Plan(
        model=model,
        cards=tuple(cards),
        split=split,
        weights=tuple(_weights(model, n) for n in split),
        slot=model.slot_tokens * model.page_bytes // model.page_tokens,
        rows=rows,
        slots=slots,
        host_tokens=host_tokens,
        host_rank=host_rank,
        engram=engram,
        host=engram + model.ranks * host_rank + MARGIN,
        sessions=tuple(
            _session(model, n, tails, drive_rate)
            for n in (100_000, 339_000, 777_000, 988_000)
            if n <= model.slot_tokens
        ),
    )


def expert_split(
    profile: Profile, cards: Sequence[float], given: str = ""
) -> tuple[int, ...] | None:
    """How many experts each card gets; None where they are in equal parts. The sum is exactly the
    model's.

    `given`: KVTIER_EXPERT_SPLIT, which wins over the profile's own. Raises ConfigError for a split
    that is not one of this model over these cards.
    """
    model, own = profile.model, profile.get("patches", "expert_split")
    passed = profile.get("environment", "KVTIER_EXPERT_SPLIT")
    text = given or str(passed.value if passed else own.value if own else "")
    if model is None or not model.experts or not text:
        return None
    split = parse_split(text) or derive_split(cards, model.experts, model.expert_bytes / GIB)
    if len(split) != model.ranks or sum(split) != model.experts:
        raise ConfigError(
            f"KVTIER_EXPERT_SPLIT is {text}: {model.name} has {model.experts} experts on "
            f"{model.ranks} cards, and this is {sum(split)} on {len(split)}; auto computes one."
        )
    return split


def _even(model: Model, cards: int) -> tuple[int, ...]:
    return (model.experts // cards,) * cards if model.weights_gib else ()


def _weights(model: Model, experts: int) -> int:
    even = model.experts / model.ranks
    return int(model.weights_gib * GIB + (experts - even) * model.expert_bytes)


def _row(
    profile: Profile, model: Model, cards: Sequence[float], split: Sequence[int], slots: int
) -> Row:
    usual = max(1, round(profile.number("max-total-tokens") / model.slot_tokens))
    # The profile's own number where it is asked for, else whole slots.
    tokens = slots * model.slot_tokens
    if slots == usual:
        tokens = int(profile.number("max-total-tokens"))
    pool = tokens * model.page_bytes // model.page_tokens + _windows(profile, model, slots)
    taken = pool + int(model.runtime_gb * GB)
    free = tuple(
        int(gib * GIB) - _weights(model, experts) - taken
        for gib, experts in zip(cards, split, strict=False)
    )
    return Row(slots, tokens, pool, free)


def _windows(profile: Profile, model: Model, slots: int) -> int:
    """Bytes of SGLang's pool of sliding windows (pool_configurator.py, compute_swa_request_cap and
    _resolve_swa_cap_tokens); 0 for models whose windows are in page_bytes."""
    if not model.window:
        return 0
    page = model.page_tokens
    request = model.window + _SWA_EVICTION_INTERVAL * model.draft_tokens + page
    request += 2 * model.draft_tokens
    tokens = slots * request + 2 * int(profile.number("chunked-prefill-size")) + page
    tokens += int(profile.number("swa-prefix-tails", 4 * slots)) * (model.window + page)
    return math.ceil(tokens / page) * model.tail_bytes


def _session(model: Model, tokens: int, tails: int, drive_rate: float) -> Session:
    kv = tokens // model.page_tokens * model.page_bytes
    restored = kv + model.tail_bytes
    seconds = model.ranks * restored / drive_rate + model.ranks * restored / LINK_RATE
    return Session(tokens, kv + tails * model.tail_bytes, restored, seconds)
