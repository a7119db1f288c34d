"""Counters of the store, for Prometheus. In a server they appear on SGLang's own /metrics.

Import it late: prometheus_client fixes its multi-process directory when it is first imported.
"""

from prometheus_client import Counter, Gauge, Histogram

PUT_PAGES = Counter("kvtier_put_pages", "Pages offered, by what became of them", ["outcome"])
"""outcome: stored, known (already there), no_parent, no_room (staging full past the deadline),
stopped (the drive fails), failed (a write or sync failed), too_large, superseded (tails that later
ones of the same put make superfluous)."""

WRITTEN_BYTES = Counter("kvtier_written_bytes", "Payload made durable, in bytes")
STORE_BYTES = Gauge(
    "kvtier_store_bytes",
    "What the store's directory takes on disk, at the last measurement",
    multiprocess_mode="mostrecent",
)
LIMIT_BYTES = Gauge(
    "kvtier_store_limit_bytes",
    "What it may take: the lesser of limit and what min_free leaves",
    multiprocess_mode="mostrecent",
)
KV_COPIES = Gauge(
    "kvtier_kv_copies",
    "Ranks that compute the same KV pages, of which one stores its own",
    multiprocess_mode="mostrecent",
)
COMMITS = Counter("kvtier_commits", "Batches made durable")
COMMIT_SECONDS = Histogram("kvtier_commit_seconds", "Time from a batch's first write to visible")
UNCOMMITTED_BYTES = Gauge(
    "kvtier_uncommitted_bytes",
    "Payload accepted but not yet durable, in bytes",
    multiprocess_mode="livesum",
)

UNCOMMITTED_TOKENS = Gauge(
    "kvtier_uncommitted_tokens",
    "Tokens whose pages are accepted but not yet durable",
    multiprocess_mode="livesum",
)
UNCOMMITTED_SECONDS = Gauge(
    "kvtier_uncommitted_seconds",
    "Age of the oldest page that is not yet durable",
    multiprocess_mode="livemax",
)
BREAKER_OPEN = Gauge(
    "kvtier_breaker_open",
    "1 while a failing drive is left alone, by side (reads, writes)",
    ["side"],
    multiprocess_mode="livemax",
)

GET_PAGES = Counter("kvtier_get_pages", "Pages asked for, by what became of them", ["outcome"])
"""outcome: read, absent, damaged (checksum), failed (I/O error), late (deadline), stopped (the
drive fails), after_miss (not looked at any more, or not delivered, since an earlier page of the
same request failed). Each page that is asked for is counted once."""

READ_BYTES = Counter("kvtier_read_bytes", "Payload read and verified, in bytes")
LOOKED_UP_PAGES = Counter("kvtier_lookup_pages", "Pages looked up, by answer", ["answer"])
