"""Why the index is no LMDB: what a flipped bit does to a reader, and what a commit costs.

    pip install lmdb && python tools/study_lmdb.py

Builds a database as the first design had it (one packed value a run), flips one byte at a time in
copies of it, and lets a child process read everything. The same is done to kvtier's snapshot.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lmdb

RUNS = 20_000
VALUE_BYTES = 800

READ_LMDB = """
import hashlib, lmdb, sys
env = lmdb.open(sys.argv[1], readonly=True, lock=False)
bad = count = 0
with env.begin() as txn:
    for key, value in txn.cursor():
        count += 1
        bad += hashlib.sha256(key).digest() != value[:32]
sys.exit(3 if bad or count != int(sys.argv[2]) else 0)
"""

READ_SNAPSHOT = """
import sys
from pathlib import Path
from kvtier.snapshot import Snapshot
sys.exit(4 if Snapshot.load(Path(sys.argv[1])) is None else 0)
"""


def fill(path: Path) -> None:
    """A database of RUNS values, each beginning with the digest of its key."""
    with lmdb.open(str(path), map_size=1 << 30) as env, env.begin(write=True) as txn:
        for number in range(RUNS):
            key = number.to_bytes(8, "big")
            txn.put(key, hashlib.sha256(key).digest().ljust(VALUE_BYTES, b"v"))


def outcome(code: int) -> str:
    """What a reader's exit status means."""
    if code < 0:
        return f"killed by signal {-code}"
    names = {0: "not noticed, answers right", 3: "WRONG ANSWERS", 4: "noticed, index made anew"}
    return names.get(code, "error raised")


def flips(
    data: Path, command: list[str], count: int, seed: int, head: int = 4096
) -> dict[str, int]:
    """Outcomes of reading after one random bit was changed, and put back: anywhere, or in the first
    `head` bytes of a 4,096-byte page."""
    pages = data.stat().st_size // 4096
    source = random.Random(seed)
    seen: collections.Counter[str] = collections.Counter()
    with data.open("r+b") as file:
        for _ in range(count):
            place = source.randrange(pages) * 4096 + source.randrange(head)
            file.seek(place)
            old = file.read(1)
            for value in (bytes([old[0] ^ 1 << source.randrange(8)]), old):
                file.seek(place)
                file.write(value)
                file.flush()
                if value != old:
                    done = subprocess.run(command, capture_output=True, check=False)
                    seen[outcome(done.returncode)] += 1
    return dict(seen)


def commits(path: Path, entries: int) -> float:
    """Median seconds of a durable commit of so many entries."""
    times = []
    with lmdb.open(str(path), map_size=1 << 30) as env:
        for _ in range(30):
            start = time.perf_counter()
            with env.begin(write=True) as txn:
                for _ in range(entries):
                    txn.put(os.urandom(16), bytes(VALUE_BYTES))
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Print both studies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        fill(base / "db")
        data = base / "db" / "data.mdb"
        command = [sys.executable, "-c", READ_LMDB, str(base / "db"), str(RUNS)]
        print("LMDB, one flipped bit:", flips(data, command, args.flips, args.seed))
        heads = flips(data, command, args.flips, args.seed, 32)
        print("LMDB, one flipped bit in the first 32 bytes of a page:", heads)
        snapshot = base / "snapshot"
        build = [sys.executable, "-c", BUILD_SNAPSHOT, str(snapshot), str(RUNS)]
        subprocess.run(build, check=True)
        command = [sys.executable, "-c", READ_SNAPSHOT, str(snapshot)]
        print("snapshot, one flipped bit:", flips(snapshot, command, args.flips, args.seed))
        for entries in (1, 8):
            print(f"LMDB commit of {entries} values: {commits(base / 'c', entries) * 1e3:.1f} ms")


BUILD_SNAPSHOT = """
import sys
from pathlib import Path
import numpy as np
from kvtier.snapshot import Rows, Snapshot
from kvtier.table import Table
n = int(sys.argv[2]) * 8
keys = np.random.default_rng(1).integers(1, 2**64, n, dtype=np.uint64)
table = Table.build(keys, np.arange(n, dtype=np.uint64))
Snapshot({}, table, Rows.empty(), memoryview(b"")).save(Path(sys.argv[1]))
"""

if __name__ == "__main__":
    main()
