"""Bit rot: files of a store are damaged at random and opened; frames are mutated in memory."""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
import tempfile
from pathlib import Path

from kvtier.catalog import Catalog
from kvtier.check import Findings, check
from kvtier.errors import IdentityError, KvtierError
from kvtier.format import (
    FRAME_ALIGNMENT,
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
        wrong, parts = checked(lambda r=root, p=path, d=ranges: _opened(r, p, d, oracle, sound))
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


class _Mutator:
    """Decodes mutants of what a sound store holds."""

    def __init__(self, sound: Path, seed: int) -> None:
        store = sound / "kvtier"
        self.rng = random.Random(seed)
        self.layout = Layout.open(store, create=False)
        self.frames = [
            (data[at : at + size], frame)
            for data in (path.read_bytes() for path in self.layout.segments.glob("*.kvm"))
            for at, frame, size in scan_frames(data)
            if frame is not None
        ]
        self.snapshot = (store / "index" / "snapshot").read_bytes()
        self.document = next((store / "namespaces").glob("*.json")).read_bytes()
        self.scratch = sound.with_name("mutated")

    def mutant(self, number: int) -> None:
        """Decode one mutant. FormatError or IdentityError if it is refused."""
        data, frame = self.rng.choice(self.frames)
        kind = number % 100
        if kind < 40:
            self._frame(data)
        elif kind < 90:
            self._body(bytes(frame.body))
        elif kind < 96:
            Identity.from_json(_mutated(self.rng, self.document).decode("utf-8", "replace"))
        elif kind == 96 and number % 1000 < 100:
            _manifest(self.rng, self.layout, self.frames)
        elif kind == 97 and number % 1000 < 100:
            self._snapshot()
        else:
            self._scan(data + data)

    def _frame(self, data: bytes) -> None:
        """A frame as it lies in a file."""
        mutant = _mutated(self.rng, data)
        _bounded(decode_frame(mutant, 0).body, mutant)

    def _body(self, body: bytes) -> None:
        """A body that a checksum vouches for."""
        mutant = _mutated(self.rng, body)
        _bounded(self.rng.choice(_DECODERS)(mutant), mutant)

    def _snapshot(self) -> None:
        self.scratch.write_bytes(_mutated(self.rng, self.snapshot))
        if Snapshot.load(self.scratch) is None:
            raise FormatError("no snapshot")

    def _scan(self, data: bytes) -> None:
        mutant = _mutated(self.rng, data)
        for at, _, size in scan_frames(mutant):
            if at + size > len(mutant) + FRAME_ALIGNMENT:
                raise AssertionError("a frame ends behind its file")


def _mutate(sound: Path, runs: int, seed: int) -> dict[str, object]:
    """Decode so many mutants; what went wrong, and figures."""
    mutator = _Mutator(sound, seed)
    wrong: list[str] = []
    decoded = refused = 0
    # A decoder that believes a count would ask for more than this.
    limit = _address_space() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(runs):
        try:
            mutator.mutant(number)
            decoded += 1
        except (FormatError, IdentityError):
            refused += 1
        except Exception as error:  # whatever else comes out of a decoder is a violation
            wrong.append(f"mutation {number}: {type(error).__name__}: {error}")
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if growth > 64:
        wrong.append(f"the process grew by {growth} MiB")
    return {"wrong": wrong[:50], "decoded": decoded, "refused": refused, "growth": growth}


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _bounded(value: object, source: bytes) -> None:
    """What was decoded is not larger than what it was decoded from."""
    if isinstance(value, list) and len(value) > len(source):
        raise AssertionError(f"{len(value)} entries from {len(source)} bytes")
    if isinstance(value, bytes | memoryview) and len(value) > len(source):
        raise AssertionError(f"{len(value)} bytes from {len(source)}")


def _manifest(rng: random.Random, layout: Layout, frames: list) -> None:
    """A catalog takes in frames whose checksum is right and whose body is not."""
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
