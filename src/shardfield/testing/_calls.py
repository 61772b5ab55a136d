"""Pickle a call for the ranks: the function, its arguments, and the caller's environment.

It uses plain pickle, not that of multiprocessing: tensors are copied by value, so that nothing depends on shared memory
or on the lifetime of the sender.
"""

import functools
import importlib
import importlib.util
import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any


@dataclass(frozen=True)
class Call:
    """The caller's environment, sent before the pickled function and arguments.

    The environment variables of a rank are `environ`, overridden by those of a launcher, overridden by `env`.
    """

    environ: dict[str, str]
    env: dict[str, str | None]
    cwd: str
    path: list[str]
    modules: dict[str, str | None]


class _ModuleRecordingPickler(pickle.Pickler):
    """A pickler that records the module of every function and class, so that ranks can load the same files."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (FunctionType, type)):
            self.modules.add(obj.__module__)
        return NotImplemented


def function_name(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def pack(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], env: Mapping[str, str | None] | None
) -> tuple[bytes, bytes]:
    """Pickle a call as (environment, body). Raise TypeError with a remedy if it cannot be pickled."""
    _check_importable(fn)
    buffer = io.BytesIO()
    pickler = _ModuleRecordingPickler(buffer)
    try:
        pickler.dump((fn, args, kwargs))
    except Exception as error:
        raise TypeError(_explain_pickle_error(fn, args, kwargs)) from error
    call = Call(
        # The caller may itself run under torchrun, whose variables would point ranks to torchrun's store.
        environ={name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")},
        env=dict(env or {}),
        cwd=os.getcwd(),
        path=[os.path.abspath(entry) for entry in sys.path],
        modules={name: getattr(sys.modules.get(name), "__file__", None) for name in pickler.modules},
    )
    return pickle.dumps(call, pickle.HIGHEST_PROTOCOL), buffer.getvalue()


def _check_importable(fn: Callable[..., Any]) -> None:
    name = function_name(fn)
    if "<lambda>" in name or "<locals>" in name:
        raise TypeError(
            f"run_on_ranks: {name} is defined inside a function or is a lambda, and ranks import functions by name; "
            "move it to module level and pass the variables that it captures as arguments"
        )
    main = sys.modules["__main__"]
    if getattr(fn, "__module__", None) == "__main__" and not os.path.isfile(getattr(main, "__file__", None) or ""):
        raise TypeError(
            f"run_on_ranks: {name} is defined in an interactive session, and ranks import functions from files; "
            "put it into a module and import it from there"
        )


def _explain_pickle_error(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a message that names the part of a call that cannot be pickled."""
    parts = [("the function", fn), *((f"argument {i}", arg) for i, arg in enumerate(args))]
    parts += [(f"argument {name}=", arg) for name, arg in kwargs.items()]
    for label, value in parts:
        try:
            pickle.dumps(value)
        except Exception as error:
            remedy = "; move it to module level" if value is fn else ""
            return f"run_on_ranks({function_name(fn)}): {label} cannot be sent to other processes: {error}{remedy}"
    return f"run_on_ranks({function_name(fn)}): the call cannot be sent to other processes"


def load_modules(modules: dict[str, str | None]) -> None:
    """Import the caller's modules from the same files and under the same names.

    The name alone does not identify a module: pytest may import a test file that is not on `sys.path`
    (importmode=importlib), and two directories may each contain a `conftest`.
    """
    for name, file in modules.items():
        if name == "__main__" or file is None:  # multiprocessing loaded __main__ when the process started
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            module = None
        if module is not None and os.path.realpath(getattr(module, "__file__", None) or "") == os.path.realpath(file):
            continue
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
