"""What the tests with whole servers share."""

from __future__ import annotations

from pathlib import Path

from kvtier_test_platform.server import Answer, Server, cacheable_tokens, prompt_tokens

MODELS = Path(__file__).parents[1] / "models"

PROMPT = prompt_tokens(1, 2600)
"""Longer than the 128 pages SGLang passes in one call, and ending within a page."""

BRANCH = PROMPT[:600] + prompt_tokens(2, 301)
"""Leaves PROMPT within a page, and ends with a whole one less a token."""

PROMPTS = (PROMPT, BRANCH)

DISTINCT_PAGES = 162 + (901 - 1) // 16 - 600 // 16
"""Whole pages of PROMPTS, those in both counted once."""


def kvtier_server(model: Path, directory: Path, **settings) -> Server:
    """A server of `model` whose store and log are in `directory`."""
    settings.setdefault("storage_backend", "kvtier")
    settings.setdefault("extra_config", {"root": str(directory)})
    return Server(model, directory / "server.log", **settings)


def assert_all_from_storage(answer: Answer, prompt: list[int]) -> None:
    assert answer.storage == answer.cached_tokens == cacheable_tokens(len(prompt)), answer
