"""`kvtier pin`, `unpin` and `wipe` as commands, on stores with sessions that share a head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from making import KV, contents, fresh_index, get, identity, keys, opened, put
from test_cli import SIZE, files, kvtier

from kvtier.pages import Link

HEAD = keys("head", 10)
ONE, TWO = keys("one", 20), keys("two", 20)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sessions below a common head, and a page of another model."""
    with opened(tmp_path) as (store, namespace):
        put(namespace, HEAD, contents(HEAD, SIZE))
        for own in (ONE, TWO):
            put(namespace, own, contents(own, SIZE), link=Link(HEAD[-1], 10))
            assert store.flush(60)
        other = store.namespace(identity("other"))
        put(other, HEAD[:1], contents(HEAD[:1], SIZE))
        assert store.flush(60)
    return tmp_path


def _there(root: Path) -> dict[str, int]:
    found = json.loads(kvtier("inspect", "--json", root).stdout)
    return {n["id"]: n["pages"] for n in found["namespaces"]}


def test_a_wiped_session_leaves_what_others_share(root: Path) -> None:
    before = _there(root)
    done = kvtier("wipe", "--session", ONE[-1].hex()[:12], "--yes", "--json", root)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["pages"] == 20 and answer["after_bytes"] < answer["before_bytes"]
    mine = identity().id
    assert _there(root) == before | {mine: 30}
    with opened(root) as (_, namespace):
        assert namespace.contains(KV, HEAD + TWO).all() and not namespace.contains(KV, ONE).any()
        assert get(namespace, HEAD + TWO, SIZE) == contents(HEAD + TWO, SIZE)
    # A rebuild from the manifests alone doesn't revive it.
    assert len(fresh_index(root / "kvtier")) == 31


def test_a_wiped_namespace_and_everything(root: Path) -> None:
    other = identity("other").id
    assert kvtier("wipe", "--namespace", other[:8], "--yes", root).returncode == 0
    assert _there(root)[other] == 0 and _there(root)[identity().id] == 50
    done = kvtier("wipe", "--all", "--yes", root)
    assert "Forgot 50 pages" in done.stdout
    assert set(_there(root).values()) == {0}
    assert not list((root / "kvtier" / "segments").glob("*.kvs"))


def test_a_wipe_asks_before_and_a_dry_run_changes_nothing(root: Path) -> None:
    before = files(root)
    done = kvtier("wipe", "--all", "--dry-run", root)
    assert done.returncode == 0 and "Would forget 51 pages" in done.stdout
    refused = kvtier("wipe", "--all", root, stdin="n\n")
    assert refused.returncode == 1 and "Forget 51 pages" in refused.stderr
    silent = kvtier("wipe", "--all", root)
    assert silent.returncode == 2 and "nothing is forgotten: give --yes" in silent.stderr
    assert files(root) == before
    assert kvtier("wipe", "--all", root, stdin="y\n").returncode == 0
    assert set(_there(root).values()) == {0}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["wipe"], "one of --session KEY, --namespace ID and --all"),
        (["wipe", "--all", "--namespace", "ab"], "one of --session KEY, --namespace ID and --all"),
        (["wipe", "--session", "zz"], "No sessions have a key that begins with 'zz'"),
        (["wipe", "--namespace", "zz"], "No namespaces with pages"),
        (["pin", "zz"], "No sessions have a key that begins with 'zz'"),
        (["unpin", "ab"], "No pins have a key that begins with 'ab'"),
    ],
)
def test_mistakes_are_one_sentence(root: Path, words: list[str], says: str) -> None:
    done = kvtier(*words, root)
    assert done.returncode == 2 and says in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_pinned_session_goes_last(root: Path) -> None:
    """The older session is pinned: the newer one gives way, and after that the pinned one."""
    assert kvtier("pin", ONE[-1].hex()[:16], root).returncode == 0
    shown = json.loads(kvtier("inspect", "--json", root).stdout)
    [mine] = [n for n in shown["namespaces"] if n["id"] == identity().id]
    assert {s["key"]: s["pinned"] for s in mine["sessions"]} == {
        ONE[-1].hex(): True,
        TWO[-1].hex(): False,
    }
    limit = shown["disk_bytes"] - (1 << 20) - 15 * SIZE  # its ballast goes before any page
    assert kvtier("gc", "--limit", str(limit), "--yes", root).returncode == 0
    with opened(root) as (_, namespace):
        assert namespace.contains(KV, HEAD + ONE).all()
        assert not namespace.contains(KV, TWO).all()
    assert kvtier("unpin", ONE[-1].hex()[:16], root).returncode == 0
    assert not list((root / "kvtier" / "pins").iterdir())
    kvtier("gc", "--limit", "0", "--yes", root)
    assert set(_there(root).values()) == {0}


def test_pinned_sessions_go_when_nothing_else_is_left(root: Path) -> None:
    kvtier("pin", ONE[-1].hex()[:16], root)
    kvtier("gc", "--limit", "0", "--yes", root)
    assert set(_there(root).values()) == {0}


def test_a_pin_that_does_not_fit_is_refused_with_the_numbers(root: Path) -> None:
    done = kvtier("pin", ONE[-1].hex()[:16], root, KVTIER_LIMIT="400K")
    assert done.returncode == 2
    assert "600 KB" in done.stderr and "400 KB (limit)" in done.stderr
    assert not (root / "kvtier" / "pins").exists()


def test_a_wiped_session_is_no_longer_pinned(root: Path) -> None:
    kvtier("pin", ONE[-1].hex()[:16], root)
    kvtier("wipe", "--session", ONE[-1].hex()[:16], "--yes", root)
    assert not list((root / "kvtier" / "pins").iterdir())


def test_a_wipe_beside_a_running_server_says_what_to_do(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, namespace):
        anchored = store.namespace(identity(), KV)
        put(anchored, HEAD, contents(HEAD, SIZE))
        assert store.flush(60)
        done = kvtier("wipe", "--all", "--yes", tmp_path, KVTIER_GRACE="0.1")
        assert done.returncode == 0 and "POST /flush_cache" in done.stdout
        # It notices without being told, and does not build on what is gone.
        store.index.refresh()
        assert not namespace.contains(KV, HEAD).any()
        assert not put(anchored, ONE, contents(ONE, SIZE), link=Link(HEAD[-1], 10)).any()
        # Once the head is computed and stored again, so is what follows.
        assert put(anchored, HEAD, contents(HEAD, SIZE)).all()
        assert put(anchored, ONE, contents(ONE, SIZE), link=Link(HEAD[-1], 10)).all()
        assert store.flush(60)
        assert get(namespace, HEAD + ONE, SIZE) == contents(HEAD + ONE, SIZE)
