"""The identity of a running engine: what changes it, what doesn't, and which rank has what."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pools import Engine
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_context

from kvtier.errors import IdentityError
from kvtier.fingerprint import weights_fingerprint
from kvtier.identity import Weights, diff
from kvtier.integration import engine
from kvtier.integration.host_pages import HostPages
from kvtier.integration.storage import TRAILING_POOLS

MODELS = Path(__file__).parents[1] / "models"

WEIGHTS = Weights("sampled", "00"), None
ONE_RANK = HiCacheStorageConfig(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    is_mla_model=False,
    enable_storage_metrics=False,
    is_page_first_layout=True,
    model_name="served",
)


@pytest.fixture
def server(start: Any) -> Engine:
    return start("swa")


def identity(server: Engine, config: HiCacheStorageConfig = ONE_RANK, **settings: Any) -> Any:
    """The identity of `server` with some of SGLang's settings changed."""
    pools = {name: HostPages(name, entry.host_pool) for name, entry in server.entries.items()}
    with changed(**settings):
        return engine.identity_of(config, pools, TRAILING_POOLS, WEIGHTS)


@contextmanager
def changed(**settings: Any) -> Iterator[None]:
    """Some of SGLang's settings in effect with other values."""
    context = get_context()
    before = {name: context.config_leaf(name) for name in settings}
    context.override("a test", **settings)
    try:
        yield
    finally:
        context.override("a test", **before)


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 4711, "host": "0.0.0.0", "log_level": "debug"},
        {"mem_fraction_static": 0.5, "max_running_requests": 7, "max_total_tokens": 99},
        {"context_length": 4096, "hicache_ratio": 3.0, "hicache_size": 5},
        {"served_model_name": "another"},
        {"hicache_storage_prefetch_policy": "best_effort", "hicache_write_policy": "write_back"},
    ],
)
def test_properties_of_an_instance_do_not_count(server, settings) -> None:
    assert identity(server, **settings).id == identity(server).id


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("kv_dtype", {"kv_cache_dtype": "fp8_e4m3"}),
        ("attention.backend", {"attention_backend": "fa3"}),
        ("attention.backend", {"decode_attention_backend": "fa3"}),
        ("attention.replay", {"enable_encoder_swa_bounded_replay": True}),
        ("engine.quantization", {"quantization": "fp8"}),
        ("engine.dtype", {"dtype": "float16"}),
        ("engine.model_overrides", {"json_model_override_args": '{"rope_theta": 1e4}'}),
        ("draft", {"speculative_algorithm": "EAGLE"}),
    ],
)
def test_what_changes_bytes_counts(server, path, settings) -> None:
    if path == "kv_dtype":  # fp8 caches are kept as bytes, whatever their format
        for entry in server.entries.values():
            entry.host_pool.dtype = torch.uint8
        other = identity(server, kv_cache_dtype="fp8_e5m2")
    else:
        other = identity(server)
    changed = [difference.path for difference in diff(other, identity(server, **settings))]
    assert [where for where in changed if where.startswith(path)] == changed != []


def test_the_host_layout_counts(start) -> None:
    ids = {
        identity(start("full", layout=layout, io=io)).id
        for layout, io in (
            ("page_first", "kernel"),
            ("page_first_direct", "direct"),
            ("layer_first", "direct"),
        )
    }
    assert len(ids) == 3


def test_all_ranks_of_a_server_have_one_identity(server) -> None:
    config = replace(ONE_RANK, tp_size=2, pp_size=2, dp_rank=1)
    ids = {
        identity(server, replace(config, tp_rank=tp, pp_rank=pp, dp_rank=dp)).id
        for tp in (0, 1)
        for pp in (0, 1)
        for dp in (0, 1)
    }
    assert len(ids) == 1
    assert identity(server).id not in ids


def test_scales_count_by_content(server, tmp_path) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    one.write_text("{}")
    same.write_text("{}")
    other.write_text("[]")
    ids = [identity(server, quantization_param_path=str(path)).id for path in (one, same, other)]
    assert ids[0] == ids[1] != ids[2]
    with pytest.raises(IdentityError, match="cannot be read"):
        identity(server, quantization_param_path=str(tmp_path / "gone"))


def test_compression_ratios_are_those_of_the_checkpoint(server, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"compress_ratios": [0, 4, 128]}))
    document = identity(server, model_path=str(tmp_path)).document
    assert document["attention"]["compression_ratios"] == [0, 4, 128]


def test_a_checkpoint_that_is_not_here_is_an_error_a_person_can_act_on(server) -> None:
    with pytest.raises(IdentityError, match="local folder"):
        engine.local_checkpoint("nobody/has-this-model", None)


def test_dummy_weights_of_two_models_are_told_apart(server, tmp_path) -> None:
    """Random weights have no content to go by, but what the folders describe differs."""
    seen = set()
    for name in ("llama", "mla"):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(MODELS / name / "config.json", folder)
        with changed(model_path=str(folder), load_format="dummy"):
            weights, _ = engine.read_weights("sampled", tmp_path / "hashes")
        assert weights.mode == "none"
        seen.add(weights.digest)
    assert len(seen) == 2


def test_weights_are_read_from_the_checkpoint_served(server, tmp_path) -> None:
    assert engine.read_weights("sampled", tmp_path) == (Weights("none", ""), None)
    model = str(MODELS / "llama")
    with changed(model_path=model):
        for mode in ("sampled", "full"):
            expected = weights_fingerprint(Path(model), mode).weights
            assert engine.read_weights(mode, tmp_path / "hashes") == (expected, None)
    other = str(MODELS / "mla")
    with changed(
        model_path=model, speculative_algorithm="EAGLE", speculative_draft_model_path=other
    ):
        target, draft = engine.read_weights("sampled", tmp_path)
    assert draft == weights_fingerprint(Path(other)).weights != target


def test_an_adapter_trained_anew_is_another_identity(server, tmp_path) -> None:
    """SGLang's keys know the adapters of --lora-paths by name and path only."""
    folder = tmp_path / "adapter"
    shutil.copytree(MODELS / "llama", folder)
    (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    ref = LoRARef(LoRARef.deterministic_id("sql", str(folder)), "sql", str(folder), False)
    pools = {name: HostPages(name, entry.host_pool) for name, entry in server.entries.items()}

    def named() -> str:
        with changed(lora_paths=[ref]):
            adapters = engine.read_adapters("sampled", tmp_path)
            found = engine.identity_of(ONE_RANK, pools, TRAILING_POOLS, WEIGHTS, adapters)
        return found.id

    assert engine.read_adapters("sampled", tmp_path) == {}
    first = named()
    assert first == named() != identity(server).id
    (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}')
    second = named()
    weights = next(folder.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert len({first, second, named()}) == 3


MHA = MHATokenToKVPoolHost.__new__(MHATokenToKVPoolHost)
OTHER = SimpleNamespace()


@pytest.mark.parametrize(
    ("name", "pool", "mla", "axes", "writes"),
    [
        ("kv", MHA, False, "tp1.pp1", True),
        ("swa", MHA, False, "tp1.pp1", True),
        ("mamba", OTHER, False, "tp1.pp1", True),
        ("kv", OTHER, True, "pp1", False),
        ("indexer", OTHER, True, "pp1", False),
        ("swa", OTHER, True, "pp1", False),
        ("deepseek_v4_c4", OTHER, True, "pp1", False),
        ("mamba", OTHER, True, "tp1.pp1", True),
        ("draft", MHA, True, "tp1.pp1", True),
        ("draft_swa", MHA, True, "tp1.pp1", True),
        ("draft", OTHER, True, "pp1", False),
        ("draft_indexer", OTHER, True, "pp1", False),
    ],
)
def test_which_rank_holds_and_stores_what(name, pool, mla, axes, writes) -> None:
    rank = replace(
        ONE_RANK, is_mla_model=mla, tp_rank=1, tp_size=2, pp_rank=1, pp_size=2, dp_rank=3
    )
    assert engine.shard_of(name, pool, rank) == axes
    assert engine.is_writer(name, pool, rank) is writes
    assert engine.is_writer(name, pool, replace(rank, tp_rank=0))
    assert engine.copies(name, pool, rank) == (1 if "tp" in axes else 2)


def test_context_parallel_ranks_hold_slices_of_their_own() -> None:
    rank = replace(ONE_RANK, is_mla_model=True, attn_cp_rank=2, attn_cp_size=4)
    assert engine.shard_of("kv", OTHER, rank) == "cp2"
    rank = replace(ONE_RANK, is_mla_model=True, tp_rank=3, tp_size=4, dcp_rank=1, dcp_size=2,
                   logical_page_size=128)  # fmt: skip
    assert engine.shard_of("kv", OTHER, rank) == "dcp1"
    assert engine.copies("kv", OTHER, rank) == 2
