"""Patches applied for the length of a test, and SGLang's HTTP routes without an engine.

`applied` uses SGLang's own hook machinery. `Chat` has the real FastAPI app, request models,
serving classes and DeepSeek encoder; only the tokenizer manager behind them is made up: it checks
the length of a prompt with SGLang's own function, keeps the request, and answers.
"""

# ruff: noqa: RUF001 (DeepSeek writes its control tokens with such bars)

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pools  # noqa: F401 - loads the plugins, before anything of SGLang is imported
from fastapi import BackgroundTasks
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins import hook_registry
from sglang.srt.runtime_context import get_context
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvtier.integration.patches import code

SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<｜latest_reminder｜>",
    "<｜deepseek_image｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
)
MODELS = {
    "dsv41": SimpleNamespace(architectures=["DeepseekV41ForCausalLM"], model_type="deepseek_v41"),
    "dsv4": SimpleNamespace(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4"),
}


@contextmanager
def applied(name: str, value: str = "") -> Iterator[None]:
    """SGLang with a patch whose `install` changes no constants of SGLang."""
    patch = code(name)
    patch.install(value)
    held = []
    for hook in patch.hooks:
        owner_name, attribute = hook.target.rsplit(".", 1)
        owner = pkgutil.resolve_name(owner_name)
        held.append((owner, attribute, inspect.getattr_static(owner, attribute)))
        hook_registry.HookRegistry._apply_target(hook.target, [(hook.type, hook.function, None)])
    try:
        yield
    finally:
        for owner, attribute, original in reversed(held):
            wrapped = getattr(owner, attribute)
            setattr(owner, attribute, original)
            hook_registry._propagate_patch(wrapped, original, owner)


def tokenizer(without: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """One token a byte, and DeepSeek's control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL if t not in without]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=SPECIAL[0], eos_token=SPECIAL[1]
    )


class _Manager:
    """What the serving classes use of a tokenizer manager."""

    def __init__(self, spec: str, context_len: int, without: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer(without)
        self.model_config = SimpleNamespace(
            hf_config=MODELS[spec],
            is_multimodal=False,
            get_default_sampling_params=dict,
        )
        self.context_len = context_len
        self.num_reserved_tokens = 0
        self.validate_total_tokens = True
        self.allow_auto_truncate = False
        self.is_generation = True
        self.server_args = None
        self.model_path = self.served_model_name = "m"
        self.request_logger = SimpleNamespace(log_requests=False)
        self.requests: list[Any] = []
        self._validate_joint_schema_request = lambda *args: None
        self._validate_token_ids_logprob = lambda *args: None

    def config_value(self, name: str) -> Any:
        return get_context().config_leaf(name)

    def create_abort_task(self, request: Any) -> BackgroundTasks:
        return BackgroundTasks()

    async def generate_request(self, request: Any, raw: Any = None) -> AsyncIterator[Any]:
        TokenizerManager._validate_one_request(self, request, request.input_ids)
        self.requests.append(request)
        answer = {
            "text": "hi",
            "output_ids": self.tokenizer.encode("hi"),
            "meta_info": {
                "id": "r",
                "finish_reason": {"type": "stop", "matched": 1},
                "prompt_tokens": len(request.input_ids),
                "completion_tokens": 2,
                "cached_tokens": 0,
                "weight_version": "1",
            },
        }
        yield answer


class Chat:
    """A client of SGLang's routes; `prompt` and `sampling` are what the last request became."""

    def __init__(
        self, spec: str = "dsv41", context_len: int = 2**20, without: tuple[str, ...] = ()
    ) -> None:
        self.manager = _Manager(spec, context_len, without)
        template = SimpleNamespace(
            chat_template_name=None,
            python_chat_template=None,
            jinja_template_content_format="string",
            force_reasoning=False,
            reasoning_config=None,
        )
        self.chat = OpenAIServingChat(self.manager, template)
        http_server.app.state.openai_serving_chat = self.chat
        http_server.app.state.anthropic_serving = AnthropicServing(self.chat)
        self.client = TestClient(http_server.app)  # without its lifespan: no engine

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.client.post(path, json=body)

    def messages(self, messages: list[Any], **more: Any) -> Any:
        """A request to /v1/messages."""
        return self.post(
            "/v1/messages", {"model": "m", "max_tokens": 16, "messages": messages, **more}
        )

    def completions(self, messages: list[Any], **more: Any) -> Any:
        """A request to /v1/chat/completions."""
        return self.post("/v1/chat/completions", {"model": "m", "messages": messages, **more})

    @property
    def prompt_ids(self) -> list[int]:
        ids: list[int] = self.manager.requests[-1].input_ids
        return ids

    @property
    def prompt(self) -> str:
        return str(self.manager.tokenizer.decode(self.prompt_ids))

    @property
    def sampling(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self.manager.requests[-1].sampling_params
        return parameters


@contextmanager
def serving(**settings: Any) -> Iterator[None]:
    """SGLang's settings of a DeepSeek server, without an engine."""
    app = http_server.app
    stack, middleware = app.middleware_stack, list(app.user_middleware)
    app.middleware_stack = None
    with get_context().override_server_args(**settings):
        try:
            yield
        finally:
            app.middleware_stack, app.user_middleware = stack, middleware
