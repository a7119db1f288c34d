"""The lab itself: a store that only seems to sync is caught."""

from __future__ import annotations

import subprocess
import sys

import pytest
from lab import TOOLS

SABOTAGE = """
import os, sys
from powercut import cuts
if sys.argv[1] == "no sync":
    os.fdatasync = lambda fd: None
else:  # the manifest is on the drive before the data it names
    from kvtier.backends.local import SegmentWriter
    SegmentWriter.sync = lambda self: None
    SegmentWriter.write = lambda self, blocks: None
[result] = cuts.run(12, 5, ("ext4",))
print(len(result.violations))
"""


@pytest.mark.needs_root
@pytest.mark.parametrize("how", ["no sync", "no data"])
def test_a_store_that_lies_is_caught(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SABOTAGE, how], cwd=TOOLS, capture_output=True, text=True, check=True
    )
    assert int(done.stdout), done.stderr
