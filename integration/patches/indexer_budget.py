"""A smaller budget for the scores of DeepSeek V4.1's indexer in prefill.

SGLang 0.5.23 scores every query row against the whole context, in tiles that may take 2 GiB with
DeepGEMM and 1 GiB with torch, where copies on the way take about three times that
(layers/attention/dsv4/v41_indexer/scoring.py:36 and 329). Both are constants of the module, read
at each call. On cards of 84 GiB that memory is not there beside the weights and the KV cache.

A budget too small costs speed: the tiles get so few rows that the kernels starve.
"""

from __future__ import annotations

from kvtier.errors import ConfigError
from kvtier.integration.patches.scheme import Patch

_SCORING = "sglang.srt.layers.attention.dsv4.v41_indexer.scoring"
_CONSTANTS = ("_DEEP_GEMM_SCORE_BUDGET_BYTES", "_TORCH_SCORE_BUDGET_BYTES")
LOWEST_MIB, HIGHEST_MIB = 64, 16384


def _install(value: str) -> None:
    budget = parse_mib(value) << 20
    try:
        from sglang.srt.layers.attention.dsv4.v41_indexer import scoring
    except ImportError:
        return  # named by `relies_on` before the server starts
    for name in _CONSTANTS:
        if hasattr(scoring, name):
            setattr(scoring, name, budget)


def parse_mib(value: str) -> int:
    """The budget in MiB. Raises ConfigError for what is no number or out of range."""
    try:
        mib = int(value)
    except ValueError:
        mib = 0
    if not LOWEST_MIB <= mib <= HIGHEST_MIB:
        raise ConfigError(
            f"KVTIER_INDEXER_BUDGET_MIB is {value}: give a whole number of MiB from "
            f"{LOWEST_MIB} to {HIGHEST_MIB}."
        )
    return mib


PATCH = Patch(
    relies_on=tuple(f"{_SCORING}.{name}" for name in _CONSTANTS),
    install=_install,
)
