"""One whole server with all patches that a small model can have, through its own command line."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtier_test_platform.committed import wait_for_kv_pages
from kvtier_test_platform.server import PAGE_SIZE, Server, prompt_tokens
from servers import MODELS, kvtier_server

from kvtier.integration.patches.repetition_guard import MATCHED

PATCHES = "clients,prompt_too_long,repetition_guard,reoffer,inline_system,indexer_budget"
SESSION = prompt_tokens(11, 800)
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("patches")


@pytest.fixture(scope="module")
def server(directory) -> Iterator[Server]:
    template = directory / "chat.jinja"
    template.write_text(TEMPLATE)
    with kvtier_server(
        MODELS / "llama",
        directory,
        arguments=("--chat-template", str(template), "--context-length", "2048"),
        environment={"KVTIER_PATCHES": PATCHES},
    ) as server:
        yield server


def _messages(server: Server, content: object, **more: object) -> tuple[int, dict]:
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    try:
        return 200, json.loads(server._call("POST", "/v1/messages", {**body, **more}))
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_the_log_names_the_patches(server) -> None:
    assert "kvtier: patches on: " in server.log.read_text(errors="replace")


def test_a_document_is_taken(server) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "<9> <10>"}
    status, answer = _messages(server, [{"type": "document", "source": source}])
    assert status == 200
    assert answer["usage"]["input_tokens"] > 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(server, stream) -> None:
    status, answer = _messages(server, "<9> " * 3000, stream=stream)
    assert status == 400
    assert answer["error"]["message"] == "prompt is too long: 3000 tokens > 2047 maximum"


def test_a_loop_is_ended(server) -> None:
    body = {
        "input_ids": [9, 10, 11],
        "sampling_params": {"max_new_tokens": 1500, "temperature": 0, "logit_bias": {"9": 1000}},
    }
    answer = json.loads(server._call("POST", "/generate", body))
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": MATCHED}
    assert answer["meta_info"]["completion_tokens"] == 256


def test_a_session_that_goes_on_after_a_clear_is_stored_from_its_start(server, directory) -> None:
    server.flush_cache()
    server.clear_storage()
    server.generate(SESSION[:400])
    wait_for_kv_pages(directory, 400 // PAGE_SIZE)
    server.clear_storage()
    server.generate(SESSION)
    wait_for_kv_pages(directory, len(SESSION) // PAGE_SIZE)
