"""`kvtier selfcheck`: whether a restored prompt gives the log probabilities of the computed one."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvtier.cli.common import AsJson, count, marked, out, progress
from kvtier.cli.served import DEFAULT_URL, AdminKey, Key, Url
from kvtier.integration.probes.client import Client
from kvtier.integration.probes.selfcheck import Report, check, difference


def selfcheck(
    url: Url = DEFAULT_URL,
    *,
    tokens: Annotated[int, typer.Option(min=256, help="Length of each prompt.")] = 4096,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0,
            help="Largest difference of a log probability; 0 means equal to the last bit, which "
            "servers with encoder replay, or with ranks that share pages, need not be.",
        ),
    ] = 0.0,
    key: Key = "",
    admin_key: AdminKey = "",
    as_json: AsJson = False,
) -> None:
    """Compare restored prompts with computed ones by their log probabilities, on a running server.

    New prompts are computed and stored, the server's caches in GPU and host memory are emptied
    (the store stays), and the same prompts are restored. Run it while nobody uses the server.
    Exit status 0: the same; 1: they differ; 2: it could not be told, and why.

    Examples:

    * `kvtier selfcheck`
    * `kvtier selfcheck http://127.0.0.1:8000 --tokens 100000`
    * `kvtier selfcheck --tolerance 0.05 --json`
    """
    client = Client(url, key, admin_key)
    with progress.status("asking the server") as status:
        report = check(client, tokens, tolerance, status.update)
    if as_json:
        print(json.dumps(document(report), indent=2))
    else:
        _show(report)
    raise typer.Exit(status_of(report))


def status_of(report: Report) -> int:
    """The exit status: 0 the same, 1 different, 2 not to be told."""
    if report.same:
        return 0
    return 2 if report.undecided else 1


def _show(report: Report) -> None:
    table = Table("tokens", "restored", "computed in", "restored in", box=None)
    table.add_column("to the device")
    table.add_column("to the computed")
    for result in report.results:
        table.add_row(
            count(result.restored.prompt_tokens),
            count(result.restored.storage),
            f"{result.computed.first_token:.3f} s",
            f"{result.restored.first_token:.3f} s",
            f"{result.error:g}",
            f"{difference(result.restored, result.computed):g}",
        )
    out.print("Differences of log probabilities, restored from the store:", highlight=False)
    out.print(table, highlight=False)
    out.print(verdict(report), highlight=False)


def verdict(report: Report) -> Text:
    """One sentence, marked up."""
    if report.undecided:
        return marked(
            "yellow",
            "Not decided:",
            " what came from the store is not to the last bit what the "
            f"device's cache held, but each of this server's {report.copies} ranks computes the "
            "same pages for itself, and all got the first one's back, which may be rounded "
            "otherwise: give a --tolerance. None helps where the first token is another (inf).",
        )
    exactly = f"within {report.tolerance:g}" if report.tolerance else "to the last bit"
    if not report.same:
        return marked(
            "red",
            "Different:",
            f" what came from the store is not {exactly} what the device's cache "
            "held: detach the store, and keep it for a report.",
        )
    scored = sum(len(r.held.prompt_logprobs) + len(r.held.logprobs) for r in report.results)
    moved = f"moves them by {report.control:g}"
    if math.isinf(report.control):
        moved = "gives another first token"
    return marked(
        "green",
        "The same:",
        f" {scored} log probabilities are those of the device's cache, "
        f"{exactly}. Another beginning {moved}.",
    )


def document(report: Report) -> dict[str, Any]:
    """For JSON."""
    return {
        "same": report.same,
        "undecided": report.undecided,
        "copies": report.copies,
        "tolerance": report.tolerance,
        "control": _finite(report.control),
        "prompts": [
            {
                "difference_to_device": _finite(result.error),
                "difference_to_computed": _finite(difference(result.restored, result.computed)),
                "device_to_itself": _finite(result.noise),
                "computed": dataclasses.asdict(result.computed),
                "device": dataclasses.asdict(result.held),
                "restored": dataclasses.asdict(result.restored),
            }
            for result in report.results
        ],
    }


def _finite(number: float) -> float | None:
    """JSON has no infinity: null says that the first token is another one."""
    return number if math.isfinite(number) else None
