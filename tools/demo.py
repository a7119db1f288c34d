"""`make demo`: a long prompt, kill -9, a restart, and the prompt's cache is back from disk.

Runs real SGLang with a tiny model of random weights on the CPU, and a store in a temporary
folder. Exit status 1 if a token that should come from the store doesn't, or the output differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier_test_platform.committed import committed_pages, kv_pages, wait_until
from kvtier_test_platform.server import (
    PAGE_SIZE,
    Answer,
    Server,
    ServerError,
    cacheable_tokens,
    prompt_tokens,
)
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

MODEL = Path(__file__).parents[1] / "tests" / "models" / "llama"
PROMPT = prompt_tokens(1, 12_000)
POOL_TOKENS = 16_384
WARM_UP = prompt_tokens(2, PAGE_SIZE + 1)

console = Console(highlight=False)


@contextmanager
def step(text: str) -> Iterator[Progress]:
    """A line with a spinner and a clock while the block runs, which stays when it is done."""
    if not console.is_terminal:
        console.print(f"  {text} …")
    columns = (SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(text, total=1)
        yield progress
        progress.update(task, completed=1)


def start(server: Server) -> None:
    server.start()
    server.generate(WARM_UP, max_new_tokens=1)  # what a process does once is not the prompt's time


def wait_for_commit(progress: Progress, store: Path) -> None:
    pages = len(PROMPT) // PAGE_SIZE + len(WARM_UP) // PAGE_SIZE
    task = progress.task_ids[0]

    def committed() -> bool:
        done = kv_pages(committed_pages(store))
        progress.update(task, description=f"waiting for the store: {done} of {pages} pages")
        return done >= pages

    wait_until(committed, f"{pages} committed pages")


def result(cold: Answer, warm: Answer) -> Table:
    table = Table(title="The same prompt", caption_justify="left")
    table.add_column("")
    table.add_column("first time", justify="right")
    table.add_column("after kill -9 and restart", justify="right")
    rows = {
        "prompt tokens": [f"{len(PROMPT):,}"] * 2,
        "time to the answer": [f"{answer.seconds:.2f} s" for answer in (cold, warm)],
        "tokens computed": [f"{len(PROMPT) - a.cached_tokens:,}" for a in (cold, warm)],
        "cached, from the device": [f"{answer.device:,}" for answer in (cold, warm)],
        "cached, from host memory": [f"{answer.host:,}" for answer in (cold, warm)],
        "cached, from the store": [f"{answer.storage:,}" for answer in (cold, warm)],
        "same output": ["", "yes" if warm.output_ids == cold.output_ids else "[red]no"],
    }
    for name, values in rows.items():
        table.add_row(name, *values)
    return table


def demonstrate(store: Path) -> bool:
    """Run the demonstration; whether every token came back as it should."""
    server = Server(
        MODEL,
        store / "server.log",
        storage_backend="kvtier",
        extra_config={"root": str(store)},
        max_total_tokens=POOL_TOKENS,
    )
    try:
        with step("starting SGLang with --hicache-storage-backend kvtier"):
            start(server)
        with step(f"a prompt of {len(PROMPT):,} tokens, computed"):
            cold = server.generate(PROMPT)
        with step("waiting for the store") as progress:
            wait_for_commit(progress, store)
        with step("kill -9"):
            server.kill9()
        with step("starting SGLang again"):
            start(server)
        with step("the same prompt"):
            warm = server.generate(PROMPT)
    finally:
        with step("stopping SGLang"):
            server.stop()

    console.print(result(cold, warm))
    console.print("[bold]kvtier inspect[/bold] says (the store goes with this demonstration):")
    subprocess.run([Path(sys.executable).parent / "kvtier", "inspect", store], check=True)

    missing = cacheable_tokens(len(PROMPT)) - warm.storage
    if missing:
        console.print(f"[red]{missing:,} tokens should have come from the store and did not.")
    if warm.output_ids != cold.output_ids:
        console.print("[red]The output is not the same.")
    return not missing and warm.output_ids == cold.output_ids


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as store:
        try:
            return 0 if demonstrate(Path(store)) else 1
        except (ServerError, TimeoutError) as error:
            console.print(str(error), style="red", markup=False, soft_wrap=True)
            return 1
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
