"""Functions in C++ that replace short sequences of torch calls, if `shardfield build` has compiled them.

A rank calls a few torch functions before and after each message, and on small tensors each of these calls takes longer
from Python than its work. A leaf function makes several of them, on plain tensors and without messages. `leaves.cpp`
makes the same torch calls as the Python function, so the bits are the same, and some ranks may have it and others not.

Nothing is compiled unless `shardfield build` is called. Without the result of it for these versions of torch, Python
and this source, or with the environment variable SHARDFIELD_NATIVE=0, the Python functions run.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

SOURCE = Path(__file__).with_name("leaves.cpp")


def leaf(function: F) -> F:
    """Return the C++ function of this name, if it is there: `function` replaces it where the two might differ.

    These are subclasses of tensors, modes of torch functions, other types of arguments, and recorded gradients.
    """
    module = extension()
    return function if module is None else module.bind(function.__name__, function)


def library_path() -> Path:
    """Return where the compiled source is kept: a name for each source and version of torch and Python."""
    versions = (torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI"), platform.machine())
    key = hashlib.sha256(SOURCE.read_bytes() + repr(versions).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("SHARDFIELD_CACHE") or Path.home() / ".cache" / "shardfield")
    return folder / "native" / f"leaves-{key}.so"


@functools.lru_cache(maxsize=1)
def extension() -> Any:
    """Return the compiled module that this process uses, or None."""
    return None if os.environ.get("SHARDFIELD_NATIVE") == "0" else load()


def load() -> Any:
    """Return the compiled module, or None. A file that cannot be loaded is ignored: it only saves time."""
    try:
        spec = importlib.util.spec_from_file_location(f"{__name__}.leaves", library_path())
        if spec is None or spec.loader is None:
            return None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError, RuntimeError):  # RuntimeError: no home folder
        return None
    return module


def state() -> str:
    """Return in words which leaf functions run, those in C++ or those in Python, and why."""
    if extension() is not None:
        return "in C++"
    if os.environ.get("SHARDFIELD_NATIVE") == "0":
        return "in Python (SHARDFIELD_NATIVE=0)"
    return "in Python: `shardfield build` compiles them"


@contextmanager
def python_leaves() -> Iterator[None]:
    """Run the Python functions inside, for tests and comparisons."""
    module = extension()
    before = False if module is None else module.enable(False)
    try:
        yield
    finally:
        if module is not None:
            module.enable(before)
