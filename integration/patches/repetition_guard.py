"""An answer that only repeats itself is ended.

A model that has fallen into a loop goes on until max_new_tokens, which for agents is often the
rest of the context: SGLang 0.5.23 ends a request at stop strings, stop tokens and the length only
(managers/schedule_batch.py:2007, `Req.update_finish_state`).

Every rank of a tensor parallel group calls this method with the same tokens in the same steps, and
the decision depends on the tokens alone, at lengths that are multiples of 16: it comes out the same
on all of them, and for any number of tokens that speculative decoding accepts at once.
"""

from __future__ import annotations

from array import array
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from kvtier.integration.patches.scheme import Hook, Patch

EVERY = 16
LONGEST_PERIOD = 256
COPIES = 4
TOKENS = 256
"""A loop is at least so many tokens long and has at least so many copies. A table of zeros in a
program can be longer: that is the price, and why the guard is off unless it is asked for."""

MATCHED = "\0repetition"
"""What `matched_stop` of the answer says. SGLang cuts the answer's text where it finds this string
(managers/detokenizer_manager.py:207), so it must be one that no text has."""


def period(ids: array[int]) -> int:
    """The length of what the end of `ids` repeats; 0 if it doesn't."""
    backwards, length = ids[::-1], 0
    while True:
        try:  # only lengths at which the last token was there before
            length = backwards.index(ids[-1], length + 1, LONGEST_PERIOD + 1)
        except ValueError:
            return 0
        looked_at = max(TOKENS, COPIES * length)
        if looked_at > len(ids):
            return 0
        if ids[-looked_at:-length] == ids[-looked_at + length :]:
            return length


def _end_a_loop(result: None, request: Any, new_accepted_len: int = 1) -> None:
    tokens = len(request.output_ids)
    end = tokens - tokens % EVERY
    if end <= tokens - new_accepted_len or request.finished():
        return
    sampling = request.sampling_params
    if sampling.ignore_eos or end < sampling.min_new_tokens:
        return
    start = max(0, end - COPIES * LONGEST_PERIOD)
    if period(request.output_ids[start:end]):
        from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR

        request.finished_reason = FINISH_MATCHED_STR(matched=MATCHED)
        request.finished_len = end


_BATCH = "sglang.srt.managers.schedule_batch"

PATCH = Patch(
    hooks=(
        Hook(
            f"{_BATCH}.Req.update_finish_state",
            HookType.AFTER,
            _end_a_loop,
            ("self", "new_accepted_len"),
        ),
    ),
    relies_on=(f"{_BATCH}.FINISH_MATCHED_STR(matched)", f"{_BATCH}.Req.finished"),
)
