"""Does a served model answer right: in text, in JSON, with tools, over several turns."""

from __future__ import annotations

import base64
import json
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtier.integration.probes.client import Client, ProbeError, UnreachableServerError

MAX_TOKENS = 1024
"""Of an answer: enough for a model that reasons although it is asked not to."""

STOCK = {
    "apples": 712, "bolts": 4096, "candles": 58, "drums": 13, "envelopes": 930, "forks": 267,
    "gloves": 84, "hammers": 31, "inkwells": 645, "jars": 1209, "kettles": 76, "lamps": 402,
}  # fmt: skip
"""What the tool knows, by item: one round trip each."""

TOOL = {
    "type": "function",
    "function": {
        "name": "count_stock",
        "description": "How many pieces of an item are in stock.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    },
}

TURNS = (
    ("My number is 4817. Repeat it.", "4817"),
    ("Add 3 to my number. Answer with the result only.", "4820"),
    ("Which number did I give you first? Answer with the number only.", "4817"),
    ("Multiply that first number by 2. Answer with the result only.", "9634"),
)

PERSON = {"name": "Anna", "age": 34, "city": "Oslo"}


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    expected: str
    got: str
    seconds: float


class _Wrong(Exception):
    """An answer that is not the expected one."""

    def __init__(self, expected: str, got: str) -> None:
        self.expected = expected
        self.got = got


def checks(client: Client, image: bool) -> Iterator[Check]:
    """Run one check after the other."""
    runs = [
        ("arithmetic", _arithmetic),
        ("JSON by a schema", _schema),
        (f"tool round trips, {len(STOCK)}", _tools),
        (f"turns of a conversation, {len(TURNS)}", _turns),
        *([("image", _image)] if image else []),
    ]
    for name, run in runs:
        began = time.perf_counter()
        try:
            expected = got = run(client)
            ok = True
        except _Wrong as wrong:
            ok, expected, got = False, wrong.expected, wrong.got
        except UnreachableServerError:
            raise
        except ProbeError as error:
            if run is _arithmetic:  # what refuses the plainest question tells nothing of answers
                raise
            ok, expected, got = False, "an answer", str(error)
        yield Check(name, ok, expected, got, time.perf_counter() - began)


def _arithmetic(client: Client) -> str:
    return _expect("391", _say(client, "What is 17 * 23? Answer with the number only."))


def _schema(client: Client) -> str:
    kinds = {"name": "string", "age": "integer", "city": "string"}
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in kinds.items()},
        "required": list(kinds),
        "additionalProperties": False,
    }
    got = _say(
        client,
        "Anna is 34 years old and lives in Oslo. Give name, age and city as JSON.",
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": schema, "strict": True},
        },
    )
    try:
        right = json.loads(got) == PERSON
    except ValueError:
        right = False
    if not right:
        raise _Wrong(json.dumps(PERSON), got)
    return got


def _tools(client: Client) -> str:
    for trip, (item, number) in enumerate(STOCK.items(), 1):
        try:
            _tool(client, item, str(number))
        except _Wrong as wrong:
            raise _Wrong(f"{wrong.expected} in round trip {trip}", wrong.got) from None
    return f"{len(STOCK)} of {len(STOCK)}"


def _tool(client: Client, item: str, number: str) -> None:
    """The model calls the tool, is told what it returned, and says so."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f'How many of the item "{item}" are in stock? Use the tool.'}
    ]
    chat = client.chat(messages, MAX_TOKENS, tools=[TOOL])
    expected = f'a call count_stock({{"item": "{item}"}})'
    if len(chat.calls) != 1:
        got = chat.text or f"{len(chat.calls)} calls"
        raise _Wrong(f"{expected} (SGLang needs --tool-call-parser)", got)
    call_id, name, arguments = chat.calls[0]
    try:
        asked = json.loads(arguments)
    except ValueError:
        asked = None
    if name != "count_stock" or asked != {"item": item}:
        raise _Wrong(expected, f"{name}({arguments})")
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages.append({"role": "assistant", "content": chat.text, "tool_calls": [call]})
    result = json.dumps({"item": item, "count": int(number)})
    messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
    _expect(number, client.chat(messages, MAX_TOKENS, tools=[TOOL]).text)


def _turns(client: Client) -> str:
    messages: list[dict[str, Any]] = []
    for turn, (question, expected) in enumerate(TURNS, 1):
        messages.append({"role": "user", "content": question})
        got = client.chat(messages, MAX_TOKENS).text
        try:
            _expect(expected, got)
        except _Wrong as wrong:
            raise _Wrong(f"{wrong.expected} in turn {turn}", wrong.got) from None
        messages.append({"role": "assistant", "content": got})
    return f"{len(TURNS)} of {len(TURNS)}"


def _image(client: Client) -> str:
    url = f"data:image/png;base64,{base64.b64encode(red_square(448)).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Which colour is this image? Answer with one word."},
    ]
    got = client.chat([{"role": "user", "content": content}], MAX_TOKENS).text
    return _expect("red", got.lower())


def red_square(side: int) -> bytes:
    """A PNG of `side` by `side` red pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\xff\0\0" * side) * side)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def _say(client: Client, question: str, **more: Any) -> str:
    return client.chat([{"role": "user", "content": question}], MAX_TOKENS, **more).text


def _expect(part: str, text: str) -> str:
    """The text, if the part is in it; numbers may be written with separators."""
    if part not in text.replace(",", ""):
        raise _Wrong(part, text)
    return text
