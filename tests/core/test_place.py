"""Where the store is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier import place
from kvtier.layout import Layout
from kvtier.place import default_root, store_path


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for /mnt/scratch, not there yet."""
    path = tmp_path / "scratch"
    monkeypatch.setattr(place, "SCRATCH", path)
    return path


def test_the_variable_wins(scratch: Path) -> None:
    scratch.mkdir()
    assert default_root({"KVTIER_ROOT": "/data", "XDG_CACHE_HOME": "/c"}) == Path("/data")


def test_scratch_comes_next_if_it_can_be_written(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch.mkdir()
    assert default_root({"KVTIER_ROOT": ""}) == scratch
    monkeypatch.setattr(place.os, "access", lambda path, mode: False)
    assert default_root({"XDG_CACHE_HOME": "/c"}) == Path("/c")


def test_a_file_called_scratch_is_no_place(scratch: Path) -> None:
    scratch.write_text("")
    assert default_root({"XDG_CACHE_HOME": "/c"}) == Path("/c")


def test_the_user_s_cache_is_last(scratch: Path) -> None:
    assert default_root({"XDG_CACHE_HOME": "/c"}) == Path("/c")
    assert default_root({}) == Path.home() / ".cache"
    assert store_path(default_root({})) == Path.home() / ".cache" / "kvtier"


def test_the_mount_and_the_store_in_it_are_the_same_place(tmp_path: Path) -> None:
    assert store_path(tmp_path) == tmp_path / "kvtier"
    assert store_path(tmp_path / "kvtier") == tmp_path / "kvtier"
    Layout.open(store_path(tmp_path), create=True)
    assert store_path(tmp_path) == store_path(tmp_path / "kvtier") == tmp_path / "kvtier"


def test_a_store_may_have_any_name(tmp_path: Path) -> None:
    Layout.open(tmp_path / "pages", create=True)
    assert store_path(tmp_path / "pages") == tmp_path / "pages"


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert store_path(Path("mount")) == tmp_path / "mount" / "kvtier"
    assert store_path(Path("~/mount")) == Path.home() / "mount" / "kvtier"
