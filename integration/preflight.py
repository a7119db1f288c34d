"""Checks in the launcher, before SGLang reads the model: a wrong start ends in one line."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

from kvtier.config import Config
from kvtier.errors import ConfigError, KvtierError, UnreachableError
from kvtier.integration import plugin
from kvtier.layout import Layout
from kvtier.place import find_store

log = logging.getLogger(__name__)

TESTED = "0.5.23"
"""The SGLang release that the tests run on."""


def check(server_args: Any) -> None:
    """Exit with one line on stderr and status 1 if this server can't work with kvtier.

    Does nothing for a server with another storage backend, or none.
    """
    if getattr(server_args, "_resolution_finished", False) or not _wants_kvtier(server_args):
        return
    try:
        plugin.refuse_if_incomplete()
        _check_version()
        _check_arguments(server_args)
        check_store(_config(server_args))
        check_page_hash()
    except KvtierError as error:
        sys.exit(f"kvtier: {error}")


def _wants_kvtier(server_args: Any) -> bool:
    backend = server_args.hicache_storage_backend
    extra = server_args.hicache_storage_backend_extra_config or ""
    return backend == plugin.BACKEND or (backend == "dynamic" and "kvtier.integration" in extra)


def _check_version() -> None:
    import sglang

    if sglang.__version__ != TESTED:
        log.warning(
            "kvtier is tested with SGLang %s and this is %s: all it needs is there.",
            TESTED,
            sglang.__version__,
        )


def _check_arguments(server_args: Any) -> None:
    if server_args.dcp_size > 1:
        raise ConfigError(
            "SGLang lets only its file and mooncake backends store pages with --dcp-size above 1: "
            "leave --dcp-size out, or choose one of those."
        )
    if not (
        server_args.enable_hierarchical_cache
        or server_args.disaggregation_decode_enable_offload_kvcache
    ):
        log.warning(
            "kvtier stores nothing without --enable-hierarchical-cache: SGLang uses storage "
            "backends only with it."
        )


def _config(server_args: Any) -> Config:
    """The settings of the extra config and the environment."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    text = server_args.hicache_storage_backend_extra_config
    try:
        extra, *_ = HybridCacheController.parse_storage_backend_extra_config(text)
    except Exception as error:  # each format's parser has its own; all of them mean this text
        raise ConfigError(
            f"--hicache-storage-backend-extra-config {text} is no JSON object and no @file with "
            f"one: {error}."
        ) from error
    return Config.load(extra, os.environ)


def check_store(config: Config) -> None:
    """Raise StoreError for a store of a newer format and for a directory that is no store.

    One that can't be reached costs only the tier: the ranks say so when they open it.
    """
    try:
        Layout.open(find_store(config.root), create=True)
    except UnreachableError:
        pass  # the server starts without the tier, and says so where the pool is made


def check_page_hash() -> None:
    """Build or load SGLang's page-hash extension now. Raises KvtierError if that fails.

    SGLang builds it at the first lookup and only logs a failure: the server looks healthy,
    stores, and never hits.
    """
    try:
        module = importlib.import_module("sglang.srt.mem_cache.cpp_utils.native_hash")
        load = module._load_native_hash_module
    except (ImportError, AttributeError):
        return  # an SGLang that hashes in another way
    try:
        load()
    except RuntimeError as error:
        raise KvtierError(
            f"SGLang cannot build its page-hash extension ({_reason(error)}): install g++, ninja, "
            "the headers of this Python (python3-dev) and of OpenSSL (libssl-dev)."
        ) from error


def _reason(error: BaseException) -> str:
    """The most telling line of a failed build."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "fatal error" in line or "not found" in line]
    return (telling or lines or [type(error).__name__])[0]
