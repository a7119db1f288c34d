"""The index follows the manifests, and survives damage to them and to its own snapshot."""

from __future__ import annotations

import os
import random
import shutil
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from making import (
    KV,
    content,
    contents,
    copies,
    fresh_index,
    get,
    get_each,
    keys,
    lose_index,
    manifests,
    opened,
    put,
    saved_index,
    settings,
    store_of,
)

import kvtier.index
from kvtier.format import FrameType, decode_run, encode_frame, scan_frames
from kvtier.index import Index
from kvtier.layout import Layout, segment_id, segment_name
from kvtier.store import Store

CHAIN = keys("chain", 60)
PARTS = contents(CHAIN, 700)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A closed store with one chain in one manifest, six runs of ten pages."""
    with opened(tmp_path) as (store, namespace):
        for start in range(0, 60, 10):
            put(namespace, CHAIN[start:][:10], PARTS[start:][:10])
            assert store.flush(60)
    return store_of(tmp_path)


def _run_frames(manifest: Path) -> list[tuple[int, int, list[bytes]]]:
    """(offset, bytes, page keys) of every run."""
    found = []
    for offset, frame, size in scan_frames(manifest.read_bytes()):
        if frame is not None and frame.type == FrameType.RUN:
            run = decode_run(frame.body)
            found.append((offset, size, [run.key(number) for number in range(len(run))]))
    return found


def _got(store: Path) -> list[bytes | None]:
    with opened(store) as (_, namespace):
        return get_each(namespace, CHAIN, 700)


def test_a_lost_snapshot_is_rebuilt_as_it_was(store: Path) -> None:
    before = copies(saved_index(store))
    assert len(before) == 60
    lose_index(store)
    assert copies(saved_index(store)) == before
    shutil.rmtree(store / "index")
    assert _got(store) == PARTS
    assert copies(saved_index(store)) == before


def test_a_damaged_snapshot_changes_no_answer(store: Path) -> None:
    before = copies(fresh_index(store))
    snapshot = store / "index" / "snapshot"
    good = snapshot.read_bytes()
    chance = random.Random(1)
    damaged = [good[:cut] for cut in (0, 1, 31, 40, 4096, len(good) - 1)]
    damaged += [b"\0" * len(good), b"\xff" * len(good), good + b"more", good[::-1]]
    for _ in range(150):
        flipped = bytearray(good)
        for _ in range(chance.choice((1, 1, 20))):
            flipped[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        damaged.append(bytes(flipped))
    for data in damaged:
        snapshot.write_bytes(data)
        index = saved_index(store)
        assert copies(index) == before
        assert index.contains(_namespace(store), _column(index, store), b"".join(CHAIN)).all()
    snapshot.write_bytes(damaged[-1])
    assert _got(store) == PARTS
    assert snapshot.read_bytes() != damaged[-1], "a good one takes its place"


def _namespace(store: Path) -> bytes:
    [path] = (store / "namespaces").glob("*.json")
    return bytes.fromhex(path.stem)


def _column(index: Index, store: Path) -> int:
    [(ident, column)] = index.columns(_namespace(store)).items()
    assert column == KV
    return ident


def test_a_directory_in_place_of_the_snapshot(store: Path) -> None:
    (store / "index" / "snapshot").unlink()
    (store / "index" / "snapshot").mkdir()
    assert _got(store) == PARTS


def test_an_older_snapshot_is_brought_up_to_date(tmp_path: Path, store: Path) -> None:
    old = (store / "index" / "snapshot").read_bytes()
    more = keys("more", 20)
    with opened(tmp_path) as (_, namespace):
        put(namespace, more, contents(more, 700))
    before = copies(saved_index(store))
    assert len(before) == 80
    (store / "index" / "snapshot").write_bytes(old)
    assert copies(saved_index(store)) == before


@pytest.mark.parametrize(
    "garbage", [b"", b"x", b"KVTF", b"KVTF" * 50, content(999, "garbage"), bytes(64)]
)
def test_frames_after_garbage_count(store: Path, garbage: bytes) -> None:
    [manifest] = manifests(store)
    data = manifest.read_bytes()
    frames = _run_frames(manifest)
    middle, last = frames[2][0], frames[-1][0]
    # Frames keep their places: a tombstone names them. So garbage takes the place of the third.
    torn = data[:middle] + garbage.ljust(frames[2][1], b"\0")[: frames[2][1]]
    manifest.write_bytes(torn + data[middle + frames[2][1] : last + 50])
    lose_index(store)
    lost = {*frames[2][2], *frames[-1][2]}
    kept = [None if key in lost else part for key, part in zip(CHAIN, PARTS, strict=True)]
    index = fresh_index(store)
    assert index.health().damaged == {manifest.stem: 2}
    assert _got(store) == kept
    with opened(store) as (after, namespace):
        assert put(namespace, CHAIN, PARTS).all()
        assert after.flush(60)
        assert get(namespace, CHAIN, 700) == PARTS
    assert saved_index(store).health().damaged == {manifest.stem: 2}


def test_any_damage_to_a_manifest_loses_at_most_what_it_hit(store: Path) -> None:
    [manifest] = manifests(store)
    good = manifest.read_bytes()
    frames = _run_frames(manifest)
    chance = random.Random(2)
    for _ in range(60):
        data = bytearray(good)
        hit = []
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(data))
            data[at] ^= 1 << chance.randrange(8)
            hit.append(at)
        manifest.write_bytes(data)
        safe = {
            key
            for offset, size, page_keys in frames
            for key in page_keys
            if not any(offset <= at < offset + size for at in hit)
        }
        index = fresh_index(store)
        found = {key for _, _, key in copies(index)}
        assert safe <= found <= set(CHAIN)
        # Only padding does not count.
        assert (
            found == set(CHAIN)
            or index.health().damaged == {manifest.stem: len(set(hit))}
            or (len(hit) > 1 and index.health().damaged)
        )
    for cut in range(0, len(good), 37):
        manifest.write_bytes(good[:cut])
        whole = {
            key for offset, size, page_keys in frames for key in page_keys if offset + size <= cut
        }
        assert whole <= {key for _, _, key in copies(fresh_index(store))} <= set(CHAIN)


def test_foreign_files_among_the_segments_do_no_harm(tmp_path: Path, store: Path) -> None:
    segments = store / "segments"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"private")
    name = segment_name(b"f" * 12, 0)
    other = segment_name(b"g" * 12, 3)
    # A manifest of this store under another segment's name.
    shutil.copy(manifests(store)[0], segments / f"{other}.kvm")
    (segments / "notes.txt").write_text("hello")
    (segments / "lost.kvm").write_text("not a segment's name")
    (segments / f"{name}.kvm").write_bytes(content(5000, "foreign"))
    (segments / f"{segment_name(b'h' * 12, 0)}.kvm").symlink_to(elsewhere)
    (segments / f"{segment_name(b'i' * 12, 0)}.kvm").mkdir()
    os.mkfifo(segments / f"{segment_name(b'j' * 12, 0)}.kvm")
    (segments / f"{segment_name(b'k' * 12, 0)}.kvs").write_bytes(b"no manifest")
    lose_index(store)
    assert _got(store) == PARTS
    health = saved_index(store).health()
    assert set(health.damaged) == {name, other}
    assert elsewhere.read_bytes() == b"private"
    assert (segments / "notes.txt").read_text() == "hello"


def test_payload_behind_a_symbolic_link_is_not_read(tmp_path: Path, store: Path) -> None:
    [payload] = [p for p in (store / "segments").glob("*.kvs") if p.stat().st_size]
    payload.rename(tmp_path / "moved")
    payload.symlink_to(tmp_path / "moved")
    assert _got(store) == [None] * 60


def test_frames_of_another_store_are_damage(tmp_path: Path, store: Path) -> None:
    with opened(tmp_path / "other") as (_, namespace):
        put(namespace, CHAIN, PARTS)
    theirs = store_of(tmp_path / "other")
    for path in (theirs / "segments").iterdir():
        shutil.copy(path, store / "segments")
    index = fresh_index(store)
    assert len(copies(index)) == 60
    assert set(index.health().damaged) == {path.stem for path in manifests(theirs)}


def test_frames_of_kinds_to_come_are_passed_over(store: Path) -> None:
    [manifest] = manifests(store)
    ident = segment_id(manifest.stem)
    assert ident is not None
    frame = encode_frame(
        77,  # type: ignore[arg-type]
        b"later",
        sequence=0,
        time_ns=0,
        segment_id=ident,
        store_id=Layout.open(store, create=False).store_id,
    )
    manifest.write_bytes(manifest.read_bytes() + frame)
    index = fresh_index(store)
    assert len(copies(index)) == 60
    assert index.health().damaged == {}


def test_a_segment_that_is_removed_takes_its_pages_along(store: Path) -> None:
    index = saved_index(store)
    [manifest] = manifests(store)
    manifest.unlink()
    os.utime(store / "segments")
    index.refresh()
    assert copies(index) == {}
    assert _got(store) == [None] * 60
    assert copies(saved_index(store)) == {}


def test_a_payload_that_is_gone_is_a_miss_until_it_is_put_again(store: Path) -> None:
    [payload] = [p for p in (store / "segments").glob("*.kvs") if p.stat().st_size]
    payload.unlink()
    with opened(store) as (after, namespace):
        assert get_each(namespace, CHAIN, 700) == [None] * 60
        assert not namespace.contains(KV, CHAIN).any(), "it would be asked for again, for ever"
        assert put(namespace, CHAIN, PARTS).all()
        assert after.flush(60)
        assert get(namespace, CHAIN, 700) == PARTS


def test_health_tells_live_writers_from_dead_ones(store: Path) -> None:
    assert saved_index(store).health().live_writers == 0
    with opened(store) as (live, namespace):
        put(namespace, keys("x", 1), contents(keys("x", 1), 700))
        assert live.flush(60)
        health = saved_index(store).health()
        assert health.live_writers == 1
        assert health.segments == len(list((store / "segments").glob("*.kvm")))
    assert saved_index(store).health().live_writers == 0


def test_snapshots_are_taken_while_a_store_is_used(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvtier.index, "LATE_PAGES", 15)
    used = Store.open(settings(store))
    index = used.index
    for name in range(10):
        more = keys(name, 10)
        with opened(store) as (other, namespace):
            put(namespace, more, contents(more, 700))
            assert other.flush(60)
        index.refresh()
        if index.stale():
            index.save()
        assert len(copies(index)) == 60 + 10 * (name + 1)
        assert copies(index) == copies(fresh_index(store))
    used.close()
    assert copies(saved_index(store)) == copies(fresh_index(store))


def test_a_snapshot_is_due_by_the_bytes_that_went_through(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of many pages that are deleted again: few entries, and their frames are still held."""
    monkeypatch.setattr(kvtier.index, "LATE_BYTES", 32 << 10)
    index = Index(Layout.open(store, create=False))
    held, saves = [], 0
    for number in range(24):
        more = keys(number, 100)
        with opened(store) as (other, namespace):
            put(namespace, more, contents(more, 16))
            assert other.flush(60)
            index.refresh()
            assert index._catalog.late_pages + index._catalog.late_runs < kvtier.index.LATE_PAGES
            held.append(index._catalog.late_bytes)
            if index.stale():
                index.save()
                assert index._catalog.late_bytes == 0
                saves += 1
    assert saves > 1
    assert max(held) < (32 << 10) + 2 * min(size for size in held if size)


def test_a_commit_can_read_while_a_snapshot_waits_for_it(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout.open(store, create=False)
    index = Index(layout)
    waits = threading.Event()
    lock = Layout.lock

    def announced(self: Layout, *, shared: bool = False) -> AbstractContextManager[None]:
        waits.set()
        return lock(self, shared=shared)

    monkeypatch.setattr(Layout, "lock", announced)
    with lock(layout, shared=True):
        saving = threading.Thread(target=index.save, daemon=True)
        saving.start()
        assert waits.wait(60)
        reading = threading.Thread(target=index.refresh, daemon=True)
        reading.start()
        reading.join(60)
        assert not reading.is_alive(), "both wait for each other"
    saving.join(60)
    assert not saving.is_alive()
