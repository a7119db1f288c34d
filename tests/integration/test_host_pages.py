"""Host pages as the store sees them: exactly the bytes that SGLang's own page copies move."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from pools import STACKS, Engine

from kvtier.errors import StoreError
from kvtier.integration.host_pages import HostPages, Loan, SlotsError
from kvtier.memory import gather

LAYOUTS = [(stack.name, *layout) for stack in STACKS.values() for layout in stack.layouts]


def slots_of(pages: HostPages, *numbers: int) -> torch.Tensor:
    """Host indices of pages by their number in the pool."""
    first = torch.tensor(numbers, dtype=torch.int64) * pages.slots
    return (first[:, None] + torch.arange(pages.slots)).reshape(-1)


def data_page(pages: HostPages, number: int) -> bytes:
    page = pages.pool.get_data_page(number * pages.slots)
    return page.contiguous().view(torch.uint8).numpy().tobytes()


def scramble(pages: HostPages, number: int) -> None:
    """Random bytes in one page, through SGLang's own copy."""
    blank = pages.pool.get_dummy_flat_data_page()
    noise = torch.randint(0, 256, (blank.numel() * blank.element_size(),), dtype=torch.uint8)
    pages.pool.set_from_flat_data_page(number * pages.slots, noise.view(blank.dtype))


def lent_bytes(loan: Loan) -> bytes:
    target = np.zeros(len(loan.buffers) * loan.buffers.part_bytes, dtype=np.uint8)
    gather(loan.buffers, np.arange(len(loan.buffers)), target.ctypes.data)
    return target.tobytes()


def write_into(loan: Loan, data: bytes) -> None:
    """Fill the lent memory, piece by piece, as a reader of the store does."""
    position = 0
    for page in loan.buffers.pointers.tolist():
        for pointer, size in zip(page, loan.buffers.sizes, strict=True):
            ctypes.memmove(pointer, data[position : position + size], size)
            position += size


def host_pages(engine: Engine) -> list[HostPages]:
    return [HostPages(name, entry.host_pool) for name, entry in engine.entries.items()]


@pytest.mark.parametrize(("stack", "layout", "io"), LAYOUTS, ids=str)
def test_a_page_taken_out_and_put_elsewhere_is_the_same_page(start, stack, layout, io):
    for pages in host_pages(start(stack, layout=layout, io=io)):
        for number in (1, 2, 3):
            scramble(pages, number)
        neighbour = data_page(pages, 3)
        bytes_ = lent_bytes(pages.lend(slots_of(pages, 1), 1, filled=True))
        assert len(bytes_) == len(data_page(pages, 1))

        place = slots_of(pages, 2)
        loan = pages.lend(place, 1, filled=False)
        write_into(loan, bytes_)
        pages.land(loan, place, np.array([True]))
        assert data_page(pages, 2) == data_page(pages, 1)
        assert data_page(pages, 3) == neighbour


@pytest.mark.parametrize(("stack", "layout", "io"), LAYOUTS, ids=str)
def test_addresses_are_those_of_the_pool(start, stack, layout, io):
    for pages in host_pages(start(stack, layout=layout, io=io)):
        if pages.by_copy or not pages.sizes:
            continue
        numbers = (pages.page_count - 1, 0, 2, 1)
        slots = slots_of(pages, *numbers)
        pointers, sizes = pages.pool.get_page_buffer_meta(slots)
        loan = pages.lend(slots, len(numbers), filled=True)
        assert loan.buffers.pointers.reshape(-1).tolist() == pointers
        assert list(loan.buffers.sizes) * len(numbers) == sizes


def test_the_indexer_of_dsa_comes_by_copy_where_it_has_no_addresses(start):
    indexer = start("dsa", layout="layer_first", io="direct").entries["indexer"]
    assert HostPages("indexer", indexer.host_pool).by_copy


def test_the_anchor_of_deepseek_v4_has_pages_without_bytes(start):
    anchor = HostPages("kv", start("deepseek-v4").entries["kv"].host_pool)
    loan = anchor.lend(slots_of(anchor, 0, 1), 2, filled=True)
    assert (anchor.sizes, loan.buffers.part_bytes, len(loan.buffers)) == ((), 0, 2)


@pytest.mark.parametrize("layout", [("page_first", "kernel"), ("layer_first", "direct")])
def test_pages_that_did_not_arrive_stay_untouched(start, layout):
    entry = start("dsa", layout=layout[0], io=layout[1]).entries["indexer"]
    pages = HostPages("indexer", entry.host_pool)
    for number in (1, 2, 3):
        scramble(pages, number)
    before = [data_page(pages, number) for number in (1, 2, 3)]
    loan = pages.lend(slots_of(pages, 1, 2, 3), 3, filled=False)
    pages.land(loan, slots_of(pages, 1, 2, 3), np.array([False, False, False]))
    assert [data_page(pages, number) for number in (1, 2, 3)] == before


@pytest.mark.parametrize(
    "slots",
    [
        torch.arange(64),  # one page for two
        torch.arange(3, 131),  # across page borders
        torch.cat([torch.arange(64), torch.arange(0, 128, 2)]),  # with gaps
        torch.arange(1 << 30, (1 << 30) + 128),  # behind the pool's end
        -torch.arange(1, 129),
        None,
    ],
)
def test_slots_that_are_no_whole_pages_are_refused(start, slots):
    pages = HostPages("kv", start("full").entries["kv"].host_pool)
    with pytest.raises(SlotsError):
        pages.lend(slots, 2, filled=True)


class WithoutPages:
    """A pool as MXFP8's in SGLang 0.5.23: neither addresses nor page copies."""

    page_size, size, layout = 64, 640, "page_first"

    def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
        raise NotImplementedError("scales live outside")

    def get_dummy_flat_data_page(self) -> None:
        raise NotImplementedError("scales live outside")


def test_a_pool_without_any_way_to_its_pages_is_refused_with_the_reason():
    with pytest.raises(StoreError, match=r"kv \(scales live outside\)"):
        HostPages("kv", WithoutPages())
