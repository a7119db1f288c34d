"""A process that measures a store every 100 ms until its standard input ends, then prints what it
saw.

Argument: the store."""

from __future__ import annotations

import json
import select
import sys
from pathlib import Path

from kvtier.backends.local import disk_usage


def main() -> None:
    """Sample."""
    samples = []
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        samples.append(disk_usage(Path(sys.argv[1])))
    print(json.dumps(samples))


if __name__ == "__main__":
    main()
