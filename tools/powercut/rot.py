"""Bit rot: files of a store are damaged at random and opened; frames are mutated in memory."""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
import tempfile
from pathlib import Path

from kvtier.check import Findings, check
from kvtier.errors import IdentityError, KvtierError
from kvtier.format import (
    FRAME_HEADER,
    FormatError,
    FrameType,
    decode_columns,
    decode_frame,
    decode_recency,
    decode_run,
    decode_tombstone,
    decode_wipe,
    encode_frame,
    scan_frames,
)
from kvtier.identity import Identity
from kvtier.index import Index
from kvtier.layout import Layout, segment_name_of
from kvtier.snapshot import Snapshot
from powercut.process import Child, checked
from powercut.result import Result
from powercut.workload import POOLS, Message, Oracle, Send, settings, verify, write

_DECODERS = (decode_run, decode_tombstone, decode_wipe, decode_recency, decode_columns)


def run(runs: int, seed: int) -> list[Result]:
    """`runs` damaged stores, and 1,000 mutations in memory for each."""
    with tempfile.TemporaryDirectory(prefix="kvtier-rot-") as folder:
        sound, oracle = _store(Path(folder) / "sound", seed)
        return [_files(sound, oracle, runs, seed), _mutations(sound, 1000 * runs, seed)]


def _store(root: Path, seed: int) -> tuple[Path, Oracle]:
    """A store with several segments, a snapshot, and tails behind it."""
    root.mkdir()
    oracle = Oracle(seed)

    def fill(send: Send) -> None:
        rng = random.Random(seed)
        write(settings(root), Oracle(seed), send, rng, steps=25, duties=("save", "reopen"))

    child = Child(fill)
    if child.wait(oracle.hear):
        raise RuntimeError(f"no store to damage: {child.errors}")
    again = Child(
        lambda send: write(settings(root), oracle, send, random.Random(seed + 1), steps=4)
    )
    again.listen(300, oracle.hear)
    again.wait(oracle.hear)
    oracle.settled()
    return root, oracle


# Files


def _files(sound: Path, oracle: Oracle, runs: int, seed: int) -> Result:
    result = Result("bit rot in files")
    before = checked(lambda: verify(settings(_copy(sound)), oracle))
    if before[0]:
        result.fail("the sound store", before[0])
    result.figures["parts of the sound store"] = before[1]
    for number in range(runs):
        rng = random.Random(f"{seed}/{number}")
        root = _copy(sound)
        kinds = ("*.kvs", "*.kvs", "*.kvm", "*.kvm", "snapshot", "namespaces/*.json", "kvtier.json")
        files = [path for path in sorted(root.rglob(rng.choice(kinds))) if path.stat().st_size]
        path = rng.choice(files)
        how, ranges = _damage(path, rng)
        name = f"{seed}/{number}: {how} in {path.name}"
        wrong, parts = checked(
            lambda r=root, p=path, d=ranges: _opened(r, p, d, oracle, sound)
        )
        result.runs += 1
        result.count(f"damaged {path.suffix or path.name}")
        result.count("parts found exact", parts)
        result.fail(name, wrong)
    return result.done()


def _copy(sound: Path) -> Path:
    root = sound.with_name("damaged")
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(sound, root)
    return root


Ranges = list[tuple[int, int]]


def _damage(path: Path, rng: random.Random) -> tuple[str, Ranges]:
    """Damage a file; what was done, and which bytes it took."""
    data = bytearray(path.read_bytes())
    size = len(data)
    kind = rng.choice(("flip", "flip", "flips", "zeros", "noise", "cut", "longer"))
    at = rng.randrange(size)
    ranges = [(at, at + 1)]
    match kind:
        case "flip":
            data[at] ^= 1 << rng.randrange(8)
        case "flips":
            places = [rng.randrange(size) for _ in range(64)]
            ranges = [(place, place + 1) for place in places]
            for place in places:
                data[place] ^= 1 << rng.randrange(8)
        case "zeros" | "noise":
            end = min(size, at + rng.choice((8, 512, 4096)))
            ranges = [(at, end)]
            data[at:end] = bytes(end - at) if kind == "zeros" else rng.randbytes(end - at)
        case "cut":
            ranges = [(at, size)]
            del data[at:]
        case "longer":
            ranges = []
            data += rng.randbytes(5000)
    path.write_bytes(bytes(data))
    return f"{kind} at {at}", ranges


def _places(index: Index) -> set[tuple[str, int, int]]:
    """Where every page is."""
    return {
        (stored.segment, stored.manifest_offset, position)
        for stored in index.runs()
        for position in stored.positions.tolist()
    }


def _opened(
    root: Path, path: Path, ranges: Ranges, oracle: Oracle, sound: Path
) -> tuple[list[str], int]:
    """Check a damaged store, then serve from it."""
    try:
        layout = Layout.open(root / "kvtier", create=False)
    except KvtierError as error:
        # Without its superblock a store is not opened, and says so; the pages are untouched.
        return ([] if path.name == "kvtier.json" else [f"refused: {error}"]), 0
    index = Index(layout, readonly=True)
    wrong = []
    if path.suffix == ".kvs":
        found = check(layout, index, payload=True)
        wrong += _unnamed(found, path)
        if found.clean:
            wrong += verify(settings(root), oracle)[0]  # what it did not name must be there
    if path.suffix == ".kvm":
        index.rebuild()
        wrong += _hidden(_places(index), path, ranges, sound)
        named = check(layout, index).manifests
        if path.stem not in named and _places(index) < _places(_whole(sound)):
            wrong.append(f"fsck did not name {path.name}: {named}")
    if path.parent.name == "namespaces" and not _same_json(path, sound):
        identities = check(layout, index).identities
        if not identities:
            wrong.append("fsck did not name a damaged identity")
    wrong_pages, parts = verify(settings(root), oracle, misses_allowed=True)
    wrong += wrong_pages
    if path.suffix in ("", ".json"):
        # Derived files and documents: nothing may be lost with them.
        wrong += verify(settings(root), oracle)[0]
    return wrong, parts


def _unnamed(found: Findings, path: Path) -> list[str]:
    """Whether fsck says which segment is damaged, and no other."""
    named = {segment_name_of(grave.segment_id) for grave in found.damaged} | set(found.truncated)
    if named - {path.stem}:
        return [f"fsck named {named}, damaged was {path.name}"]
    if found.clean and found.damaged:
        return ["fsck calls a damaged store clean"]
    return []


def _hidden(there: set[tuple[str, int, int]], path: Path, ranges: Ranges, sound: Path) -> list[str]:
    """Pages that are gone although the frame that names them is whole."""
    manifest = _original(path, sound)
    sizes = {at: size for at, frame, size in scan_frames(manifest) if frame is not None}
    wrong = []
    for segment, offset, position in _places(_whole(sound)) - there:
        end = offset + sizes.get(offset, 0)
        hit = segment == path.stem and any(a < end and b > offset for a, b in ranges)
        if not hit:
            wrong.append(f"page {position} of the run at {offset} in {segment} is hidden")
    return wrong


def _whole(sound: Path) -> Index:
    index = Index(Layout.open(sound / "kvtier", create=False), readonly=True)
    index.rebuild()
    return index


def _same_json(path: Path, sound: Path) -> bool:
    """Whether a document still says what it said: white space may be anything."""
    try:
        return bool(json.loads(path.read_bytes()) == json.loads(_original(path, sound)))
    except ValueError:
        return False


def _original(path: Path, sound: Path) -> bytes:
    return next(sound.rglob(path.name)).read_bytes()


# Memory


def _mutations(sound: Path, runs: int, seed: int) -> Result:
    """Decoders get damaged bytes: a value or their own error, and no more memory than the input."""
    result = Result("mutations of frames and headers in memory")
    said: list[Message] = []
    child = Child(lambda send: send({"say": "mutated"} | _mutate(sound, runs, seed)))
    status = child.wait(said.append)
    result.runs = runs
    if not said:
        result.fail(f"{seed}", [f"ended with status {status}: {child.errors}"])
        return result.done()
    result.fail(f"{seed}", said[0]["wrong"])
    result.figures = {
        "decoded": said[0]["decoded"],
        "refused": said[0]["refused"],
        "growth of the process in MiB": said[0]["growth"],
    }
    return result.done()


def _mutate(sound: Path, runs: int, seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    store = sound / "kvtier"
    manifests = [path.read_bytes() for path in (store / "segments").glob("*.kvm")]
    frames = [
        (data[at : at + size], frame)
        for data in manifests
        for at, frame, size in scan_frames(data)
        if frame is not None
    ]
    snapshot = (store / "index" / "snapshot").read_bytes()
    document = next((store / "namespaces").glob("*.json")).read_bytes()
    scratch = sound.with_name("mutated")
    layout = Layout.open(store, create=False)
    wrong: list[str] = []
    decoded = refused = 0
    _mutated(rng, frames[0][0])
    # More than this is never needed: a decoder that believes a count would ask for gigabytes.
    limit = 1 << 30
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + limit, resource.RLIM_INFINITY))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(runs):
        data, frame = rng.choice(frames)
        kind = number % 100
        try:
            if kind < 40:  # frames as they lie in a file
                mutant = _mutated(rng, data)
                _bounded(decode_frame(mutant, 0).body, mutant)
            elif kind < 90:  # bodies that a checksum vouches for
                mutant = _mutated(rng, bytes(frame.body))
                _bounded(rng.choice(_DECODERS)(mutant), mutant)
            elif kind < 96:
                mutant = _mutated(rng, document)
                Identity.from_json(mutant.decode("utf-8", "replace"))
            elif kind == 96 and number % 1000 < 100:  # whole manifests, some of them signed
                _manifest(rng, layout, frames, scratch)
            elif kind == 97 and number % 1000 < 100:
                scratch.write_bytes(_mutated(rng, snapshot))
                if Snapshot.load(scratch) is None:
                    raise FormatError("no snapshot")
            else:
                mutant = _mutated(rng, data + data)
                for at, _, size in scan_frames(mutant):
                    if at + size > len(mutant) + 8:
                        wrong.append("a frame ends behind its file")
            decoded += 1
        except (FormatError, IdentityError):
            refused += 1
        except Exception as error:
            wrong.append(f"mutation {number}, kind {kind}: {type(error).__name__}: {error}")
            if len(wrong) > 20:
                break
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if growth > 64:
        wrong.append(f"the process grew by {growth} MiB")
    return {"wrong": wrong, "decoded": decoded, "refused": refused, "growth": growth}


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _bounded(value: object, source: bytes) -> None:
    """What was decoded is not larger than what it was decoded from."""
    if isinstance(value, list) and len(value) > len(source):
        raise AssertionError(f"{len(value)} entries from {len(source)} bytes")
    if isinstance(value, bytes | memoryview) and len(value) > len(source):
        raise AssertionError(f"{len(value)} bytes from {len(source)}")


def _manifest(rng: random.Random, layout: Layout, frames: list, scratch: Path) -> None:
    """A catalog takes in frames whose checksum is right and whose body is not."""
    from kvtier.catalog import Catalog

    catalog = Catalog(layout.store_id)
    catalog.add_segment(f"{bytes(12).hex()}-0")
    segment = catalog.segments[0]
    offset = 0
    for _ in range(5):
        _, frame = rng.choice(frames)
        body = _mutated(rng, bytes(frame.body))
        data = encode_frame(
            rng.choice(list(FrameType)),
            body,
            sequence=0,
            time_ns=1,
            segment_id=segment.ident,
            store_id=layout.store_id,
        )
        catalog.apply(segment, offset, decode_frame(data, 0), data)
        offset += len(data)
    for stored in catalog.runs():
        for pool in POOLS:
            catalog.locate(stored.run.namespace, 0, bytes(stored.run.keys))
            catalog.contains(stored.run.namespace, hash(pool.name) % 2**64, bytes(stored.run.keys))


_EDGES = (0, 1, 0x7F, 0x80, 0xFF)


def _mutated(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, cut, doubled, or a count made huge."""
    if not data:
        return rng.randbytes(rng.randrange(64))
    mutant = bytearray(data[: 4096 if len(data) > 4096 and rng.random() < 0.5 else len(data)])
    for _ in range(rng.choice((1, 1, 1, 3, 16))):
        at = rng.randrange(len(mutant))
        match rng.randrange(6):
            case 0:
                mutant[at] ^= 1 << rng.randrange(8)
            case 1:
                mutant[at] = rng.choice(_EDGES)
            case 2 if len(mutant) > 8:
                at = min(at, len(mutant) - 8)
                value = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
                mutant[at : at + 8] = struct.pack("<Q", value)
            case 3:
                del mutant[at:]
                mutant = mutant or bytearray(1)
            case 4:
                end = min(len(mutant), at + 16)
                mutant[at:end] = rng.randbytes(end - at)
            case _:
                # The header's counts and sizes are where a decoder could be led astray.
                at = min(rng.randrange(FRAME_HEADER.size), len(mutant) - 1)
                mutant[at] = rng.choice(_EDGES)
    return bytes(mutant)


