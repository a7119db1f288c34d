"""Write the tiny models of the tests: `python tests/models/generate.py [DIRECTORY]`.

Random weights from a fixed seed, 512 token ids, two to four layers: small enough for the
repository, and of the three shapes of KV cache that the tests need:

    llama   one pool on every rank a part of the heads
    swa     layers with a sliding window of 64 tokens beside full ones (Mellum)
    mla     one latent KV vector a token, the same on every rank (DeepSeek V2)

The generated files are kept in git, so that a run needs this script only to change a model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    LlamaConfig,
    MellumConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto import AutoModelForCausalLM

VOCABULARY = 512
CONTEXT = 32768
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    num_attention_heads=4,
    head_dim=16,
    max_position_embeddings=CONTEXT,
    # Ten times the usual width: the next token then depends on the whole context, so that a
    # wrong page shows in the output.
    initializer_range=0.2,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    dtype="bfloat16",
)
YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": CONTEXT // 2,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
ADDED = {"mla": {"rope_scaling": YARN, "rope_theta": 10000.0, "moe_layer_freq": 1}}
"""What SGLang reads from config.json and transformers no longer writes."""


def llama() -> PreTrainedConfig:
    return LlamaConfig(**COMMON, num_hidden_layers=2, num_key_value_heads=2, intermediate_size=128)


def swa() -> PreTrainedConfig:
    return MellumConfig(
        **COMMON,
        num_hidden_layers=4,
        num_key_value_heads=2,
        intermediate_size=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["dense"] * 4,
        sliding_window=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    )


def mla() -> PreTrainedConfig:
    return DeepseekV2Config(
        **COMMON,
        num_hidden_layers=2,
        num_key_value_heads=4,
        intermediate_size=128,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=2,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        rope_parameters={**YARN, "rope_theta": 10000.0},
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """One word `<n>` for each token id n."""
    words = {f"<{i}>": i for i in range(VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<0>", bos_token="<1>", eos_token="<2>"
    )


def main(directory: Path) -> None:
    for shape in (llama, swa, mla):
        target = directory / shape.__name__
        torch.manual_seed(20)
        model = AutoModelForCausalLM.from_config(shape()).to(torch.bfloat16)
        model.save_pretrained(target)
        tokenizer().save_pretrained(target)
        path = target / "config.json"
        written = json.loads(path.read_text()) | ADDED.get(shape.__name__, {})
        path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
        size = sum(f.stat().st_size for f in target.iterdir())
        print(f"{target}: {size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
