"""SGLang with its plugins loaded on the test platform, and the engines of `tests/sglang`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvtier_test_platform.patience import patience

sys.path.insert(0, str(Path(__file__).parent.parent / "sglang"))

from pools import Engine, engines  # loads the plugins, before anything of SGLang is imported

__all__ = ["patience"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """A maker of engines on the store in `tmp_path`."""
    with engines(tmp_path / "store") as start:
        yield start
