"""Hooks that mend what SGLang does: one file each, named as in kvtier.patches.

docs/patches.md says what SGLang does and where, how each is tested and when it can go.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # split.py is for the launcher, too, which has no SGLang
    from kvtier.integration.patches.scheme import Patch


def code(name: str) -> Patch:
    """The hooks of a patch of kvtier.patches.PATCHES."""
    patch: Patch = importlib.import_module(f"{__name__}.{name}").PATCH
    return patch
