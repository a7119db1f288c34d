"""The tests that docs/reports.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_named_in_the_reports_exists() -> None:
    text = (ROOT / "docs" / "reports.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 40
    for path, name in named:
        source = (ROOT / path).read_text()
        assert f"def {name}(" in source if name else "def test_" in source, (path, name)
