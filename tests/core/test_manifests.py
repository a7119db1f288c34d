"""Merging manifests without payload: on real stores, and killed at any step."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path

import pytest
from making import KV, contents, copies, fresh_index, identity, lose_index, opened, put, saved_index
from sparse import (
    SIZES,
    copy_of,
    exact,
    killed,
    layout_of,
    put_session,
    session,
    state_of,
    thin_out,
)

from kvtier.collection import collect
from kvtier.format import column_id
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.manifests import MOST_MANIFESTS, merge_manifests
from kvtier.space import reclaim

SESSIONS = [session(number) for number in range(90)]
CUT = range(4, 84)
"""Sessions that have lost all but two pages, each in a deletion of its own."""


def _bare(layout: Layout) -> list[str]:
    """Manifests without payload."""
    names = {path.stem for path in layout.segments.glob("*.kvm")}
    return sorted(names - {path.stem for path in layout.segments.glob("*.kvs")})


def _known(index: Index) -> list[object]:
    """All that manifests say of live pages."""
    there = {key for _, _, key in copies(index)}
    uses = [
        sorted((key, when) for key, when in index.uses(name).items() if key in there)
        for name in sorted(index.namespaces())
        if name != identity("other").id_bytes
    ]
    return [copies(index), uses, state_of(index)]


@pytest.fixture(scope="module")
def deleted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a store of many manifests without payload: most tell of deletions, one of a
    wiped namespace and of uses, and some have runs that others delete."""
    root = tmp_path_factory.mktemp("deleted")
    later = {"commit_interval": 60.0, "staging_size": 64 << 20, "commit_size": 16 << 20}
    wiped = SESSIONS[0]
    with opened(root, **later) as (store, namespace):
        other = store.namespace(identity("other"))
        assert put(other, wiped, contents(wiped, SIZES[KV], KV)).all()
        for number in range(len(SESSIONS)):
            put_session(store, namespace, number)
    layout = layout_of(root)
    with opened(root, **later) as (store, namespace):
        exact(namespace, SESSIONS[3])
        assert store.namespace(identity("other")).clear()
    for number in range(6):
        with opened(root, **later) as (store, namespace):
            put_session(store, namespace, ("gone", number))
            last = SESSIONS[1][-1 - number]
            [place] = store.index.locate(identity().id_bytes, column_id(KV), last)
            store.bury([place.stored.grave(int(place.stored.positions[0]), 1)])
    for number in range(6):
        thin_out(layout, {session(("gone", number))[-1]: 0})
    for number in CUT:
        thin_out(layout, {SESSIONS[number][-1]: 2})
    reclaim(layout, Index(layout))
    return root


def test_merged_manifests_say_the_same(deleted: Path, tmp_path: Path) -> None:
    root = copy_of(deleted, tmp_path / "root")
    layout = layout_of(root)
    before, bare = _known(fresh_index(layout.path)), _bare(layout)
    assert len(bare) > MOST_MANIFESTS
    with opened(root) as (store, namespace):
        assert merge_manifests(layout, Index(layout)) == len(bare)
        assert len(_bare(layout)) == 1
        assert not set(_bare(layout)) & set(bare)
        for index in (fresh_index(layout.path), saved_index(layout.path)):
            assert _known(index) == before
        store.index.refresh()
        assert copies(store.index) == before[0]
        for number, chain in enumerate(SESSIONS):
            if number != 1:
                exact(namespace, chain[:2] if number in CUT else chain)
        assert not namespace.contains(KV, [SESSIONS[number][2] for number in CUT]).any()
    # The one that is left goes with the last segment that it names.
    assert merge_manifests(layout, Index(layout)) == 0
    collect(layout, Index(layout), 0, grace=0.0)
    assert len(list(layout.segments.glob("*.kvm"))) == 0


def test_a_kill_in_the_middle_of_a_merge_changes_nothing(deleted: Path, tmp_path: Path) -> None:
    before = _known(fresh_index(layout_of(deleted).path))

    def merge(root: Path) -> None:
        merge_manifests(layout_of(root), Index(layout_of(root)))

    total = killed(lambda: merge(copy_of(deleted, tmp_path / "whole")), 0)
    left = set()
    for number in random.Random(8).sample(range(1, total), 20):
        root = copy_of(deleted, tmp_path / str(number))
        layout = layout_of(root)
        if number % 2:
            lose_index(layout.path)  # manifests come in another order
        assert not killed(partial(merge, root), number)
        assert _known(fresh_index(layout.path)) == before
        assert _known(saved_index(layout.path)) == before
        left.add(len(_bare(layout)))
        merge(root)
        assert _known(fresh_index(layout.path)) == before
        assert len(_bare(layout)) <= MOST_MANIFESTS + 2
        shutil.rmtree(root)
    assert len(left) > 5
