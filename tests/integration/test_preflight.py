"""A start that cannot work ends in the launcher, before the model is read, with one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.server_args import ServerArgs

from kvtier.integration import preflight


def _args(extra: object, **more: object) -> ServerArgs:
    text = extra if isinstance(extra, str) else json.dumps(extra)
    return ServerArgs(
        model_path="dummy",
        hicache_storage_backend="kvtier",
        hicache_storage_backend_extra_config=text,
        **more,
    )


def _refusal(args: ServerArgs) -> str:
    """The line with which resolving the arguments ends the process."""
    with pytest.raises(SystemExit) as ended:
        args.resolve_once()
    line = str(ended.value.code)
    assert line.startswith("kvtier: ")
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"rooot": "/tmp"}, "did you mean root?"),
        ({"root": "/tmp", "commit_size": "7 parsecs"}, "commit_size"),
        ({"prefetch_threshold": "many"}, "prefetch_threshold must be int"),
        ("{", "is no JSON object"),
        ("[1]", "is no JSON object"),
        ("@/no/such/file.toml", "No such file"),
    ],
)
def test_a_wrong_setting_is_named(extra, reason) -> None:
    assert reason in _refusal(_args(extra))


def test_an_unknown_variable_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KVTIER_ROOOT", "/tmp")
    assert "did you mean KVTIER_ROOT?" in _refusal(_args({"root": str(tmp_path)}))


def test_settings_may_come_from_a_toml_file(tmp_path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text(f'root = "{tmp_path}/store"\ncommit_size = "1Mi"\n')
    _args(f"@{file}").resolve_once()


def test_a_store_of_a_newer_format_is_refused_and_left_alone(tmp_path) -> None:
    superblock = tmp_path / "kvtier" / "kvtier.json"
    superblock.parent.mkdir()
    superblock.write_text('{"format": 99, "store": "' + "0" * 32 + '"}')
    before = superblock.read_bytes(), sorted(tmp_path.rglob("*"))
    assert "upgrade kvtier" in _refusal(_args({"root": str(tmp_path)}))
    assert (superblock.read_bytes(), sorted(tmp_path.rglob("*"))) == before


def test_a_directory_that_is_no_store_is_refused(tmp_path) -> None:
    root = tmp_path / "kvtier"
    root.mkdir()
    (root / "thesis.tex").touch()
    assert "thesis.tex" in _refusal(_args({"root": str(root)}))


def test_a_store_that_cannot_be_reached_costs_only_the_tier() -> None:
    _args({"root": "/proc/nowhere"}).resolve_once()


def test_decode_context_parallelism_is_refused_with_the_alternative(tmp_path) -> None:
    assert "--dcp-size" in _refusal(_args({"root": str(tmp_path)}, dcp_size=2, tp_size=2))


def test_what_sglang_lacks_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.delattr(HybridCacheController, "should_backup")
    assert "should_backup (not there)" in _refusal(_args({"root": str(tmp_path)}))


def test_servers_without_kvtier_are_never_refused(monkeypatch) -> None:
    monkeypatch.delattr(HybridCacheController, "should_backup")
    monkeypatch.setenv("KVTIER_ROOOT", "/tmp")
    ServerArgs(model_path="dummy", hicache_storage_backend="file").resolve_once()
    ServerArgs(model_path="dummy").resolve_once()


def test_another_sglang_version_only_warns(monkeypatch, caplog, tmp_path) -> None:
    monkeypatch.setattr(preflight, "TESTED", "0.1")
    _args({"root": str(tmp_path)}).resolve_once()
    assert "tested with SGLang 0.1" in caplog.text


def test_a_failed_build_of_the_page_hash_names_its_cause(monkeypatch, tmp_path) -> None:
    def build() -> None:
        try:
            raise RuntimeError(
                "Error building extension 'hicache_hash_cpp': [1/2] c++ -MMD ...\n"
                "hash_binding.cpp:5:10: fatal error: openssl/sha.h: No such file or directory\n"
                "compilation terminated."
            )
        except RuntimeError as error:
            raise RuntimeError("Failed to load HiCache native hash extension") from error

    monkeypatch.setattr(native_hash, "_load_native_hash_module", build)
    line = _refusal(_args({"root": str(tmp_path)}))
    assert "fatal error: openssl/sha.h" in line
    assert "libssl-dev" in line


def test_a_machine_without_compiler_is_refused(tmp_path) -> None:
    code = "from kvtier.integration.preflight import check_page_hash; check_page_hash()"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CXX": "/no/such/g++", "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 1
    assert "KvtierError: SGLang cannot build its page-hash extension" in ran.stderr


def test_the_launcher_ends_with_one_line_and_status_1(tmp_path) -> None:
    """As a user starts it; the model does not even exist."""
    flags = (
        f"--model-path={tmp_path / 'no-model'}",
        "--enable-hierarchical-cache",
        "--hicache-storage-backend=kvtier",
        '--hicache-storage-backend-extra-config={"rooot": "/tmp"}',
    )
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *flags],
        env={**os.environ, "PATH": _path_with_ninja()},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("kvtier: ")
    assert "did you mean root?" in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr


def _path_with_ninja() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
