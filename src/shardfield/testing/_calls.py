"""A call as it travels: what to run, and the surroundings of the caller it should see.

Plain pickle, not multiprocessing's: tensors go by value, so nothing depends on shared memory or on
how long the sender lives.
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
    """The caller's surroundings, sent ahead of the pickled function and arguments.

    A rank's environment is `environ`, then what a launcher would set for it, then `env`.
    """

    environ: dict[str, str]
    env: dict[str, str | None]
    cwd: str
    path: list[str]
    modules: dict[str, str | None]


class _ModuleRecordingPickler(pickle.Pickler):
    """Notes the module of every function and class it meets, so that ranks can load the same files."""

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
    """Pickle a call as (surroundings, body), or say what to change so that it can be."""
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
            f"run_on_ranks: {name} is defined inside a function or is a lambda, and ranks import what they run by "
            "name; move it to module level and pass what it closes over as arguments"
        )
    main = sys.modules["__main__"]
    if getattr(fn, "__module__", None) == "__main__" and not os.path.isfile(getattr(main, "__file__", None) or ""):
        raise TypeError(
            f"run_on_ranks: {name} was typed into an interactive session, and ranks import what they run from a file; "
            "put it into a module and import it from there"
        )


def _explain_pickle_error(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Say which part of a call does not pickle."""
    parts = [("the function", fn), *((f"argument {i}", arg) for i, arg in enumerate(args))]
    parts += [(f"argument {name}=", arg) for name, arg in kwargs.items()]
    for what, part in parts:
        try:
            pickle.dumps(part)
        except Exception as error:
            where = "; move it to module level" if part is fn else ""
            return f"run_on_ranks({function_name(fn)}): {what} cannot be sent to other processes: {error}{where}"
    return f"run_on_ranks({function_name(fn)}): the call cannot be sent to other processes"


def load_modules(modules: dict[str, str | None]) -> None:
    """Have `sys.modules` hold the caller's modules under the caller's names.

    pytest may import a test file that is not on `sys.path` (importmode=importlib), and two directories may
    hold a `conftest`; then only the file says which module is meant.
    """
    for name, file in modules.items():
        if name == "__main__" or file is None:  # multiprocessing has loaded __main__ when the process started
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
