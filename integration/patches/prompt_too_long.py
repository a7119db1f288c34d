"""/v1/messages says in Anthropic's words that a prompt is too long, and says it with status 400.

Coding agents compact their history when they read `prompt is too long: N tokens > M maximum`, and
ask for fewer tokens when they read `input length and max_tokens exceed context limit: N + K > M`.
SGLang 0.5.23 says the same in words of its own (managers/tokenizer_manager.py:1350 and 1372,
managers/utils.py:284), and to a request for a stream only inside the stream, after status 200
(entrypoints/anthropic/serving.py, `_handle_streaming`); /v1/chat/completions waits for the first
chunk and answers 400 (entrypoints/openai/serving_chat.py, `_handle_streaming_request`).
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from kvtier.integration.patches.scheme import Hook, Patch, refuse_without_plugins

_SERVING = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"

# Both first limits are exclusive: a prompt of exactly that length is refused.
_PROMPT = (
    re.compile(r"The input \((\d+) tokens\) is longer than the model's context length \((\d+) "),
    re.compile(r"Input length \((\d+) tokens\) exceeds the maximum allowed length \((\d+) "),
)
_TOTAL = re.compile(
    r"maximum context length of (\d+) tokens\. You requested a total of \d+ tokens: "
    r"(\d+) tokens from the input messages and (\d+) tokens for the completion"
)


def anthropic_words(message: str) -> str:
    """The message as Anthropic's API writes it; unchanged if it is about something else."""
    for pattern in _PROMPT:
        if found := pattern.search(message):
            tokens, limit = map(int, found.groups())
            return f"prompt is too long: {tokens} tokens > {limit - 1} maximum"
    if found := _TOTAL.search(message):
        limit, tokens, more = map(int, found.groups())
        return (
            f"input length and `max_tokens` exceed context limit: {tokens} + {more} > {limit}, "
            "decrease input length or `max_tokens` and try again"
        )
    return message


def _reword(
    original: Callable[..., Any], serving: Any, status_code: int, error_type: str, message: str,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    words = anthropic_words(message)
    if words != message:
        error_type = "invalid_request_error"  # SGLang's own name comes through, where it has one
    return original(serving, status_code, error_type, words, *args, **kwargs)


async def _answer_400_instead_of_a_stream(
    original: Callable[..., Any], serving: Any, *args: Any, **kwargs: Any
) -> Any:
    """A stream begins with message_start also where all that follows is an error."""
    response = await original(serving, *args, **kwargs)
    frames = getattr(response, "body_iterator", None)
    if frames is None:
        return response
    begun: list[Any] = []
    async for frame in frames:
        begun.append(frame)
        if not frame.startswith("event: message_start\n"):
            break
    error = _request_error(begun[-1]) if begun else None
    if error is not None:
        await frames.aclose()
        return serving._error_response(
            status_code=400, error_type="invalid_request_error", message=error
        )
    response.body_iterator = _after(begun, frames)
    return response


def _request_error(frame: str) -> str | None:
    """The message of an error event that blames the request; None for any other event."""
    if not frame.startswith("event: error\n"):
        return None
    error = json.loads(frame.partition("data: ")[2])["error"]
    return str(error["message"]) if error["type"] == "invalid_request_error" else None


async def _after(begun: list[Any], frames: AsyncIterator[Any]) -> AsyncIterator[Any]:
    for frame in begun:
        yield frame
    async for frame in frames:
        yield frame


PATCH = Patch(
    hooks=(
        Hook(
            f"{_SERVING}._error_response",
            HookType.AROUND,
            _reword,
            ("self", "status_code", "error_type", "message"),
        ),
        Hook(
            f"{_SERVING}._handle_streaming",
            HookType.AROUND,
            _answer_400_instead_of_a_stream,
            ("self", "chat_request"),
        ),
    ),
    refusal=refuse_without_plugins,
)
