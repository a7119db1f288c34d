"""The commands that check a served model, against real SGLang."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from kvtier_test_platform.server import ADMIN_KEY, PAGE_SIZE, Server, cacheable_tokens
from servers import MODELS, kvtier_server

TOKENS = 640


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("served")
    template = directory / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}")
    arguments = ("--enable-metrics", "--chat-template", str(template))
    with kvtier_server(MODELS / "llama", directory, arguments=arguments) as server:
        yield server


def kvtier(*words: str) -> tuple[int, dict]:
    """Exit status of a command, and its JSON."""
    done = subprocess.run(
        [sys.executable, "-c", "from kvtier.cli import main; main()", *words, "--json"],
        env={"PATH": "/usr/bin:/bin", "SGLANG_ADMIN_API_KEY": ADMIN_KEY},
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert done.stdout, done.stderr
    assert ADMIN_KEY not in done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)


@contextmanager
def altered(port: int) -> Iterator[str]:
    """The address of a server that passes everything on, but changes the last digit of each log
    probability of what comes from the store."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.pass_on(None)

        def do_POST(self) -> None:
            self.pass_on(self.rfile.read(int(self.headers.get("content-length") or 0)))

        def pass_on(self, body: bytes | None) -> None:
            kept = ("authorization", "content-type")
            headers = {k: v for k, v in self.headers.items() if k.lower() in kept}
            url = f"http://127.0.0.1:{port}{self.path}"
            request = urllib.request.Request(url, body, headers, method=self.command)
            with urllib.request.urlopen(request) as response:
                answer = response.read()
            if b'"storage":%d' % TOKENS in answer:
                answer = re.sub(rb"\d(?=,\d+,null\])", _other, answer)
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def _other(digit: re.Match[bytes]) -> bytes:
    return b"%d" % ((int(digit[0]) + 5) % 10)


def test_what_is_restored_is_what_was_computed(server: Server) -> None:
    status, found = kvtier("selfcheck", url(server), "--tokens", str(TOKENS))
    assert status == 0 and found["same"]
    for prompt in found["prompts"]:
        assert prompt["difference_to_device"] == 0
        assert prompt["computed"]["storage"] == prompt["computed"]["device"] == 0
        assert prompt["device"]["device"] == prompt["restored"]["storage"] == TOKENS
        assert len(prompt["restored"]["prompt_logprobs"]) == PAGE_SIZE - 2
    assert found["control"] != 0  # null: another first token


def test_a_last_digit_that_differs_is_seen(server: Server) -> None:
    with altered(server.port) as address:
        status, found = kvtier("selfcheck", address, "--tokens", str(TOKENS))
    assert (status, found["same"]) == (1, False)
    assert all(0 < prompt["difference_to_device"] < 1e-9 for prompt in found["prompts"])


def test_a_long_prompt_is_cold_and_one_that_is_not_is_found_out(server: Server) -> None:
    words = ("bench", "cold", url(server), "--tokens", "600", "--needles", "0")
    status, found = kvtier(*words)
    assert (status, found["cached_tokens"]) == (0, 0)
    assert found["prompt_tokens"] == pytest.approx(600, rel=0.05)
    assert found["first_token_seconds"] > 0 and found["output_tokens"] > 0

    # This model's tokenizer knows none of the words, so that another prompt has the same tokens.
    status, again = kvtier(*words)
    assert (status, again["cached_tokens"]) == (1, cacheable_tokens(again["prompt_tokens"]))


def test_a_model_of_random_weights_is_found_out(server: Server) -> None:
    status, checks = kvtier("smoke", url(server))
    assert status == 1
    assert not any(check["ok"] for check in checks)
    assert checks[0]["expected"] == "391" and checks[0]["got"].startswith("<")
