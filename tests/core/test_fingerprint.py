"""Fingerprints of made-up checkpoints: what each mode sees, and what must make no difference."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import filehash, fingerprint
from kvtier.errors import IdentityError
from kvtier.fingerprint import BLOCK, WHOLE, sample_extents, weights_fingerprint

MODES = ("sampled", "full")
CONFIG = {"model_type": "made_up", "quantization_config": {"bits": 8}, "_name_or_path": "/a"}
TOKENIZER = {"tokenizer_class": "T", "chat_template": "{{ messages }}"}


def write_safetensors(path: Path, sizes: dict[str, int], content: bytes | None = None) -> int:
    """A file with tensors of these sizes, holes if there is no content; where its data begins."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(content or b"")
        file.truncate(8 + len(text) + end)
    return 8 + len(text)


def flip(path: Path, offset: int, length: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(length)
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in old))


def digest(folder: Path, mode: str = "sampled") -> str:
    return weights_fingerprint(folder, mode).digest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small checkpoint of two shards with an index, tokenizer and settings."""
    folder = tmp_path / "model"
    folder.mkdir()
    random = np.random.default_rng(7)
    for shard in ("00001", "00002"):
        sizes = {f"layer.{shard}.weight": 40_000, f"layer.{shard}.scale": 100}
        write_safetensors(folder / f"model-{shard}.safetensors", sizes, random.bytes(40_100))
    weight_map = {
        f"layer.{shard}.{part}": f"model-{shard}.safetensors"
        for shard in ("00001", "00002")
        for part in ("weight", "scale")
    }
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    return folder


# Report R014 and the issue: what makes no difference, and what does.


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_elsewhere_is_the_same(model: Path, tmp_path: Path, mode: str) -> None:
    copy = tmp_path / "other name"
    shutil.copytree(model, copy)
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    assert digest(copy, mode) == digest(model, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_renamed_shard_is_the_same(model: Path, mode: str) -> None:
    before = digest(model, mode)
    (model / "model-00001.safetensors").rename(model / "zz.safetensors")
    assert digest(model, mode) == before
    (model / "model.safetensors.index.json").unlink()
    assert digest(model, mode) == before


def _edit_json(name: str, edit: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        edit(values)
        (folder / name).write_text(json.dumps(values))

    return change


def _write(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


UNIMPORTANT = {
    "spacing and order of settings": _write(
        "config.json", json.dumps(dict(reversed(CONFIG.items())), indent=4)
    ),
    "where it was saved": _edit_json("config.json", lambda c: c.update(_name_or_path="/b")),
    "version that saved it": _edit_json("config.json", lambda c: c.update(transformers_version=5)),
    "chat template": _edit_json("tokenizer_config.json", lambda c: c.update(chat_template="x")),
    "chat template file": _write("chat_template.jinja", "x"),
    "sampling defaults": _write("generation_config.json", "{}"),
    "notes": _write("README.md", "x"),
    "training leftovers": _write("training_args.bin", "x"),
}


@pytest.mark.parametrize("change", UNIMPORTANT.values(), ids=UNIMPORTANT)
def test_what_changes_no_cached_byte_is_left_out(
    model: Path, change: Callable[[Path], None]
) -> None:
    before = digest(model)
    change(model)
    assert digest(model) == before


IMPORTANT = {
    "quantisation value": _edit_json(
        "config.json", lambda c: c.update(quantization_config={"bits": 4})
    ),
    "any setting": _edit_json("config.json", lambda c: c.update(rope_theta=1.0)),
    "setting of another type": _edit_json("config.json", lambda c: c.update(model_type=1)),
    "settings that are no JSON": _write("config.json", "{"),
    "quantisation file": _write("hf_quant_config.json", "{}"),
    "tokenizer": _write("tokenizer.json", "{}"),
    "tokenizer setting": _edit_json(
        "tokenizer_config.json", lambda c: c.update(tokenizer_class="U")
    ),
    "code of the model": _write("modeling_made_up.py", "x"),
    "one more weight file": _write("extra.bin", "x"),
    "a weight file less": lambda folder: (folder / "model-00002.safetensors").unlink(),
}


@pytest.mark.parametrize("change", IMPORTANT.values(), ids=IMPORTANT)
@pytest.mark.parametrize("mode", MODES)
def test_what_changes_cached_bytes_is_seen(
    model: Path, change: Callable[[Path], None], mode: str
) -> None:
    before = digest(model, mode)
    change(model)
    assert digest(model, mode) != before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offset", [0, 1, 12_345, 20_000, 39_999, 40_000, 40_099])
def test_any_byte_of_a_small_checkpoint_is_seen(model: Path, offset: int, mode: str) -> None:
    before = digest(model, mode)
    path = model / "model-00002.safetensors"
    flip(path, path.stat().st_size - 40_100 + offset)
    assert digest(model, mode) != before


def test_names_and_shapes_are_seen(tmp_path: Path) -> None:
    digests = set()
    for sizes in ({"a": 8}, {"b": 8}, {"a": 4, "b": 4}, {"b": 4, "a": 4}):
        write_safetensors(tmp_path / "model.safetensors", sizes, bytes(8))
        digests.add(digest(tmp_path))
    assert len(digests) == 4


def test_swapped_contents_are_seen(model: Path) -> None:
    """Which settings file or tensor holds which bytes matters, not only the set of contents."""
    before = digest(model)
    settings, tokenizer = (model / "config.json"), (model / "tokenizer_config.json")
    texts = settings.read_bytes(), tokenizer.read_bytes()
    settings.write_bytes(texts[1])
    tokenizer.write_bytes(texts[0])
    assert digest(model) != before


def test_the_index_decides_between_two_files_with_the_same_tensor(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_safetensors(tmp_path / f"{name}.safetensors", {"t": 4}, name.encode() * 4)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"t": "a.safetensors"}}')
    of_a = digest(tmp_path)
    index.write_text('{"weight_map": {"t": "b.safetensors"}}')
    assert digest(tmp_path) != of_a
    index.write_text("{}")
    with pytest.raises(IdentityError, match="index"):
        digest(tmp_path)


def test_digest_of_a_known_checkpoint_never_changes(tmp_path: Path) -> None:
    """Stores already written depend on this: another digest means every page is a miss."""
    write_safetensors(
        tmp_path / "model.safetensors", {"a": 50_000, "b": 4}, bytes(range(250)) * 200
    )
    (tmp_path / "config.json").write_text('{"model_type": "known"}')
    assert digest(tmp_path) == "84c61999285d73f30019dc6f50d3f197"
    assert digest(tmp_path, "full") == "7facd54d82d1bef0fd5328c1c85e424f"


def test_samples_of_known_tensors_never_move() -> None:
    ends = np.array([20_000, 25_000, 400_000], dtype=np.int64)
    begins = np.array([0, 20_000, 25_000], dtype=np.int64)
    extents = sample_extents(["a", "b", "c"], begins, ends, 100_000)
    assert extents.tolist() == [
        [0, 26_024],
        [78_528, 79_552],
        [126_727, 127_751],
        [155_439, 156_463],
        [245_861, 246_885],
        [310_979, 312_003],
        [350_202, 351_226],
        [398_976, 400_000],
    ]


# Checkpoints too large to be read whole.

SIZES = {
    "big.weight": 700 << 20,
    "big.weight_scale": 5000,
    "norm": WHOLE,
    "other.weight": (400 << 20) + 13,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, str]]:
    """A folder whose one weight file is 1.1 GB of holes, where its data begins, its digest."""
    folder = tmp_path_factory.mktemp("large")
    begin = write_safetensors(folder / "model.safetensors", SIZES)
    yield folder, begin, digest(folder)
    shutil.rmtree(folder)


def seen(large: tuple[Path, int, str], offset: int, length: int = 1) -> bool:
    """Whether the sampled digest sees a change there; the change is undone."""
    folder, begin, before = large
    path = folder / "model.safetensors"
    flip(path, begin + offset, length)
    try:
        return digest(folder) != before
    finally:
        flip(path, begin + offset, length)


def extents_of(large: tuple[Path, int, str]) -> np.ndarray:
    """The sampled extents, counted from the begin of the data."""
    ends = np.cumsum(list(SIZES.values()))
    begins = ends - list(SIZES.values())
    size = (large[0] / "model.safetensors").stat().st_size
    return sample_extents(list(SIZES), begins, ends, fingerprint.stratum(size))


def test_first_last_and_small_tensors_are_seen(large: tuple[Path, int, str]) -> None:
    first_end = SIZES["big.weight"]
    for offset in (0, BLOCK - 1, first_end - BLOCK, first_end - 1):
        assert seen(large, offset)
    for offset in (0, 2500, 4999, 5000, 5000 + WHOLE // 2, 5000 + WHOLE - 1, 5000 + WHOLE):
        assert seen(large, first_end + offset)
    assert seen(large, sum(SIZES.values()) - 1)


def test_inner_samples_and_long_stretches_are_seen(large: tuple[Path, int, str]) -> None:
    extents = extents_of(large)
    for begin, end in extents[[len(extents) // 3, -5]].tolist():
        assert seen(large, begin)
        assert seen(large, end - 1)
    step = fingerprint.stratum(sum(SIZES.values()))
    assert seen(large, 300 << 20, 2 * step)


def test_one_byte_between_the_samples_is_seen_by_full_only(
    large: tuple[Path, int, str],
) -> None:
    """The limit that docs/identity.md states."""
    folder, begin, _ = large
    extents = extents_of(large)
    between = int(extents[7, 1])
    assert between < extents[8, 0]
    assert not seen(large, between)
    before = digest(folder, "full")
    flip(folder / "model.safetensors", begin + between)
    after = digest(folder, "full")
    flip(folder / "model.safetensors", begin + between)
    assert after != before


def test_a_large_checkpoint_is_not_read_whole(large: tuple[Path, int, str]) -> None:
    found = weights_fingerprint(large[0])
    assert found.mode == "sampled"
    assert found.files == 1
    assert 0 < found.bytes_read < sum(SIZES.values()) // 20
    assert found.weights.digest == found.digest
    assert found.weights.mode == "sampled"


pieces = st.lists(
    st.sampled_from([0, 1, BLOCK, WHOLE, WHOLE + 1, 70_000, 300_000, 5_000_000]), max_size=8
)


@given(pieces, st.sampled_from([64 * 1024, 1 << 20]))
def test_extents_cover_what_is_promised(sizes: Sequence[int], step: int) -> None:
    ends = np.cumsum(np.array(sizes, dtype=np.int64))
    begins = ends - np.array(sizes, dtype=np.int64)
    extents = sample_extents([f"t{i}" for i in range(len(sizes))], begins, ends, step)
    covered = np.zeros(sum(sizes) + 1, dtype=bool)
    for begin, end in extents.tolist():
        assert 0 <= begin <= end <= sum(sizes)
        covered[begin:end] = True
    assert np.all(extents[1:, 0] > extents[:-1, 1])
    for begin, end, size in zip(begins, ends, sizes, strict=True):
        if size <= WHOLE:
            assert covered[begin:end].all()
            continue
        assert covered[begin : begin + BLOCK].all()
        assert covered[end - BLOCK : end].all()
        # A stretch of two strata contains a whole one, and so that one's sample.
        longest = 2 * max(step, size // fingerprint.INNER_BLOCKS)
        holes = np.flatnonzero(covered[begin:end])
        assert np.diff(holes).max() < longest


def test_samples_follow_names_and_not_places() -> None:
    sizes = np.array([5_000_000], dtype=np.int64)
    begin = np.array([0], dtype=np.int64)
    here = sample_extents(["t"], begin, sizes, 64 * 1024)
    there = sample_extents(["t"], begin + 777, sizes + 777, 64 * 1024)
    other = sample_extents(["u"], begin, sizes, 64 * 1024)
    assert np.array_equal(here + 777, there)
    assert not np.array_equal(here, other)


# Other formats.


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Trap()))
        archive.writestr("archive/data/0", bytes(100_000))
    (tmp_path / "old.pt").write_bytes(pickle.dumps(Trap()))
    for mode in MODES:
        digest(tmp_path, mode)
    assert not (tmp_path / "ran").exists()


def test_checksums_of_a_large_zip_cover_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.save writes a zip whose directory has a CRC-32 of every tensor."""
    monkeypatch.setattr(fingerprint, "SMALL_CHECKPOINT", 0)
    digests = set()
    for value in (b"\0", b"\1"):
        with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
            tensor = bytearray(3_000_000)
            tensor[1_234_567] = value[0]
            info = zipfile.ZipInfo("archive/data/0", (1980, 1, 1, 0, 0, 0))
            archive.writestr(info, bytes(tensor))
        found = weights_fingerprint(tmp_path)
        assert found.bytes_read < 1_000_000
        digests.add(found.digest)
    assert len(digests) == 2


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "consolidated.00.pth"])
def test_files_of_unknown_structure_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(fingerprint, "SMALL_CHECKPOINT", 0)
    path = tmp_path / name
    size = fingerprint.RAW_HEAD + 40 * fingerprint.RAW_PIECE + 17
    with path.open("wb") as file:
        file.write(b"GGUF")
        file.truncate(size)
    before = digest(tmp_path)
    for offset in (0, fingerprint.RAW_HEAD // 2, fingerprint.RAW_HEAD, size - 1):
        flip(path, offset)
        assert digest(tmp_path) != before
        flip(path, offset)
    assert digest(tmp_path) == before
    assert weights_fingerprint(tmp_path).bytes_read < size


def test_a_single_file_may_be_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(1000))
    before = digest(path)
    (tmp_path / "config.json").write_text("{}")
    assert digest(path) == before
    flip(path, 700)
    assert digest(path) != before


@pytest.mark.parametrize("size", [0, 1, 7])
def test_tiny_raw_files(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "SMALL_CHECKPOINT", -1)
    (tmp_path / "a.bin").write_bytes(bytes(size))
    assert len(digest(tmp_path)) == 32


def test_a_checkpoint_without_weights_is_told_from_one_with(model: Path, tmp_path: Path) -> None:
    """What `--load-format dummy` runs on."""
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    for mode in MODES:
        assert digest(bare, mode) != digest(model, mode)
    found = weights_fingerprint(bare)
    assert found.files == 3


# The hub's cache.


@pytest.fixture
def hub(model: Path, tmp_path: Path) -> Path:
    """The same checkpoint as a snapshot of a hub cache: links to blobs named by their hash."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in model.iterdir():
        content = path.read_bytes()
        hash_of = hashlib.sha256 if path.suffix == ".safetensors" else hashlib.sha1
        blob = blobs / hash_of(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@pytest.mark.parametrize("mode", MODES)
def test_a_hub_snapshot_equals_a_plain_copy(hub: Path, model: Path, mode: str) -> None:
    assert digest(hub, mode) == digest(model, mode)


def test_full_does_not_read_the_blobs_of_a_hub(hub: Path, model: Path) -> None:
    in_hub, plain = weights_fingerprint(hub, "full"), weights_fingerprint(model, "full")
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert plain.bytes_read - in_hub.bytes_read == weights


def test_a_blob_changed_in_place_is_still_sampled(hub: Path) -> None:
    before = digest(hub, "full")
    flip(hub / "model-00001.safetensors", 3000)
    assert digest(hub, "full") != before


def test_names_that_are_no_sha256_are_no_evidence(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name in ("0" * 40, "g" * 64, "0" * 64):
        (blobs / name).write_bytes(b"x")
        (tmp_path / name).symlink_to(blobs / name)
    assert filehash.hub_hash(tmp_path / ("0" * 40)) is None
    assert filehash.hub_hash(tmp_path / ("g" * 64)) is None
    assert filehash.hub_hash(blobs / ("0" * 64)) is None
    assert filehash.hub_hash(tmp_path / ("0" * 64)) == bytes(32)


# The cache of full hashes.


def read_for_hashing(folder: Path, cache: Path | None) -> int:
    """Bytes that mode "full" reads beyond those of "sampled"."""
    full = weights_fingerprint(folder, "full", cache)
    return full.bytes_read - weights_fingerprint(folder).bytes_read


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled as soon as they are written."""
    monkeypatch.setattr(filehash, "SETTLED_NS", 0)


@pytest.mark.usefixtures("settled")
def test_files_are_hashed_once(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"
    without = weights_fingerprint(model, "full").digest
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert read_for_hashing(model, cache) == weights
    assert read_for_hashing(model, cache) == 0
    assert weights_fingerprint(model, "full", cache).digest == without
    assert (cache / filehash.CACHE_NAME).stat().st_mode & 0o777 == 0o600
    assert cache.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in cache.iterdir()} == {filehash.CACHE_NAME, filehash.LOCK_NAME}
    (model / "model-00001.safetensors").rename(model / "renamed.safetensors")
    assert 0 < read_for_hashing(model, cache) < weights, "a rename changes the ctime"


@pytest.mark.usefixtures("settled")
def test_a_change_that_hides_its_time_is_seen(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model / "model-00002.safetensors"
    before = weights_fingerprint(model, "full", tmp_path / "cache").digest
    status = path.stat()
    flip(path, status.st_size - 5)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights_fingerprint(model, "full", tmp_path / "cache").digest != before


def test_a_file_just_written_is_not_remembered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filehash, "SETTLED_NS", 3600 * 10**9)
    for _ in range(2):
        assert read_for_hashing(model, tmp_path / "cache") > 0


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": "zz"}', "[" * 100_000, "\0"])
def test_a_damaged_cache_is_written_anew(model: Path, tmp_path: Path, text: str) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / filehash.CACHE_NAME).write_text(text)
    assert read_for_hashing(model, cache) > 0
    assert read_for_hashing(model, cache) == 0


@pytest.mark.usefixtures("settled")
def test_a_cache_that_others_may_write_does_not_count(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert read_for_hashing(model, cache) > 0
    (cache / filehash.CACHE_NAME).chmod(0o666)
    assert read_for_hashing(model, cache) > 0
    assert read_for_hashing(model, cache) == 0


def test_a_cache_that_cannot_be_kept_only_warns(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    found = weights_fingerprint(model, "full", tmp_path / "file" / "cache")
    assert found.digest == digest(model, "full")
    assert "cannot be kept" in caplog.text


@pytest.mark.usefixtures("settled")
def test_of_many_at_once_one_reads(model: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        reads = list(pool.map(lambda _: read_for_hashing(model, tmp_path / "cache"), range(4)))
    assert sorted(reads)[:3] == [0, 0, 0]
    assert max(reads) > 0


def test_progress_ends_at_the_total(model: Path) -> None:
    seen: list[tuple[int, int]] = []
    weights_fingerprint(model, "full", progress=lambda done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


# What cannot be read.


def test_a_file_that_changes_while_it_is_hashed_is_refused(model: Path) -> None:
    for path in model.glob("*.safetensors"):
        os.utime(path, (1, 1))  # times of files are coarse: two writes may have the same

    def meddle(done: int, total: int) -> None:
        for path in model.glob("*.safetensors"):
            flip(path, 9)

    with pytest.raises(IdentityError, match="changed while it was read"):
        weights_fingerprint(model, "full", progress=meddle)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x02\0\0\0\0\0\0",
        b"\xff" * 8 + b"{}",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0{]",
        (36).to_bytes(8, "little") + b'{"t":{"dtype":"U8","data_offsets":0}}',
        (39).to_bytes(8, "little") + b'{"t":{"dtype":"U8","data_offsets":[0]}}',
        (41).to_bytes(8, "little") + b'{"t":{"dtype":"U8","data_offsets":[0,9]}}',
        (42).to_bytes(8, "little") + b'{"t":{"dtype":"U8","data_offsets":[-1,0]}}',
        (53).to_bytes(8, "little") + b'{"t":{"dtype":"U8","data_offsets":[0,99999999999999]}}',
        (8).to_bytes(8, "little") + b'{"t":[1]}',
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_a_damaged_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match="not a whole safetensors file") as caught:
        weights_fingerprint(tmp_path)
    assert str(path) in str(caught.value)


def test_every_cut_of_a_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": 50, "b": 20}, bytes(70))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(IdentityError):
            weights_fingerprint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.gguf"])
def test_a_broken_link_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(tmp_path / "gone")
    with pytest.raises(IdentityError, match=name):
        weights_fingerprint(tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, model: Path) -> None:
    for path in (tmp_path / "missing", Path("meta-llama/Llama-3.1-8B"), Path(os.devnull)):
        with pytest.raises(IdentityError, match="is not a folder"):
            weights_fingerprint(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(IdentityError, match="neither weights nor"):
        weights_fingerprint(tmp_path / "empty")
    with pytest.raises(IdentityError, match="sampled or full"):
        weights_fingerprint(model, "fast")
