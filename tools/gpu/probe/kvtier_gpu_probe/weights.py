"""Dummy weights as of a model that was just initialised for training."""

from __future__ import annotations

import zlib
from typing import Any

import torch

WIDTH = 0.03
"""Half the range of a matrix's entries: about unit variance through layers 4,000 wide."""

SPLIT = {"ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "FusedMoE"}
"""SGLang's layers of which each rank has a part, and what is derived from them."""


def fill(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """In place of SGLang's initialize_dummy_weights (model_loader/weight_utils.py of 0.5.23).

    Norms and scales are 1, other vectors almost 0, matrices uniform and different from one
    parameter to the next; from rank to rank where a layer is split over ranks, so that their pages
    differ, and the same where it is not.
    """
    from sglang.srt.runtime_context import get_parallel

    modules = dict(model.named_modules(remove_duplicate=False))
    rank = get_parallel().tp_rank
    for name, parameter in model.state_dict().items():
        if not torch.is_floating_point(parameter):
            continue
        owner, _, last = name.rpartition(".")
        if "weight_scale" in last or (parameter.dim() <= 1 and ("norm" in name or "scale" in last)):
            parameter.fill_(1.0)
        else:
            width = WIDTH if parameter.dim() > 1 else 1e-3
            generator = torch.Generator(device=parameter.device)
            split = any(kind.__name__ in SPLIT for kind in type(modules[owner]).__mro__)
            generator.manual_seed(zlib.crc32(name.encode()) + (rank if split else 0))
            _uniform(parameter, width, generator)


def _uniform(parameter: torch.Tensor, width: float, generator: torch.Generator) -> None:
    if parameter.element_size() > 1:
        parameter.uniform_(-width, width, generator=generator)
        return
    # Formats of 8 bits have no uniform_ of their own.
    values = torch.empty(parameter.shape, dtype=torch.float16, device=parameter.device)
    parameter.data.copy_(values.uniform_(-width, width, generator=generator).to(parameter.dtype))
