"""Every expert is loaded by one rank, and runs in the slot that it was loaded in.

SGLang's own layer, quantization method and weight loader build and fill each rank's weights on the
CPU, and SGLang's own call of FlashInfer is followed up to the kernel. The kernel is stood in for by
what FlashInfer says it does with ids: those from ep_rank * n on, n of them, are its own, n the
number of its weights. It answers with the expert whose weights it finds in the slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patching import applied, serving
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner import flashinfer_cutlass
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import mxfp4_flashinfer_cutlass_moe
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from sglang.srt.runtime_context import get_flags, get_parallel
from sglang.srt.server_args import ServerArgs

from kvtier.errors import ConfigError, KvtierError
from kvtier.integration.patches import expert_split
from kvtier.integration.patches.split import Share, derive_split, parse_split

EXPERTS, TOP_K, HIDDEN, INNER = 384, 6, 384, 128
EVEN = (96, 96, 96, 96)
SPLITS = [(108, 92, 92, 92), (1, 381, 1, 1), EVEN]


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setattr(mxfp4_flashinfer_cutlass_moe, "is_flashinfer_available", lambda: True)
    monkeypatch.setattr(flashinfer_cutlass, "_flashinfer_cutlass_fused_moe", _kernel_and_activation)
    monkeypatch.setenv("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")
    with serving(moe_runner_backend="flashinfer_mxfp4"):
        yield


# --- four ranks, one after the other --------------------------------------------------------------


@contextmanager
def rank_of(rank: int, ranks: int = 4) -> Iterator[None]:
    sizes = dict.fromkeys(("tp_size", "ep_size", "attn_tp_size", "moe_ep_size"), ranks)
    places = dict.fromkeys(("tp_rank", "attn_tp_rank", "moe_ep_rank"), rank)
    more = {"moe_tp_size": 1, "moe_tp_rank": 0, "tp_group": None}
    with get_parallel().override(**sizes, **places, **more):
        yield


def build(experts: int = EXPERTS, **changes: Any) -> FusedMoE:
    config = Fp8Config(
        is_checkpoint_fp8_serialized=True,
        activation_scheme="dynamic",
        weight_block_size=[128, 128],
        is_fp4_experts=True,
    )
    method = mxfp4_flashinfer_cutlass_moe.Mxfp4FlashinferCutlassMoEMethod(Fp8MoEMethod(config), "")
    values = {"quant_config": config, "quant_method": method, "top_k": TOP_K, "layer_id": 0}
    return FusedMoE(
        num_experts=experts,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        **{**values, **changes},
    )


def load(layer: FusedMoE) -> None:
    """All experts of the checkpoint, as DeepseekV4ForCausalLM.load_weights hands them over."""
    mapping = FusedMoE.make_expert_params_mapping(
        ckpt_gate_proj_name="w1",
        ckpt_down_proj_name="w2",
        ckpt_up_proj_name="w3",
        num_experts=EXPERTS,
    )
    parameters = dict(layer.named_parameters())
    for parameter_name, _, expert, shard in mapping:
        for suffix in ("weight", "weight_scale_inv"):
            parameter = parameters[parameter_name.removeprefix("experts.") + suffix]
            whole = parameter.shape[1:]
            shape = (whole[0] if shard == "w2" else whole[0] // 2, whole[1])
            digit = (expert // 100 if shard == "w3" else expert % 100) + 1
            weight = torch.full(shape, digit, dtype=torch.uint8).view(parameter.dtype)
            parameter.weight_loader(parameter, weight, f"w.{suffix}", shard, expert)


def expert_in(slot: int, fc1: torch.Tensor, fc2: torch.Tensor, scales: list) -> int:
    """Which expert's weights and scales are in a slot; they must be all of one."""
    up, gate = fc1[slot].view(torch.uint8).chunk(2)
    up_scale, gate_scale = scales[0][slot].view(torch.uint8).chunk(2)
    down, down_scale = fc2[slot].view(torch.uint8), scales[1][slot].view(torch.uint8)
    low = {digit for part in (gate, gate_scale, down, down_scale) for digit in _values(part)}
    high = {digit for part in (up, up_scale) for digit in _values(part)}
    assert len(low) == len(high) == 1, f"slot {slot} has parts of several experts"
    return 100 * (high.pop() - 1) + low.pop() - 1


def _values(part: torch.Tensor) -> set[int]:
    return {int(part.min()), int(part.max())}


def _kernel_and_activation() -> tuple[Callable[..., None], Any]:
    return _kernel, SimpleNamespace(Swiglu=0, SwigluStep=1)


def _kernel(
    *, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights,
    quant_scales, ep_size, ep_rank, output, **rest,
) -> None:  # fmt: skip
    count = fc1_expert_weights.shape[0]
    output.zero_()
    for token, chosen in enumerate(token_selected_experts.tolist()):
        for place, identity in enumerate(chosen):
            assert -1 <= identity < count * ep_size, "an id that the kernel doesn't have"
            slot = identity - ep_rank * count
            if 0 <= slot < count:
                expert = expert_in(slot, fc1_expert_weights, fc2_expert_weights, quant_scales)
                output[token, expert] += token_final_scales[token, place]


TOKENS = torch.stack(
    [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(i))[:TOP_K] for i in range(90)]
    + [torch.arange(start, start + TOP_K) for start in range(0, EXPERTS, TOP_K)]  # each expert once
).to(torch.int32)
WEIGHTS = torch.tensor([0.5, 0.25, 0.125, 0.0625, 1.0, 2.0]).expand(len(TOKENS), TOP_K)


def wanted() -> torch.Tensor:
    """What one rank with all experts would answer: each token, the weight of each expert."""
    dense = torch.zeros(len(TOKENS), EXPERTS)
    return dense.scatter_add(1, TOKENS.long(), WEIGHTS)


def answer(layer: FusedMoE, ids: torch.Tensor = TOKENS) -> torch.Tensor:
    dispatched = StandardDispatchOutput(
        hidden_states=torch.zeros(len(ids), HIDDEN, dtype=torch.bfloat16),
        hidden_states_scale=None,
        topk_output=StandardTopKOutput(WEIGHTS[: len(ids)], ids.clone(), None),
    )
    return layer.quant_method.apply(layer, dispatched).hidden_states.float()


def proof(layers: list[FusedMoE]) -> None:
    """Raises AssertionError unless every expert is in one slot of one rank and runs there."""
    held = [
        [
            expert_in(
                slot,
                layer.w13_weight,
                layer.w2_weight,
                [layer.w13_weight_scale_inv, layer.w2_weight_scale_inv],
            )
            for slot in range(layer.num_local_experts)
        ]
        for layer in layers
    ]
    loaded = sorted(itertools.chain.from_iterable(held))
    assert loaded == list(range(EXPERTS)), "not every expert is loaded once"
    answers = []
    for rank, layer in enumerate(layers):
        with rank_of(rank):
            answers.append(answer(layer))
    assert torch.equal(sum(answers), wanted()), "an expert ran in another's slot"


def ranks_of(split: tuple[int, ...]) -> list[FusedMoE]:
    layers = []
    for rank in range(len(split)):
        with rank_of(rank):
            layer = build()
            load(layer)
        layers.append(layer)
    return layers


# --- the proof ------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_expert_runs_where_it_was_loaded(split) -> None:
    with applied("expert_split", ",".join(map(str, split))):
        layers = ranks_of(split)
        assert [layer.num_local_experts for layer in layers] == list(split)
        proof(layers)


def test_sglang_alone_passes_the_same_proof_with_an_even_split() -> None:
    proof(ranks_of(EVEN))


def test_padding_stays_padding() -> None:
    with applied("expert_split", "108,92,92,92"), rank_of(1):
        layer = build()
        load(layer)
        ids = torch.full((2, TOP_K), -1, dtype=torch.int32)
        assert not answer(layer, ids).any()


def _rotated(ids: list[int]) -> list[int]:
    return ids[1:] + ids[:1]


def _break_ids(monkeypatch) -> None:
    right = Share.kernel_ids
    monkeypatch.setattr(Share, "kernel_ids", lambda share: _rotated(right(share)))


def _break_ids_as_for_an_even_split(monkeypatch) -> None:
    monkeypatch.setattr(Share, "kernel_ids", lambda share: list(range(EXPERTS)))


def _break_others(monkeypatch) -> None:
    """Foreign experts run in the first slot, too."""

    def ids(share: Share) -> list[int]:
        slots = (share.slot(expert) for expert in range(EXPERTS))
        return [share.rank * share.held + max(slot, 0) for slot in slots]

    monkeypatch.setattr(Share, "kernel_ids", ids)


def _break_loading(monkeypatch) -> None:
    """All ranks but the first load the experts before those that are theirs."""
    right = Share.slot
    monkeypatch.setattr(
        Share, "slot", lambda share, expert: right(share, expert + (share.rank > 0))
    )


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (_break_ids, "an expert ran in another's slot"),
        (_break_ids_as_for_an_even_split, "an id that the kernel doesn't have"),
        (_break_others, "an expert ran in another's slot"),
        (_break_loading, "not every expert is loaded once"),
    ],
)
def test_a_broken_control_fails_the_same_proof(break_it, reason, monkeypatch) -> None:
    break_it(monkeypatch)
    with applied("expert_split", "108,92,92,92"), pytest.raises(AssertionError, match=reason):
        proof(ranks_of((108, 92, 92, 92)))


def test_without_the_patch_sglang_has_even_splits_only() -> None:
    """Once this fails, SGLang can split experts unevenly and the patch can go."""
    with rank_of(0):
        with pytest.raises(AssertionError):
            build(experts=383)
        assert build().num_local_experts == EXPERTS // 4


# --- what it refuses, and what it leaves alone --------------------------------------------------


@pytest.mark.parametrize(
    ("split", "changes", "reason"),
    [
        ("108,92,92,91", {}, "383 experts on 4 ranks, and a layer has 384"),
        ("200,184", {}, "on 2 ranks, and a layer has 384"),
        ("108,92,92,92", {"num_fused_shared_experts": 1}, "fused with 1 shared ones"),
    ],
)
def test_a_split_of_another_model_is_refused(split, changes, reason) -> None:
    with applied("expert_split", split), rank_of(0), pytest.raises(ConfigError, match=reason):
        build(**changes)


def test_another_kernel_is_refused() -> None:
    with applied("expert_split", "108,92,92,92"), rank_of(0), ExitStack() as stack:
        stack.enter_context(serving(moe_runner_backend="triton"))
        with pytest.raises(KvtierError, match="this server has UnquantizedFusedMoEMethod"):
            build(quant_config=None, quant_method=None)


def test_layers_of_a_draft_model_are_left_alone() -> None:
    drafting = get_flags().moe.override(in_speculative_scope=True)
    with applied("expert_split", "108,92,92,92"), rank_of(1), drafting:
        assert build(experts=128).num_local_experts == 32


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tp_size": 4, "ep_size": 1}, "--ep-size is 1, --tp-size 4"),
        ({"tp_size": 2, "ep_size": 2}, "it has 4 ranks and --ep-size is 2"),
        ({"enable_eplb": True}, "--enable-eplb is True"),
        ({"moe_runner_backend": "triton"}, "--moe-runner-backend is triton"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend is deepep"),
        ({"attn_dp_size": 4}, "--attn-dp-size is 4"),
    ],
)
def test_servers_it_has_not_been_proven_with_are_refused(settings, reason) -> None:
    expert_split.PATCH.install("108,92,92,92")
    right = {"tp_size": 4, "ep_size": 4}
    assert expert_split.PATCH.refusal(ServerArgs("m", **right)) is None
    assert reason in expert_split.PATCH.refusal(ServerArgs("m", **{**right, **settings}))


# --- the split from memory ----------------------------------------------------------------------


def test_the_split_of_the_reference_rig() -> None:
    """One card of 96 GB and three of 84 GiB."""
    assert derive_split([95.6, 84.0, 84.0, 84.0], 384) == (108, 92, 92, 92)


@pytest.mark.parametrize(
    ("memory", "experts"),
    [
        ([80.0] * 4, 384),
        ([96.0, 84.0], 128),
        ([95.6, 95.6, 84.0, 84.0, 80.1], 384),
        ([24.0] * 7, 256),
    ],
)
def test_a_derived_split_leaves_the_same_memory_free(memory, experts) -> None:
    split = derive_split(memory, experts)
    assert sum(split) == experts
    free = [card - 0.70 * count for card, count in zip(memory, split, strict=True)]
    assert max(free) - min(free) < 2 * 0.70


def test_cards_too_unlike_are_refused() -> None:
    with pytest.raises(ConfigError, match="too unlike"):
        derive_split([141.0, 24.0], 64)


def test_auto_reads_the_cards(monkeypatch) -> None:
    sizes = [95.6, 84.0, 84.0, 84.0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda rank: SimpleNamespace(total_memory=int(sizes[rank] * 2**30)),
    )
    with applied("expert_split", "auto"), rank_of(0):
        assert build().num_local_experts == 108


def test_auto_without_cards_says_what_to_do(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with applied("expert_split", "auto"), rank_of(0), pytest.raises(ConfigError, match="sees 1"):
        build()


@pytest.mark.parametrize("value", ["", "108", "108,0", "108,x", "108;92", "108,-1"])
def test_a_split_that_makes_no_sense_is_refused(value) -> None:
    with pytest.raises(ConfigError, match="KVTIER_EXPERT_SPLIT is"):
        parse_split(value)
