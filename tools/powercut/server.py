"""A real SGLang server goes through a power cut, on the CPU, with a tiny model."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from powercut.filesystem import FileSystem, private_mounts, work_folder
from powercut.result import Result

TESTS = Path(__file__).parents[2] / "tests" / "sglang"


def run(runs: int, seed: int) -> list[Result]:
    """`runs` cuts on each kind of file system."""
    private_mounts()
    sys.path.insert(0, str(TESTS))
    result = Result("power cut below a server of SGLang")
    for _ in range(runs):
        for kind in ("ext4", "xfs"):
            with work_folder() as folder:
                system = FileSystem(kind, folder)
                try:
                    _cut(system, folder, result)
                finally:
                    system.close()
    return [result.done()]


def _cut(system: FileSystem, folder: Path, result: Result) -> None:
    """Prompts, a cut, kill -9, a remount, a start: all that was committed comes from storage."""
    from kvtier_test_platform.committed import wait_for_kv_pages
    from kvtier_test_platform.server import Server, cacheable_tokens
    from servers import BRANCH, DISTINCT_PAGES, MODELS, PROMPT, PROMPTS

    def server() -> Server:
        return Server(
            MODELS / "swa",
            folder / "server.log",
            storage_backend="kvtier",
            extra_config={"root": str(system.path)},
        )

    with server() as first:
        cold = [first.generate(prompt) for prompt in PROMPTS]
        wait_for_kv_pages(system.path, DISTINCT_PAGES)
        gc.collect()
        system.cut()
        alive = first.generate(BRANCH)  # the engine goes on without its drive
        first.kill9()
    system.unmount()
    system.mount()
    with server() as second:
        warm = [second.generate(prompt) for prompt in PROMPTS]
        second.kill9()
    result.runs += 1
    wrong = []
    if alive.output_ids != cold[1].output_ids:
        wrong.append("another output after the drive had gone")
    if [answer.output_ids for answer in warm] != [answer.output_ids for answer in cold]:
        wrong.append("another output after the restart")
    for prompt, answer in zip(PROMPTS, warm, strict=True):
        if answer.cached_tokens != cacheable_tokens(len(prompt)):
            wrong.append(f"of {len(prompt)} tokens {answer.cached_tokens} were cached")
    if warm[0].storage != cacheable_tokens(len(PROMPT)):
        wrong.append(f"{warm[0].storage} tokens came from storage")
    result.count("tokens from storage", warm[0].storage + warm[1].storage)
    result.fail(system.kind, wrong)
