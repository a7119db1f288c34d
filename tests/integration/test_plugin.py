"""The plugin on the real SGLang wheel: its hooks take, and what is missing is named."""

from __future__ import annotations

import argparse
import inspect
import json
from types import SimpleNamespace

import pytest
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs, prepare_server_args

from kvtier.errors import KvtierError
from kvtier.integration import engine, plugin


def _config(**changes: object) -> HiCacheStorageConfig:
    values = dict(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="m",
    )
    return HiCacheStorageConfig(**{**values, **changes})


def test_the_command_line_takes_kvtier_as_a_backend() -> None:
    extra = "--hicache-storage-backend-extra-config={}"
    backend = "--hicache-storage-backend=kvtier"
    args = prepare_server_args(["--model-path=dummy", backend, extra])
    assert args.hicache_storage_backend == "kvtier"


def test_the_other_backends_are_still_offered() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    [action] = [a for a in parser._actions if a.dest == "hicache_storage_backend"]
    assert {"file", "mooncake", "dynamic", "kvtier"} <= set(action.choices)


def test_all_hooks_took_and_nothing_is_missing() -> None:
    assert plugin.missing() == []
    plugin.refuse_if_incomplete()


@pytest.mark.parametrize("hook", plugin.HOOKS, ids=lambda hook: hook.target.rsplit(".", 1)[1])
def test_each_target_that_is_gone_is_named(hook, monkeypatch) -> None:
    owner, name = hook.target.rsplit(".", 1)
    monkeypatch.delattr(plugin.pkgutil.resolve_name(owner), name)
    # A method of the base class may show up in its place, with other parameters.
    assert any(problem.startswith(f"{hook.target} (") for problem in plugin.missing())
    with pytest.raises(KvtierError, match=name):
        plugin.refuse_if_incomplete()


@pytest.mark.parametrize("hook", plugin.HOOKS, ids=lambda hook: hook.target.rsplit(".", 1)[1])
def test_each_hook_that_did_not_take_is_named(hook, monkeypatch) -> None:
    owner, name = hook.target.rsplit(".", 1)
    holder = plugin.pkgutil.resolve_name(owner)
    patched = inspect.getattr_static(holder, name)
    bare = inspect.unwrap(getattr(patched, "__func__", patched))
    kind = type(patched) if isinstance(patched, staticmethod | classmethod) else (lambda f: f)
    monkeypatch.setattr(holder, name, kind(bare))
    assert f"{hook.target} (the hook has not taken)" in plugin.missing()


def test_a_target_with_other_parameters_is_named(monkeypatch) -> None:
    monkeypatch.setattr(HybridCacheController, "should_backup", lambda self, pool: True)
    [problem] = plugin.missing()
    assert problem.endswith("should_backup (without transfer)")


def test_a_lost_part_of_the_storage_contract_is_named(monkeypatch) -> None:
    monkeypatch.delattr(HiCacheStorage, "on_host_pools_registered")
    monkeypatch.delattr(HiCacheController, "_page_set_zero_copy")
    monkeypatch.setattr(engine, "LEAVES", (*engine.LEAVES, "no_such_setting"))
    assert plugin.missing() == [
        "HiCacheStorage.on_host_pools_registered (not there)",
        "HiCacheController._page_set_zero_copy (not there)",
        "ServerArgs (without no_such_setting)",
    ]


def test_a_rank_builds_no_backend_on_an_incomplete_sglang(monkeypatch, tmp_path) -> None:
    monkeypatch.delattr(HybridCacheController, "should_backup")
    config = _config(extra_config={"root": str(tmp_path)})
    with pytest.raises(KvtierError, match="should_backup"):
        StorageBackendFactory.create_backend("kvtier", config, None)


def test_other_backends_are_built_as_before(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    monkeypatch.delattr(HybridCacheController, "should_backup")  # even where kvtier could not
    backend = StorageBackendFactory.create_backend("file", _config(), None)
    assert isinstance(backend, HiCacheFile)


def test_prefix_keys_and_addresses_are_turned_on_by_themselves(start) -> None:
    server = start("full")
    assert server.cache.hicache_storage_pass_prefix_keys
    assert server.controller.page_get_func == server.controller._page_get_zero_copy
    assert server.controller.page_set_func == server.controller._page_set_zero_copy


def test_run_time_detach_and_attach(start, tmp_path) -> None:
    server = start("full")
    tokens = server.prompt()
    server.compute(tokens)
    server.store(tokens)
    assert server.cache.detach_storage_backend()[0]
    assert server.controller.page_get_func == server.controller._generic_page_get
    extra = json.dumps({"root": str(tmp_path / "store")})

    assert server.cache.attach_storage_backend("kvtier", extra) == (
        True,
        "Attached HiCache storage backend successfully.",
    )
    assert server.cache.hicache_storage_pass_prefix_keys
    assert server.controller.page_get_func == server.controller._page_get_zero_copy
    assert server.storage.batch_exists(server.page_keys(tokens)) == server.stack.pages


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ('{"rooot": "/tmp"}', "did you mean root"),
        ('{"root": "/proc/nowhere"}', "/proc/nowhere"),
        ('{"root": "/tmp", "commit_size": "7Q"}', "commit_size"),
    ],
)
def test_a_run_time_attach_that_cannot_work_says_why_and_the_server_goes_on(
    start, extra, reason
) -> None:
    server = start("full")
    assert server.cache.detach_storage_backend()[0]
    get_context().override("detached, as the scheduler says", hicache_storage_backend=None)
    done, message = server.cache.attach_storage_backend("kvtier", extra)
    assert not done
    assert reason in message
    assert server.controller.storage_backend is None


def test_the_dynamic_backend_is_kvtier_too(start, tmp_path) -> None:
    server = start("full")
    assert server.cache.detach_storage_backend()[0]
    extra = {
        "backend_name": "mine",
        "module_path": "kvtier.integration.storage",
        "class_name": "KvtierStorage",
        "interface_v1": 1,
        "root": str(tmp_path / "store"),
    }
    assert server.cache.attach_storage_backend("dynamic", json.dumps(extra))[0]
    assert server.cache.hicache_storage_pass_prefix_keys
    tokens = server.prompt()
    server.compute(tokens)
    server.store(tokens)
    assert server.storage.flush(60)
    assert server.storage.batch_exists(server.page_keys(tokens)) == server.stack.pages

    assert server.cache.detach_storage_backend()[0]
    del extra["interface_v1"]
    done, message = server.cache.attach_storage_backend("dynamic", json.dumps(extra))
    assert not done
    assert 'add "interface_v1": 1' in message


def _transfer(name: PoolName) -> PoolTransfer:
    return PoolTransfer(name=name, keys=["k"])


def test_should_backup_is_left_alone_for_other_backends() -> None:
    controller = SimpleNamespace(
        backup_skip=True, storage_backend_type="file", storage_backend=object(), mem_pool_host=None
    )
    assert not HybridCacheController.should_backup(controller, _transfer(PoolName.DRAFT))
    assert HybridCacheController.should_backup(controller, _transfer(PoolName.MAMBA))
