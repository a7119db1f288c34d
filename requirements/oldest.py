"""Print kvtier's dependencies at the lowest versions that pyproject.toml allows, for pip."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def main() -> None:
    for line in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]:
        requirement = Requirement(line)
        (lowest,) = (one.version for one in requirement.specifier if one.operator == ">=")
        print(f"{requirement.name}=={lowest}")


if __name__ == "__main__":
    main()
