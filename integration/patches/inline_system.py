"""System messages within a DeepSeek conversation are rendered where they stand.

Coding agents put reminders between turns, as messages with the role `system`. SGLang 0.5.23 moves
their text into the first system message for every encoder but Kimi K3's
(entrypoints/openai/chat_encoding.py:62, read once in entrypoints/anthropic/serving.py:193), so each
new reminder changes the prompt from its start: nothing after it is found in any cache.

DeepSeek V4.1's encoder (deepseek-recipe 0.2.0) renders them in place, after its System token. V4
has no such token and its encoder joins them to the first itself; it has one for reminders, which
stands for the same: instructions within a conversation.
"""

# ruff: noqa: RUF001 (DeepSeek writes its control tokens with such bars)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from kvtier.integration.patches.scheme import Hook, Patch, refuse_without_plugins

_RECIPE = "sglang.srt.parser.deepseek_recipe_renderer"
_REMINDER_TOKEN = "<｜latest_reminder｜>"

Message = Mapping[str, Any]


def _renders_in_place(result: bool, spec: str | None) -> bool:
    return result or spec in ("dsv41", "dsv4")


def _encode(
    original: Callable[..., Any], recipe: Any, body: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    # A checkpoint without the token gets what it got before.
    is_v4 = recipe.model == _model_name("dsv4")
    if is_v4 and recipe.hf_tokenizer.token_to_id(_REMINDER_TOKEN) is not None:
        body = {**body, "messages": as_reminders(body["messages"])}
    return original(recipe, body, *args, **kwargs)


def _model_name(spec: str) -> str:
    from sglang.srt.parser.deepseek_recipe_renderer import MODEL_NAMES

    return str(MODEL_NAMES[spec])


def as_reminders(messages: Sequence[Message]) -> list[Message]:
    """The messages, with those from the system after the first of somebody else as reminders."""
    started = False
    turned: list[Message] = []
    for message in messages:
        is_system = message["role"] in ("system", "developer")
        started = started or not is_system
        turned.append({**message, "role": "latest_reminder"} if started and is_system else message)
    return turned


PATCH = Patch(
    hooks=(
        Hook(
            "sglang.srt.entrypoints.openai.chat_encoding.spec_supports_inline_system",
            HookType.AFTER,
            _renders_in_place,
            ("spec",),
        ),
        Hook(f"{_RECIPE}.DeepSeekRecipe.encode", HookType.AROUND, _encode, ("self", "body")),
    ),
    relies_on=(f"{_RECIPE}.MODEL_NAMES",),
    refusal=refuse_without_plugins,
)
