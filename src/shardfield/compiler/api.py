"""`compile`: a callable on ShardTensors whose calls run as compiled local programs."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from .. import trace_state
from .._compat import autocast_state
from ..errors import Untraceable
from ..tensor import ShardTensor
from .backends import Backend
from .closures import Captured
from .guards import is_array
from .lowering import Passes
from .module_proxy import make_proxy
from .module_state import ModuleState, is_index
from .program import Program
from .pytree import flatten

RETRACES = 16  # programs of one callable, beyond which it runs as it is


def compile(
    model_or_step: Callable,
    *,
    backend: str | Callable = "inductor",
    fullgraph: bool = True,
    dynamic: bool = False,
    passes: Iterable[str] | None = None,
    retraces: int = RETRACES,
) -> Any:
    """A module or function on ShardTensors, traced into one local forward and one local backward graph.

    What it returns is called as the original is, and has its parameters: a module gives a module that shares them and
    all its attributes, and
    what DDP or FSDP2 has wrapped is compiled inside, FSDP2's innermost units each, and is itself returned. Each
    new set of layouts, shapes, dtypes, devices and flags (grad mode, training, autocast) is traced once, on all ranks
    together. What cannot be traced is an error with `fullgraph`; without, it runs uncompiled, and a warning says why.

    `backend`: "inductor", "aot_eager" (the graphs as they are), or a function `(graph, example inputs) -> callable`.
    `passes`: which of these are applied; all of them, unless said otherwise. "halos": convolutions and activations that
    follow each other in an nn.Sequential share a halo where that is fewer bytes and little work is done twice. "once":
    equal messages are sent once. "buckets": small sums of gradients share messages. "overlap": messages start early and
    land late, with work between.
    """
    if dynamic:
        raise ValueError("compile: layouts are fixed when a program is traced, so its shapes are: leave dynamic=False")
    if not callable(model_or_step):
        raise TypeError(f"compile: a module or a function is wanted, and this is a {type(model_or_step).__name__}")
    if retraces < 1:
        raise ValueError(f"compile: retraces={retraces}: at least one trace is needed")
    how = Backend(backend), Passes(passes), fullgraph, retraces
    if not isinstance(model_or_step, nn.Module):
        return Compiled(model_or_step, *how)
    if isinstance(model_or_step, (DistributedDataParallel, FSDPModule)):
        for unit in _units(model_or_step):
            unit.__dict__["forward"] = Compiled(unit.forward, *how)
        return model_or_step
    return _compile_module(*how, model_or_step)


def _compile_module(backend: Backend, passes: Passes, fullgraph: bool, retraces: int, module: nn.Module) -> Any:
    how = backend, passes, fullgraph, retraces
    return make_proxy(module, functools.partial(_compile_module, *how), Compiled(module.forward, *how))


def _units(model: nn.Module) -> list[nn.Module]:
    """The modules inside a data-parallel wrapper around which no message of its own is sent."""
    if isinstance(model, DistributedDataParallel):
        return [model.module]
    units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return [m for m in units if not any(isinstance(child, FSDPModule) for child in m.modules() if child is not m)]


class Compiled:
    """A callable and its programs, one for each set of layouts and flags it was called with."""

    def __init__(self, target: Callable, backend: Backend, passes: Passes, fullgraph: bool, retraces: int):
        self._target, self._backend, self._passes = target, backend, passes
        self._fullgraph, self._retraces = fullgraph, retraces
        self._programs: dict[Any, list[Program]] = {}
        self._eager: dict[Any, list[Any]] = {}  # with the arguments, so that no other gets the id of one of them
        self._last_signature: list[str] = []  # what it was last traced for
        self.traces = 0
        self.__name__ = getattr(target, "__name__", type(target).__name__)
        self.__qualname__ = getattr(target, "__qualname__", self.__name__)
        self.__doc__ = target.__doc__
        self.__wrapped__ = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if trace_state.tracer is not None:  # inside another program that is being traced
            return self._target(*args, **kwargs)
        leaves, spec = flatten((args, kwargs))
        key = self._cache_key(leaves, spec)
        for program in self._programs.get(key, ()):
            if program.guards_pass(leaves):
                return program.run(leaves)
        if key in self._eager:
            return self._target(*args, **kwargs)
        made = self._trace(key, leaves, spec)
        return self._target(*args, **kwargs) if made is None else made.run(leaves)

    def __deepcopy__(self, memo: dict) -> Compiled:
        """A copy has its own target, and traces anew."""
        return Compiled(copy.deepcopy(self._target, memo), self._backend, self._passes, self._fullgraph, self._retraces)

    def __reduce__(self) -> tuple:
        return Compiled, (self._target, self._backend, self._passes, self._fullgraph, self._retraces)

    def _cache_key(self, leaves: list[Any], spec: Any) -> tuple:
        found: list[Any] = [spec, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()]
        found += autocast_state()
        found.append(torch.are_deterministic_algorithms_enabled())
        seen: dict[int, int] = {}
        for leaf in leaves:
            if isinstance(leaf, ShardTensor):
                found += (
                    leaf._layout,
                    leaf._dtype,
                    leaf._device,
                    leaf.requires_grad,
                    seen.setdefault(id(leaf), len(seen)),
                )
            elif isinstance(leaf, Tensor):
                found += (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, seen.setdefault(id(leaf), len(seen)))
            else:
                found += (type(leaf), _static_key(leaf))
        return tuple(found)

    def _trace(self, key: tuple, leaves: list[Any], spec: Any) -> Program | None:
        if self.traces >= self._retraces:
            self._fall_back(
                key,
                leaves,
                f"it has been traced {self.traces} times already, for other layouts, shapes, flags or values that are "
                "no tensors: a number that changes from call to call is best passed as a tensor",
            )
            return None
        self.traces += 1
        try:
            program = self._build_program(leaves, spec)
        except Untraceable as error:
            if self._fullgraph:
                raise
            self._fall_back(key, leaves, str(error))
            return None
        self._last_signature = program.signature
        self._programs.setdefault(key, []).insert(0, program)
        return program

    def _build_program(self, leaves: list[Any], spec: Any) -> Program:
        """A program; where it depends on values, which a trace has none of, one for these tensors of integers alone."""
        captured = Captured(self._target, leaves)
        how = leaves, spec, self._backend, self._passes
        try:
            return Program(
                self._target, ModuleState(captured), *how, constant_indices=False, last_signature=self._last_signature
            )
        except Untraceable as error:
            state = ModuleState(captured, constant_indices=True)
            indices = state.constants or any(isinstance(x, Tensor) and is_index(x) for x in leaves)
            if not (indices and error.values):
                raise
            return Program(self._target, state, *how, constant_indices=True, last_signature=self._last_signature)

    def _fall_back(self, key: tuple, leaves: list[Any], reason: str) -> None:
        if self._fullgraph:
            raise Untraceable(f"compile: {self.__qualname__}: {reason}")
        if not self._eager:
            warnings.warn(f"{self.__qualname__} runs uncompiled: {reason}", stacklevel=4)
        self._eager[key] = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]


def _static_key(value: Any) -> Any:
    """What stands in a key for an argument that is no tensor; programs keep it, so that no other gets its id."""
    if isinstance(value, float):
        return value.hex()  # 0.0 is not -0.0, and nan is nan
    if isinstance(value, slice):  # hashable from Python 3.12 on
        return value.start, value.stop, value.step
    if isinstance(value, set):
        return frozenset(value)
    if is_array(value):
        return value.shape, str(value.dtype), value.tobytes()
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
