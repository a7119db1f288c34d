"""One of two ranks for test_patch_reoffer.py: `reoffer_rank.py RANK FOLDER`, one line of JSON out.

The store of rank 1 loses everything after the first turn, behind SGLang's back.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from patching import applied
from pools import engines
from test_patch_reoffer import _offered, rounds, stored, turn

from kvtier.integration.patches import reoffer


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    reoffer.EVERY = 8
    with applied("reoffer"), engines(folder / f"store{rank}") as start:
        engine = start("full")
        engine.cache.attn_tp_group = dist.group.WORLD
        offered = _offered(engine)
        turn(engine, 2)
        if rank == 1:
            assert engine.storage.clear()
        turn(engine, 3)
        refused = bool(getattr(engine.controller, "kvtier_refused", False))
        rounds(engine)
        tokens = turn(engine, 5)
        answer = {"offered": offered, "refused": refused, "stored": stored(engine, tokens)}
        dist.barrier()
    print(json.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
