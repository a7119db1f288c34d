"""Answers that repeat themselves, on SGLang's own requests."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from patching import applied, serving
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from kvtier.integration.patches import repetition_guard

LIMIT = 4096
STEPS = (1, 2, 5, 16, 37)
"""Tokens that one step adds; more than one with speculative decoding."""


@pytest.fixture(autouse=True)
def settings():
    with serving():
        yield


@pytest.fixture
def patched():
    with applied("repetition_guard"):
        yield


def generate(ids: list[int], step: int = 1, **sampling) -> Req:
    """A request that got `ids` in steps until SGLang called it finished."""
    least = sampling.pop("min_new_tokens", 0)
    parameters = SamplingParams(max_new_tokens=LIMIT, **sampling)
    parameters.normalize(None)
    parameters.min_new_tokens = least  # which SGLang takes only with a tokenizer
    request = Req("r", "", [1, 2, 3], parameters, vocab_size=50_000)
    for start in range(0, len(ids), step):
        new = ids[start : start + step]
        request.output_ids.extend(new)
        request.update_finish_state(len(new))
        if request.finished():
            break
    return request


def text(tokens: int, seed: int = 7) -> list[int]:
    return random.Random(seed).choices(range(10, 49_000), k=tokens)


def loop(before: int, period: int, tokens: int = LIMIT) -> list[int]:
    return (text(before) + text(period, seed=8) * (tokens // period))[:tokens]


@pytest.mark.parametrize("period", [1, 2, 7, 64, 200, 256])
def test_a_loop_is_ended_and_where_does_not_depend_on_the_steps(patched, period) -> None:
    ended = [generate(loop(100, period), step) for step in STEPS]
    assert {request.finished_reason.matched for request in ended} == {repetition_guard.MATCHED}
    [output] = {tuple(request.output_ids_through_stop) for request in ended}
    assert len(output) % 16 == 0
    assert 100 + max(256, 4 * period) <= len(output) < 100 + max(256, 4 * period) + 16 + period


def test_two_ranks_end_at_the_same_token(patched) -> None:
    """As ranks do: the same steps, of unlike sizes."""
    sizes = random.Random(3).choices(range(1, 7), k=LIMIT)
    lengths = []
    for _ in range(2):
        request = generate([])
        ids = iter(loop(333, 50))
        for size in sizes:
            request.output_ids.extend(next(ids) for _ in range(size))
            request.update_finish_state(size)
            if request.finished():
                break
        lengths.append((len(request.output_ids), request.finished_len))
    assert lengths[0] == lengths[1]
    assert lengths[0][1] < 333 + 256 + 50 + 16


@pytest.mark.parametrize(
    "ids",
    [
        text(LIMIT - 1),
        loop(0, 257, LIMIT - 1),  # longer than what is looked for
        [t for part in range(9, 19) for t in text(80) * 3 + text(80, part)],  # three copies each
        text(200) + [5] * 255 + text(200, 2),
        [token for row in range(60) for token in (5, 6, 5, 6, 5, 6, 1000 + row)],  # a table
    ],
)
def test_what_is_no_loop_goes_on(patched, ids) -> None:
    for step in (1, 5):
        request = generate(ids, step)
        assert not request.finished()
        assert len(request.output_ids) == len(ids)


def test_a_benchmark_that_ignores_the_end_goes_on(patched) -> None:
    assert not generate(loop(0, 5), ignore_eos=True).finished()
    assert generate(loop(0, 5), min_new_tokens=2000).finished_len == 2000


def test_sglang_s_own_reasons_come_first(patched) -> None:
    request = generate([*loop(0, 5, 271), 9], stop_token_ids=[9])
    assert request.finished_len is not None
    assert request.finished_reason.matched == repetition_guard.MATCHED
    request = generate([*loop(0, 5, 255), 9], stop_token_ids=[9])
    assert request.finished_reason.matched == 9


def test_the_text_of_the_answer_is_not_cut() -> None:
    """SGLang cuts it at the matched string, so a word would cut every text that has the word."""
    trim = DetokenizerManager.trim_matched_stop
    answer = "an end to all repetition, repetition, repetition"
    detokenizer = SimpleNamespace()
    reason = {"type": "stop", "matched": repetition_guard.MATCHED}
    assert trim(detokenizer, answer, reason, False) == answer
    assert trim(detokenizer, answer, {**reason, "matched": "repetition"}, False) != answer


def test_without_the_patch_a_loop_goes_on_to_the_limit() -> None:
    """Once this fails, SGLang has a guard of its own and the patch can go."""
    request = generate(loop(100, 7, LIMIT + 10))
    assert request.finished_reason.to_json() == {"type": "length", "length": LIMIT}
