"""Page keys: what is asked for when reading is what was named when writing.

SGLang hashes a page together with the page before it, from the tree node by node when it writes,
and from the end of what matched when it reads. However the tree splits in between, both must come
to the same keys, and kvtier must find under them what it was given.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pools import STACKS, Engine, engines

SMALL = replace(
    STACKS["full"],
    name="small pages",
    config=replace(STACKS["full"].config, page_size=4, kv_size=2048, num_layers=1),
)
PAGE = SMALL.config.page_size


@st.composite
def conversations(draw: st.DrawFn) -> list[list[int]]:
    """Prompts of whole pages that branch off one another after any number of pages."""
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(1, 6))):
        fork = draw(st.sampled_from([[], *prompts]))
        shared = draw(st.integers(0, len(fork) // PAGE)) * PAGE
        pages = draw(st.integers(1, 8))
        # Few different tokens, so that branches share pages and prefixes of pages by chance.
        fresh = draw(st.lists(st.integers(1, 3), min_size=pages * PAGE, max_size=pages * PAGE))
        prompts.append(fork[:shared] + fresh)
    return prompts


def chain(tokens: list[int]) -> list[str]:
    """Page keys by their definition: SHA-256 of the key before and the page's tokens as uint32."""
    keys: list[str] = []
    digest = b""
    for start in range(0, len(tokens), PAGE):
        page = np.array(tokens[start : start + PAGE], dtype="<u4").tobytes()
        digest = hashlib.sha256(digest + page).digest()
        keys.append(digest.hex())
    return keys


@given(data=st.data())
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_what_was_written_is_found_from_any_split(tmp_path_factory, data):
    prompts = data.draw(conversations())
    chains = [chain(prompt) for prompt in prompts]
    with engines(tmp_path_factory.mktemp("keys") / "store") as start:
        writer = start(SMALL)
        written = _record(writer, "batch_set_v1")
        for prompt in prompts:  # each insert may split nodes of those before
            writer.compute(prompt)
            writer.store(prompt)
        for prefix, keys in written:
            named = prefix + keys
            assert any(named == whole[: len(named)] for whole in chains)
        assert {key for _, keys in written for key in keys} == set().union(*chains)
        writer.close()

        reader = start(SMALL)
        asked = _record(reader, "batch_exists")
        for prompt, whole in zip(prompts, chains, strict=True):
            if known := data.draw(st.integers(0, len(whole))):
                reader.compute(prompt[: known * PAGE])
                reader.store(prompt[: known * PAGE])
            missing = len(whole) - reader.matched(prompt) // PAGE
            asked.clear()
            assert reader.prefetch(prompt) == len(prompt)
            # The keys before these, which SGLang passes as well, lack those of the node where
            # the match ends (UnifiedTreeCore.get_prefix_hash_values): nobody may rely on them.
            assert [keys for _, keys in asked] == ([whole[-missing:]] if missing else [])


def _record(engine: Engine, method: str) -> list[tuple[list[str], list[str]]]:
    """The (keys before, keys) of every call of a method of the storage backend from now on."""
    calls: list[tuple[list[str], list[str]]] = []
    original = getattr(engine.storage, method)

    def recorded(keys, *args):
        calls.append((list(args[-1].prefix_keys or ()), list(keys)))
        return original(keys, *args)

    setattr(engine.storage, method, recorded)
    return calls
