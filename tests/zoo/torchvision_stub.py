"""Stub of torchvision, which timm imports and which has no CPU build: the names that the import touches."""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager


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


@contextmanager
def in_place() -> Iterator[None]:
    """Install the stub inside the block unless torchvision exists; other packages must not find it afterwards."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    try:
        for name in ("", ".transforms", ".transforms.functional", ".ops", ".ops.misc", ".datasets", ".models"):
            full = f"torchvision{name}"
            module = sys.modules[full] = _Module(full)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
            parent, _, child = full.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        yield
    finally:
        for full in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
            del sys.modules[full]
