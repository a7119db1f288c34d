"""`kvtier bench`: measure a served model."""

from __future__ import annotations

import dataclasses
import json
import signal
from typing import Annotated, Any

import typer
from rich.text import Text

from kvtier.cli.common import AsJson, count, marked, out, progress
from kvtier.cli.selfcheck import document, status_of, verdict
from kvtier.cli.served import DEFAULT_URL, AdminKey, Key, Url
from kvtier.cli.watch import table
from kvtier.errors import ConfigError
from kvtier.integration.launcher.address import Address
from kvtier.integration.launcher.command import Command
from kvtier.integration.probes.client import Client
from kvtier.integration.probes.cold import CITIES, Cold
from kvtier.integration.probes.cold import measure as measure_cold
from kvtier.integration.probes.restore import Restore
from kvtier.integration.probes.restore import measure as measure_restore
from kvtier.sizes import format_size

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
        found = measure_cold(client, tokens, needles, status.update)
    if as_json:
        print(json.dumps(_cold_document(found), indent=2))
    else:
        _show_cold(found)
    if not found.sound:
        raise typer.Exit(1)


@bench.command(context_settings={"allow_extra_args": True})
def restore(
    context: typer.Context,
    *,
    url: Annotated[
        # Named, since typer 0.27 would call it --URL.
        str | None,
        typer.Option(
            "--url", metavar="URL", help="Where it will answer; else by its own --host and --port."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=256, help="Length of the session, about.")] = 20000,
    tolerance: Annotated[
        float,
        typer.Option(min=0, help="Largest difference of a log probability; 0: to the last bit."),
    ] = 0.0,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Start a server, fill it, kill -9 it, start it again: how soon is a session back, and is it
    the same?

    What follows `--` starts the server and stays in the foreground. The page cache of the store's
    and of the model's files is dropped between the two lives, as far as they are on this machine.
    The server is stopped at the end. Exit status 1 if what was restored is not what was computed,
    2 if that cannot be told.

    Examples:

    * `kvtier bench restore -- kvtier launch generic --model /models/llama`
    * `kvtier bench restore --tokens 777000 -- kvtier launch h200-4x --model /models/DeepSeek-V4.1`
    """
    if not context.args:
        raise ConfigError(
            "Say how to start the server: kvtier bench restore -- kvtier launch generic --model "
            "PATH."
        )
    client = Client(url or Address.of(Command({}, list(context.args), [])).url, key)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server goes with this command
    with progress.status("") as status:
        found = measure_restore(client, context.args, tokens, tolerance, status.update)
    if as_json:
        print(json.dumps(_restore_document(found), indent=2))
    else:
        _show_restore(found)
    raise typer.Exit(status_of(found.report))


def _show_restore(found: Restore) -> None:
    result = found.result
    session, restored = count(result.restored.prompt_tokens), count(result.restored.storage)
    say(f"server: ready after {found.first_start:.1f} s, {found.second_start:.1f} s after kill -9")
    dropped = f"dropped for {count(found.forgotten)} files of the store and the model"
    say(f"page cache: {dropped if found.forgotten else 'not dropped, the files are not here'}")
    say(
        Text.assemble(f"session: {session} tokens, ", _coloured(True, f"{restored} from the store"))
    )
    say(f"first token, computed: {result.computed.first_token:.2f} s")
    say(f"first token, from the device's cache: {result.held.first_token:.2f} s")
    parts = f"{format_size(int(found.read_bytes))} read"
    if result.restored.storage_wait:
        parts += f", waited {result.restored.storage_wait:.2f} s for the store"
    if found.load_back:
        parts += f", {found.load_back:.3f} s to the device"
    say(f"first token, restored: {result.restored.first_token:.2f} s ({parts})")
    say(verdict(found.report))


def _restore_document(found: Restore) -> dict[str, Any]:
    return {
        "start_seconds": found.first_start,
        "start_after_kill_seconds": found.second_start,
        "page_cache_dropped_files": found.forgotten,
        "read_bytes": found.read_bytes,
        "load_back_seconds": found.load_back,
        **document(found.report),
    }


def _show_cold(found: Cold) -> None:
    chat = found.chat
    cached = _coloured(chat.cached == 0, f"{count(chat.cached)} of them from a cache")
    say(Text.assemble(f"prompt: {count(chat.prompt_tokens)} tokens, ", cached))
    say(f"first token: {chat.first_token:.2f} s, {found.prefill_rate:,.0f} tokens/s")
    say(f"answer: {count(chat.output_tokens)} tokens at {found.decode_rate:,.1f} tokens/s")
    if found.needles:
        all_found = found.found == len(found.needles)
        text = _coloured(all_found, f"{found.found} of {len(found.needles)} found")
        for needle in found.needles:
            text.append("" if needle.found else f"; {needle.city} at {needle.depth:.0%} missed")
        say(Text.assemble("needles: ", text))
    if found.cards:
        out.print(table(found.cards), highlight=False)


def say(text: str | Text) -> None:
    out.print(text, highlight=False, soft_wrap=True)


def _coloured(good: bool, text: str) -> Text:
    return marked("green" if good else "red", text)


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
