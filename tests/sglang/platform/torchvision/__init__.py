"""Test only: an empty torchvision.

SGLang imports names of it at module level (for images, which these tests don't send). The real
one either fails to import beside the CPU build of torch or brings gigabytes of CUDA with it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import ClassVar

__version__ = "0.0.0"


class _Placeholder(type):
    """A class any attribute of which is the dotted name it was asked by."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _EmptyModule(types.ModuleType):
    """A module that has every public name."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of torchvision, and finds it empty."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _EmptyModule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
for _name in ("io", "ops", "transforms"):
    importlib.import_module(f"{__name__}.{_name}")
