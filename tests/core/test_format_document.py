"""docs/format.md says what the code does, and is enough to read a store."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import pytest
import xxhash
from making import KV, contents, identity, keys, opened, put, store_of

from kvtier import format as f
from kvtier import layout, pages, snapshot
from kvtier.pages import Column

DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()

Rows = list[list[str]]
Record = dict[str, int | bytes]


def _tables() -> dict[str, Rows]:
    """Rows of the table below each heading that names something in code."""
    tables: dict[str, Rows] = {}
    heading = ""
    for line in DOCUMENT.splitlines():
        if line.startswith("#"):
            named = re.search(r"`(\w+)`$", line)
            heading = named[1] if named else line.strip("# ")
        elif line.startswith("|") and not line.startswith("|---"):
            tables.setdefault(heading, []).append([c.strip(" `") for c in line.split("|")[1:-1]])
    return {name: rows[1:] for name, rows in tables.items()}


TABLES = _tables()
STRUCTS = {
    name: value
    for module in (f, snapshot)
    for name, value in vars(module).items()
    if isinstance(value, struct.Struct)
}


def _sizes(layout_: struct.Struct) -> list[int]:
    text = layout_.format
    assert text[0] == "<"
    fields = re.findall(r"(\d*)([a-zA-Z])", text[1:])
    assert all(kind == "s" or not count for count, kind in fields)
    return [struct.calcsize("<" + count + kind) for count, kind in fields]


@pytest.mark.parametrize("name", STRUCTS)
def test_each_structure_has_its_table(name: str) -> None:
    rows = TABLES[name]
    sizes = [int(row[1]) for row in rows]
    assert sizes == _sizes(STRUCTS[name])
    assert [int(row[0]) for row in rows] == [sum(sizes[:n]) for n in range(len(sizes))]
    assert sum(sizes) == STRUCTS[name].size


@pytest.mark.parametrize("kind", [f.FrameType, f.RunFlag])
def test_each_number_has_its_row(kind: type[IntEnum]) -> None:
    rows = TABLES[kind.__name__]
    assert {row[1]: int(row[0]) for row in rows} == {member.name: member for member in kind}


def test_constants_are_those_of_the_code() -> None:
    for name, value, _ in TABLES["Constants"]:
        [found] = {vars(module)[name] for module in (f, pages) if name in vars(module)}
        assert found == int(value), name
    assert f"magic | `{f.FRAME_MAGIC.decode()}`" in DOCUMENT
    assert f"magic | `{snapshot.MAGIC.decode()}`" in DOCUMENT
    assert [row[0] for row in TABLES["ARRAYS"]] == list(snapshot.ARRAYS)


def test_every_file_of_a_store_is_in_the_document(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace):
        put(namespace, keys("a", 2), contents(keys("a", 2), 100))
        assert store.flush(60)
        store.index.save()
        writer = "[0-9a-f]{24}"
        names = {
            "kvtier.json",
            "lock",
            "gate",
            "index/snapshot",
            "index/doorbell",
            "index/ballast",
            "index/quota",
            f"index/status-{writer}.json",
            f"namespaces/{namespace.id}.json",
            rf"segments/{writer}-\d+\.kvs",
            rf"segments/{writer}-\d+\.kvm",
        }
        found = {
            str(path.relative_to(store.root))
            for path in store.root.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        }
        for name in found:
            assert any(re.fullmatch(pattern, name) for pattern in names), name
    for folder in (layout.SEGMENTS, layout.NAMESPACES, layout.INDEX):
        assert f"  {folder}/" in DOCUMENT


# A reader made of the document's tables alone.


def _record(name: str, data: bytes, at: int) -> tuple[Record, int]:
    """Fields of a structure by the names in its table, and where it ends."""
    record: Record = {}
    for offset, size, field, _ in TABLES[name]:
        start = at + int(offset)
        raw = data[start : start + int(size)]
        if field in ("magic", "segment", "store", "namespace", "parent", "key"):
            record[field] = raw
        elif field != "reserved":
            record[field] = int.from_bytes(raw, "little")
        else:
            assert not any(raw)
    return record, at + sum(int(row[1]) for row in TABLES[name])


def _number(record: Record, field: str) -> int:
    value = record[field]
    assert isinstance(value, int)
    return value


def _bytes(record: Record, field: str) -> bytes:
    value = record[field]
    assert isinstance(value, bytes)
    return value


def _frames(manifest: bytes) -> Iterator[tuple[str, bytes]]:
    types = {int(row[0]): row[1] for row in TABLES["FrameType"]}
    at = 0
    while at < len(manifest):
        head, end = _record("FRAME_HEADER", manifest, at)
        body = manifest[end : end + _number(head, "body bytes")]
        blank = manifest[at : end - 8] + bytes(8)
        assert head["checksum"] == xxhash.xxh3_64_intdigest(blank + body)
        yield types[_number(head, "type")], body
        at = -(-(end + len(body)) // 8) * 8


def _parts(body: bytes, payload: bytes) -> Iterator[tuple[bytes, int, bytes, bytes]]:
    """(namespace, column, key, bytes) of every part of a run."""
    run, at = _record("RUN_HEADER", body, 0)
    count = _number(run, "pages")
    page_keys = [body[at + 32 * n : at + 32 * (n + 1)] for n in range(count)]
    at += 32 * count
    blocks = []
    for _ in range(_number(run, "blocks")):
        block, at = _record("BLOCK", body, at)
        blocks.append(block)
    namespace = _bytes(run, "namespace")
    for block in blocks:
        column = _number(block, "column")
        about = namespace + column.to_bytes(8, "little")
        size, start = _number(block, "part bytes"), _number(block, "offset")
        whole = payload[start : start + size * count]
        seed = xxhash.xxh3_64_intdigest(about + b"".join(page_keys))
        assert not size or block["checksum"] == xxhash.xxh3_64_intdigest(whole, seed)
        for number, key in enumerate(page_keys):
            part = whole[number * size : (number + 1) * size]
            if size:
                seed = xxhash.xxh3_64_intdigest(about + key)
                stored = int.from_bytes(body[at : at + 8], "little")
                assert stored == xxhash.xxh3_64_intdigest(part, seed)
                at += 8
            yield namespace, column, key, part
    assert at == len(body)


def test_the_document_is_enough_to_read_a_store(tmp_path: Path) -> None:
    chain = keys("read", 20)
    sizes = {KV: 5000, Column("anchor"): 0, Column("swa", "tp0"): 70}
    with opened(tmp_path) as (store, namespace):
        for column, size in sizes.items():
            put(namespace, chain, contents(chain, size, column), column, window=int(size == 70))
        assert store.flush(60)
    found: dict[tuple[bytes, int, bytes], bytes] = {}
    names: dict[int, tuple[str, str]] = {}
    kinds: dict[str, int] = defaultdict(int)
    for manifest in (store_of(tmp_path) / "segments").glob("*.kvm"):
        payload = manifest.with_suffix(".kvs").read_bytes()
        for kind, body in _frames(manifest.read_bytes()):
            kinds[kind] += 1
            if kind == "RUN":
                for owner, ident, key, part in _parts(body, payload):
                    found[owner, ident, key] = part
            elif kind == "COLUMNS":
                head, at = _record("COLUMN_HEADER", body, 0)
                for _ in range(_number(head, "entries")):
                    entry, at = _record("COLUMN_ENTRY", body, at)
                    pool_end = at + _number(entry, "pool bytes")
                    end = pool_end + _number(entry, "shard bytes")
                    names[_number(entry, "column")] = (
                        body[at:pool_end].decode(),
                        body[pool_end:end].decode(),
                    )
                    at = end
    assert kinds["RUN"] >= 2
    assert set(names.values()) == {tuple(column) for column in sizes}
    for ident, (pool, shard) in names.items():
        assert ident == xxhash.xxh3_64_intdigest(f"{pool}\0{shard}".encode())
    expected = {
        (identity().id_bytes, f.column_id(column), key): part
        for column, size in sizes.items()
        for key, part in zip(chain, contents(chain, size, column), strict=True)
    }
    assert found == expected
