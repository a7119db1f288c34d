"""Write the locks from what is installed: `.venv/bin/python requirements/lock.py`.

core.txt    kvtier's dependencies and the `dev` extra of pyproject.toml
sglang.txt  the packages of sglang.in
each with everything those need, at the versions of this environment. torch and SGLang are left
out: tools/setup.sh installs them by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
APART = {"torch", "sglang", "kvtier"}


def closure(requirements: Iterable[Requirement], found: dict[str, str]) -> None:
    """Add name -> version of every installed requirement, and of what it requires, to `found`."""
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        seen = f"{name}[{','.join(sorted(requirement.extras))}]"
        if seen in found:
            continue
        distribution = metadata.distribution(name)
        found[seen] = distribution.version
        closure(needed(distribution, requirement.extras), found)


def needed(distribution: metadata.Distribution, extras: set[str]) -> Iterator[Requirement]:
    for line in distribution.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield requirement


def write(path: Path, found: dict[str, str], header: str) -> None:
    pins = {seen.partition("[")[0]: version for seen, version in found.items()}
    lines = [f"{name}=={version}" for name, version in sorted(pins.items()) if name not in APART]
    path.write_text("\n".join([f"# {header}; written by requirements/lock.py", *lines, ""]))


def main() -> None:
    core: dict[str, str] = {}
    closure([Requirement("kvtier[dev]")], core)
    closure(needed(metadata.distribution("kvtier"), {""}), core)
    write(HERE / "core.txt", core, "kvtier, its tests and linters")

    lines = (line.partition("#")[0].strip() for line in (HERE / "sglang.in").open())
    sglang: dict[str, str] = {}
    closure([Requirement(line) for line in lines if line], sglang)
    write(HERE / "sglang.txt", sglang, "SGLang on a machine without a GPU, except torch and SGLang")


if __name__ == "__main__":
    main()
