"""What a client of /v1/messages reads when its prompt is too long."""

from __future__ import annotations

import pytest
from patching import Chat, applied, serving
from sglang.srt.managers.utils import validate_input_length

from kvtier.integration.patches.prompt_too_long import anthropic_words

LIMIT = 400
LONG = [{"role": "user", "content": "word " * 100}]
SHORT = [{"role": "user", "content": "word"}]


@pytest.fixture(autouse=True)
def settings():
    with serving(tool_call_parser=None, reasoning_parser=None):
        yield


@pytest.fixture
def patched():
    with applied("prompt_too_long"):
        yield


def _error(answer) -> str:
    assert answer.status_code == 400
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    return body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(patched, stream) -> None:
    message = _error(Chat(context_len=LIMIT).messages(LONG, stream=stream))
    words = message.split()
    assert message == f"prompt is too long: {words[4]} tokens > {LIMIT - 1} maximum"
    assert int(words[4]) > 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_leaves_no_room_for_the_answer(patched, stream) -> None:
    message = _error(Chat(context_len=LIMIT).messages(SHORT, stream=stream, max_tokens=LIMIT))
    assert message.startswith("input length and `max_tokens` exceed context limit: ")
    assert f" + {LIMIT} > {LIMIT}, decrease input length or `max_tokens`" in message


def test_the_scheduler_s_own_limit() -> None:
    class Request:
        origin_input_ids = range(500)

    words = validate_input_length(Request(), LIMIT, allow_auto_truncate=False)
    assert words is not None
    assert anthropic_words(words) == "prompt is too long: 500 tokens > 399 maximum"


def test_answers_and_other_errors_are_as_before(patched) -> None:
    chat = Chat()
    assert chat.messages(SHORT).json()["content"] == [{"type": "text", "text": "hi"}]
    events = [
        line.removeprefix("event: ")
        for line in chat.messages(SHORT, stream=True).text.splitlines()
        if line.startswith("event: ")
    ]
    assert events == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    tool = {"type": "tool", "name": "none_such"}
    tools = [{"name": "read", "input_schema": {"type": "object"}}]
    assert "none_such" in _error(chat.messages(SHORT, tools=tools, tool_choice=tool))


def test_a_fault_within_a_stream_stays_in_the_stream(patched) -> None:
    chat = Chat()

    async def fail(*args):
        raise RuntimeError
        yield

    chat.manager.generate_request = fail
    answer = chat.messages(SHORT, stream=True)
    assert answer.status_code == 200
    assert "event: error" in answer.text
    assert "api_error" in answer.text


def test_without_the_patch_the_words_are_sglang_s_and_a_stream_begins() -> None:
    """Once this fails, SGLang has mended it and the patch can go."""
    chat = Chat(context_len=LIMIT)
    error = chat.messages(LONG).json()["error"]
    assert error["type"] == "BadRequestError"
    assert "is longer than the model's context length" in error["message"]
    error = chat.messages(SHORT, max_tokens=LIMIT).json()["error"]
    assert "Please reduce the number" in error["message"]
    stream = chat.messages(LONG, stream=True)
    assert stream.status_code == 200
    assert "event: error" in stream.text
