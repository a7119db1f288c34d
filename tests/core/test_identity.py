"""Identity documents: what changes the id, what doesn't, and how a bad one is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from enum import Enum
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import IdentityError
from kvtier.identity import (
    ABSENT,
    Attention,
    Identity,
    ParallelSizes,
    PoolLayout,
    Weights,
    diff,
    shard_label,
)

KV = PoolLayout(pieces=(65536, 65536), dtype="bfloat16", layout="page_first", sharded_by=("tp",))

SERVED: dict[str, Any] = {
    "weights": Weights("sampled", "9f" * 16),
    "kv_dtype": "bfloat16",
    "page_tokens": 256,
    "pools": {"kv": KV, "swa": PoolLayout((4096,), "bfloat16", "page_first", trailing=True)},
    "parallel": ParallelSizes(tp=2, attn_tp=2),
    "memory_layout": "page_first",
    "attention": Attention("flashinfer", compression_ratios=(1, 2), replay="decoder"),
    "kv_scales": {"source": "checkpoint"},
    "draft": {"weights": "sampled:77", "algorithm": "EAGLE"},
    "engine": {"quantization": "fp8"},
}


def served(**changes: Any) -> Identity:
    return Identity.build(**{**SERVED, **changes})


def test_id_is_the_head_of_the_canonical_sha256() -> None:
    identity = served()
    document = json.loads(identity.canonical)
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")
    assert identity.canonical == canonical
    assert identity.id_bytes == hashlib.sha256(canonical).digest()[:16]
    assert identity.id == identity.id_bytes.hex()
    assert len(identity.id) == 32


def test_id_of_a_known_document_never_changes() -> None:
    """Stores already written depend on this."""
    assert Identity.of({"b": [1, True, None], "a": "ü"}).id == "e7f009b0a8ac9a298678259779ae24b8"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", Weights("sampled", "9e" * 16)),
        ("weights", Weights("full", "9f" * 16)),
        ("kv_dtype", "float8_e4m3fn"),
        ("page_tokens", 128),
        ("pools", {"kv": KV}),
        ("pools", {**SERVED["pools"], "kv": dataclasses.replace(KV, pieces=(131072,))}),
        ("pools", {**SERVED["pools"], "kv": dataclasses.replace(KV, pieces=None)}),
        ("pools", {**SERVED["pools"], "kv": dataclasses.replace(KV, dtype="float16")}),
        ("pools", {**SERVED["pools"], "kv": dataclasses.replace(KV, layout="layer_first")}),
        ("pools", {**SERVED["pools"], "kv": dataclasses.replace(KV, sharded_by=())}),
        ("pools", {**SERVED["pools"], "kv": dataclasses.replace(KV, trailing=True)}),
        ("parallel", ParallelSizes(tp=4, attn_tp=4)),
        ("parallel", ParallelSizes(tp=2, attn_tp=1, dp_attention=True)),
        ("parallel", ParallelSizes(tp=2, attn_tp=2, pp=2)),
        ("parallel", ParallelSizes(tp=2, attn_tp=2, attn_cp=2)),
        ("parallel", ParallelSizes(tp=2, attn_tp=2, dcp=2)),
        ("memory_layout", "page_first_direct"),
        ("attention", Attention("fa3", compression_ratios=(1, 2), replay="decoder")),
        ("attention", Attention("flashinfer", compression_ratios=(4, 128), replay="decoder")),
        ("attention", Attention("flashinfer", compression_ratios=(1, 2), replay="encoder")),
        ("kv_scales", None),
        ("draft", None),
        ("engine", {"quantization": "fp8", "layout_version": 2}),
        ("format_version", 99),
    ],
)
def test_each_field_that_changes_bytes_changes_the_id(field: str, value: object) -> None:
    changed = served(**{field: value})
    assert changed.id != served().id
    found = diff(served(), changed)
    roots = {"page_tokens", "format", field.removesuffix("_version")}
    assert found
    assert all(entry.path.split(".")[0] in roots for entry in found)


def test_order_and_labels_do_not_change_the_id() -> None:
    backwards = dict(reversed(list(SERVED.items())))
    backwards["pools"] = dict(reversed(list(SERVED["pools"].items())))
    assert Identity.build(**backwards) == served()
    named = served(about={"served_name": "any", "host": "a"})
    assert named.id == served().id
    assert named == served()
    assert hash(named) == hash(served())


def test_nothing_of_the_instance_is_in_the_document() -> None:
    """Report R051: these change between two runs of the same model."""
    text = served().canonical.decode()
    for word in ("port", "host", "name", "fraction", "requests", "context_length", "graph", "log"):
        assert word not in text
    assert "lora" not in text


def test_documents_are_frozen() -> None:
    engine = {"list": [1, 2]}
    identity = served(engine=engine)
    before = identity.id
    engine["list"].append(3)
    identity.document["engine"]["list"].append(4)
    assert identity.id == before
    assert identity.document["engine"] == {"list": [1, 2]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        identity.canonical = b"{}"  # type: ignore[misc]


def test_json_round_trip_keeps_id_and_labels() -> None:
    identity = served(about={"model_path": "/models/ü"})
    text = identity.to_json()
    assert text.startswith('{\n  "id": "' + identity.id)
    back = Identity.from_json(text, identity.id)
    assert back == identity
    assert back.about == {"model_path": "/models/ü"}
    assert Identity.from_json(text.encode()) == identity


def test_other_mappings_and_text_enums_are_plain_documents() -> None:
    class Pool(str, Enum):  # noqa: UP042 (SGLang's PoolName is of this kind)
        KV = "kv"

    odd = Identity.of(MappingProxyType({Pool.KV: (Pool.KV, 1), "m": MappingProxyType({})}))
    assert odd == Identity.of({"kv": ["kv", 1], "m": {}})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        "{}",
        '{"identity": {}}',
        '{"identity": 1, "about": {}}',
        '{"identity": {}, "about": {"a": 1}, "id": "44136fa355b3678a1146ad16f7e8649e"}',
        '{"identity": {"a": 1.5}, "about": {}}',
        '{"identity": {"a": NaN}, "about": {}}',
        '{"identity": {"a": ' + "[" * 500 + "]" * 500 + '}, "about": {}}',
        "[" * 1_000_000,
        " " * 2_000_000,
        b"\xff\xfe",
    ],
)
def test_what_is_not_a_document_is_refused_with_one_sentence(text: str | bytes) -> None:
    with pytest.raises(IdentityError) as caught:
        Identity.from_json(text)
    assert "\n" not in str(caught.value)


def test_altered_and_misplaced_documents_are_refused() -> None:
    text = served().to_json()
    altered = text.replace('"page_tokens": 256', '"page_tokens": 128')
    assert altered != text
    with pytest.raises(IdentityError, match=served().id):
        Identity.from_json(altered)
    with pytest.raises(IdentityError, match="ffff"):
        Identity.from_json(text, "f" * 32)


@pytest.mark.parametrize("value", [1.5, b"x", {1: 2}, {"a": {1, 2}}, object()])
def test_values_json_cannot_keep_are_refused_with_their_path(value: object) -> None:
    with pytest.raises(IdentityError, match=r"engine\.deep"):
        served(engine={"deep": value})


def test_impossible_page_size_is_refused() -> None:
    with pytest.raises(IdentityError, match="0 tokens"):
        served(page_tokens=0)


def test_diff_names_each_differing_field() -> None:
    other = served(
        kv_dtype="float8_e4m3fn",
        engine={"quantization": "fp8", "extra": {}},
        pools={**SERVED["pools"], "kv": dataclasses.replace(KV, pieces=(131072,))},
        draft=None,
    )
    found = {entry.path: (entry.a, entry.b) for entry in diff(served(), other)}
    assert found == {
        "draft": (ABSENT, None),
        "draft.algorithm": ("EAGLE", ABSENT),
        "draft.weights": ("sampled:77", ABSENT),
        "engine.extra": (ABSENT, {}),
        "kv_dtype": ("bfloat16", "float8_e4m3fn"),
        "pools.kv.pieces": ([65536, 65536], [131072]),
    }
    assert diff(served(), served(about={"x": "y"})) == []
    assert [entry.path for entry in diff(Identity.of({"a": True}), Identity.of({"a": 1}))] == ["a"]


@pytest.mark.parametrize(
    ("coordinates", "label"),
    [
        ({}, ""),
        ({"tp": 1, "pp": 0}, "tp1.pp0"),
        ({"pp": 0, "tp": 1}, "tp1.pp0"),
        ({"dp": 3, "dcp": 2, "cp": 1, "pp": 0, "tp": 15}, "tp15.pp0.cp1.dcp2.dp3"),
    ],
)
def test_shard_labels(coordinates: dict[str, int], label: str) -> None:
    assert shard_label(coordinates) == label


@given(
    st.dictionaries(st.sampled_from(["tp", "pp", "cp", "dcp", "dp"]), st.integers(0, 9)),
    st.dictionaries(st.sampled_from(["tp", "pp", "cp", "dcp", "dp"]), st.integers(0, 9)),
)
def test_two_shards_never_share_a_label(a: dict[str, int], b: dict[str, int]) -> None:
    assert (shard_label(a) == shard_label(b)) == (a == b)


@pytest.mark.parametrize(
    "coordinates",
    [{"ep": 0}, {"tp": -1}, {"tp": True}, {"tp": 10**6, "pp": 10**6, "cp": 10**6}],
)
def test_impossible_shards_are_refused(coordinates: dict[str, int]) -> None:
    with pytest.raises(IdentityError):
        shard_label(coordinates)


scalars = st.none() | st.booleans() | st.integers() | st.text()
documents = st.dictionaries(
    st.text(),
    st.recursive(
        scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12
    ),
)


@given(documents, documents)
def test_equal_documents_and_only_these_have_equal_ids(a: Any, b: Any) -> None:
    same = json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    one, two = Identity.of(a), Identity.of(b)
    assert (one.id == two.id) == same
    assert (diff(one, two) == []) == same
    assert Identity.from_json(one.to_json(), one.id) == one
