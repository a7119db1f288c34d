"""An agent's turns as DeepSeek's encoder renders them: whether the prompt only ever grows."""

# ruff: noqa: RUF001 (DeepSeek writes its control tokens with such bars)

from __future__ import annotations

import itertools

import pytest
from patching import Chat, applied, serving

SYSTEM = "You are a coding agent. " * 40
TURNS = 20


@pytest.fixture(autouse=True)
def settings():
    with serving(tool_call_parser=None, reasoning_parser=None):
        yield


def agent_log() -> list[list[dict]]:
    """The messages of each request of an agent: tool calls, their results, and reminders."""
    log: list[dict] = [{"role": "user", "content": "Mend the tests."}]
    requests = []
    for turn in range(TURNS):
        if turn % 3 == 1:
            reminder = f"<system-reminder>file {turn} has changed</system-reminder>"
            log.append({"role": "system", "content": [{"type": "text", "text": reminder}]})
        requests.append(list(log))
        call = {"type": "tool_use", "id": f"c{turn}", "name": "read", "input": {"file": turn}}
        result = {"type": "tool_result", "tool_use_id": f"c{turn}", "content": f"line {turn}\n" * 9}
        log.append({"role": "assistant", "content": [{"type": "text", "text": "Reading."}, call]})
        log.append({"role": "user", "content": [result]})
    return requests


TOOLS = [{"name": "read", "input_schema": {"type": "object", "properties": {}}}]


def prompts(chat: Chat) -> list[list[int]]:
    """The token ids of each prompt of the log, without the header of the answer to come."""
    found = []
    header = chat.manager.tokenizer.convert_tokens_to_ids("<｜Assistant｜>")
    for messages in agent_log():
        answer = chat.messages(messages, system=SYSTEM, tools=TOOLS)
        assert answer.status_code == 200, answer.text
        ids = chat.prompt_ids
        found.append(ids[: len(ids) - 1 - ids[::-1].index(header)])
    return found


def shared(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    unlike = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(unlike, min(len(a), len(b)))


def kept(found: list[list[int]]) -> list[float]:
    """How much of each prompt the next one begins with."""
    return [shared(a, b) / len(a) for a, b in itertools.pairwise(found)]


@pytest.mark.parametrize("spec", ["dsv41", "dsv4"])
def test_every_prompt_begins_with_the_one_before(spec) -> None:
    with applied("inline_system"):
        found = prompts(Chat(spec))
    assert kept(found) == [1.0] * (TURNS - 1)


@pytest.mark.parametrize("spec", ["dsv41", "dsv4"])
def test_without_the_patch_each_reminder_changes_the_prompt_from_its_start(spec) -> None:
    """Once this fails, SGLang has mended it and the patch can go."""
    found = kept(prompts(Chat(spec)))
    changed = [turn for turn, share in enumerate(found, 1) if share < 1]
    assert changed == [turn for turn in range(1, TURNS) if turn % 3 == 1]
    assert found[18] < 0.5  # after 18 turns, less than half of the prompt is left


@pytest.mark.parametrize(
    ("spec", "token"), [("dsv41", "<｜System｜>"), ("dsv4", "<｜latest_reminder｜>")]
)
def test_a_reminder_stands_where_it_was_said(spec, token) -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "system", "content": "REMINDER"},
        {"role": "user", "content": "three"},
    ]
    with applied("inline_system"):
        chat = Chat(spec)
        for ask in (chat.messages, chat.completions):
            ask([{"role": "system", "content": SYSTEM}, *messages])
            assert f"two<｜end▁of▁sentence｜>{token}REMINDER<｜User｜>three" in chat.prompt
            assert chat.prompt.count(token) == (2 if spec == "dsv41" else 1)


def test_a_checkpoint_without_the_token_for_reminders_gets_what_it_got_before() -> None:
    messages = [{"role": "user", "content": "one"}, {"role": "system", "content": "REMINDER"}]
    with applied("inline_system"):
        chat = Chat("dsv4", without=("<｜latest_reminder｜>",))
        assert chat.messages(messages, system="S").status_code == 200
    assert "S\n\nREMINDER<｜User｜>one" in chat.prompt
