"""How fast the cards add up what each has: run by `kvtier launch --preflight`, one process a card.

A wrong NCCL_P2P_LEVEL shows here and nowhere else: everything works, five times slower.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping

_SIZE = 256 * 2**20
_TIMES = 8


def measure(
    ranks: int, environment: Mapping[str, str], *, device: str = "cuda", size: int = _SIZE
) -> float:
    """Bus bandwidth of an all-reduce of `size` bytes over `ranks` processes, in bytes a second:
    what each card sends, 2 (n - 1) / n of the size. 0 if it cannot be run; for CPUs too, for
    tests."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", __name__, device, str(size)]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0.0
    found = re.search(r"^busbw (\S+)$", done.stdout, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _rank(device: str, size: int) -> None:
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    values = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
    seconds = []
    for _ in range(_TIMES):
        values.fill_(1)
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    if values[-1].item() != ranks:
        sys.exit(f"all-reduce is wrong: {values[-1].item()} instead of {ranks}")
    if rank == 0:
        median = sorted(seconds[1:])[len(seconds) // 2 - 1]
        print(f"busbw {2 * (ranks - 1) / ranks * size / median:.0f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]))
