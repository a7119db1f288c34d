"""Lay out site-packages for an offline machine with Hopper cards, as small as it can be.

    make_site.py TARGET      run with the interpreter of the environment to take from

Takes the packages that such a machine lacks, without what serving text models never opens, and
with the GPU code of other cards emptied. The machine's own Python 3.12, numpy and NVIDIA libraries
are used; NCCL is not, since this torch needs a newer one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

FROM = Path(sysconfig.get_paths()["purelib"])
FATBIN = Path(__file__).with_name("fatbin.py")

DISTRIBUTIONS = Path(__file__).with_name("packages.txt").read_text().split()
"""What is taken along; the machine has everything else."""

LEFT_OUT = tuple(Path(__file__).with_name("left_out.txt").read_text().split())
"""Beginnings of paths: other cards' tools, build inputs, tests, data of other uses."""

FLASH_ATTENTION = "^(?!flash_fwd_hdim)|^flash_fwd_hdim(64|128)_bf16(?!.*softcap)"
"""FlashAttention 3 for the models in models/ only: bf16, heads of 64 or 128, no soft cap."""

PRUNED = {
    "torch/lib/libtorch_cuda.so": None,
    "torch/lib/libtorch_cuda_linalg.so": None,
    "nvidia/nccl/lib/libnccl.so.2": None,
    "sgl_kernel/sm90/common_ops.abi3.so": None,
    "sgl_kernel/flashmla_ops.abi3.so": None,
    "sgl_kernel/flash_ops.abi3.so": FLASH_ATTENTION,
    "flash_mla/_C_legacy.abi3.so": None,
}
"""Libraries with GPU code, and which sources' code stays in them (None: all for the card)."""

STRIPPED = (
    "torch/lib/libtorch_cuda.so",
    "torch/lib/libtorch_cuda_linalg.so",
    "torch/lib/libtorch_cpu.so",
    "torch/lib/libtorch_python.so",
    "nvidia/nccl/lib/libnccl.so.2",
    "triton/_C/libtriton.so",
    "tilelang/lib/libtvm_compiler.so",
    "tilelang/lib/libtilelang.so",
    "z3/lib/libz3.so",
)

KERNEL_SOURCES_LEFT_OUT = ("cake_", "blackwell", "alphamoe", "kda", "fused_moe", "gdn",
                           "experimental", "fmha_v2", "xqa")  # fmt: skip
"""Sources of FlashInfer's run-time compiler that the models in models/ do not use."""


def is_taken(path: str) -> bool:
    return not (
        path.startswith(LEFT_OUT)
        or path.endswith(".pyi")
        or "__pycache__" in path
        or "/licenses/" in path
        or (path.startswith("flashinfer/") and not path.endswith((".py", ".txt")))
    )


def copy(source: str | Path, target: str | Path) -> None:
    """A hard link where that can be, so that the tree costs no space of its own."""
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except OSError:
        shutil.copy2(source, target)


def take(distribution: Distribution, site: Path) -> int:
    """Copy the wanted files of a package; their bytes."""
    size = 0
    for path in map(str, distribution.files or ()):
        source = FROM / path
        if is_taken(path) and source.is_file():
            copy(source, site / path)
            size += source.stat().st_size
    return size


def take_trees(site: Path) -> None:
    """What is compiled against or imported outside the packages' own import path."""
    ignored = shutil.ignore_patterns("__pycache__", "*.a", "*cu12*")
    trees = [
        "torch/include/pybind11",
        *(f"flashinfer/data/{part}" for part in ("include", "cutlass", "spdlog", "cccl")),
        "nvidia_cutlass_dsl/dsl_packages",
        "nvidia_cutlass_dsl/cu13",
        *(path.name for path in FROM.glob("nvidia_cutlass_dsl*.dist-info")),
    ]
    for tree in trees:
        shutil.copytree(FROM / tree, site / tree, ignore=ignored, copy_function=copy)
    sources = "flashinfer/data/csrc"
    for path in (FROM / sources).rglob("*"):
        relative = path.relative_to(FROM / sources)
        if path.is_file() and not relative.parts[0].startswith(KERNEL_SOURCES_LEFT_OUT):
            copy(path, site / sources / relative)


def shrink(path: str, site: Path) -> None:
    """Replace a library by one without other cards' code and without symbols."""
    target = site / path
    target.unlink(missing_ok=True)  # a link to the environment's own file: never write to it
    target.parent.mkdir(parents=True, exist_ok=True)
    if path in PRUNED:
        sources = PRUNED[path]
        choice = ["--sources", sources] if sources else []
        subprocess.run([sys.executable, FATBIN, FROM / path, target, *choice], check=True)
    else:
        shutil.copyfile(FROM / path, target)
    if path in STRIPPED:
        subprocess.run(["strip", "--strip-all", target], check=True)
    target.chmod(0o755)


def main() -> None:
    site = Path(sys.argv[1])
    shutil.rmtree(site, ignore_errors=True)
    sizes: dict[str, int] = {}
    for distribution in distributions(path=[str(FROM)]):
        name = distribution.metadata["Name"].lower().replace("_", "-").replace(".", "-")
        if name in DISTRIBUTIONS:
            sizes[name] = take(distribution, site)
    take_trees(site)
    for path in sorted({*PRUNED, *STRIPPED}):
        shrink(path, site)
    report(sizes)


def report(sizes: dict[str, int]) -> None:
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True)[:12]:
        print(f"{sizes[name] / 1e6:8.1f} MB  {name}")
    absent: Iterable[str] = sorted(set(DISTRIBUTIONS) - set(sizes))
    print(f"{sum(sizes.values()) / 1e6:8.1f} MB in all; not installed here: {' '.join(absent)}")


if __name__ == "__main__":
    main()
