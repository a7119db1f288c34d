"""Tests with real SGLang on a machine without a GPU."""

import os
import sys
from pathlib import Path

from kvtier_test_platform.patience import patience

__all__ = ["patience"]

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))  # the faults of tools/powercut

# ninja, which builds HiCache's page hash at first use, lies beside this interpreter.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
