"""Requests of coding agents that SGLang refuses are rewritten before it reads them.

SGLang 0.5.23 answers 400 to blocks that are not in its list (entrypoints/anthropic/protocol.py:113:
`document`, blocks of server tools, `container_upload`), to `redacted_thinking` in a history
(entrypoints/anthropic/serving.py:375), to tools that run on Anthropic's servers and are not in its
list (protocol.py:226), and to the effort `off` (entrypoints/openai/protocol.py:879 and
protocol.py:345). Its sampling default is top_p 1.0 where neither the request nor the checkpoint
says one (entrypoints/openai/protocol.py:1062).

Those are pydantic models, which cannot be hooked: an ASGI middleware rewrites the JSON. It stands
innermost, after decompression and API keys. A body that needs no change passes byte by byte, and
so does one that it cannot read: SGLang says what is wrong with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from kvtier.integration.patches.documents import as_blocks
from kvtier.integration.patches.scheme import Hook, Patch, refuse_without_plugins

log = logging.getLogger(__name__)

MAX_BODY = 64 * 2**20
"""A longer body passes unread."""

SAMPLING = {"temperature": 1.0, "top_p": 0.95}
"""DeepSeek's recommendation for V4 and V4.1."""

_CHAT = "/v1/chat/completions"
_MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
_OFF = ("off", "none")

# Families of server tools that SGLang knows and leaves out by itself.
_KNOWN_TOOLS = ("web_search_", "computer_", "bash_", "text_editor_")

Scope = Mapping[str, Any]
Json = dict[str, Any]


class Clients:
    """ASGI middleware around SGLang's routes for chats."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "POST" or path not in (*_MESSAGES, _CHAT):
            await self.app(scope, receive, send)
            return
        body, unread = await _body(receive)
        if not unread:
            rewritten = await asyncio.to_thread(rewrite, path, body, _model_defaults(scope))
            if rewritten is not body:
                body, scope = rewritten, _with_length(scope, len(rewritten))
        await self.app(scope, _replay(body, unread, receive), send)


def rewrite(path: str, body: bytes, model_defaults: Mapping[str, Any]) -> bytes:
    """The request's JSON as SGLang takes it; `body` itself if nothing is to be changed."""
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            return body
        before = json.dumps(request)
        if path == _CHAT:
            _chat(request)
        else:
            _messages(request)
        if path != "/v1/messages/count_tokens":
            _sampling(request, model_defaults)
        after = json.dumps(request)
    except Exception as error:  # whatever it is, SGLang's answer to it is the right one
        log.debug("kvtier: a request to %s is left as it is: %r", path, error)
        return body
    return body if after == before else after.encode()


# --- what changes -------------------------------------------------------------------------------


def _chat(request: Json) -> None:
    if request.get("reasoning_effort") == "off":
        request["reasoning_effort"] = "none"
    reasoning = request.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") == "off":
        request["reasoning"] = {**reasoning, "effort": "none"}


def _messages(request: Json) -> None:
    output = request.get("output_config")
    if isinstance(output, dict) and output.get("effort") in _OFF:
        request["output_config"] = {k: v for k, v in output.items() if k != "effort"}
        request["thinking"] = {"type": "disabled"}
    if isinstance(request.get("tools"), list):
        request["tools"] = [tool for tool in request["tools"] if not _runs_elsewhere(tool)]
    if isinstance(request.get("system"), list):
        request["system"] = blocks(request["system"])
    for message in request["messages"]:
        if isinstance(message["content"], list):
            message["content"] = blocks(message["content"])


def _sampling(request: Json, model_defaults: Mapping[str, Any]) -> None:
    if not any(request.get(name) is not None or name in model_defaults for name in SAMPLING):
        request.update(SAMPLING)


def _runs_elsewhere(tool: Any) -> bool:
    """A tool without a schema, of which only Anthropic knows what it takes."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not kind or kind == "custom" or "input_schema" in tool:
        return False
    return not str(kind).startswith(_KNOWN_TOOLS)


def blocks(content: list[Any]) -> list[Any]:
    """Content blocks, with those that SGLang doesn't know as text."""
    found: list[Any] = []
    for block in content:
        kind = str(block.get("type")) if isinstance(block, dict) else ""
        if kind == "redacted_thinking":
            continue  # encrypted for Anthropic: no model can read it
        if kind == "document":
            found.extend(blocks(as_blocks(block)))
        elif kind == "container_upload":
            found.append(_text(f"[File {block.get('file_id')}: this server has no container]"))
        elif kind in ("server_tool_use", "mcp_tool_use"):
            called = json.dumps(block.get("input") or {}, ensure_ascii=False)
            found.append(_text(f"[Called {block.get('name')}: {called}]"))
        elif kind.endswith("_tool_result"):
            found.append(_text("\n".join(["[Result]", *_words(block.get("content"))])))
        elif kind == "tool_result" and isinstance(block.get("content"), list):
            found.append({**block, "content": blocks(block["content"])})
        else:
            found.append(block)
    return found


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _words(content: Any) -> list[str]:
    """What can be read in the result of a server tool."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [words for part in content for words in _words(part)]
    if not isinstance(content, dict):
        return []
    if content.get("type") == "document":
        return [str(block["text"]) for block in as_blocks(content) if block.get("type") == "text"]
    found = [
        str(content[name])
        for name in ("title", "url", "text", "stdout", "stderr", "error_code")
        if content.get(name)
    ]
    return found + _words(content.get("content"))


# --- ASGI ---------------------------------------------------------------------------------------


async def _body(receive: Any) -> tuple[bytes, list[Any]]:
    """The whole body; or what came of it, and the message at which reading it stopped."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts), [message]
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY:
            return b"".join(parts), [message]
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts), []


def _replay(body: bytes, unread: list[Any], receive: Any) -> Callable[[], Awaitable[Any]]:
    waiting = [{"type": "http.request", "body": body, "more_body": bool(unread)}, *unread]

    async def next_message() -> Any:
        return waiting.pop(0) if waiting else await receive()

    return next_message


def _with_length(scope: Scope, length: int) -> Scope:
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _model_defaults(scope: Scope) -> Mapping[str, Any]:
    """The sampling parameters of the checkpoint's generation_config.json that SGLang will use."""
    chat = getattr(scope["app"].state, "openai_serving_chat", None)
    return getattr(chat, "default_sampling_params", None) or {}


def _add(*args: Any, **kwargs: Any) -> None:
    from sglang.srt.entrypoints.http_server import app
    from starlette.middleware import Middleware

    app.user_middleware.append(Middleware(Clients))


PATCH = Patch(
    hooks=(
        Hook(
            "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
            HookType.BEFORE,
            _add,
            ("server_args",),
        ),
    ),
    relies_on=(
        "sglang.srt.entrypoints.http_server.app.user_middleware",
        "sglang.srt.entrypoints.anthropic.protocol.AnthropicContentBlock",
    ),
    refusal=refuse_without_plugins,
)
