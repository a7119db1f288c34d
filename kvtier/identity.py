"""The identity of a namespace: all that must match for stored bytes to be interchangeable.

The document is readable JSON; the hash of its canonical form is the namespace's id.
docs/identity.md says what belongs in it and why.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from kvtier.errors import IdentityError
from kvtier.format import FORMAT_VERSION

Json: TypeAlias = "str | int | bool | Sequence[Json] | Mapping[str, Json] | None"
"""What a document holds. No floats: they have several spellings, so write them as strings."""

ID_BYTES = 16
MAX_JSON_CHARACTERS = 1 << 20
"""A longer text is not a document of ours; real ones have about 2,000 characters."""

MAX_DEPTH = 16

AXES = ("tp", "pp", "cp", "dcp", "dp")
"""Rank coordinates in the order of a shard's label: tensor (within the attention group), pipeline,
attention context, decode context, data (SGLang 0.5.23, HiCacheStorageConfig)."""

MAX_LABEL = 24


class _Absent:
    """Stands in a difference for a field that one document lacks."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


class Difference(NamedTuple):
    """A field in which two documents differ: its dotted path and both values, ABSENT if missing."""

    path: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Weights:
    """A model's weights: the fingerprint's mode and digest (see kvtier/fingerprint.py)."""

    mode: str
    digest: str


@dataclass(frozen=True)
class PoolLayout:
    """How one page of one host pool lies in memory, the same on every rank of the server.

    `pieces`: bytes of each piece of a page in order (SGLang's get_page_buffer_meta); empty for a
    pool without bytes. None where ranks differ, as with unequal pipeline stages: then say what
    divides them (layers of each stage) in `engine`, so that all ranks build the same document.
    `sharded_by`: the axes along which ranks hold different bytes; empty for a replicated pool.
    `trailing`: needed at a boundary only.
    `dtype` and `layout` are the engine's own words, such as "float8_e4m3fn" and "page_first".
    """

    pieces: tuple[int, ...] | None
    dtype: str
    layout: str
    sharded_by: tuple[str, ...] = ()
    trailing: bool = False

    def to_document(self) -> dict[str, Json]:
        return {
            "part_bytes": None if self.pieces is None else sum(self.pieces),
            "pieces": None if self.pieces is None else list(self.pieces),
            "dtype": self.dtype,
            "layout": self.layout,
            "sharded_by": list(self.sharded_by),
            "trailing": self.trailing,
        }


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes that decide how a page's bytes are cut over ranks; never a rank's own number.

    `tp`: ranks of the tensor-parallel group. `attn_tp`: ranks that one page's heads are cut over
    (tp without data-parallel attention). `pp`: pipeline stages. `attn_cp`, `dcp`: context
    parallel ranks of prefill attention and of decode. `dp_attention`: attention is data parallel.
    The number of data-parallel replicas is left out, since each computes the same pages.
    """

    tp: int = 1
    attn_tp: int = 1
    pp: int = 1
    attn_cp: int = 1
    dcp: int = 1
    dp_attention: bool = False

    def to_document(self) -> dict[str, Json]:
        return dict(vars(self))


@dataclass(frozen=True)
class Attention:
    """What computes the cached bytes.

    `backend`: the attention backend's name. `compression_ratios`: of each layer or pool, where the
    model compresses its cache. `replay`: how state that isn't stored is recomputed at a boundary
    (bounded encoder replay, decoder replay), None if the model has no such state.
    """

    backend: str
    compression_ratios: tuple[int, ...] = ()
    replay: str | None = None

    def to_document(self) -> dict[str, Json]:
        return {
            "backend": self.backend,
            "compression_ratios": list(self.compression_ratios),
            "replay": self.replay,
        }


@dataclass(frozen=True)
class Identity:
    """A frozen identity document.

    `canonical`: the document as JSON with sorted keys and no blanks, in ASCII: what is hashed.
    `about`: what helps a person (model path, served name); it is kept beside the document and
    counts neither for the id nor for equality.
    """

    canonical: bytes
    about: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, document: Mapping[str, Json], about: Mapping[str, str] | None = None) -> Identity:
        """The identity with this document. Raises IdentityError for a value JSON can't keep."""
        text = json.dumps(_plain(document, ()), sort_keys=True, separators=(",", ":"))
        return cls(text.encode("ascii"), dict(about or {}))

    @classmethod
    def build(
        cls,
        *,
        weights: Weights,
        kv_dtype: str,
        page_tokens: int,
        pools: Mapping[str, PoolLayout],
        parallel: ParallelSizes,
        memory_layout: str,
        attention: Attention,
        kv_scales: Mapping[str, Json] | None = None,
        draft: Mapping[str, Json] | None = None,
        engine: Mapping[str, Json] | None = None,
        about: Mapping[str, str] | None = None,
        format_version: int = FORMAT_VERSION,
    ) -> Identity:
        """The identity of a served model.

        What belongs: everything that changes the bytes of a cached page, or which bytes a page
        has, and nothing that differs between two runs of the same model; docs/identity.md lists
        both. `kv_scales`: how the KV cache is quantised and where its scales come from. `draft`:
        the draft model's weights and algorithm, where its pools are stored. `engine`: whatever
        else of the engine changes bytes, compared exactly (weight quantisation chosen at load,
        model dtype, overrides of the model's config, layers of each pipeline stage, version of
        the engine's own layout).

        Raises IdentityError for an impossible value.
        """
        if page_tokens < 1:
            raise IdentityError(f"A page of {page_tokens} tokens is impossible: give 1 or more.")
        document: dict[str, Json] = {
            "format": format_version,
            "weights": dict(vars(weights)),
            "kv_dtype": kv_dtype,
            "kv_scales": kv_scales,
            "page_tokens": page_tokens,
            "pools": {name: pool.to_document() for name, pool in pools.items()},
            "parallel": parallel.to_document(),
            "memory_layout": memory_layout,
            "attention": attention.to_document(),
            "draft": draft,
            "engine": engine or {},
        }
        return cls.of(document, about)

    @property
    def id_bytes(self) -> bytes:
        """The namespace's 16-byte id: the head of the SHA-256 of the canonical document."""
        return hashlib.sha256(self.canonical).digest()[:ID_BYTES]

    @property
    def id(self) -> str:
        """The id as 32 hex digits."""
        return self.id_bytes.hex()

    @property
    def document(self) -> dict[str, Any]:
        """A copy of the document."""
        return dict(json.loads(self.canonical))

    def to_json(self) -> str:
        """The document with its id and `about`, indented for a person; `from_json` reads it."""
        whole = {"id": self.id, "about": dict(self.about), "identity": self.document}
        return json.dumps(whole, indent=2, sort_keys=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, expected_id: str | None = None) -> Identity:
        """The identity that `to_json` wrote.

        Raises IdentityError if the text is not such a document, or its content has another id
        than the one it states or than `expected_id`.
        """
        whole = _parsed(text)
        if not isinstance(whole, dict) or not isinstance(whole.get("identity"), dict):
            raise IdentityError("This is not an identity document: it has no object `identity`.")
        about = whole.get("about")
        if not isinstance(about, dict) or not all(isinstance(v, str) for v in about.values()):
            raise IdentityError("This is not an identity document: `about` is not made of strings.")
        identity = cls.of(whole["identity"], about)
        for expected in (whole.get("id"), expected_id or identity.id):
            if expected != identity.id:
                raise IdentityError(
                    f"The identity document should have the id {expected} and has {identity.id}: "
                    "it was altered or misplaced, restore or remove the file."
                )
        return identity

    @property
    def page_tokens(self) -> int:
        """Tokens of a page; 0 if the document does not say."""
        tokens = self.document.get("page_tokens")
        return tokens if isinstance(tokens, int) else 0


def stored_identity(folder: Path, namespace: str) -> Identity:
    """The document of a namespace in a store's `folder` of documents. IdentityError if there is
    none that can be trusted."""
    path = folder / f"{namespace}.json"
    try:
        return Identity.from_json(path.read_bytes(), expected_id=namespace)
    except OSError as error:
        raise IdentityError(
            f"Cannot read {path}: {error.strerror}; the next start of its server writes it anew."
        ) from error


def diff(a: Identity, b: Identity) -> list[Difference]:
    """The fields in which two identities differ, by dotted path, sorted. Lists count as a whole."""
    flat_a, flat_b = dict(_fields(a.document, ())), dict(_fields(b.document, ()))
    return [
        Difference(".".join(path), flat_a.get(path, ABSENT), flat_b.get(path, ABSENT))
        for path in sorted(flat_a.keys() | flat_b.keys())
        if _spelling(flat_a.get(path, ABSENT)) != _spelling(flat_b.get(path, ABSENT))
    ]


def shard_label(coordinates: Mapping[str, int]) -> str:
    """The label of a rank-sharded pool's shard: {"tp": 1, "pp": 0} is "tp1.pp0".

    Give only the coordinates along which the pool's bytes differ and whose size is above 1; none
    for a replicated pool, whose label is "". The order is that of AXES, whatever the mapping's.
    Raises IdentityError for an unknown axis, a negative rank, or more than 24 characters.
    """
    for axis, rank in coordinates.items():
        if axis not in AXES or isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise IdentityError(
                f"{axis}={rank!r} is no rank coordinate: known axes are {', '.join(AXES)}, "
                "ranks count from 0."
            )
    label = ".".join(f"{axis}{coordinates[axis]}" for axis in AXES if axis in coordinates)
    if len(label) > MAX_LABEL:
        raise IdentityError(f"The shard label {label} has more than {MAX_LABEL} characters.")
    return label


def _plain(value: object, path: tuple[str, ...]) -> Any:
    """`value` in dicts and lists only; IdentityError, naming the path, if JSON can't keep it."""
    where = ".".join(path) or "document"
    if len(path) > MAX_DEPTH:
        raise IdentityError(f"The identity's {where} is nested too deeply: flatten it.")
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise IdentityError(f"The identity's {where} has the key {key!r}: use text.")
        return {key: _plain(item, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, str(index))) for index, item in enumerate(value)]
    raise IdentityError(
        f"The identity's {where} is {value!r}: use text, whole numbers, booleans, lists or objects "
        "(write a fraction as text)."
    )


def _parsed(text: str | bytes) -> object:
    if len(text) > MAX_JSON_CHARACTERS:
        raise IdentityError("This is not an identity document: it has more than 1 Mi characters.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IdentityError(f"This is not an identity document: {error}.") from None


def _fields(value: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """Every leaf below `value` with its path; an empty object is a leaf."""
    if not isinstance(value, dict) or not value:
        return [(path, value)]
    return [leaf for key, item in value.items() for leaf in _fields(item, (*path, key))]


def _spelling(value: Any) -> str:
    """`value` as JSON, so that true and 1 differ."""
    return repr(value) if value is ABSENT else json.dumps(value, sort_keys=True)
