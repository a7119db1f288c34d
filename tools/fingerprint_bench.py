"""Time the sampled fingerprint on a made-up mixture-of-experts checkpoint.

The shards are sparse files with real headers: 500 GB take no space but for what is sampled. With
--fill those parts are written, so that a cold run reads the drive rather than holes.

    python tools/fingerprint_bench.py /path/on/the/drive --fill
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvtier import fingerprint
from kvtier.sizes import format_size, parse_size


def write_checkpoint(folder: Path, total: int, tensors: int, shards: int, fill: bool) -> None:
    """Half of the tensors are weights, half the block scales beside them (3,584 bytes each)."""
    scale = 3584
    weight = total // (tensors // 2) - scale
    layout = list(_names(tensors // 2))
    per_shard = -(-len(layout) // shards)
    (folder / "config.json").write_text('{"model_type": "made_up"}')
    for shard in range(shards):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in layout[shard * per_shard : (shard + 1) * per_shard]:
            for tensor, size in ((name, weight), (f"{name}_scale_inv", scale)):
                shape = {"dtype": "F8_E4M3", "shape": [size], "data_offsets": [end, end + size]}
                header[tensor] = shape
                end += size
        text = json.dumps(header).encode()
        with (folder / f"model-{shard:05}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    if fill:
        for path in folder.glob("*.safetensors"):
            _fill(path, total)


def _names(count: int) -> Iterator[str]:
    for number in range(count):
        layer, rest = divmod(number, 768)
        expert, matrix = divmod(rest, 3)
        yield f"model.layers.{layer}.mlp.experts.{expert}.{('gate', 'up', 'down')[matrix]}.weight"


def _fill(path: Path, total: int) -> None:
    """Write random bytes wherever the fingerprint will look."""
    random = np.random.default_rng(len(path.name))
    with path.open("r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        _, names, begins, ends = fingerprint.pieces(path, file, size)
        step = fingerprint.stratum(total)
        for begin, end in fingerprint.sample_extents(names, begins, ends, step).tolist():
            os.pwrite(file.fileno(), random.bytes(end - begin), begin)


def drop_cache(folder: Path) -> None:
    """Make the files' next reads come from the drive."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the checkpoint is made, and removed")
    parser.add_argument("--total", type=parse_size, default=parse_size("500G"))
    parser.add_argument("--tensors", type=int, default=130_000)
    parser.add_argument("--shards", type=int, default=50)
    parser.add_argument("--fill", action="store_true", help="write what will be sampled")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fingerprint-bench-", dir=args.folder))
    try:
        write_checkpoint(folder, args.total, args.tensors, args.shards, args.fill)
        drop_cache(folder)
        for run in range(args.runs):
            cpu = time.process_time()
            found = fingerprint.weights_fingerprint(folder)
            print(
                f"{'cold' if run == 0 else 'warm'}: {found.seconds:.2f} s wall, "
                f"{time.process_time() - cpu:.2f} s CPU, {format_size(found.bytes_read)} read, "
                f"{found.digest}"
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
