"""The short form of the lab in tools/powercut."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_root: mounts file systems")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only root may mount: for anybody else those tests are left out, and counted as such."""
    if os.geteuid() == 0:
        return
    left_out = [item for item in items if item.get_closest_marker("needs_root")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
