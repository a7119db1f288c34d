# ruff: noqa: PLR0917 (the signatures are SGLang's)
"""Host stand-ins for the copy kernels of `sgl_kernel.kvcacheio` and SGLang's Mamba copies.

Names, keyword arguments and layouts are those of the calls in SGLang 0.5.23's
`mem_cache/pool_host/*.py` and `mem_cache/memory_pool_host.py`. Layouts of a host buffer:

    layer_first        (layer, token, item)              as on the device
    page_first         (token, layer, item)              `layout_dim` bytes from token to token
    page_first_direct  (page, layer, token of page, item)
    page_head          (page, head, token of page, layer, dim)

Suffixes read source_destination: `lf` layer first (the device), `pf` page first, `ph` page head.
`item_size`, `src_layout_dim` and `dst_layout_dim` are bytes; indices are token slots, or page
rows where a pool's item is a page. Arguments that only tune a launch are ignored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch


class Rows(NamedTuple):
    """Rows of bytes in memory: the address of row 0 and the bytes from row to row."""

    address: int
    stride: int

    def array(self, count: int, size: int) -> np.ndarray:
        """The first `count` rows of `size` bytes, as a writable (count, size) view."""
        span = (count - 1) * self.stride + size
        memory = (ctypes.c_uint8 * span).from_address(int(self.address))
        return np.lib.stride_tricks.as_strided(
            np.frombuffer(memory, dtype=np.uint8), (count, size), (self.stride, 1)
        )


def copy_rows(
    src: Rows, src_indices: torch.Tensor, dst: Rows, dst_indices: torch.Tensor, size: int
) -> None:
    """Copy `size` bytes of each indexed source row to the destination row beside it."""
    if src_indices.numel() == 0:
        return
    taken, given = src_indices.numpy(), dst_indices.numpy()
    rows = src.array(int(taken.max()) + 1, size)[taken]
    dst.array(int(given.max()) + 1, size)[given] = rows


# io backend "kernel", one layer, host to device


def transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size, **_):
    copy_rows(
        Rows(src.data_ptr(), item_size),
        src_indices,
        Rows(dst.data_ptr(), item_size),
        dst_indices,
        item_size,
    )


def transfer_kv_per_layer(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, item_size, **_):
    transfer_kv_per_layer_mla(src_k, dst_k, src_indices, dst_indices, item_size)
    transfer_kv_per_layer_mla(src_v, dst_v, src_indices, dst_indices, item_size)


def transfer_kv_per_layer_mla_pf_lf(
    src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_
):
    copy_rows(
        Rows(src.data_ptr() + layer_id * item_size, src_layout_dim),
        src_indices,
        Rows(dst.data_ptr(), item_size),
        dst_indices,
        item_size,
    )


def transfer_kv_per_layer_pf_lf(
    src_k,
    dst_k,
    src_v,
    dst_v,
    src_indices,
    dst_indices,
    layer_id,
    item_size,
    src_layout_dim,
    **_,
):
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(
            src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
        )


def transfer_kv_per_layer_ph_lf(
    src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, page_size, **_
):
    page, token = src_indices // page_size, src_indices % page_size
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        dst[dst_indices] = src[page, :, token, layer_id]


# io backend "kernel", all layers, device to host; `src_layers` holds the address of each layer


def transfer_kv_all_layer_mla(
    src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers, **_
):
    for src, dst in zip(
        src_layers.tolist()[:num_layers], dst_layers.tolist()[:num_layers], strict=True
    ):
        copy_rows(Rows(src, item_size), src_indices, Rows(dst, item_size), dst_indices, item_size)


def transfer_kv_all_layer(
    src_k_layers,
    dst_k_layers,
    src_v_layers,
    dst_v_layers,
    src_indices,
    dst_indices,
    item_size,
    num_layers,
    **_,
):
    for src, dst in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(src, dst, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_
):
    for layer, src in enumerate(src_layers.tolist()[:num_layers]):
        copy_rows(
            Rows(src, item_size),
            src_indices,
            Rows(dst.data_ptr() + layer * item_size, dst_layout_dim),
            dst_indices,
            item_size,
        )


def transfer_kv_all_layer_lf_pf(
    src_k_layers,
    dst_k,
    src_v_layers,
    dst_v,
    src_indices,
    dst_indices,
    item_size,
    dst_layout_dim,
    num_layers,
    **_,
):
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            src, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


def transfer_kv_all_layer_lf_ph(
    src_k_layers,
    dst_k,
    src_v_layers,
    dst_v,
    src_indices,
    dst_indices,
    item_size,
    num_layers,
    page_size,
    head_num,
    **_,
):
    page, token = dst_indices // page_size, dst_indices % page_size
    slots = src_indices.numpy()
    for layers, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, address in enumerate(layers.tolist()[:num_layers]):
            rows = Rows(address, item_size).array(int(slots.max()) + 1, item_size)[slots]
            items = torch.from_numpy(rows).view(dst.dtype)
            dst[page, :, token, layer] = items.view(len(slots), head_num, -1)


def transfer_kv_mamba_pf_lf(
    src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_
):
    transfer_kv_per_layer_mla_pf_lf(
        src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
    )


def transfer_kv_mamba_lf_pf(
    src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_
):
    transfer_kv_all_layer_mla_lf_pf(
        src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
    )


# io backend "direct": lists of tensors, indexed by token


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size, **_):
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size, **_
):
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        items = src[_direct_index(src_indices, layer_id, page_size)]
        dst[dst_indices] = items.reshape(len(dst_indices), *dst.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs, dst_ptrs, src_indices, dst_indices, page_size, **_
):
    layers = len(src_ptrs) // len(dst_ptrs)  # the layers of K, then those of V
    for i, src in enumerate(src_ptrs):
        dst = dst_ptrs[i // layers]
        index = _direct_index(dst_indices, i % layers, page_size)
        dst[index] = src[src_indices].reshape(dst[index].shape)


def _direct_index(indices: torch.Tensor, layer: int, page_size: int) -> tuple:
    """Where token `indices` of `layer` lie in a page_first_direct buffer; for pages of one item
    the buffer may lack the token dimension."""
    if page_size == 1:
        return indices, layer
    return indices // page_size, layer, indices % page_size


KERNELS: dict[str, Callable] = {
    name: value for name, value in globals().items() if name.startswith("transfer_kv_")
}
