"""`kvtier limit` as people type it, on real stores."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from making import contents, keys, opened, put, until
from test_cli import SIZE, _no_traceback, kvtier

from kvtier.backends.local import disk_usage
from kvtier.deletion import BALLAST_BYTES
from kvtier.layout import Layout
from kvtier.limits import Amount, Limits
from kvtier.quota import Quota
from kvtier.status import statuses


@pytest.fixture
def store(tmp_path: Path) -> Layout:
    """An empty store."""
    return Layout.open(tmp_path / "kvtier", create=True)


def shown(store: Layout, *words: str, **environment: str) -> dict[str, object]:
    """What the command says of the store, for machines."""
    done = kvtier("limit", *words, "--json", store.path, **environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_without_limits(store: Layout) -> None:
    before = sorted(store.path.rglob("*"))
    found = shown(store)
    space = os.statvfs(store.path)
    assert found["file_system_bytes"] == space.f_blocks * space.f_frsize
    assert found["used_bytes"] == disk_usage(store.path)
    assert (found["limit"], found["limit_bytes"], found["limit_from"]) == (None, None, "default")
    assert (found["min_free"], found["min_free_from"]) == ("5%", "default")
    assert (found["daily_writes_bytes"], found["written_today_bytes"]) == (None, 0)
    assert found["cap_by"] == "min_free"
    done = kvtier("limit", store.path.parent)
    assert re.search(r"takes +[\d.]+ KB +of [\d.]+ [GT]B, by min_free", done.stdout)
    assert "each server's own settings count" in done.stdout
    assert sorted(store.path.rglob("*")) == before, "it only looked"


def test_where_a_limit_comes_from(store: Layout) -> None:
    found = shown(store, KVTIER_LIMIT="50M", KVTIER_GRACE="no number")
    assert (found["limit_bytes"], found["limit_from"]) == (50_000_000, "KVTIER_LIMIT")
    assert (found["cap_bytes"], found["cap_by"]) == (50_000_000, "limit")
    found = shown(store, "--set", "40M", KVTIER_LIMIT="50M", KVTIER_MIN_FREE="7%")
    assert (found["limit_bytes"], found["limit_from"]) == (40_000_000, "limits.json")
    assert (found["min_free"], found["min_free_from"]) == ("7%", "KVTIER_MIN_FREE")


def test_values_add_up_until_they_are_cleared(store: Layout) -> None:
    shown(store, "--set", "800G", "--min-free", "50M")
    shown(store, "--daily-writes", "500G")
    found = shown(store, "--set", "80%")
    assert (found["limit"], found["min_free"], found["daily_writes_bytes"]) == (
        "80%",
        "50M",
        500 * 10**9,
    )
    done = kvtier("limit", store.path)
    assert re.search(r"limit +[\d.]+ [GT]B \(80%\) +limits\.json", done.stdout)
    assert "own settings" not in done.stdout
    assert shown(store, "--clear")["limit"] is None
    assert not (store.path / "limits.json").exists()


def test_a_running_process_notices_and_its_writes_are_shown(store: Layout) -> None:
    now = [2_000_000_000.0]
    quota = Quota(store, Limits(Amount(10**7), Amount(0)), clock=lambda: now[0])
    assert quota.reserve(10**6)
    done = kvtier("limit", "--set", "1M", store.path)
    assert done.returncode == 0, done.stderr
    now[0] += 1
    assert not quota.reserve(4096)
    quota.close()
    quota = Quota(store, Limits(Amount(10**7), Amount(0)))
    assert quota.reserve(700_000)
    quota.spend(700_000)
    quota.close()
    assert shown(store)["written_today_bytes"] == 700_000


def test_what_a_running_server_goes_by_is_shown(tmp_path: Path) -> None:
    """It has a limit in its own settings, which nothing here knows of."""
    with opened(tmp_path, limit=50 * 10**6) as (server, _):
        until(lambda: any(s.cap_bytes for s in statuses(server.layout)), "it never said its cap")
        found = shown(server.layout)
        assert found["limit"] is None
        said = {"cap_bytes": 50 * 10**6, "cap_by": "limit"}
        assert found["processes"] == [{"pid": os.getpid(), "host": socket.gethostname(), **said}]
        done = kvtier("limit", tmp_path)
        assert re.search(rf"process {os.getpid()} +50\.0 MB +is its cap, by limit", done.stdout)
    assert shown(Layout.open(tmp_path / "kvtier", create=False))["processes"] == []


def test_a_store_above_its_limit(store: Layout) -> None:
    (store.path / "foreign").write_bytes(bytes(3_000_000))
    done = kvtier("limit", "--set", "1M", store.path)
    assert done.returncode == 0
    assert re.search(r"2\.0\d MB above what it may take: see `kvtier gc`", done.stdout)


def test_a_damaged_file_is_named_and_replaced(store: Layout) -> None:
    (store.path / "limits.json").write_text("{")
    done = kvtier("limit", store.path)
    assert done.returncode == 0
    assert done.stderr.count("limits.json is damaged and changes nothing for servers that run") == 1
    assert shown(store, "--set", "1G")["limit"] == "1G"
    assert kvtier("limit", store.path).stderr == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "8x"], "--set: '8x' has the unknown unit 'x'"),
        (["--set", "180%"], "--set: '180%' is not a share"),
        (["--min-free", "some"], "--min-free: 'some' is not a size"),
        (["--daily-writes", "5%"], "--daily-writes: '5%' is not a size"),
        (["--clear", "--set", "1G"], "Either set limits or --clear them"),
    ],
)
def test_mistakes_say_how_to_mend_them(store: Layout, words: list[str], message: str) -> None:
    done = kvtier("limit", *words, store.path)
    assert done.returncode == 2
    assert message in done.stderr
    _no_traceback(done)
    assert not (store.path / "limits.json").exists()


def test_no_store(tmp_path: Path) -> None:
    done = kvtier("limit", "--set", "1G", tmp_path)
    assert done.returncode == 2
    _no_traceback(done)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def sessions(tmp_path: Path) -> Layout:
    """A store of four sessions with 100 pages of 20 KB each."""
    with opened(tmp_path / "kvtier") as (opened_store, namespace):
        for name in "abcd":
            chain = keys(name, 100)
            put(namespace, chain, contents(chain, SIZE))
            assert opened_store.flush(60)
    return Layout.open(tmp_path / "kvtier", create=False)


def _pages(store: Layout) -> int:
    found = json.loads(kvtier("inspect", "--json", store.path).stdout)
    return int(found["namespaces"][0]["pages"])


SLIPS = [
    (["limit", "--set", "800"], "--set: '800' is 800 bytes: did you mean 800G?"),
    (["limit", "--set", "0"], "With a limit of 0 B, 8.00 MB of the 8.00 MB that is stored goes"),
    (["limit", "--set", "800B"], "With a limit of 800 B, 8.00 MB of the 8.00 MB"),
    (["limit", "--min-free", "100%"], "With a limit of "),
    (["limit", "--min-free", "50"], "--min-free: '50' is 50 bytes: did you mean 50G?"),
    (["limit", "--daily-writes", "500"], "--daily-writes: '500' is 500 bytes: did you mean 500G?"),
    (["gc", "--limit", "1000"], "--limit: '1000' is 1000 bytes: did you mean 1000G?"),
    (["gc", "--limit", "1M"], "With a limit of 1.00 MB, 8.00 MB of the 8.00 MB"),
    (["gc", "--limit", "0"], "With a limit of 0 B, 8.00 MB of the 8.00 MB"),
]


@pytest.mark.parametrize(("words", "says"), SLIPS)
def test_a_slip_takes_nothing(sessions: Layout, words: list[str], says: str) -> None:
    done = kvtier(*words, sessions.path)
    assert done.returncode == 2
    assert says in done.stderr and "give --yes if that is meant" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (sessions.path / "limits.json").exists() and _pages(sessions) == 400


def test_what_is_meant_is_done(sessions: Layout) -> None:
    assert shown(sessions, "--set", "800", "--yes")["limit_bytes"] == 800
    # A limit that is raised takes nothing, however low it stays.
    assert shown(sessions, "--set", "1M")["limit_bytes"] == 10**6
    for limit in ("0", "800"):
        dry = kvtier("gc", "--limit", limit, "--dry-run", sessions.path)
        assert dry.stdout.startswith("Would free 8.00 MB") and not dry.stderr
    assert _pages(sessions) == 400
    kvtier("gc", "--limit", "0", "--yes", sessions.path)
    assert _pages(sessions) == 0
    assert shown(sessions, "--set", "2M")["limit_bytes"] == 2 * 10**6


def test_clearing_a_limit_is_asked_about_as_well(sessions: Layout) -> None:
    shown(sessions, "--set", "1G")
    done = kvtier("limit", "--clear", sessions.path, KVTIER_LIMIT="1M")
    assert done.returncode == 2 and "With a limit of 1.00 MB" in done.stderr
    assert shown(sessions)["limit"] == "1G"
    assert shown(sessions, "--clear")["limit"] is None


def test_a_small_share_goes_unasked_unless_it_is_pinned(sessions: Layout) -> None:
    limit = f"{disk_usage(sessions.path) - BALLAST_BYTES - 20 * SIZE}B"
    pin = [keys(name, 100)[-1].hex() for name in "abcd"]
    for key in pin:
        assert kvtier("pin", key, sessions.path).returncode == 0
    for words in (["limit", "--set", limit], ["gc", "--limit", limit]):
        done = kvtier(*words, sessions.path)
        assert done.returncode == 2 and ", 1 pinned session among it." in done.stderr
    for key in pin:
        assert kvtier("unpin", key, sessions.path).returncode == 0
    assert kvtier("limit", "--set", limit, sessions.path).returncode == 0
    assert kvtier("gc", "--limit", limit, sessions.path).returncode in (0, 1)
    assert 0 < _pages(sessions) < 400


@pytest.mark.parametrize("answer", ["y", "n"])
def test_at_a_terminal_it_asks(sessions: Layout, answer: str) -> None:
    ours, theirs = os.openpty()
    try:
        os.write(ours, f"{answer}\n{answer}\n".encode())
        command = [sys.executable, "-c", "from kvtier.cli import main; main()"]
        words = ["limit", "--set", "800", str(sessions.path)]
        done = subprocess.run(
            [*command, *words], stdin=theirs, capture_output=True, text=True, check=False
        )
    finally:
        os.close(theirs)
        os.close(ours)
    assert "did you mean 800G?" in done.stderr and "Go on? [y/N]" in done.stderr
    assert done.returncode == (0 if answer == "y" else 1)
    assert ("8.00 MB of the 8.00 MB" in done.stderr) == (answer == "y")
    assert (sessions.path / "limits.json").exists() == (answer == "y")
