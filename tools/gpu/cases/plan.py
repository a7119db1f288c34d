"""What is run: cases, and the plans that put them on cards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parents[1] / "models"

ENGINE = (
    *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--chunked-prefill-size", "8192", "--cuda-graph-backend-prefill", "disabled"),
    *("--cuda-graph-max-bs-decode", "4"),
    # Multicast between cards is not allowed on every host.
    *("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"),
)
"""Of every server on a GPU; decode runs in CUDA graphs and with overlap scheduling."""


@dataclass(frozen=True)
class Case:
    """One server configuration and what is measured with it.

    `tier`: a --hicache-storage-backend, None for a server without HiCache. `gpus`: cards it may
    use. `tokens`: lengths of the prompts that are restored after a restart. `remainders`: prompts
    of whole pages of 256 tokens and so many more are restored, too. `decode` measures a running
    stream beside a restore; `pages` compares stored pages with those on the device. `medium` is
    the length of all other prompts: warm-up, load, remainders. `store` are kvtier's settings.
    """

    name: str
    model: Path
    tier: str | None
    gpus: tuple[int, ...] = ()
    tp: int = 1
    tokens: tuple[int, ...] = ()
    remainders: tuple[int, ...] = ()
    decode: bool = False
    pages: bool = False
    medium: int = 12_000
    store: Mapping[str, object] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


LONG = (20_000, 100_000)
REMAINDERS = (1, 127, 128, 200)

DENSE = ("--page-size", "64", "--max-total-tokens", "131072")
SWA = (*DENSE, "--attention-backend", "triton", "--moe-runner-backend", "triton")
V4 = (
    *("--max-total-tokens", "65536", "--moe-runner-backend", "triton", "--page-size", "256"),
    # Compiling the decode kernels takes minutes the first time, with graphs before the start.
    *("--cuda-graph-backend-decode", "disabled"),
    # And the prefill's kernels more minutes, in which the server must not take itself for stuck.
    *("--watchdog-timeout", "1800"),
)
FP8_EXPERTS = {"SGLANG_DSV4_FP4_EXPERTS": "0"}


Cards = tuple[int, ...]


def dense(tier: str | None, cards: Cards, **rest: Any) -> Case:
    arguments = DENSE
    if len(cards) > 2:  # every rank needs a KV head of its own
        arguments += ("--json-model-override-args", '{"num_key_value_heads": 4}')
    return Case(f"dense-tp{len(cards)}-{tier}", MODELS / "dense", tier, cards, len(cards), LONG,
                arguments=arguments, **rest)  # fmt: skip


def swa(tier: str | None, cards: Cards, **rest: Any) -> Case:
    return Case(f"swa-tp{len(cards)}-{tier}", MODELS / "swa", tier, cards, len(cards), LONG,
                arguments=SWA, **rest)  # fmt: skip


def one_card(cards: Cards) -> list[Case]:
    """Each model on one card, kvtier beside its peers."""
    first, last = cards[:1], cards[-1:]
    return [
        dense("kvtier", first, decode=True, pages=True),
        dense("file", first, decode=True),
        dense(None, last, decode=True),
        swa("kvtier", last, pages=True),
        swa("file", last),
    ]


def split(cards: Cards) -> list[Case]:
    """Each model split over all cards."""
    return [
        dense("kvtier", cards, pages=True),
        replace(
            dense("kvtier", cards),
            name=f"dense-tp{len(cards)}-page-cache",
            store={"direct_io": False},
        ),
        dense("file", cards),
        swa("kvtier", cards, pages=True, decode=True),
        swa("file", cards, decode=True),
        swa(None, cards, decode=True),
    ]


def deepseek(cards: Cards) -> list[Case]:
    """The shrunken DeepSeek models in the configurations that may run on Hopper."""
    encoder = "--enable-encoder-swa-bounded-replay"
    configurations = {
        "v4.1": ("dsv41",),
        "v4.1-encoder-replay": ("dsv41", encoder),
        "v4.1-no-replay": ("dsv41", "--no-enable-decoder-swa-bounded-replay"),
        "v4.1-bf16": ("dsv41-bf16",),
        "v4.1-bf16-encoder-replay": ("dsv41-bf16", encoder),
        "v4.1-graphs": ("dsv41", "--cuda-graph-backend-decode", "full"),
        "v4": ("dsv4",),
        "v4-encoder-replay": ("dsv4", encoder),
    }
    cases = [
        Case(name, MODELS / model, "kvtier", (card,), 1, (20_000,), REMAINDERS, pages=True,
             arguments=(*V4, *extra), environment=FP8_EXPERTS)
        for (name, (model, *extra)), card in zip(configurations.items(), cycle(cards))
    ]  # fmt: skip
    # V4's answers to long prompts differ from themselves by as much as other prompts' do, so that
    # log probabilities cannot be compared; up to index_topk * 4 tokens it attends to all of them.
    v4, v41 = (next(case for case in cases if case.name == name) for name in ("v4", "v4.1"))
    cases += [
        replace(v4, name="v4-short", tokens=(1_470,), medium=1_500),
        replace(v41, name="v4.1-none", tier=None, pages=False),
    ]
    if len(cards) > 1:
        cases.append(replace(v41, name=f"v4.1-tp{len(cards)}", gpus=cards, tp=len(cards)))
    return cases


def dry(_: Cards) -> list[Case]:
    """For trying the scripts where no GPU is: small models and short prompts."""
    models = Path(__file__).parents[3] / "tests" / "models"
    small: dict[str, Any] = {"tokens": (2000,), "remainders": (1, 127), "medium": 600}
    # torch_native looks into the window's pool with slots of the full one.
    swa = ("--swa-full-tokens-ratio", "1.0")
    two: dict[str, Any] = {"tp": 2, "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    return [
        Case("dry-kvtier", models / "llama", "kvtier", decode=True, pages=True, **small),
        Case("dry-swa", models / "swa", "kvtier", pages=True, arguments=swa, **small),
        Case("dry-tp2", models / "llama", "kvtier", pages=True, **two, **small),
        Case("dry-none", models / "llama", None, decode=True, **small),
    ]


PLANS: dict[str, Callable[[Cards], list[Case]]] = {
    "one": one_card,
    "split": split,
    "deepseek": deepseek,
    "dry": dry,
}
