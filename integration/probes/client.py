"""One SGLang server, seen through its HTTP interface."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvtier.errors import KvtierError

OUTPUT_TOKENS = 8
"""Tokens that are generated, and compared, after a prompt of token ids."""

ANSWER_TIMEOUT = 3600.0
"""Seconds without a byte after which an answer is given up: a long prompt may take that."""

STILL = 1.5
"""Seconds without news of its counters after which a store counts as having written everything."""

SETTLE_TIMEOUT = 900.0

_VOCABULARY = range(10, 500)
"""Token ids that every model has."""

_COUNTERS = (
    "kvtier_written_bytes_total",
    "kvtier_put_pages_total",
    "sglang:backuped_tokens_total",
)
"""What moves while pages are on their way to the store."""

Progress = Callable[[str], None]
"""Is told what goes on, in a few words."""


class ProbeError(KvtierError):
    """A served model cannot be asked, or its answers say nothing about what was to be seen."""


class UnreachableServerError(ProbeError):
    """Nothing answers, or not to us: no other question will be answered either."""


@dataclass(frozen=True)
class Answer:
    """The greedy answer to a prompt of token ids. Times in seconds."""

    prompt_tokens: int
    device: int
    """Tokens that came from the device's cache."""
    host: int
    storage: int
    first_token: float
    """From sending to the first output token."""
    storage_wait: float
    """Of that, how long the request waited for the store, as SGLang says."""
    tokens: tuple[int, ...]
    """The output."""
    logprobs: tuple[float, ...]
    """Of the output tokens."""
    prompt_logprobs: tuple[float, ...]
    """Of the prompt's tokens that were computed, but the first."""

    @property
    def cached(self) -> int:
        return self.device + self.host + self.storage


@dataclass(frozen=True)
class Chat:
    """The answer to a conversation. Times in seconds."""

    text: str
    """Without what a model that reasons said before it."""
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]
    """Tool calls: id, name, arguments as JSON."""
    finish: str
    prompt_tokens: int
    output_tokens: int
    cached: int | None
    """Tokens of the prompt from any cache; None if the server doesn't report them."""
    first_token: float
    seconds: float


class Client:
    """`url` is where the server answers, with or without /v1. The keys are sent and never shown:
    `admin_key`, else `key`, with what only an administrator may do."""

    def __init__(self, url: str, key: str = "", admin_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ProbeError(f"{url} is no address of a server: it begins with http://.")
        self._key = key
        self._admin_key = admin_key or key

    # The server

    def info(self) -> dict[str, Any]:
        """SGLang's settings as it runs. They hold its keys: never show all of them."""
        found: dict[str, Any] = self._json("GET", "/server_info")
        return found

    def healthy(self) -> bool:
        """Whether the server answers now."""
        try:
            with self._open("GET", "/health", timeout=5):
                return True
        except ProbeError:
            return False

    def flush(self) -> None:
        """Empty the caches on the device and in host memory; the store stays. SGLang refuses while
        other requests run."""
        with self._open("POST", "/flush_cache?timeout=60", key=self._admin_key, timeout=90):
            pass

    def metrics(self) -> dict[str, float]:
        """Each metric by its name, summed over its labels, without the buckets of histograms."""
        with self._open("GET", "/metrics", timeout=30) as response:
            text = response.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith("_bucket"):
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def settle(self, progress: Progress) -> None:
        """Wait until all that was computed is committed to the store."""
        last: list[float] = []
        began = changed = time.monotonic()
        while time.monotonic() - changed < STILL:
            metrics = self.metrics()
            if "kvtier_uncommitted_bytes" not in metrics:
                raise ProbeError(
                    "The server's /metrics say nothing of kvtier: start it with kvtier launch, or "
                    "with --hicache-storage-backend kvtier and --enable-metrics."
                )
            waiting = metrics["kvtier_uncommitted_bytes"]
            now = [waiting, *(metrics.get(name, 0.0) for name in _COUNTERS)]
            if waiting or now != last:
                last, changed = now, time.monotonic()
            if time.monotonic() - began > SETTLE_TIMEOUT:
                raise ProbeError(
                    f"The store was still writing after {SETTLE_TIMEOUT:.0f} s: ask again once no "
                    "other requests run."
                )
            progress(f"waiting for the store: {waiting / 1e6:,.1f} MB to be committed")
            time.sleep(0.1)

    def count_tokens(self, text: str) -> int:
        """How many tokens a text has for the served model."""
        body = {"prompt": text, "add_special_tokens": False}
        return int(self._json("POST", "/tokenize", body)["count"])

    # Prompts

    def generate(self, prompt: Sequence[int], scored_from: int) -> Answer:
        """Continue token ids by OUTPUT_TOKENS. The prompt's log probabilities are given from
        position `scored_from` on, and no cache is used beyond it."""
        body = {
            "input_ids": list(prompt),
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": scored_from,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": OUTPUT_TOKENS,
                "ignore_eos": True,
            },
        }
        began, first = time.perf_counter(), 0.0
        last: dict[str, Any] = {}
        for event in self._events("/generate", body):
            first = first or time.perf_counter() - began
            last = event
        if "meta_info" not in last:
            raise ProbeError(f"{self.url}/generate ended without an answer: see the server's log.")
        try:
            meta = last["meta_info"]
            details = meta.get("cached_tokens_details") or {}
            output = meta["output_token_logprobs"]
            return Answer(
                prompt_tokens=meta["prompt_tokens"],
                device=details.get("device", 0),
                host=details.get("host", 0),
                storage=details.get("storage", 0),
                first_token=first,
                storage_wait=meta.get("storage_prefetch_wait") or 0.0,
                tokens=tuple(row[1] for row in output),
                logprobs=_numbers(row[0] for row in output),
                prompt_logprobs=_numbers(row[0] for row in meta["input_token_logprobs"][1:]),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise ProbeError(
                f"{self.url}/generate answered without log probabilities: SGLang 0.5.23 is needed."
            ) from error

    def chat(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int = 512, **more: Any
    ) -> Chat:
        """The greedy answer to a conversation, asked not to reason aloud first."""
        body = {
            "model": "default",
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"thinking": False, "enable_thinking": False},
            **more,
        }
        texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        calls: dict[int, list[str]] = {}
        usage: dict[str, Any] = {}
        began, first, finish = time.perf_counter(), 0.0, ""
        for event in self._events("/v1/chat/completions", body):
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                for kind, parts in texts.items():
                    parts.append(delta.get(kind) or "")
                for call in delta.get("tool_calls") or ():
                    _add_call(calls, call)
                finish = choice.get("finish_reason") or finish
                if delta.get("tool_calls") or any(parts[-1] for parts in texts.values()):
                    first = first or time.perf_counter() - began
        seconds = time.perf_counter() - began
        return Chat(
            text="".join(texts["content"]),
            reasoning="".join(texts["reasoning_content"]),
            calls=tuple((call[0], call[1], call[2]) for _, call in sorted(calls.items())),
            finish=finish,
            prompt_tokens=usage.get("prompt_tokens", 0),
            output_tokens=usage.get("completion_tokens", 0),
            cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            first_token=first or seconds,
            seconds=seconds,
        )

    # HTTP

    def _events(self, path: str, body: object) -> Iterator[dict[str, Any]]:
        """The JSON documents of a stream of server-sent events."""
        with self._open("POST", path, body) as response:
            try:
                for line in response:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if event.get("error"):
                            raise ProbeError(f"{path} refused: {_said(event)}.")
                        yield event
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ProbeError(
                    f"{self.url}{path} broke off in the middle of an answer ({error}): "
                    "see the server's log."
                ) from error

    def _json(self, method: str, path: str, body: object = None) -> Any:
        with self._open(method, path, body) as response:
            try:
                return json.load(response)
            except ValueError:
                raise ProbeError(f"{self.url}{path} is not SGLang: it answers no JSON.") from None

    @contextmanager
    def _open(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        key: str | None = None,
        timeout: float = ANSWER_TIMEOUT,
    ) -> Iterator[http.client.HTTPResponse]:
        key = self._key if key is None else key
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"}
            | ({"authorization": f"Bearer {key}"} if key else {}),
        )
        try:
            response = urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            kind = UnreachableServerError if error.code in (401, 403) else ProbeError
            raise kind(_refusal(self.url, path, error)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UnreachableServerError(
                f"Nothing answers at {self.url} ({reason}): start the server, or give its address."
            ) from None
        with response:
            yield response


def prompt(seed: object, count: int) -> list[int]:
    """`count` token ids, the same for the same seed."""
    return random.Random(str(seed)).choices(_VOCABULARY, k=count)


def _numbers(values: Iterator[float | None]) -> tuple[float, ...]:
    return tuple(float("nan") if value is None else value for value in values)


def _add_call(calls: dict[int, list[str]], part: Mapping[str, Any]) -> None:
    """A tool call comes in parts: id and name with the first, then pieces of the arguments."""
    call = calls.setdefault(part.get("index") or 0, ["", "", ""])
    function = part.get("function") or {}
    call[0] = part.get("id") or call[0]
    call[1] = function.get("name") or call[1]
    call[2] += function.get("arguments") or ""


def _refusal(url: str, path: str, error: urllib.error.HTTPError) -> str:
    path = path.partition("?")[0]
    if error.code in (401, 403):
        return (
            f"{url}{path} wants a key: give --api-key (and --admin-api-key, if the server has "
            "one), or set SGLANG_API_KEY and SGLANG_ADMIN_API_KEY."
        )
    if error.code == 404:
        needed = " started with --enable-metrics" if path == "/metrics" else ""
        return f"{url} has no {path}: a server of SGLang 0.5.23{needed} is needed."
    text = error.read().decode(errors="replace").strip()
    try:
        text = _said(json.loads(text))
    except ValueError:
        pass
    return f"{url}{path} refused with status {error.code}: {text[:300]}"


def _said(document: Any) -> str:
    """The message in a document that tells of an error, whatever its form."""
    while isinstance(document, dict):
        document = document.get("error") or document.get("message") or json.dumps(document)
    return str(document).rstrip(".")
