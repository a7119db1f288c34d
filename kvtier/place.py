"""Where the store is: from what a person typed, or the usual places."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvtier.layout import SUPERBLOCK

STORE = "kvtier"
"""Name of the store directory inside a mount."""

SCRATCH = Path("/mnt/scratch")


def default_root(environ: Mapping[str, str]) -> Path:
    """KVTIER_ROOT, else /mnt/scratch if it is there and writable, else the user's cache
    directory."""
    root = environ.get("KVTIER_ROOT")
    if root:
        return Path(root)
    if SCRATCH.is_dir() and os.access(SCRATCH, os.W_OK | os.X_OK):
        return SCRATCH
    cache = environ.get("XDG_CACHE_HOME")
    return Path(cache) if cache else Path.home() / ".cache"


def find_store(root: Path | None) -> Path:
    """The store directory that a person's `root` names, or the usual place without one."""
    return store_path(root or default_root(os.environ))


def store_path(root: Path) -> Path:
    """The store directory that `root` names: `root` itself if it is a store or called kvtier,
    else `kvtier` in it."""
    root = root.expanduser().absolute()
    if root.name == STORE:
        return root
    try:
        is_store = (root / SUPERBLOCK).exists()
    except OSError:
        is_store = False  # no right to look: whoever opens it says so
    return root if is_store else root / STORE
