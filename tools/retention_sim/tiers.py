"""GPU and host memory above the store: what of a prompt need not be asked of the store."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from retention_sim.geometry import OFFERED_TAILS, PAGE_TOKENS

Ints = npt.NDArray[np.int64]

CAPACITY_TOKENS = 3_150_000


class Tiers:
    """One LRU over pages, which like SGLang's radix tree forgets leaves first.

    A prefix can be gone on from where a prompt or an answer ended, since the sliding window is
    kept there. What a request has restored or computed is here afterwards in any case, so this is
    the same for all stores.
    """

    def __init__(self, depth: Ints) -> None:
        """`depth`: pages up to and with each page of the trace, (pages,)."""
        self._depth = depth
        self._boundary = np.zeros(len(depth), np.bool_)
        self._used = np.zeros(len(depth), np.int64)
        self._resident = np.zeros(0, np.int64)
        self._clock = 0

    def restart(self) -> None:
        """Everything is lost."""
        self._boundary[:] = False
        self._used[:] = 0
        self._resident = np.zeros(0, np.int64)

    def request(self, pages: Ints, prompt: int, matchable: int) -> int:
        """Longest prefix in pages, up to `matchable`, to go on from; then all `pages` are here.

        `prompt`: full pages of the prompt, which come first.
        """
        there = self._used[pages[:matchable]] > 0
        reach = matchable if there.all() else int(there.argmin())
        ends = np.flatnonzero(self._boundary[pages[:reach]])
        self._clock += 1
        fresh = pages[self._used[pages] == 0]
        self._used[pages] = self._clock
        for end in (prompt, len(pages)):
            self._boundary[pages[max(0, end - OFFERED_TAILS) : end]] = True
        self._resident = np.concatenate((self._resident, fresh))
        self._evict(len(self._resident) - CAPACITY_TOKENS // PAGE_TOKENS)
        return int(ends[-1]) + 1 if len(ends) else 0

    def _evict(self, count: int) -> None:
        if count <= 0:
            return
        order = np.lexsort((-self._depth[self._resident], self._used[self._resident]))
        gone = self._resident[order[:count]]
        self._boundary[gone] = False
        self._used[gone] = 0
        self._resident = self._resident[order[count:]]
