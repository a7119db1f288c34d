"""The makers of keys, pages and stores are those of the core's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "core"))
