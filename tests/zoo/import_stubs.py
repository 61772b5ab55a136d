"""Stubs of packages that models' packages import but models never use, such as torchvision and cloud storage."""

import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec


class _Kind(type):
    """Class whose every attribute is its own name: replaces enums and classes that are never instantiated."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (), {"__call__": lambda self, *args, **kwargs: None})


class _Stubs(MetaPathFinder, Loader):
    """Import any submodule of the given packages as an empty module."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


@contextmanager
def stubbed(*packages: str) -> Iterator[None]:
    """Stub those of the packages that are not installed; other packages must not find them after the block."""
    stubs = _Stubs([name for name in packages if importlib.util.find_spec(name) is None])
    sys.meta_path.append(stubs)
    try:
        yield
    finally:
        sys.meta_path.remove(stubs)
        for name in [n for n in sys.modules if n.partition(".")[0] in stubs.packages]:
            del sys.modules[name]
