"""What the tests with whole servers share."""

from __future__ import annotations

from pathlib import Path

from kvtier_test_platform.server import PAGE_SIZE, Answer, Server, cacheable_tokens, prompt_tokens

MODELS = Path(__file__).parents[1] / "models"

PROMPT = prompt_tokens(1, 2600)
"""More than the 128 pages SGLang passes in one call; it ends within a page."""

BRANCH = PROMPT[:600] + prompt_tokens(2, 297)
"""Leaves PROMPT within a page; it ends with the first token of one."""

PROMPTS = (PROMPT, BRANCH)

DISTINCT_PAGES = len(PROMPT) // PAGE_SIZE + len(BRANCH) // PAGE_SIZE - 600 // PAGE_SIZE
"""Whole pages of PROMPTS, those in both counted once."""


def kvtier_server(model: Path, directory: Path, **settings) -> Server:
    """A server of `model` whose store and log are in `directory`."""
    settings.setdefault("storage_backend", "kvtier")
    settings.setdefault("extra_config", {"root": str(directory)})
    return Server(model, directory / "server.log", **settings)


def assert_all_from_storage(answer: Answer, prompt: list[int]) -> None:
    assert answer.storage == answer.cached_tokens == cacheable_tokens(len(prompt)), answer
