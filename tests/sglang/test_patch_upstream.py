"""What agents rely on and SGLang has by itself, so that no patch is needed for it."""

# ruff: noqa: RUF001 (DeepSeek writes its control tokens with such bars)

from __future__ import annotations

import pytest
from patching import Chat, serving

USER = {"role": "user", "content": "Read it."}
TOOL = {"name": "read", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(autouse=True)
def settings():
    with serving(tool_call_parser="deepseekv41", reasoning_parser="deepseek-v41"):
        yield


@pytest.mark.parametrize(
    ("effort", "level"),
    [("minimal", 50), ("low", 50), ("medium", 75), ("high", 75), ("max", 100)],
)
def test_effort_levels_of_v41(effort, level) -> None:
    chat = Chat()
    chat.completions([USER], reasoning_effort=effort)
    assert f"Reasoning Effort: {level} (range" in chat.prompt
    chat.messages([USER], output_config={"effort": effort}, thinking={"type": "adaptive"})
    assert f"Reasoning Effort: {level} (range" in chat.prompt


def test_xhigh_is_max_for_anthropic_s_clients_and_high_for_openai_s() -> None:
    chat = Chat()
    chat.messages([USER], output_config={"effort": "xhigh"}, thinking={"type": "adaptive"})
    assert "Reasoning Effort: 100 (range" in chat.prompt
    chat.completions([USER], reasoning_effort="xhigh")
    assert "Reasoning Effort: 75 (range" in chat.prompt


def test_another_effort_changes_the_prompt_from_its_start() -> None:
    """So a session that changes it finds nothing of itself in any cache."""
    chat = Chat()
    chat.completions([USER], reasoning_effort="low")
    low = chat.prompt_ids
    chat.completions([USER], reasoning_effort="max")
    assert low[:20] == chat.prompt_ids[:20]  # the control tokens and "Reasoning Effort: "
    assert low[:21] != chat.prompt_ids[:21]


def test_the_result_of_a_tool_opens_no_new_turn() -> None:
    """The thoughts before the call stay, and those of a turn that has ended stay with tools."""
    call = {"type": "tool_use", "id": "c", "name": "read", "input": {}}
    thought = {"type": "thinking", "thinking": "Think.", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "Done."}
    turn = [
        USER,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Reading."}, call]},
        {"role": "user", "content": [result]},
    ]
    chat = Chat()
    chat.messages(turn, tools=[TOOL], thinking={"type": "adaptive"})
    assert "<think>Think.</think>Reading." in chat.prompt
    assert chat.prompt.endswith("<tool_result>Done.</tool_result><｜Assistant｜><think>")


@pytest.mark.parametrize(
    ("name", "status"), [("mcp__server__tool", 200), ("ns::name", 400), ("ns.name", 400)]
)
def test_names_of_tools(name, status) -> None:
    chat = Chat()
    function = {"name": name, "parameters": TOOL["input_schema"]}
    tools = [{"type": "function", "function": function}]
    assert chat.completions([USER], tools=tools).status_code == status
    assert chat.messages([USER], tools=[{**TOOL, "name": name}]).status_code == status
