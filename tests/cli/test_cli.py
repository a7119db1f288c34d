"""The commands as people type them: real processes, real stores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from making import KV, contents, files, identity, keys, opened, put

from kvtier.deletion import BALLAST_BYTES
from kvtier.identity import Identity
from kvtier.limits import Space
from kvtier.pages import Column, Link
from kvtier.status import StatusFile

SIZE = 20_000


def kvtier(
    *words: str | Path, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command; its output has no line breaks of a narrow terminal."""
    return subprocess.run(
        [sys.executable, "-c", "from kvtier.cli import main; main()", *map(str, words)],
        capture_output=True,
        input=stdin,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


@pytest.mark.parametrize("drive", ["5G", "5GB", "5GB/s"])
def test_a_plan_takes_a_rate_as_people_write_it(drive: str) -> None:
    done = kvtier("plan", "rtxpro-mixed", "--drive", drive)
    assert "read the session at 5.00 GB/s" in done.stdout


@pytest.mark.parametrize("drive", ["0", "5", "5K/s"])
def test_a_plan_refuses_a_rate_that_no_drive_has(drive: str) -> None:
    done = kvtier("plan", "rtxpro-mixed", "--drive", drive)
    assert done.returncode == 2 and "give bytes a second, such as 5G" in done.stderr
    _no_traceback(done)


def _no_traceback(done: subprocess.CompletedProcess[str]) -> None:
    assert "Traceback" not in done.stdout + done.stderr


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store of two sessions of one model."""
    with opened(tmp_path) as (store, namespace):
        head = keys("head", 10)
        put(namespace, head, contents(head, SIZE))
        for number in range(2):
            own = keys(number, 20)
            put(namespace, own, contents(own, SIZE), link=Link(head[-1], 10))
            assert store.flush(60)
    return tmp_path


def _with_identity(root: Path, **changes: object) -> Identity:
    named = Identity.of(
        {"kv_dtype": "bfloat16", "page_tokens": 16, **changes},  # type: ignore[dict-item]
        {"model_path": "/models/tiny"},
    )
    from making import settings

    from kvtier.store import Store

    store = Store.open(settings(root))
    namespace = store.namespace(named)
    chain = keys(str(changes), 8)
    put(namespace, chain, contents(chain, SIZE))
    store.close()
    return named


def test_inspect_shows_what_is_there(root: Path) -> None:
    named = _with_identity(root)
    done = kvtier("inspect", root)
    assert done.returncode == 0, done.stderr
    assert "healthy" in done.stdout
    assert f"namespace {named.id}  /models/tiny  bfloat16, 16 tokens a page" in done.stdout
    assert "8 pages (128 tokens, 160 KB); restorable 8 pages, 160 KB" in done.stdout
    found = json.loads(kvtier("inspect", "--json", root / "kvtier").stdout)
    sizes = {n["id"]: (n["pages"], n["restorable_pages"]) for n in found["namespaces"]}
    assert sizes == {identity().id: (50, 50), named.id: (8, 8)}
    [session] = next(n for n in found["namespaces"] if n["id"] == named.id)["sessions"]
    assert (session["tokens"], session["restorable_tokens"]) == (128, 128)
    assert session["key"] == keys("{}", 8)[-1].hex()
    payload = sum(n["bytes"] for n in found["namespaces"])
    assert payload == 58 * SIZE
    walked = sum(path.lstat().st_blocks * 512 for path in (root / "kvtier").rglob("*"))
    assert found["disk_bytes"] == walked + (root / "kvtier").stat().st_blocks * 512


def test_inspect_of_one_session(root: Path) -> None:
    named = _with_identity(root)
    wanted = keys("{}", 8)[-1].hex()
    done = kvtier("inspect", "--session", wanted[:12].upper(), "--json", root)
    assert json.loads(done.stdout)["namespace"] == named.id
    done = kvtier("inspect", "--session", "zz", root)
    assert done.returncode == 2 and "No sessions have a key that begins with 'zz'" in done.stderr


def test_inspect_says_in_what_namespaces_differ(root: Path) -> None:
    a, b = _with_identity(root), _with_identity(root, kv_dtype="fp8_e4m3")
    done = kvtier("inspect", "--diff", a.id[:8], b.id[:8], "--json", root)
    assert json.loads(done.stdout) == [{"field": "kv_dtype", "a": "bfloat16", "b": "fp8_e4m3"}]
    done = kvtier("inspect", "--diff", a.id[:8], b.id[:8], root)
    assert "kv_dtype" in done.stdout and "fp8_e4m3" in done.stdout


NASTY = {
    "/models/[fp8]/x": "/models/[fp8]/x",
    "/models/[/]": "/models/[/]",
    "/models/[red]:heart:\\[bold]\\": "/models/[red]:heart:\\[bold]\\",
    "/m/\x1b[31m\x1b]0;title\x07": r"/m/\x1b[31m\x1b]0;title\x07",
    "/m/line\n\rline\u2028\x85": r"/m/line\n\rline\u2028\x85",
    os.fsdecode(b"/m/\xff"): r"/m/\udcff",
    "/m/\u202egnp.exe\u2066": r"/m/\u202egnp.exe\u2066",
    "/m/모델-é": "/m/모델-é",
}
"""What a model's path may be, and how it is shown."""


@pytest.mark.parametrize("given", list(NASTY))
def test_text_from_outside_is_shown_as_it_is_and_does_nothing(tmp_path: Path, given: str) -> None:
    shown = NASTY[given]
    root = tmp_path / given.replace("/", "_")
    document = {"kv_dtype": given, "page_tokens": 16}
    nasty = Identity.of(document, {"model_path": given})  # type: ignore[arg-type]
    with opened(root) as (store, _):
        namespace = store.namespace(nasty)
        chain = keys("chain", 3)
        pool = given if given.isascii() else "kv"  # the engine's names of pools are ASCII
        put(namespace, chain, contents(chain, 100), Column(pool, pool))
        assert store.flush(60)
        other = Identity.of({"kv_dtype": "x", "page_tokens": 16}, {})
        put(store.namespace(other), chain, contents(chain, 100))
        assert store.flush(60)
        status = {"uncommitted_bytes": 0, "uncommitted_tokens": 0, "uncommitted_seconds": 0.0}
        more = {"failures": 0, "reads_stopped": given, "writes_stopped": ""}
        said = StatusFile(store.layout, "nasty")
        said.write(**status, **more)
        (store.root / f"foreign{given.replace('/', '_')}").write_bytes(b"x")
        done = kvtier("inspect", root, COLUMNS="400")
        said.close()
    assert done.returncode == 0, done.stderr
    assert f"{shown}  {shown}, 16 tokens a page" in done.stdout
    assert f"pools {NASTY.get(pool, pool)}; shards {NASTY.get(pool, pool)}" in done.stdout
    assert f"no reads for now: {shown}" in done.stdout
    folder = shown.replace("/", "_")
    assert f"files kvtier did not make: foreign{folder}" in done.stdout
    assert done.stdout.startswith(f"{tmp_path}/{folder}/kvtier  store ")
    done = kvtier("inspect", "--diff", nasty.id, other.id, root, COLUMNS="400")
    assert done.returncode == 0 and shown in done.stdout
    for words in (["limit"], ["fsck"], ["gc", "--dry-run"], ["wipe", "--all", "--yes"]):
        done = kvtier(*words, root, COLUMNS="400")
        assert done.returncode == 0, done.stderr
        # The table's title is as wide as the table.
        assert words != ["limit"] or f"{folder}/kvtier" in done.stdout.replace("\n", "")
    done = kvtier("limit", tmp_path / "none" / given.replace("/", "_"))
    assert done.returncode == 2 and f"none/{folder}" in done.stderr
    assert done.stderr.count("\n") == 1
    _no_traceback(done)


def test_inspect_changes_nothing(root: Path) -> None:
    before = files(root)
    for words in (["inspect", root], ["inspect", "--json", root], ["fsck", root]):
        assert kvtier(*words).returncode in (0, 1)
    assert files(root) == before


def test_inspect_beside_a_running_server(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace):
        chain = keys("chain", 30)
        put(namespace, chain, contents(chain, SIZE))
        assert store.flush(60)
        found = json.loads(kvtier("inspect", "--json", tmp_path).stdout)
        assert found["live_writers"] == 1
        assert found["namespaces"][0]["pages"] == 30
        done = kvtier("gc", "--limit", "400K", "--yes", "--json", tmp_path, KVTIER_GRACE="0.1")
        assert done.returncode == 0, done.stderr
        store.index.refresh()
        left = int(namespace.contains(KV, chain).sum())
        assert 0 < left < 30 and namespace.contains(KV, chain)[:left].all()


def test_gc_brings_a_store_under_its_limit(root: Path) -> None:
    before = json.loads(kvtier("inspect", "--json", root).stdout)["disk_bytes"]
    share = json.loads(kvtier("gc", "--limit", "50%", "--dry-run", "--json", root).stdout)
    assert share["limit_bytes"] == Space.of(root).size // 2
    limit = before - BALLAST_BYTES - 15 * SIZE  # so small a limit gives the ballast up first
    dry = json.loads(kvtier("gc", "--limit", str(limit), "--dry-run", "--json", root).stdout)
    assert dry["pages"] > 0 and dry["dry_run"]
    assert json.loads(kvtier("inspect", "--json", root).stdout)["disk_bytes"] == before
    done = kvtier("gc", "--limit", str(limit), "--yes", root)
    assert done.returncode == 0 and done.stdout.startswith("Freed ")
    after = json.loads(kvtier("inspect", "--json", root).stdout)
    assert after["disk_bytes"] <= limit
    [namespace] = after["namespaces"]
    assert namespace["restorable_pages"] == namespace["pages"] < 50


def test_gc_says_when_foreign_files_keep_it_from_the_limit(root: Path) -> None:
    (root / "kvtier" / "theirs.bin").write_bytes(b"x" * 100_000)
    done = kvtier("gc", "--limit", "50K", "--yes", root)
    assert done.returncode == 1 and "foreign files" in done.stdout
    assert (root / "kvtier" / "theirs.bin").stat().st_size == 100_000
    assert "theirs.bin" in kvtier("inspect", root).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gc", "--limit", "10Q"], "unknown unit 'Q'"),
        (["gc", "--limit", "much"], "much"),
        (["gc", "--limit", "120%"], "'120%' is not a share"),
        (["gc", "--limit", "-5G"], "-5G"),
        (["inspect", "--diff", "1", "2"], "namespaces have an id that begins with '1'"),
        (["frob"], "No such command"),
    ],
)
def test_mistakes_get_a_sentence(root: Path, words: list[str], said: str) -> None:
    done = kvtier(*words, *([] if words == ["frob"] else [root]))
    assert done.returncode == 2
    assert said in done.stderr
    _no_traceback(done)


@pytest.mark.parametrize("command", [["inspect"], ["gc", "--limit", "1G"], ["fsck"]])
@pytest.mark.parametrize("kind", ["missing", "empty", "foreign", "file", "newer", "broken"])
def test_no_command_stumbles_over_a_bad_directory(
    tmp_path: Path, command: list[str], kind: str
) -> None:
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("no directory")
    elif kind != "missing":
        place.mkdir()
        (place / "kvtier").mkdir()
        text = {
            "foreign": None,
            "empty": None,
            "newer": '{"format": 99, "store": "' + "00" * 16 + '"}',
            "broken": "{",
        }[kind]
        if kind == "foreign":
            (place / "kvtier" / "holiday.jpg").write_bytes(b"jpg")
        if text:
            (place / "kvtier" / "kvtier.json").write_text(text)
    before = files(tmp_path)
    done = kvtier(*command, place)
    assert done.returncode == 2
    assert done.stderr.startswith("kvtier: ") and done.stderr.count("\n") == 1
    _no_traceback(done)
    assert files(tmp_path) == before


def test_an_empty_store_is_no_mistake(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    done = kvtier("inspect", tmp_path)
    assert done.returncode == 0 and "healthy" in done.stdout
    assert kvtier("gc", "--limit", "1G", tmp_path).returncode == 0
    assert kvtier("fsck", "--verify-payload", "--rebuild-index", tmp_path).returncode == 0


def test_fsck_names_and_forgets_what_is_damaged(root: Path) -> None:
    _with_identity(root)
    (document,) = [
        p for p in (root / "kvtier/namespaces").glob("*.json") if identity().id in p.name
    ]
    clean = kvtier("fsck", "--verify-payload", root)
    assert clean.returncode == 0, clean.stdout
    segment = max((root / "kvtier/segments").glob("*.kvs"), key=lambda p: p.stat().st_size)
    with segment.open("r+b") as file:
        file.seek(3 * SIZE + 5)
        old = file.read(1)
        file.seek(3 * SIZE + 5)
        file.write(bytes([old[0] ^ 4]))
    assert kvtier("fsck", root).returncode == 0  # it doesn't read payload
    done = kvtier("fsck", "--verify-payload", "--json", root)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert [row["page"] for row in found["damaged"]] == [3]
    assert found["damaged"][0]["segment"] == segment.stem
    assert found["verified_bytes"] == 57 * SIZE
    again = json.loads(kvtier("fsck", "--verify-payload", "--json", root).stdout)
    assert again["clean"] and again["pages"] == found["pages"] - 1
    document.write_text(document.read_text().replace('"model"', '"modem"'))
    done = kvtier("fsck", root)
    assert done.returncode == 1 and "identity:" in done.stdout
    segment.write_bytes(segment.read_bytes()[:100])
    assert "truncated" in kvtier("fsck", root).stdout


def test_fsck_rebuilds_the_index(root: Path) -> None:
    snapshot = root / "kvtier/index/snapshot"
    before = json.loads(kvtier("inspect", "--json", root).stdout)["namespaces"]
    snapshot.write_bytes(b"nonsense")
    assert kvtier("fsck", "--rebuild-index", root).returncode == 0
    assert snapshot.stat().st_size > 1000
    assert json.loads(kvtier("inspect", "--json", root).stdout)["namespaces"] == before


def test_the_root_may_come_from_the_environment(root: Path) -> None:
    done = kvtier("inspect", KVTIER_ROOT=str(root))
    assert done.returncode == 0 and str(root / "kvtier") in done.stdout


@pytest.mark.parametrize("command", ["inspect", "gc", "fsck"])
def test_help_has_examples_one_a_line_at_80_columns(command: str) -> None:
    shown = kvtier(command, "--help", COLUMNS="80").stdout
    lines = [line.strip() for line in shown.partition("Examples:")[2].splitlines()]
    assert len([line for line in lines if line.startswith(f"• kvtier {command} ")]) >= 2


def test_a_reader_that_goes_away_is_no_fault(root: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "from kvtier.cli import main; main()", "inspect", root]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 1 and not done.stderr.strip()


def test_columns_of_shards_are_named(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace):
        chain = keys("chain", 3)
        for rank in range(2):
            put(namespace, chain, contents(chain, 100, rank), Column("kv", f"tp{rank}"))
        assert store.flush(60)
    assert "pools kv; shards tp0, tp1" in kvtier("inspect", tmp_path).stdout
