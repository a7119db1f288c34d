"""Results as a short table."""

from __future__ import annotations

from statistics import median
from typing import Any

TIMES = ("cold", "device", "restored", "restored_more", "restored_again")


def table(results: dict[str, Any]) -> str:
    lines = ["case | tokens | cold s | device s | restored s | more | again s | from store | "
             "dlogprob to device, cold | control"]  # fmt: skip
    for name, result in results.items():
        control = result.get("control", {}).get("logprob")
        for length, row in result.get("prompts", {}).items():
            cells = [
                name,
                str(length),
                *(seconds(row.get(key)) for key in TIMES),
                str(row.get("restored", {}).get("cached")),
                f"{change(row, 'restored_to_device')}, {change(row, 'restored_to_cold')}",
                "" if control is None else f"{control:.4f}",
            ]
            lines.append(" | ".join(cells))
            if "next_turn" in row:
                lines.append(f"    without the patch: cached {row['without_patch']['cached']}, "
                             f"next turn: cached {row['next_turn']['cached']}")  # fmt: skip
        lines += notes(name, result)
    return "\n".join(lines)


def notes(name: str, result: dict[str, Any]) -> list[str]:
    lines = []
    for length, row in result.get("turns", {}).items():
        lines.append(f"    two turns, {length}: {row}")
    for length, row in result.get("computed_again", {}).items():
        lines.append(f"    computed again, {length}: {row}")
    if "stored" in result:
        lines.append(f"    stored {result['stored']}, starts {result.get('start_s')}")
    lines += [f"    stream {key}: {value}" for key, value in result.get("stream", {}).items()]
    for when, ranks in result.get("pages", {}).items():
        lines += [f"    pages, {when}: {rank}" for rank in ranks]
    lines += [f"{name} {key}: {result[key]}" for key in ("left_out", "error") if key in result]
    return lines


def seconds(answer: dict[str, Any] | list[dict[str, Any]] | None) -> str:
    """Of one answer; the median of several."""
    if answer is None:
        return "-"
    answers = answer if isinstance(answer, list) else [answer]
    return f"{median(one['first_token_s'] for one in answers):.3f}"


def change(row: dict[str, Any], key: str) -> str:
    return "-" if key not in row else f"{row[key]['logprob']:.5f}"
