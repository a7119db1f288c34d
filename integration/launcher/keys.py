"""The file of --keys: SGLang's --config with the API keys, read as SGLang reads it."""

from __future__ import annotations

from pathlib import Path

from kvtier.errors import ConfigError


def check(file: Path) -> None:
    """ConfigError for a file with which SGLang would serve without a key, or not start at all."""
    try:
        import yaml  # type: ignore[import-untyped]  # SGLang brings it
    except ImportError:
        raise ConfigError(
            "--keys needs PyYAML, which comes with SGLang: pip install pyyaml."
        ) from None
    try:
        found = yaml.safe_load(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--keys {file}: {error.strerror}: give a file with api-key: YOUR-KEY in it."
        ) from None
    except yaml.YAMLError as error:  # its own text shows lines of the file
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"--keys {file} is no YAML{where}: write api-key: YOUR-KEY.") from None
    if file.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"--keys {file}: SGLang reads only .yaml and .yml: rename it.")
    key = found.get("api-key", "") if isinstance(found, dict) else ""
    if not isinstance(key, str) and key is not None:
        raise ConfigError(f"--keys {file}: the api-key is no text: put it in quotes.")
    if not (key or "").strip():
        raise ConfigError(
            f"--keys {file} has no api-key, and anybody could use the server: write the line "
            "api-key: YOUR-KEY into it."
        )
