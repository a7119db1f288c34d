"""Requests of coding agents through SGLang's routes and request models, with the middleware."""

from __future__ import annotations

import base64
import json

import pytest
from patching import Chat, applied, serving

from kvtier.integration.patches import clients, documents

USER = {"role": "user", "content": "Read it."}
PDF_TEXT = "The moon is made of basalt."


def pdf(text: str = PDF_TEXT) -> str:
    """A PDF of one page, in base64."""
    drawing = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 200]/Contents 4 0 R"
        b"/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(drawing), drawing),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj%s endobj\n" % (number, content)
    table = len(out)
    out += b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % p for p in places)
    out += b"trailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % table
    return base64.b64encode(out).decode()


def document(**source: object) -> dict:
    return {"type": "document", "title": "Moon", "source": source}


PDF = document(type="base64", media_type="application/pdf", data=pdf())
REFUSED = {
    "pdf": [PDF],
    "text document": [document(type="text", media_type="text/plain", data="Basalt.")],
    "document of blocks": [document(type="content", content=[{"type": "text", "text": "Basalt."}])],
    "document by address": [document(type="url", url="https://example.org/moon.pdf")],
    "document in a tool's result": [{"type": "tool_result", "tool_use_id": "c", "content": [PDF]}],
    "file of a container": [{"type": "container_upload", "file_id": "f1"}],
    "search on their server": [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "moon"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s1",
            "content": [
                {
                    "type": "web_search_result",
                    "title": "Moon facts",
                    "url": "https://example.org",
                    "encrypted_content": "EqgfCioIARgB",
                }
            ],
        },
    ],
    "code on their server": [
        {"type": "server_tool_use", "id": "s2", "name": "code_execution", "input": {"code": "1"}},
        {
            "type": "code_execution_tool_result",
            "tool_use_id": "s2",
            "content": {"type": "code_execution_result", "stdout": "1\n", "return_code": 0},
        },
    ],
    "their MCP": [
        {"type": "mcp_tool_use", "id": "m1", "name": "look", "server_name": "x", "input": {}},
        {
            "type": "mcp_tool_result",
            "tool_use_id": "m1",
            "content": [{"type": "text", "text": "R"}],
        },
    ],
}


@pytest.fixture(autouse=True)
def settings():
    with serving(tool_call_parser="deepseekv41", reasoning_parser="deepseek-v41"):
        yield


@pytest.fixture
def patched():
    with applied("clients"):
        clients.PATCH.hooks[0].function()  # as it is called before the HTTP server runs
        yield Chat()


def _with(content: list) -> list:
    role = "assistant" if content[0]["type"].endswith("_use") else "user"
    call = {"type": "tool_use", "id": "c", "name": "read", "input": {}}
    called = [{"role": "assistant", "content": [call]}] if "tool_use_id" in content[0] else []
    return [USER, *called, {"role": role, "content": content}, USER]


@pytest.mark.parametrize("name", REFUSED)
def test_without_the_patch_sglang_refuses(name) -> None:
    """Once this fails, SGLang takes it and that part of the patch can go."""
    answer = Chat().messages(_with(REFUSED[name]))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("messages.")  # the request model's words


@pytest.mark.parametrize("name", REFUSED)
def test_what_sglang_refuses_is_answered(patched, name) -> None:
    for path, more in (("/v1/messages", {"max_tokens": 9}), ("/v1/messages/count_tokens", {})):
        body = {"model": "m", "messages": _with(REFUSED[name]), **more}
        answer = patched.post(path, body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text document", "[Document: Moon]\nBasalt."),
        ("document of blocks", "Basalt."),
        ("document by address", "cannot fetch a document by url"),
        ("file of a container", "[File f1: this server has no container]"),
        ("search on their server", '[Called web_search: {"query": "moon"}]'),
        ("search on their server", "[Result]\nMoon facts\nhttps://example.org"),
        ("code on their server", "[Result]\n1\n"),
        ("their MCP", "[Result]\nR"),
    ],
)
def test_the_model_reads(patched, name, words) -> None:
    patched.messages(_with(REFUSED[name]))
    assert words in patched.prompt
    assert "EqgfCioIARgB" not in patched.prompt


@pytest.mark.parametrize("name", ["pdf", "document in a tool's result"])
def test_the_model_reads_a_pdf_and_the_same_in_every_turn(patched, name) -> None:
    patched.messages(_with(REFUSED[name]))
    first = patched.prompt_ids
    assert f"[Document: Moon]\nPage 1:\n{PDF_TEXT}" in patched.prompt
    documents._remembered.clear()
    patched.messages(_with(REFUSED[name]))
    assert patched.prompt_ids == first


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("%%%", "no valid base64"),
        (base64.b64encode(b"no pdf at all").decode(), "The PDF cannot be read"),
        (pdf(""), "1 pages and no text"),
        ("A" * (documents.MAX_PDF_BYTES * 4 // 3 + 4), "more than 32 MiB"),
    ],
)
def test_a_pdf_that_cannot_be_read_is_named_and_no_error(data, reason) -> None:
    [block] = documents.as_blocks(document(type="base64", data=data))
    assert reason in block["text"]


def test_redacted_thinking_is_left_out(patched) -> None:
    secret = {"type": "redacted_thinking", "data": "EmwKAhgB"}
    history = [USER, {"role": "assistant", "content": [secret, {"type": "text", "text": "Yes."}]}]
    assert patched.messages([*history, USER]).status_code == 200
    assert "Yes." in patched.prompt
    assert "EmwKAhgB" not in patched.prompt


def test_without_the_patch_redacted_thinking_is_refused() -> None:
    secret = {"type": "redacted_thinking", "data": "EmwKAhgB"}
    answer = Chat().messages([USER, {"role": "assistant", "content": [secret]}, USER])
    assert answer.status_code == 400
    assert "redacted_thinking history is not supported" in answer.text


THEIR_TOOLS = [
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
]
OWN_TOOL = {"name": "read", "input_schema": {"type": "object", "properties": {}}}


def test_tools_that_only_anthropic_can_run_are_left_out(patched) -> None:
    assert patched.messages([USER], tools=[*THEIR_TOOLS, OWN_TOOL]).status_code == 200
    assert '"name": "read"' in patched.prompt
    assert "web_fetch" not in patched.prompt


def test_without_the_patch_such_tools_are_refused() -> None:
    assert Chat().messages([USER], tools=[*THEIR_TOOLS, OWN_TOOL]).status_code == 400


OFF = [
    ("messages", {"output_config": {"effort": "off"}, "thinking": {"type": "adaptive"}}),
    ("messages", {"output_config": {"effort": "none"}}),
    ("completions", {"reasoning_effort": "off"}),
    ("completions", {"reasoning": {"effort": "off"}}),
]


@pytest.mark.parametrize(("route", "more"), OFF)
def test_effort_off_turns_thinking_off(patched, route, more) -> None:
    answer = getattr(patched, route)([USER], **more)
    assert answer.status_code == 200, answer.text
    assert patched.prompt.endswith("</think>")


@pytest.mark.parametrize(("route", "more"), OFF)
def test_without_the_patch_effort_off_is_refused(route, more) -> None:
    assert getattr(Chat(), route)([USER], **more).status_code == 400


@pytest.mark.parametrize("route", ["messages", "completions"])
@pytest.mark.parametrize(
    ("given", "checkpoint", "used"),
    [
        ({}, {}, (1.0, 0.95)),
        ({"temperature": 0.0}, {}, (0.0, 1.0)),
        ({"top_p": 0.5}, {}, (1.0, 0.5)),
        ({}, {"temperature": 0.6}, (0.6, 1.0)),
        ({}, {"top_p": 0.8}, (1.0, 0.8)),
    ],
)
def test_sampling_defaults_where_nobody_says_any(patched, route, given, checkpoint, used) -> None:
    patched.chat.default_sampling_params = checkpoint
    getattr(patched, route)([USER], **given)
    assert (patched.sampling["temperature"], patched.sampling["top_p"]) == used


def test_without_the_patch_top_p_is_1() -> None:
    chat = Chat()
    chat.messages([USER])
    assert (chat.sampling["temperature"], chat.sampling["top_p"]) == (1.0, 1.0)


# --- the middleware itself ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"messages": 7}', b'{"messages": [1]}', b"\xff", b"[" * 100_000],
)
def test_what_is_no_request_passes_byte_by_byte(body) -> None:
    assert clients.rewrite("/v1/messages", body, {}) is body


def test_a_request_that_needs_no_change_passes_byte_by_byte() -> None:
    request = {"temperature": 1, "messages": [{"role": "user", "content": "é \ud800"}]}
    body = json.dumps(request, separators=(", ", " :  ")).encode()
    assert clients.rewrite("/v1/messages", body, {}) is body


def test_errors_are_sglang_s_own(patched) -> None:
    for body in ({}, {"messages": 7}, {"messages": [{"role": "user", "content": [{"type": "x"}]}]}):
        answer = patched.post("/v1/messages", {"model": "m", "max_tokens": 1, **body})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert patched.client.post("/v1/messages", content=b"{").status_code == 400


def test_a_body_over_the_limit_and_one_in_pieces_arrive_whole(patched, monkeypatch) -> None:
    text = {"type": "text", "text": "x" * 5000}
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [text, PDF]}]}
    raw = json.dumps(body).encode()
    pieces = [raw[start : start + 700] for start in range(0, len(raw), 700)]
    send = {"content": iter(pieces), "headers": {"content-type": "application/json"}}
    assert patched.client.post("/v1/messages", **send).status_code == 200
    monkeypatch.setattr(clients, "MAX_BODY", 2000)
    answer = patched.client.post("/v1/messages", **{**send, "content": iter(pieces)})
    assert answer.status_code == 400  # unread by the patch, and refused as without it
    assert "document" in answer.text


def test_other_routes_are_left_alone(patched) -> None:
    assert patched.client.get("/").text == '"SGLang is running"'
