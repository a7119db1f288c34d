"""Where the pages of an SGLang host pool lie in memory, as the store wants to know it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import StoreError
from kvtier.pages import Bools, PageBuffers

I64 = npt.NDArray[np.int64]


class SlotsError(ValueError):
    """The slots of a call are not whole pages of the pool, so no byte of it can be moved."""


@dataclass(frozen=True)
class Loan:
    """Memory of n pages lent to one call of the store.

    `buffers` lie in the pool itself, or in `copies`, a uint8 array of shape (n, part bytes), for
    a pool that only hands out whole pages by copy. Keep the loan until the store has answered.
    """

    buffers: PageBuffers
    copies: npt.NDArray[np.uint8] | None = None


class HostPages:
    """One host pool seen as pages: their pieces' sizes, and where they are.

    `slots` is how many host indices name one page: `logical_page_size` where the pool is widened
    by decode context parallelism (pool_host/base.py of SGLang 0.5.23), else `page_size`, 1 for
    Mamba states. `sizes` are the bytes of a page's pieces in the pool's own order.

    Raises StoreError for a pool whose pages can be reached in no way.
    """

    def __init__(self, name: str, pool: Any) -> None:
        self.name = name
        self.pool = pool
        self.slots = int(getattr(pool, "logical_page_size", None) or pool.page_size)
        self.page_count = int(getattr(pool, "logical_size", pool.size)) // self.slots
        self._affine: tuple[I64, I64] | None = None
        pointers = self._probe()
        self.by_copy = pointers is None
        if pointers is None:
            self.sizes: tuple[int, ...] = (self._flat_bytes(),)
        elif self._can_be_affine(pointers):
            self._affine = pointers[0], pointers[1] - pointers[0]

    def lend(self, indices: torch.Tensor, count: int, *, filled: bool) -> Loan:
        """The memory of `count` pages at the slots `indices`, int64 of count * `slots`.

        `filled` asks for the pages' present bytes (to store them); without it, pages by copy
        come with any bytes, to be written to and then taken over with `land`.
        """
        first = self._first_slots(indices, count)
        if self.by_copy:
            copies = np.empty((count, self.sizes[0]), dtype=np.uint8)
            if filled:
                for row, slot in zip(copies, first.tolist(), strict=True):
                    row[:] = _bytes_of(self.pool.get_data_page(slot, flat=True))
            pointers = copies.ctypes.data + np.arange(count, dtype=np.int64) * self.sizes[0]
            return Loan(_page_buffers(pointers.reshape(count, 1), self.sizes), copies)
        if not self.sizes:
            return Loan(_page_buffers(np.empty((count, 0), dtype=np.int64), ()))
        if self._affine is None:
            return Loan(_page_buffers(self._pointers(indices, count), self.sizes))
        base, stride = self._affine
        return Loan(_page_buffers(base + first[:, None] // self.slots * stride, self.sizes))

    def land(self, loan: Loan, indices: torch.Tensor, arrived: Bools) -> None:
        """Move pages that came by copy into the pool, where `arrived`; others stay untouched."""
        if loan.copies is None:
            return
        first = self._first_slots(indices, len(loan.copies)).tolist()
        for row in arrived.nonzero()[0].tolist():
            page = torch.from_numpy(loan.copies[row]).view(self._flat_page.dtype)
            self.pool.set_from_flat_data_page(first[row], page)

    def _first_slots(self, indices: torch.Tensor, count: int) -> I64:
        """The first slot of each page. Raises SlotsError if they are not `count` whole pages."""
        if indices is None or indices.numel() != count * self.slots:
            given = 0 if indices is None else indices.numel()
            raise SlotsError(
                f"{given} slots for {count} pages of {self.slots} slots of pool {self.name}."
            )
        slots = indices.cpu().numpy().astype(np.int64, copy=False).reshape(count, self.slots)
        first: I64 = slots[:, 0]
        neighbours = (slots[:, -1] - first == self.slots - 1) & (first % self.slots == 0)
        if not (neighbours & (first >= 0) & (first < self.page_count * self.slots)).all():
            raise SlotsError(f"The slots are not whole pages of pool {self.name}.")
        return first

    def _probe(self) -> I64 | None:
        """Addresses, (3, k), of pages 0, 1 and the last; sets `sizes`. None if only by copy."""
        pages = np.array([0, min(1, self.page_count - 1), self.page_count - 1])
        slots = pages[:, None] * self.slots + np.arange(self.slots)
        try:
            meta = self.pool.get_page_buffer_meta(torch.from_numpy(slots.reshape(-1)))
        except (AttributeError, NotImplementedError, ValueError):
            # What SGLang's pools answer where a layout or side state has no addresses:
            # pool_host/mha.py, dsa.py, mamba.py and mha_mxfp8.py of 0.5.23.
            return None
        # The byte-less anchor of DeepSeek V4 answers None (memory_pool_host.py, LogicalHostPool).
        pointers, sizes = meta if meta is not None else ([], [])
        self.sizes = tuple(int(size) for size in sizes[: len(sizes) // 3])
        if len(pointers) != len(sizes) or list(sizes) != list(self.sizes) * 3:
            raise StoreError(
                f"The pages of pool {self.name} differ in shape; kvtier cannot store them: "
                "serve without --hicache-storage-backend kvtier."
            )
        return np.array(pointers, dtype=np.int64).reshape(3, len(self.sizes))

    def _can_be_affine(self, pointers: I64) -> bool:
        """Whether a page's address is base + page * stride, so that numpy can compute it."""
        if getattr(self.pool, "shared_allocation_domain", None) is not None or self.page_count < 3:
            return False  # slots of a shared domain are translated, and move
        stride = pointers[1] - pointers[0]
        return bool((pointers[2] == pointers[0] + (self.page_count - 1) * stride).all())

    def _pointers(self, indices: torch.Tensor, count: int) -> I64:
        pointers, _ = self.pool.get_page_buffer_meta(indices)
        return np.array(pointers, dtype=np.int64).reshape(count, len(self.sizes))

    @cached_property
    def _flat_page(self) -> torch.Tensor:
        return self.pool.get_dummy_flat_data_page()

    def _flat_bytes(self) -> int:
        try:
            return int(self._flat_page.numel() * self._flat_page.element_size())
        except NotImplementedError as error:
            raise StoreError(
                f"SGLang gives no access to the pages of pool {self.name} ({error}); choose "
                "another KV dtype or --hicache-mem-layout page_first."
            ) from error


def _page_buffers(pointers: I64, sizes: tuple[int, ...]) -> PageBuffers:
    return PageBuffers(np.ascontiguousarray(pointers).view(np.uint64), sizes)


def _bytes_of(page: torch.Tensor) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = page.contiguous().view(torch.uint8).reshape(-1).numpy()
    return array
