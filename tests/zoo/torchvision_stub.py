"""timm imports torchvision, for which there is no CPU build: a module of that name that has what imports touch."""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager


class _Kind(type):
    """A class of which every attribute is its own name: stands for enums and for classes that are never made."""

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
    """Inside, the stub is there, unless there is a torchvision; other packages must not take it for one afterwards."""
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
