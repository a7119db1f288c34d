"""Sizes of DeepSeek-V4.1-Flash as SGLang 0.5.23 offers it to a storage backend, in bytes a page."""

PAGE_TOKENS = 256

POOLS = {
    "deepseek_v4_c1": 149_760,
    "deepseek_v4_c1_indexer": 17_408,
    "deepseek_v4_c2": 224_640,
    "deepseek_v4_c2_indexer": 26_112,
    "kv": 0,
}
"""Pools that are needed at every page. `kv` is the anchor: a page of it is a mark without bytes,
and it is written last."""

TAIL_POOL = "swa"
TAIL_BYTES = 6_439_680
"""The sliding-window pool: 40 layers and the three of the draft model."""

WINDOW_PAGES = 1
"""Pages of the sliding-window pool that a boundary needs."""

CHUNK_PAGES = 8
"""Pages of a prefill chunk of 2,048 tokens."""

OFFERED_TAILS = 2
"""Pages of the sliding-window pool that are offered at the end of every chunk and every answer."""

KV_BYTES = sum(POOLS.values())
