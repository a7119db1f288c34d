"""A process that reserves, writes and spends; killed by tests.

Arguments: store, limit in bytes, bytes of a file, seed, then: "" goes on for ever, deleting some of
its files when it is refused; "hold" reserves once, writes half of it, says "held" and waits.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from kvtier.layout import Layout
from kvtier.limits import Amount, Limits
from kvtier.quota import Quota


def write(path: Path, size: int) -> None:
    """Take blocks of the file system."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, os.urandom(size))
    finally:
        os.close(fd)


def main() -> None:
    """Fill the store up to the cap, again and again."""
    root, limit, size, seed, then = sys.argv[1:]
    source = random.Random(seed)
    layout = Layout.open(Path(root), create=False)
    quota = Quota(layout, Limits(Amount(int(limit)), Amount(0)))
    print("ready", flush=True)
    if then == "hold":
        assert quota.reserve(int(size)), quota.reason
        write(layout.segments / f"{seed}-held", int(size) // 2)
        print("held", flush=True)
        signal.pause()
    mine: list[Path] = []
    refused = False
    while True:
        some = source.randrange(1, int(size) // 4096 + 1) * 4096
        if quota.reserve(some):
            mine.append(layout.segments / f"{seed}-{source.getrandbits(60):x}")
            write(mine[-1], some)
            quota.spend(some)
        elif not refused:
            refused = True
            print("refused", flush=True)
        else:
            source.shuffle(mine)
            for path in mine[: len(mine) // 4 + 1]:
                path.unlink()
            del mine[: len(mine) // 4 + 1]
            quota.measure()
            time.sleep(source.random() / 10)


if __name__ == "__main__":
    main()
