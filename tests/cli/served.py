"""A server that answers like SGLang: what it holds is in memory, and tests make it wrong."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = 64

Reply = dict[str, Any]
"""A message of the assistant: content, reasoning_content, tool_calls."""


class Served:
    """A server while the block runs, on a free port unless one is given. `chat` answers
    conversations."""

    def __init__(
        self, chat: Callable[[dict[str, Any]], Reply] | None = None, port: int = 0
    ) -> None:
        self.port = port
        self.chat = chat or (lambda body: {"content": "I don't know."})
        self.backend: str | None = "kvtier"
        self.longest_prompt = 10**6
        self.cache_report = True
        self.metrics = "kvtier_uncommitted_bytes 0.0\nkvtier_written_bytes_total 4096.0\n"
        self.key = ""
        self.admin_key = ""
        self.cached_from_start = 0
        """Cached tokens of every answer."""
        self.stored = 1.0
        """Share of a prompt that comes back from the store."""
        self.wrong = 0.0
        """Added to a log probability of what comes from the store."""
        self.other_last_token = False
        """Whether its output ends with another token, with the same log probability."""
        self.noise = 0.0
        """Added once more with every answer."""
        self.deaf = False
        """Whether the answer depends on the prompt's end only."""
        self.flushes = True
        self.dies = False
        """Whether its answers end before they begin."""
        self.missing: set[str] = set()
        """Paths that are not there."""
        self.on_store: Callable[[], object] = lambda: None
        """Called when a prompt was stored."""
        self.bodies: list[tuple[str, Any]] = []
        self.url = ""
        self._device: set[tuple[int, ...]] = set()
        self.store: set[tuple[int, ...]] = set()
        self._answers = 0

    def __enter__(self) -> Served:
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.handle(self, None)

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                served.handle(self, json.loads(self.rfile.read(length) or "null"))

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def handle(self, request: BaseHTTPRequestHandler, body: Any) -> None:
        path = request.path.partition("?")[0]
        self.bodies.append((path, body))
        wanted = self.admin_key or self.key if path == "/flush_cache" else self.key
        if wanted and request.headers.get("authorization") != f"Bearer {wanted}":
            self._send(request, 401, {"error": "Unauthorized"})
        elif path in self.missing:
            self._send(request, 404, {"detail": "Not Found"})
        elif path == "/server_info":
            self._send(request, 200, self._info())
        elif path == "/metrics":
            self._send(request, 200, self.metrics)
        elif path == "/tokenize":
            self._send(request, 200, {"count": len(body["prompt"].split())})
        elif path == "/flush_cache":
            if self.flushes:
                self._device.clear()
            self._send(request, 200, "Cache flushed.\n")
        elif path == "/generate":
            self._send(request, 200, self._events([] if self.dies else [self._generate(body)]))
        elif path == "/v1/chat/completions":
            self._send(request, 200, self._events(self._chat(body)))
        else:
            self._send(request, 200, "")

    @staticmethod
    def _events(documents: list[Any]) -> str:
        return "".join(f"data: {json.dumps(d)}\n\n" for d in documents) + "data: [DONE]\n\n"

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, status: int, document: Any) -> None:
        text = document if isinstance(document, str) else json.dumps(document)
        request.send_response(status)
        request.send_header("content-length", str(len(text.encode())))
        request.end_headers()
        request.wfile.write(text.encode())

    def _info(self) -> dict[str, Any]:
        return {
            "page_size": PAGE,
            "hicache_storage_backend": self.backend,
            "enable_cache_report": self.cache_report,
            "max_req_input_len": self.longest_prompt,
            "admin_api_key": "secret",
        }

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = tuple(body["input_ids"])
        start = body["logprob_start_len"]
        whole = start // PAGE * PAGE
        source = "device" if ids in self._device else "storage" if ids in self.store else ""
        cached = int(whole * self.stored) if source == "storage" else whole if source else 0
        self._device.add(ids)
        self.store.add(ids)
        self._answers += 1
        self.on_store()
        seed = hashlib.sha256(repr(ids[-3:] if self.deaf else ids).encode()).digest()
        shift = self.noise * self._answers + (self.wrong if source == "storage" else 0.0)
        output = [[-byte / 7 - shift, byte, None] for byte in seed[:8]]
        if self.other_last_token and source == "storage":
            output[-1][1] += 1
        details = {"device": self.cached_from_start, "host": 0, "storage": 0}
        details |= {source: cached} if source else {}
        return {
            "output_ids": [row[1] for row in output],
            "meta_info": {
                "prompt_tokens": len(ids),
                "cached_tokens_details": details if cached or self.cached_from_start else None,
                "storage_prefetch_wait": 0.25 if source == "storage" else 0.0,
                "output_token_logprobs": output,
                "input_token_logprobs": [
                    [None if i == start else -ids[i] / 3, ids[i], None]
                    for i in range(start, len(ids))
                ],
            },
        }

    def _chat(self, body: dict[str, Any]) -> list[Any]:
        reply = self.chat(body)
        first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        calls = [
            {"index": i, "id": call["id"], "function": call["function"]}
            for i, call in enumerate(reply.get("tool_calls") or ())
        ]
        delta = {k: v for k, v in reply.items() if k != "tool_calls"} | {"tool_calls": calls}
        words = sum(len(str(m.get("content") or "").split()) for m in body["messages"])
        usage: dict[str, Any] = {"prompt_tokens": words, "completion_tokens": 8}
        if self.cache_report:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_from_start}
        return [
            first,
            {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ]


def serve_until_killed(port: int, file: Path, wrong: float) -> None:
    """A server with a store and a child process, which outlive it unless all are killed. The file
    holds what it stored, the process ids of all its lives' children, and how often it was ended by
    SIGTERM."""
    known = {"store": [], "children": [], "ended": 0}
    known |= json.loads(file.read_text()) if file.exists() else {}
    known["children"].append(subprocess.Popen(["sleep", "1000"]).pid)

    def save() -> None:
        known["store"] = [list(ids) for ids in served.store]
        file.write_text(json.dumps(known))

    def end(*_: object) -> None:
        known["ended"] += 1
        save()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    with Served(port=port) as served:
        served.wrong = wrong
        served.store = {tuple(ids) for ids in known["store"]}
        served.on_store = save
        save()
        signal.pause()


if __name__ == "__main__":
    serve_until_killed(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
