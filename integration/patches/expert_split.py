"""Cards of unlike memory hold unlike numbers of experts.

SGLang 0.5.23 gives every rank of an expert parallel group the same number
(layers/moe/fused_moe_triton/layer.py:414), so the smallest card decides for all: with one card of
95.6 GiB and three of 84 GiB, 12 GiB of the large one are of no use.

Three hooks: a layer is built with this rank's number of experts on every rank, experts are loaded
where this rank's share says, and their ids are translated before FlashInfer's CUTLASS kernel for
mxfp4 sees them (layers/moe/moe_runner/flashinfer_cutlass.py:483), which takes the place of its
experts from the rank. Other kernels, and what moves experts while the server runs, are refused.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from kvtier.errors import ConfigError, KvtierError
from kvtier.integration.patches.scheme import Hook, Patch
from kvtier.integration.patches.split import Share, derive_split, parse_split

log = logging.getLogger(__name__)

KERNEL = "Mxfp4FlashinferCutlassMoEMethod"
"""How SM90 and SM120 compute DeepSeek V4's experts (quantization/mxfp4_flashinfer_cutlass_moe.py).
"""

_given: dict[str, tuple[int, ...] | None] = {}


def _install(value: str) -> None:
    _given["split"] = parse_split(value)
    # SGLang refuses cards whose memory differs by more than a tenth (distributed/bootstrap.py:441).
    os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")


def _share(layer: Any, experts: int, shared: int) -> Share | None:
    """This rank's share of a layer's experts; None for layers that are not split."""
    from sglang.srt.runtime_context import get_flags, get_parallel

    ranks, rank = get_parallel().moe_ep_size, get_parallel().moe_ep_rank
    if get_flags().moe.in_speculative_scope or type(layer).is_shared_fused_moe:
        return None
    split = _given.get("split") or derive_split(_memory_gib(ranks), experts)
    if len(split) != ranks or sum(split) != experts or shared:
        raise ConfigError(
            f"The patch expert_split has {','.join(map(str, split))} for {sum(split)} experts on "
            f"{len(split)} ranks, and a layer has {experts} (fused with {shared} shared ones) on "
            f"{ranks}: set KVTIER_EXPERT_SPLIT to a split of this model, or unset it."
        )
    return Share(split, rank)


def _memory_gib(ranks: int) -> list[float]:
    import torch

    if torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"KVTIER_EXPERT_SPLIT=auto needs to see the cards of all {ranks} ranks and sees "
            f"{torch.cuda.device_count()}: give the number of experts of each rank."
        )
    return [torch.cuda.get_device_properties(rank).total_memory / 2**30 for rank in range(ranks)]


def _build(
    original: Callable[..., None], layer: Any, num_experts: int, *args: Any, **kwargs: Any
) -> None:
    share = _share(layer, num_experts, kwargs.get("num_fused_shared_experts", 0))
    if share is None:
        original(layer, num_experts, *args, **kwargs)
        return
    original(layer, share.held * len(share.split), *args, **kwargs)
    import torch

    if type(layer.quant_method).__name__ != KERNEL:
        raise KvtierError(
            f"The patch expert_split works with {KERNEL} and this server has "
            f"{type(layer.quant_method).__name__}: use --moe-runner-backend flashinfer_mxfp4 on "
            "SM90 or SM120, or unset KVTIER_EXPERT_SPLIT."
        )
    layer.kvtier_share = share
    # Made here, not at first use: CUDA graphs keep its address.
    ids = torch.tensor(share.kernel_ids(), dtype=torch.int32, device=layer.w13_weight.device)
    layer.register_buffer("kvtier_kernel_ids", ids, persistent=False)
    if layer.layer_id == 0:
        log.info("kvtier: experts are split %s", ",".join(map(str, share.split)))


def _load(original: Callable[..., int], layer: Any, expert_id: int) -> int:
    share: Share | None = getattr(layer, "kvtier_share", None)
    return original(layer, expert_id) if share is None else share.slot(expert_id)


def _run(
    original: Callable[..., Any], dispatch_output: Any, quant_info: Any, runner_config: Any
) -> Any:
    ids = getattr(runner_config.layer, "kvtier_kernel_ids", None)
    if ids is not None and dispatch_output.hidden_states.shape[0]:
        from sglang.srt.layers.moe.topk import TopKOutputChecker

        topk = dispatch_output.topk_output
        if TopKOutputChecker.format_is_bypassed(topk):
            topk = topk.to_standard()
        chosen = topk.topk_ids
        # -1 is padding, and stays so.
        translated = ids[chosen.clamp_min(0).long()].to(chosen.dtype).where(chosen >= 0, chosen)
        dispatch_output = dispatch_output._replace(topk_output=topk._replace(topk_ids=translated))
    return original(dispatch_output, quant_info, runner_config)


_UNSPLIT: dict[str, tuple[Any, ...]] = {
    "moe_a2a_backend": (None, "none"),
    "enable_eplb": (False,),
    "ep_num_redundant_experts": (0,),
    "init_expert_location": ("trivial",),
    "ep_dispatch_algorithm": (None,),
    "elastic_ep_backend": (None,),
    "enable_dp_attention": (False,),
    "attn_dp_size": (None, 1),
    "enable_lora": (None, False),
    "lora_paths": (None,),
    "moe_runner_backend": ("auto", "flashinfer_mxfp4"),
}
"""Settings with which the experts of a rank, or their ids, are what the hooks take them for."""


def _refusal(server_args: Any) -> str | None:
    if server_args.ep_size != server_args.tp_size or server_args.pp_size > 1:
        return (
            f"--ep-size is {server_args.ep_size}, --tp-size {server_args.tp_size} and --pp-size "
            f"{server_args.pp_size}: it needs the first two alike and no stages"
        )
    split = _given.get("split")
    if split is not None and len(split) != server_args.ep_size:
        return f"it has {len(split)} ranks and --ep-size is {server_args.ep_size}"
    if split is None and (server_args.nnodes, server_args.base_gpu_id) != (1, 0):
        return "`auto` looks at the first cards of one machine"
    for name, allowed in _UNSPLIT.items():
        value = getattr(server_args, name)
        if value not in allowed:
            return f"--{name.replace('_', '-')} is {value}, with which it has not been proven"
    return None


_LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE"
_CUTLASS = "sglang.srt.layers.moe.moe_runner.flashinfer_cutlass"

PATCH = Patch(
    hooks=(
        Hook(
            f"{_LAYER}.__init__",
            HookType.AROUND,
            _build,
            ("self", "num_experts", "num_fused_shared_experts"),
        ),
        Hook(
            f"{_LAYER}._map_global_expert_id_to_local_expert_id",
            HookType.AROUND,
            _load,
            ("self", "expert_id"),
        ),
        Hook(
            f"{_CUTLASS}._fused_experts_flashinfer_mxfp4_cutlass",
            HookType.AROUND,
            _run,
            ("dispatch_output", "quant_info", "runner_config"),
        ),
    ),
    relies_on=(
        f"sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe.{KERNEL}",
        "sglang.srt.layers.moe.topk.TopKOutputChecker.format_is_bypassed",
        f"{_LAYER}.is_shared_fused_moe",
        "sglang.srt.environ.Envs.SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK",
    ),
    install=_install,
    refusal=_refusal,
)
