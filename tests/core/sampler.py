"""A process that measures a store every 100 ms, then prints what it saw.

Arguments: the store, how many samples."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from kvtier.backends.local import disk_usage


def main() -> None:
    """Sample."""
    samples = []
    for _ in range(int(sys.argv[2])):
        samples.append(disk_usage(Path(sys.argv[1])))
        time.sleep(0.1)
    print(json.dumps(samples))


if __name__ == "__main__":
    main()
