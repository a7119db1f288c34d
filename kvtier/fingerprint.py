"""What a checkpoint's weights are, told from its bytes: docs/identity.md says what each mode sees.

The digest depends on content alone, not on where the folder lies or what its weight files are
called. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.errors import IdentityError
from kvtier.filehash import Progress, file_hashes, reading
from kvtier.identity import Weights

I64 = npt.NDArray[np.int64]

VERSION = b"kvtier weights 1\n"
"""Changes whenever the same weights would get another digest."""

BLOCK = 1024
"""Bytes of one sample."""

WHOLE = 16 * 1024
"""Pieces up to this many bytes are covered whole."""

INNER_BLOCKS = 3
"""Samples of a larger piece besides its first and last block ..."""

INNER_SAMPLES = 1 << 15
MIN_STRATUM = 64 * 1024
"""... and about 32,768 more in all, spread evenly, but at most one for every 64 KiB."""

SMALL_CHECKPOINT = 1 << 30
"""Checkpoints up to this many bytes are covered whole: that takes about a second."""

JOIN_GAP = 8 * 1024
"""Samples this near to each other are read, and hashed, as one extent."""

RAW_HEAD = 16 << 20
"""Bytes at the head of a file of unknown structure that are covered whole (GGUF's header)."""

RAW_PIECE = 1 << 20
RAW_PIECES = 1 << 14
"""The rest of such a file counts as pieces of at least 1 MiB, at most 16,384 of them."""

MAX_HEADER = 100_000_000
"""The safetensors library refuses longer headers, too."""

MAX_READ = 1 << 20
BATCH_READS = 256
BATCH_BYTES = 4 << 20
"""A batch, whose reads the kernel starts together, ends at so many reads or bytes."""

THREADS = 3
"""More threads wait for the interpreter's lock rather than the drive: 8 take longer, and twice the
processor time (16 cores, warm and cold page cache)."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
NOT_WEIGHTS = ("training_args.*", "optimizer.*", "scheduler.*", "scaler.*", "rng_state*")
"""What training leaves in a checkpoint folder."""

SETTINGS_FILES = (
    "config.json",
    "adapter_config.json",
    "params.json",
    "*quant*.json",
    "*scales*.json",
    "*processor_config.json",
    "tokenizer_config.json",
)
"""JSON files that count by their values: their spacing and order don't matter."""

RAW_FILES = (
    "tokenizer.json",
    "tokenizer.model*",
    "tekken.json",
    "*.tiktoken",
    "*.spm",
    "spiece.model",
    "sentencepiece*.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "*.py",
)
"""Files that count byte for byte: the tokenizer, and code that comes with the model."""

IDLE_KEYS = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "chat_template"})
"""Keys that change no cached byte wherever they stand in a settings file: where a model was saved
from and by which library, and how a chat becomes text (the page key has the tokens)."""


@dataclass(frozen=True)
class Fingerprint:
    """`digest`: 32 hex digits. `files`: how many files count. `bytes_read`, `seconds`: its cost."""

    mode: str
    digest: str
    files: int
    bytes_read: int
    seconds: float

    @property
    def weights(self) -> Weights:
        """The part of it that belongs into an identity."""
        return Weights(self.mode, self.digest)


@dataclass
class _Evidence:
    """What one weight file shows: its digest, its tensors' names, and what reading it took."""

    digest: bytes
    bytes_read: int
    names: list[str] = field(default_factory=list)


def weights_fingerprint(
    model_path: Path,
    mode: str = "sampled",
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Fingerprint:
    """The fingerprint of the checkpoint folder (or single weight file) `model_path`.

    "sampled" reads headers, settings and samples of every tensor. "full" also takes the SHA-256
    of every weight file, once per version of the file if `cache_dir` is given; a file of a hub
    cache isn't read for it, since its name is that hash.

    Raises IdentityError if something is missing, unreadable, damaged or changing.
    """
    if mode not in ("sampled", "full"):
        raise IdentityError(f"There is no fingerprint mode {mode!r}: choose sampled or full.")
    start = time.perf_counter()
    with reading(model_path):
        weights, others = _checkpoint_files(model_path)
        step = stratum(sum(path.stat().st_size for path in weights))
    whole = hashlib.sha256(VERSION)
    bytes_read = _add_other_files(whole, others)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="kvtier-fingerprint") as pool:
        evidence = list(pool.map(lambda path: _sampled(path, step), weights))
    bytes_read += sum(item.bytes_read for item in evidence)
    _add_records(whole, b"samples", _sampled_records(model_path, weights, evidence))
    if mode == "full":
        hashes, hashed = file_hashes(weights, cache_dir, progress)
        bytes_read += hashed
        _add_records(whole, b"full", hashes)
    return Fingerprint(
        mode=mode,
        digest=whole.hexdigest()[:32],
        files=len(weights) + len(others),
        bytes_read=bytes_read,
        seconds=time.perf_counter() - start,
    )


def stratum(total: int) -> int:
    """Bytes that one inner sample stands for in a checkpoint of `total` bytes; 0: cover all."""
    return 0 if total <= SMALL_CHECKPOINT else max(MIN_STRATUM, total // INNER_SAMPLES)


def _checkpoint_files(model_path: Path) -> tuple[list[Path], list[Path]]:
    """The weight files, and the settings, tokenizer and code files, each sorted by name."""
    if model_path.is_file():
        return [model_path], []
    if not model_path.is_dir():
        raise IdentityError(
            f"{model_path} is not a folder: give the local folder of the checkpoint "
            "(a hub name must have been resolved to its snapshot)."
        )
    files = sorted(path for path in model_path.iterdir() if not path.is_dir())
    weights = [
        path for path in files if path.suffix in WEIGHT_SUFFIXES and not _matches(path, NOT_WEIGHTS)
    ]
    others = [path for path in files if _matches(path, SETTINGS_FILES + RAW_FILES)]
    if not weights and not others:
        raise IdentityError(
            f"{model_path} holds neither weights nor a config.json: give a checkpoint's folder."
        )
    return weights, others


def _matches(path: Path, patterns: Iterable[str]) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in patterns)


def _add_other_files(whole: hashlib._Hash, paths: Sequence[Path]) -> int:
    """Add settings, tokenizer and code under their names, which say what they are; bytes read."""
    bytes_read = 0
    records = []
    for path in paths:
        with reading(path):
            content = path.read_bytes()
        bytes_read += len(content)
        if _matches(path, SETTINGS_FILES):
            content = _values(content)
        records.append(
            path.name.encode("utf-8", "surrogateescape") + b"\0" + hashlib.sha256(content).digest()
        )
    _add_records(whole, b"files", records)
    return bytes_read


def _values(content: bytes) -> bytes:
    """A settings file's values in one spelling; as it is if it isn't JSON."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return content
    return json.dumps(_without_idle_keys(values), sort_keys=True).encode("ascii")


def _without_idle_keys(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in IDLE_KEYS}
        return {key: _without_idle_keys(item) for key, item in kept.items()}
    if isinstance(value, list):
        return [_without_idle_keys(item) for item in value]
    return value


def _add_records(whole: hashlib._Hash, title: bytes, records: Iterable[bytes]) -> None:
    """Add a list of records whose order doesn't matter, framed so that no two lists look alike."""
    ordered = sorted(records)
    whole.update(b"%s %d\n" % (title, len(ordered)))
    for record in ordered:
        whole.update(b"%d\n" % len(record) + record)


def _sampled_records(
    folder: Path, paths: Sequence[Path], evidence: Sequence[_Evidence]
) -> list[bytes]:
    """One record a file: its digest, and whether the index names it where that matters.

    The index only maps tensors to file names, so it is left out, except for a tensor that lies in
    two files: then the index decides which file the engine loads.
    """
    count = Counter(name for item in evidence for name in item.names)
    twice = {name for name, times in count.items() if times > 1}
    named = _indexed_files(folder) if twice else set()
    return [
        item.digest + (b"+" if twice.intersection(item.names) and path.name in named else b"")
        for path, item in zip(paths, evidence, strict=True)
    ]


def _indexed_files(folder: Path) -> set[str]:
    """The file names that the folder's safetensors indexes mention."""
    named: set[str] = set()
    for path in folder.glob("*.safetensors.index.json"):
        try:
            named.update(map(str, json.loads(path.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise IdentityError(f"{path} is not a safetensors index: restore it.") from None
    return named


def _sampled(path: Path, step: int) -> _Evidence:
    """Header and samples of one weight file."""
    with reading(path), path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        header, names, begins, ends = pieces(path, file, size)
        if step:
            # The samples lie far apart: what the kernel would read ahead is not wanted.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            extents = sample_extents(names, begins, ends, step)
        else:
            extents = np.array([[0, size]], dtype=np.int64)
        digest = hashlib.sha256(b"%d\n%d\n" % (size, len(header)) + header)
        bytes_read = len(header) + _add_extents(digest, path, file.fileno(), extents)
    return _Evidence(digest.digest(), bytes_read, names if path.suffix == ".safetensors" else [])


def pieces(path: Path, file: io.FileIO, size: int) -> tuple[bytes, list[str], I64, I64]:
    """A file's header and its pieces: their names, first bytes and ends.

    Pieces are tensors (safetensors), zip members (.pt, .bin: their CRC-32s are in the header), or
    equal stretches of a file whose structure isn't known here (.gguf, old .bin).
    """
    if path.suffix == ".safetensors":
        return _safetensors_pieces(path, file, size)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError):
        return _raw_pieces(size)
    header = "\n".join(f"{m.filename}\0{m.CRC} {m.file_size} {m.header_offset}" for m in members)
    begins = np.array([m.header_offset for m in members], dtype=np.int64)
    sizes = np.array([m.compress_size for m in members], dtype=np.int64)
    ends = np.minimum(begins + sizes, size)
    return header.encode("utf-8", "replace"), [m.filename for m in members], begins, ends


def _safetensors_pieces(
    path: Path, file: io.FileIO, size: int
) -> tuple[bytes, list[str], I64, I64]:
    damaged = IdentityError(
        f"{path} is not a whole safetensors file (damaged or still in download): fetch it again."
    )
    length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise damaged
    header = os.pread(file.fileno(), length, 8)
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        names = list(tensors)
        offsets = np.array([tensors[name]["data_offsets"] for name in names], dtype=np.int64)
        offsets = offsets.reshape(-1, 2) + (8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise damaged from None
    begins, ends = offsets[:, 0], offsets[:, 1]
    if np.any(begins < 8 + length) or np.any(ends < begins) or np.any(ends > size):
        raise damaged
    return header, names, begins, ends


def _raw_pieces(size: int) -> tuple[bytes, list[str], I64, I64]:
    head = min(size, RAW_HEAD)
    step = max(RAW_PIECE, -(-(size - head) // RAW_PIECES))
    # The head is cut so finely that its pieces are covered whole.
    begins = np.concatenate([np.arange(0, head, WHOLE), np.arange(head, size, step)])
    ends = np.append(begins[1:], size)[: len(begins)]
    return b"", [str(begin) for begin in begins], begins.astype(np.int64), ends.astype(np.int64)


def sample_extents(names: Sequence[str], begins: I64, ends: I64, step: int) -> I64:
    """Which bytes of a file are read and hashed: int64 (m, 2), begin and end, in order.

    Small pieces whole; of the others the first and last block, and one block in each of several
    equal strata of about `step` bytes, at a place that follows from the piece's name and size.
    """
    sizes = ends - begins
    large = sizes > WHOLE
    counts = np.where(large, INNER_BLOCKS + sizes // step, 0)
    hashes = [xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) for name in names]
    seeds = np.array(hashes, dtype=np.uint64)
    owner = np.repeat(np.arange(len(names)), counts)
    stratum = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    width = (sizes[owner] - 2 * BLOCK) // counts[owner]
    random = _mixed(seeds[owner] ^ _mixed((sizes[owner] + stratum).astype(np.uint64)))
    inside = (random % (width - BLOCK + 1).astype(np.uint64)).astype(np.int64)
    inner = begins[owner] + BLOCK + stratum * width + inside
    first_end = np.where(large, begins + BLOCK, ends)
    last_begin = np.where(large, ends - BLOCK, begins)
    starts = np.concatenate([begins, last_begin, inner])
    stops = np.concatenate([first_end, ends, inner + BLOCK])
    return _joined(starts, stops)


def _joined(starts: I64, stops: I64) -> I64:
    """The ranges in order, those that touch or lie within JOIN_GAP made one."""
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(stops[order])
    if not len(starts):
        return np.empty((0, 2), np.int64)
    breaks = np.flatnonzero(starts[1:] > reach[:-1] + JOIN_GAP)
    return np.stack([starts[np.append(0, breaks + 1)], reach[np.append(breaks, -1)]], axis=1)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 over an array."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _add_extents(digest: hashlib._Hash, path: Path, fd: int, extents: I64) -> int:
    """Hash the extents' bytes; how many they are.

    The kernel is told of the next batch before this one is read, so that one thread keeps many
    reads in flight and seldom waits for the drive.
    """
    bytes_read = 0
    batches = list(_read_batches(extents))
    batches.append([])
    _advise(fd, batches[0])
    for batch, following in pairwise(batches):
        _advise(fd, following)
        parts = [os.pread(fd, length, begin) for begin, length in batch]
        if [len(part) for part in parts] != [length for _, length in batch]:
            raise IdentityError(f"{path} became shorter while it was read: leave it unchanged.")
        content = b"".join(parts)
        bytes_read += len(content)
        digest.update(content)
    return bytes_read


def _read_batches(extents: I64) -> Iterator[list[tuple[int, int]]]:
    """Batches of reads as (begin, length), each read of at most MAX_READ bytes."""
    batch: list[tuple[int, int]] = []
    waiting = 0
    for begin, end in extents.tolist():
        for start in range(begin, end, MAX_READ):
            length = min(MAX_READ, end - start)
            batch.append((start, length))
            waiting += length
            if len(batch) == BATCH_READS or waiting >= BATCH_BYTES:
                yield batch
                batch, waiting = [], 0
    if batch:
        yield batch


def _advise(fd: int, reads: Iterable[tuple[int, int]]) -> None:
    for begin, length in reads:
        os.posix_fadvise(fd, begin, length, os.POSIX_FADV_WILLNEED)
