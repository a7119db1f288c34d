"""Reads pages: places sorted into extents, extents read by a few threads into memory kvtier owns,
verified there, and only then copied to where they were asked for."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier import telemetry
from kvtier.backends.local import read_extent
from kvtier.boundaries import run_length
from kvtier.breaker import Breaker
from kvtier.catalog import Located
from kvtier.complaints import Complaints
from kvtier.config import Config
from kvtier.format import ALIGNMENT, Block, Grave, align, block_seed, checksum, column_id, part_seed
from kvtier.index import Index
from kvtier.layout import Layout
from kvtier.memory import Arena, BufferPool, scatter
from kvtier.pages import KEY_BYTES, Bools, PoolPages

EXTENT_BYTES = 16 << 20
"""Neighbouring parts are read together up to this size."""

GAP_BYTES = 64 << 10
"""Bytes nobody asked for that are read along rather than ending an extent."""

PASSING = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.EINTR,
    errno.EAGAIN,
}
"""Errors of this process or this moment, which say nothing about what is stored."""

OUTCOMES = ("after_miss", "absent", "damaged", "failed", "late", "stopped", "read")
"""What becomes of a page that is asked for (telemetry.GET_PAGES)."""

_LATE_SHARE = 8
"""A call that is late waits this part of `read_deadline` for what is under way: SGLang 0.5.23 ends
a server whose storage threads take longer than 10 s to end."""

_LOOK_SECONDS = 0.25
"""While a read is waited for, whether others came back is looked at so often."""

_AHEAD = 2
"""Extents in flight per read thread."""


@dataclass(frozen=True)
class _Span:
    """Neighbouring parts of one block, wanted by one request."""

    request: int
    wanted: npt.NDArray[np.int64]
    """Index of each page in the request."""
    located: Located
    block: Block
    first: int
    """Position of the first page in the run."""

    @property
    def start(self) -> int:
        return self.block.offset + self.first * self.block.part_bytes

    @property
    def size(self) -> int:
        return len(self.wanted) * self.block.part_bytes

    def graves(self, which: Bools) -> list[Grave]:
        """Places of some of the span's pages."""
        positions = np.flatnonzero(which)
        return [
            self.located.stored.grave(self.first + int(positions[start]), end - start)
            for start, end in _neighbours(positions, len(positions))
        ]


@dataclass
class _Extent:
    """Bytes of one segment read with one system call, and what is wanted of them."""

    segment: str
    start: int
    end: int
    spans: list[_Span] = field(default_factory=list)


class _Late(Exception):
    """No read came back in time."""


class _Task:
    """One call of `Reader.get`: what was asked, and the answer so far."""

    def __init__(self, namespace: bytes, requests: Sequence[PoolPages], deadline: float) -> None:
        self.namespace = namespace
        self.requests = requests
        self.deadline = deadline
        """No read begins after it."""
        self.progress = time.monotonic()
        """When the last read came back."""
        self.outcomes = [np.zeros(len(r.keys), np.int8) for r in requests]
        """Number in OUTCOMES; only the first page that fails and those read are told apart."""
        self.done: list[Bools] = [np.zeros(len(r.keys), np.bool_) for r in requests]
        self.right: list[Bools] = [np.zeros(len(r.keys), np.bool_) for r in requests]
        """Pages that were read and are what was stored."""
        self.limits = [len(request.keys) for request in requests]
        """Index of the first page of each request that failed."""
        self.damaged: list[Grave] = []

    def fail(self, request: int, pages: npt.NDArray[np.int64], outcome: str) -> None:
        """These pages, and so all later ones, will not be delivered."""
        self.limits[request] = min(self.limits[request], int(pages[0]))
        self.outcomes[request][pages] = OUTCOMES.index(outcome)

    def came_back(self, _: object) -> None:
        """A read has ended, well or not."""
        self.progress = time.monotonic()

    def answers(self) -> list[Bools]:
        """Which pages were delivered; each page asked for is counted once."""
        for limit, answer, outcomes in zip(self.limits, self.done, self.outcomes, strict=True):
            answer[limit:] = False
            outcomes[answer] = OUTCOMES.index("read")
            counts = np.bincount(outcomes, minlength=len(OUTCOMES)).tolist()
            for outcome, pages in zip(OUTCOMES, counts, strict=True):
                telemetry.GET_PAGES.labels(outcome).inc(pages)
        return self.done


_Reading = Future[tuple[Arena, int, list[Bools]]]
_Flight = tuple[_Extent, _Reading]
_Held = tuple[_Extent, Arena, int, list[Bools]]
"""What was read: where to, the file offset of its first byte, which parts of each span are good."""


class Reader:
    """Gets pages out of the segments. Faults are misses: nothing here raises for a bad drive."""

    def __init__(self, layout: Layout, index: Index, config: Config, breaker: Breaker) -> None:
        self._layout = layout
        self._index = index
        self._config = config
        self._breaker = breaker
        self._buffers = BufferPool(config.staging_size)
        self._threads = ThreadPoolExecutor(config.read_threads, "kvtier-read")
        self._complaints = Complaints()

    def close(self) -> None:
        """Let the threads go; a read that hangs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def get(
        self, namespace: bytes, requests: Sequence[PoolPages]
    ) -> tuple[list[Bools], list[Grave]]:
        """(bool (n,) a request, places whose bytes were not what was stored).

        Pages land in their buffers only where True. After the first page that fails in a request
        its later pages are left alone: whoever reads a prefix has no use for them.
        """
        task = _Task(namespace, requests, time.monotonic() + self._config.read_deadline)
        spans: list[_Span] = []
        for number in range(len(requests)):
            spans += self._plan(task, number)
        self._read_all(task, _extents([s for s in spans if s.wanted[0] < task.limits[s.request]]))
        return task.answers(), task.damaged

    def _plan(self, task: _Task, number: int) -> list[_Span]:
        """What must be read for a request; pages without bytes are answered at once."""
        request, done = task.requests[number], task.done[number]
        column = column_id(request.column)
        keys = b"".join(request.keys)
        asked = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        there = np.zeros(len(request.keys), np.bool_)
        spans = []
        for located in self._index.locate(task.namespace, column, keys):
            run, positions = located.stored.run, located.stored.positions
            block = run.block(column)
            if block is None or block.part_bytes != request.buffers.part_bytes:
                continue
            stored = np.frombuffer(run.keys, np.uint8).reshape(-1, KEY_BYTES)
            same = (stored[positions] == asked[located.wanted]).all(axis=1)
            positions, wanted = positions[same], located.wanted[same]
            there[wanted] = True
            if not block.part_bytes:
                done[wanted] = task.right[number][wanted] = True
                continue
            longest = max(1, EXTENT_BYTES // block.part_bytes)
            for start, end in _neighbours(positions, longest):
                first = int(positions[start])
                spans.append(_Span(number, wanted[start:end], located, block, first))
        absent = np.flatnonzero(~there)
        if len(absent):
            task.fail(number, absent, "absent")
        return spans

    def _read_all(self, task: _Task, extents: list[_Extent]) -> None:
        """Read extents a few at a time, in the order of the files, and copy out what is right."""
        if extents and not self._breaker.allows():
            self._give_up(task, extents, "stopped")
            return
        waiting = deque(extents)
        flying: deque[_Flight] = deque()
        held: list[_Held] = []
        while self._send_more(task, waiting, flying):
            extent, future = flying.popleft()
            try:
                arena, start, right = self._wait(task, future)
            except (_Late, CancelledError) as end:
                late = isinstance(end, _Late)
                self._abandon([future, *(other for _, other in flying)])
                rest = [extent, *(e for e, _ in flying), *waiting]
                self._give_up(task, rest, "late" if late else "stopped")
                if late and time.monotonic() >= task.progress + self._config.read_deadline:
                    self._breaker.failed(
                        f"no answer within {self._config.read_deadline:g} s", at_once=True
                    )
                break
            except OSError as error:
                self._missed(task, extent, error)
                continue
            self._breaker.passed()
            for span, good in zip(extent.spans, right, strict=True):
                task.right[span.request][span.wanted[good]] = True
                if not good.all():
                    task.fail(span.request, span.wanted[~good], "damaged")
                    task.damaged += span.graves(~good)
            held = self._land(task, [*held, (extent, arena, start, right)])
        self._land(task, held, last=True)

    def _send_more(
        self, task: _Task, waiting: deque[_Extent], flying: deque[_Flight]
    ) -> deque[_Flight]:
        """The reads under way, with more of those that wait; none is begun after the call's
        deadline: a drive that is slow and not dead gives what it can until then."""
        if waiting and time.monotonic() >= task.deadline:
            self._give_up(task, waiting, "late")
            waiting.clear()
        while waiting and len(flying) < _AHEAD * self._config.read_threads:
            extent = waiting.popleft()
            flying.append((extent, self._send(task, extent)))
        return flying

    def _wait(self, task: _Task, future: _Reading) -> tuple[Arena, int, list[Bools]]:
        """What this read brought. _Late if no read of the call came back for `read_deadline`, or
        for a short part of it once the call itself is late."""
        while True:
            patience = self._config.read_deadline
            if time.monotonic() >= task.deadline:
                patience /= _LATE_SHARE
            left = task.progress + patience - time.monotonic()
            if not future.done():  # a cancelled one would be waited for
                wait([future], min(max(left, 0.0), _LOOK_SECONDS))
            if future.done():
                return future.result()
            if left <= 0:
                raise _Late

    def _land(self, task: _Task, held: list[_Held], *, last: bool = False) -> list[_Held]:
        """Copy out what is right where all pages before it are; what has to wait for those.

        `last`: nothing more comes, so that only pages before each limit are wanted.
        """
        ends = [
            limit if last else min(limit, run_length(right))
            for limit, right in zip(task.limits, task.right, strict=True)
        ]
        waiting = []
        for extent, arena, start, right in held:
            if any(
                span.wanted[-1] >= ends[span.request] and span.wanted[0] < task.limits[span.request]
                for span in ([] if last else extent.spans)
            ):
                waiting.append((extent, arena, start, right))
                continue
            for span, good in zip(extent.spans, right, strict=True):
                usable = good & (span.wanted < task.limits[span.request])
                source = arena.address + span.start - start
                self._deliver(task.requests[span.request], span, usable, source)
                task.done[span.request][span.wanted[usable]] = True
            self._buffers.give_back(arena)
        return waiting

    def _send(self, task: _Task, extent: _Extent) -> _Reading:
        """The read under way; cancelled if there are no threads, or no longer."""
        try:
            future = self._threads.submit(self._read, task.namespace, extent)
        except RuntimeError:  # closed meanwhile, or no more threads for this process
            future = Future()
            future.cancel()
        future.add_done_callback(task.came_back)
        return future

    def _deliver(self, request: PoolPages, span: _Span, usable: Bools, source: int) -> None:
        size = span.block.part_bytes
        positions = np.flatnonzero(usable)
        for start, end in _neighbours(positions, len(positions)):
            pages = span.wanted[positions[start:end]]
            scatter(request.buffers, pages, source + int(positions[start]) * size)
        telemetry.READ_BYTES.inc(len(positions) * size)

    def _read(self, namespace: bytes, extent: _Extent) -> tuple[Arena, int, list[Bools]]:
        """(buffer, file offset of its first byte, which parts of each span are right)."""
        start = extent.start // ALIGNMENT * ALIGNMENT
        size = align(extent.end) - start
        try:
            arena = self._buffers.take(size)
        except MemoryError as error:
            raise OSError(errno.ENOMEM, "no memory for a read") from error
        try:
            got = read_extent(
                self._layout.payload(extent.segment),
                start,
                arena.view[:size],
                direct=self._config.direct_io,
            )
        except BaseException:
            self._buffers.give_back(arena)
            raise
        right = []
        for span in extent.spans:
            place = span.start - start
            data = arena.view[place : place + span.size]
            right.append(_verify(namespace, span, data, got - place))
        return arena, start, right

    def _abandon(self, futures: Sequence[Future[tuple[Arena, int, list[Bools]]]]) -> None:
        """Late reads end in our own memory; it is used again only after they have ended."""

        def returned(future: Future[tuple[Arena, int, list[Bools]]]) -> None:
            if not future.cancelled() and future.exception() is None:
                self._buffers.give_back(future.result()[0])

        for future in futures:
            if not future.cancel():
                future.add_done_callback(returned)

    def _missed(self, task: _Task, extent: _Extent, error: OSError) -> None:
        """A read failed: forget its pages here, or the engine would ask for them for ever. They
        are known again after the next start, or when a drive that failed for long works again.
        Errors that pass forget nothing and say nothing of the drive."""
        self._give_up(task, [extent], "failed")
        passing = error.errno in PASSING
        for span in () if passing else extent.spans:
            for grave in span.graves(np.ones(len(span.wanted), np.bool_)):
                self._index.discard(grave)
        if not passing and not isinstance(error, FileNotFoundError):
            self._breaker.failed(error.strerror or str(error))
        self._complaints.add("read", f"cannot read {extent.segment} ({error}): counted as a miss")

    def _give_up(self, task: _Task, extents: Iterable[_Extent], outcome: str) -> None:
        for extent in extents:
            for span in extent.spans:
                task.fail(span.request, span.wanted, outcome)


def _verify(namespace: bytes, span: _Span, data: memoryview, there: int) -> Bools:
    """Which parts of a span are what was stored. `there`: bytes the file had from its start."""
    block, run, size = span.block, span.located.stored.run, span.block.part_bytes
    count = len(span.wanted)
    if there >= span.size and count == len(run):
        seed = block_seed(namespace, block.column, run.keys)
        if checksum(data, seed) == block.checksum:
            return np.ones(count, np.bool_)
    good = np.zeros(count, np.bool_)
    for number in range(min(count, max(0, there) // size)):
        position = span.first + number
        seed = part_seed(namespace, block.column, run.key(position))
        part = data[number * size : (number + 1) * size]
        good[number] = checksum(part, seed) == int(block.part_checksums[position])
    return good


def _neighbours(positions: npt.NDArray[np.int64], longest: int) -> list[tuple[int, int]]:
    """(start, end) of slices in which each position follows the one before."""
    slices = []
    start = 0
    values = positions.tolist()
    for index in range(1, len(values) + 1):
        if (
            index == len(values)
            or values[index] != values[index - 1] + 1
            or index - start >= longest
        ):
            slices.append((start, index))
            start = index
    return slices


def _extents(spans: list[_Span]) -> list[_Extent]:
    """Spans sorted by place and joined where they are neighbours, or nearly so."""
    extents: list[_Extent] = []
    for span in sorted(spans, key=lambda s: (s.located.stored.segment, s.start)):
        segment, end = span.located.stored.segment, span.start + span.size
        last = extents[-1] if extents else None
        if (
            last is None
            or last.segment != segment
            or span.start > last.end + GAP_BYTES
            or max(end, last.end) - last.start > EXTENT_BYTES
        ):
            last = _Extent(segment, span.start, end)
            extents.append(last)
        last.end = max(last.end, end)
        last.spans.append(span)
    return extents
