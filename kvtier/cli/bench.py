"""`kvtier bench`: measure a served model."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from kvtier.cli.common import AsJson, count, out, progress
from kvtier.cli.served import DEFAULT_URL, AdminKey, Key, Url
from kvtier.cli.watch import table
from kvtier.integration.probes.client import Client
from kvtier.integration.probes.cold import CITIES, Cold, measure

bench = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


@bench.callback()
def _about() -> None:
    """Measure a served model: a long prompt that no cache knows, a restore after kill -9."""


@bench.command()
def cold(
    url: Url = DEFAULT_URL,
    *,
    tokens: Annotated[int, typer.Option(min=256, help="Length of the prompt, about.")] = 131072,
    needles: Annotated[
        int, typer.Option(min=0, max=len(CITIES), help="Facts hidden in it, at even depths.")
    ] = 5,
    key: Key = "",
    admin_key: AdminKey = "",
    as_json: AsJson = False,
) -> None:
    """Send a new long prompt to a running server, and see how fast and how well it is read.

    The server's caches in GPU and host memory are emptied before (the store stays). On the server's
    own machine the lowest free memory of each NVIDIA card is shown, too. Exit status 1 if a token
    came from a cache, or a needle was not found.

    Examples:

    * `kvtier bench cold --tokens 131072`
    * `kvtier bench cold http://127.0.0.1:8000 --tokens 878000 --needles 5 --json`
    """
    client = Client(url, key, admin_key)
    with progress.status("asking the server") as status:
        found = measure(client, tokens, needles, status.update)
    if as_json:
        print(json.dumps(_cold_document(found), indent=2))
    else:
        _show_cold(found)
    if not found.sound:
        raise typer.Exit(1)


def _show_cold(found: Cold) -> None:
    chat = found.chat
    cached = _coloured(chat.cached == 0, f"{count(chat.cached)} of them from a cache")
    say(f"prompt: {count(chat.prompt_tokens)} tokens, {cached}")
    say(f"first token: {chat.first_token:.2f} s, {found.prefill_rate:,.0f} tokens/s")
    say(f"answer: {count(chat.output_tokens)} tokens at {found.decode_rate:,.1f} tokens/s")
    if found.needles:
        all_found = found.found == len(found.needles)
        text = _coloured(all_found, f"{found.found} of {len(found.needles)} found")
        for needle in found.needles:
            text += "" if needle.found else f"; {needle.city} at {needle.depth:.0%} missed"
        say(f"needles: {text}")
    if found.cards:
        out.print(table(found.cards), highlight=False)


def say(text: str) -> None:
    out.print(text, highlight=False, soft_wrap=True)


def _coloured(good: bool, text: str) -> str:
    return f"[{'green' if good else 'red'}]{text}[/]"


def _cold_document(found: Cold) -> dict[str, Any]:
    return {
        "prompt_tokens": found.chat.prompt_tokens,
        "cached_tokens": found.chat.cached,
        "first_token_seconds": found.chat.first_token,
        "prefill_tokens_per_second": found.prefill_rate,
        "output_tokens": found.chat.output_tokens,
        "decode_tokens_per_second": found.decode_rate,
        "needles": [dataclasses.asdict(needle) for needle in found.needles],
        "answer": found.chat.text,
        "cards": [dataclasses.asdict(card) for card in found.cards],
    }
