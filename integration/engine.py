"""What the running SGLang engine is: the identity of the pages it computes, and this rank's place.

Every fact is read in the scheduler process, after SGLang has resolved its arguments, and must
come out the same on every rank of one server. docs/identity.md says what belongs in the identity.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_context, get_parallel

from kvtier.errors import IdentityError
from kvtier.fingerprint import weights_fingerprint
from kvtier.identity import (
    Attention,
    Identity,
    Json,
    ParallelSizes,
    PoolLayout,
    Weights,
    shard_label,
)
from kvtier.integration.host_pages import HostPages

PAGE_LAYOUT_VERSION = 1
"""Raise it when an SGLang release orders the bytes of a page anew without a change of any field
below; SGLang's own version is not part of the identity, since most releases change nothing."""

NO_MODEL = ("dummy", "none")
"""Model paths under which SGLang's own unit fixtures run without weights."""

LEAVES = (
    "model_path",
    "revision",
    "download_dir",
    "load_format",
    "dtype",
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "json_model_override_args",
    "lora_paths",
    "modelopt_quant",
    "attention_backend",
    "decode_attention_backend",
    "prefill_attention_backend",
    "dsv4_attn_backend",
    "enable_encoder_swa_bounded_replay",
    "enable_decoder_swa_bounded_replay",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
)
"""SGLang settings (by their flat names in ServerArgs) that the identity is made of."""

Pools = Mapping[str, HostPages]


def setting(name: str) -> Any:
    """The value of an SGLang setting that is in effect in this process."""
    return get_context().config_leaf(name)


def sharded_axes(name: str, pool: Any, config: HiCacheStorageConfig) -> tuple[str, ...]:
    """The axes along which ranks of this server hold different bytes of a pool's page.

    Tensor parallel ranks hold different heads, except of what MLA and DeepSeek V4 replicate
    (`is_mla_model`); even there recurrent states and MHA draft pools are cut by head. Pipeline
    stages hold different layers and context parallel ranks different slices. Data-parallel
    replicas compute the same pages, so a session moves freely between them.
    """
    draft = name in (PoolName.DRAFT.value, PoolName.DRAFT_SWA.value)
    by_head = (
        not config.is_mla_model
        or name == PoolName.MAMBA.value
        or (draft and isinstance(pool, MHATokenToKVPoolHost))
    )
    sizes = {
        "tp": config.tp_size if by_head else 1,
        "pp": config.pp_size,
        "cp": config.attn_cp_size,
        "dcp": config.dcp_size,
    }
    return tuple(axis for axis, size in sizes.items() if size > 1)


def shard_of(name: str, pool: Any, config: HiCacheStorageConfig) -> str:
    """The label of this rank's shard of a pool; "" where every rank computes the same pages."""
    ranks = {
        "tp": config.tp_rank,
        "pp": config.pp_rank,
        "cp": config.attn_cp_rank,
        "dcp": config.dcp_rank,
    }
    return shard_label({axis: ranks[axis] for axis in sharded_axes(name, pool, config)})


def copies(name: str, pool: Any, config: HiCacheStorageConfig) -> int:
    """How many ranks compute the same pages of a pool. One stores them, and all get its bytes back,
    which need not be those that each had (docs/gpu-results.md).
    """
    if "tp" in sharded_axes(name, pool, config):
        return 1
    return int(config.tp_size // config.dcp_size)


def is_writer(name: str, pool: Any, config: HiCacheStorageConfig) -> bool:
    """Whether this rank stores the pool: one rank stores what all tensor parallel ranks share."""
    return config.is_storage_writer or "tp" in sharded_axes(name, pool, config)


def read_weights(mode: str, cache: Path) -> tuple[Weights, Weights | None]:
    """The fingerprints of the served model and of its draft model, None without one.

    Reads the checkpoint: every rank does, since samples of a checkpoint that was just loaded come
    from the page cache in less time than ranks need to agree. Hashes of whole files (mode "full")
    are kept in the folder `cache`. Raises IdentityError if there is no checkpoint to read.
    """
    target = _weights(setting("model_path"), setting("revision"), mode, cache)
    draft = setting("speculative_draft_model_path")
    if setting("speculative_algorithm") is None or draft is None:
        return target, None
    if draft == setting("model_path"):
        return target, target
    return target, _weights(draft, setting("speculative_draft_model_revision"), mode, cache)


def read_adapters(mode: str, cache: Path) -> dict[str, str]:
    """Name and fingerprint of each LoRA adapter of --lora-paths.

    SGLang's page keys have an id made of an adapter's name and path alone (LoRARef.deterministic_id
    in lora/lora_registry.py), so an adapter trained anew in its folder has the old one's keys.
    Adapters loaded at run time get a random id. Raises IdentityError if one cannot be read.
    """
    return {
        ref.lora_name: weights_fingerprint(
            local_checkpoint(ref.lora_path, None), mode, cache
        ).digest
        for ref in setting("lora_paths") or ()
    }


def identity_of(
    config: HiCacheStorageConfig,
    pools: Pools,
    trailing: frozenset[str],
    weights: tuple[Weights, Weights | None],
    adapters: Mapping[str, str] | None = None,
) -> Identity:
    """The identity of the pages that this server computes.

    `pools` are all registered host pools, `trailing` the names of those needed at a boundary
    only, `weights` what `read_weights` returned, `adapters` what `read_adapters` did.
    """
    kv = pools[PoolName.KV.value]
    target, draft = weights
    tags = {name: pages.pool.storage_format_tag for name, pages in pools.items()
            if getattr(pages.pool, "storage_format_tag", None)}  # fmt: skip
    engine: dict[str, Json] = {
        "layout_version": PAGE_LAYOUT_VERSION,
        "dtype": setting("dtype"),
        "quantization": setting("quantization"),
        "model_overrides": json.loads(setting("json_model_override_args") or "{}", parse_float=str),
        "page_formats": tags,
    }
    if adapters:
        engine["adapters"] = adapters
    if setting("modelopt_quant") is not None:
        engine["modelopt_quant"] = str(setting("modelopt_quant"))
    if config.pp_size > 1:
        # How layers are dealt to stages (distributed/utils.py of SGLang); "" is SGLang's own way.
        engine["stage_layers"] = os.environ.get("SGLANG_PP_LAYER_PARTITION", "")
    return Identity.build(
        weights=target,
        kv_dtype=_kv_dtype(kv.pool),
        kv_scales=_kv_scales(),
        page_tokens=config.logical_page_size or kv.slots,
        pools={
            name: _pool_layout(pages, sharded_axes(name, pages.pool, config), name in trailing)
            for name, pages in pools.items()
        },
        parallel=_parallel_sizes(config),
        memory_layout=str(kv.pool.layout),
        attention=_attention(),
        draft=_draft(draft),
        engine=engine,
        about={
            "model_path": str(setting("model_path")),
            "served_name": str(config.model_name),
            "sglang": sglang.__version__,
        },
    )


def _pool_layout(pages: HostPages, axes: tuple[str, ...], trailing: bool) -> PoolLayout:
    dtypes = [getattr(pages.pool, name, None) for name in ("dtype", "temporal_dtype")]
    # Stages and context parallel ranks may own unlike numbers of layers.
    alike = not {"pp", "cp"} & set(axes)
    return PoolLayout(
        pieces=pages.sizes if alike else None,
        dtype="+".join(_dtype_name(dtype) for dtype in dtypes if dtype is not None),
        layout=str(pages.pool.layout),
        sharded_by=axes,
        trailing=trailing,
    )


def _kv_dtype(kv: Any) -> str:
    """The KV cache's number format. SGLang keeps fp8 as bytes: then only the setting tells."""
    stored = _dtype_name(kv.dtype)
    chosen = str(setting("kv_cache_dtype"))
    return stored if chosen == "auto" or "float" in stored else f"{chosen} in {stored}"


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _kv_scales() -> Mapping[str, Json] | None:
    path = setting("quantization_param_path")
    if path is None:
        return None
    try:
        return {"sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}
    except OSError as error:
        raise IdentityError(
            f"The KV scales of --quantization-param-path {path} cannot be read: {error.strerror}."
        ) from error


def _parallel_sizes(config: HiCacheStorageConfig) -> ParallelSizes:
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled

    return ParallelSizes(
        tp=get_parallel().tp_size,
        attn_tp=config.tp_size,
        pp=config.pp_size,
        attn_cp=config.attn_cp_size,
        dcp=config.dcp_size,
        dp_attention=bool(is_dp_attention_enabled()),
    )


def _attention() -> Attention:
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend",
             "dsv4_attn_backend")  # fmt: skip
    chosen = {name.removesuffix("attention_backend").strip("_"): setting(name) for name in names}
    replay = [
        part for part in ("encoder", "decoder") if setting(f"enable_{part}_swa_bounded_replay")
    ]
    return Attention(
        backend=" ".join(f"{part} {name}".strip() for part, name in chosen.items() if name),
        compression_ratios=_compression_ratios(),
        replay="+".join(replay) or None,
    )


def _compression_ratios() -> tuple[int, ...]:
    """Of each layer, where the checkpoint's config names them (DeepSeek V4)."""
    model = str(setting("model_path"))
    if model in NO_MODEL:
        return ()
    config = local_checkpoint(model, setting("revision")) / "config.json"
    try:
        ratios = json.loads(config.read_text()).get("compress_ratios")
    except FileNotFoundError:
        return ()
    return tuple(int(ratio) for ratio in ratios or ())


def _draft(weights: Weights | None) -> Mapping[str, Json] | None:
    algorithm = setting("speculative_algorithm")
    if algorithm is None:
        return None
    return {
        "algorithm": str(algorithm),
        "weights": None if weights is None else dict(vars(weights)),
        "quantization": setting("speculative_draft_model_quantization"),
        "kv_dtype": setting("speculative_draft_kv_cache_dtype"),
    }


def _weights(model: str, revision: str | None, mode: str, cache: Path) -> Weights:
    if model in NO_MODEL:
        return Weights("none", "")
    weights = weights_fingerprint(local_checkpoint(model, revision), mode, cache).weights
    if setting("load_format") == "dummy":
        # Random weights of the model that the folder's settings describe.
        return Weights("none", weights.digest)
    return weights


def local_checkpoint(model: str, revision: str | None) -> Path:
    """Where the checkpoint lies on this machine. Raises IdentityError if it doesn't."""
    path = Path(model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=setting("download_dir"),
            local_files_only=True,
        )
    except (HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise IdentityError(
            f"The checkpoint of {model} is not on this machine, so kvtier cannot recognise it: "
            "give --model-path a local folder."
        ) from error
    return Path(found)
