"""`compile`: wrap a callable on ShardTensors so that its calls run as compiled local programs."""

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

from .. import runtime
from .._compat.autocast import autocast_state
from ..errors import ShardfieldError, Untraceable
from ..tensor import ShardTensor
from .backends import Backend
from .closures import Captured
from .guards import is_array
from .lowering import Passes
from .module_proxy import make_proxy
from .module_state import ModuleState, is_index
from .program import Program
from .pytree import flatten

RETRACES = 16  # traces of one callable, after which new signatures run uncompiled


def compile(
    model_or_step: Callable,
    *,
    backend: str | Callable = "inductor",
    fullgraph: bool = True,
    dynamic: bool = False,
    passes: Iterable[str] | None = None,
    retraces: int = RETRACES,
    graphs: bool = False,
) -> Any:
    """Return a compiled version of a module or function on ShardTensors.

    The callable is traced into one local forward graph and one local backward graph. A compiled module shares the
    parameters, buffers and all other attributes of the original. A model wrapped by DDP or FSDP2 is compiled in place,
    inside its wrapper, and returned; under FSDP2 each innermost unit is compiled. Every new combination of layouts,
    shapes, dtypes, devices and flags (grad mode, training, autocast) is traced once, by all ranks together. A callable
    that cannot be traced is an error if `fullgraph` is True. If it is False, the callable runs uncompiled and a warning
    gives the reason.

    `backend` is "inductor", "aot_eager" (run the graphs uncompiled), or a function
    `(graph, example inputs) -> callable`. `passes` selects graph passes; the default is all of them. "halos":
    consecutive convolutions and activations of an nn.Sequential share one halo exchange if that sends fewer bytes and
    repeats little work. "once": identical collectives run once. "buckets": small gradient all_reduces are coalesced.
    "overlap": collectives start early and are waited for late, with computation in between.

    `graphs`: after a few calls the forward and the backward program of a combination are captured as CUDA graphs,
    messages included, and each is launched by one call from then on. They are captured again if the parameters move in
    memory. A program that a graph cannot contain is refused: on a device other than CUDA, with messages staged through
    host memory, with checks of values on the host. With `fullgraph=False` such a program runs without graphs, with a
    warning.
    """
    if dynamic:
        raise ValueError("compile: dynamic shapes are not supported, since a trace fixes layouts: leave dynamic=False")
    if not callable(model_or_step):
        raise TypeError(f"compile: expected a module or a function, got a {type(model_or_step).__name__}")
    if retraces < 1:
        raise ValueError(f"compile: retraces={retraces}: expected at least 1")
    options = Backend(backend), Passes(passes), fullgraph, retraces, graphs
    if not isinstance(model_or_step, nn.Module):
        return Compiled(model_or_step, *options)
    if isinstance(model_or_step, (DistributedDataParallel, FSDPModule)):
        if graphs:
            raise ValueError(
                "compile: graphs=True needs parameters that stay in place in memory, and those of a model wrapped by "
                "DDP or FSDP do not: leave graphs=False, or capture the whole step (`shardfield train --graphs`)"
            )
        for unit in _units(model_or_step):
            unit.__dict__["forward"] = Compiled(unit.forward, *options)
        return model_or_step
    return _compile_module(*options, model_or_step)


def _compile_module(
    backend: Backend, passes: Passes, fullgraph: bool, retraces: int, graphs: bool, module: nn.Module
) -> Any:
    options = backend, passes, fullgraph, retraces, graphs
    return make_proxy(module, functools.partial(_compile_module, *options), Compiled(module.forward, *options))


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the modules inside a DDP or FSDP2 wrapper whose forward contains no collective of the wrapper."""
    if isinstance(model, DistributedDataParallel):
        return [model.module]
    units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return [m for m in units if not any(isinstance(child, FSDPModule) for child in m.modules() if child is not m)]


class Compiled:
    """Hold a callable and its compiled programs, one for each combination of layouts and flags in its calls."""

    def __init__(
        self, target: Callable, backend: Backend, passes: Passes, fullgraph: bool, retraces: int, graphs: bool = False
    ):
        self._target, self._backend, self._passes = target, backend, passes
        self._fullgraph, self._retraces, self._graphs = fullgraph, retraces, graphs
        self._programs: dict[Any, list[Program]] = {}
        self._valid_for = (0, 0)  # version of the registry and epoch of the runtime that the programs were traced with
        # Keys that run uncompiled. The arguments are kept alive: a key may hold the id of one of them.
        self._eager: dict[Any, list[Any]] = {}
        self._last_signature: list[str] = []  # signature of the latest trace
        self.traces = self._old_traces = 0
        self.__name__ = getattr(target, "__name__", type(target).__name__)
        self.__qualname__ = getattr(target, "__qualname__", self.__name__)
        self.__doc__ = target.__doc__
        self.__wrapped__ = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rt = runtime.active
        if rt.tracer is not None:  # inside the trace of another program
            return self._target(*args, **kwargs)
        if rt.virtual is not None and rt.virtual.moves_tensors:
            raise ShardfieldError(
                f"compile: {self.__qualname__}: a compiled program reads memory by address, and tensors of virtual "
                'ranks are moved out of memory; use memory="keep", or do not compile'
            )
        if self._valid_for != (rt.registry.version, rt.epoch):  # a rule was registered since, or a new world began
            self._valid_for = (rt.registry.version, rt.epoch)
            self._programs, self._eager, self._old_traces = {}, {}, self.traces
        leaves, spec = flatten((args, kwargs))
        key = self._cache_key(leaves, spec)
        for program in self._programs.get(key, ()):
            if program.guards_pass(leaves):
                return program.run(leaves)
        if key in self._eager:
            return self._target(*args, **kwargs)
        new_program = self._trace(key, leaves, spec)
        return self._target(*args, **kwargs) if new_program is None else new_program.run(leaves)

    def __deepcopy__(self, memo: dict) -> Compiled:
        """Copy the target; the copy has no programs and traces again."""
        return Compiled(copy.deepcopy(self._target, memo), *self._options())

    def __reduce__(self) -> tuple:
        return Compiled, (self._target, *self._options())

    def _options(self) -> tuple[Any, ...]:
        return self._backend, self._passes, self._fullgraph, self._retraces, self._graphs

    def _cache_key(self, leaves: list[Any], spec: Any) -> tuple:
        key: list[Any] = [spec, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()]
        key += autocast_state()
        key.append(torch.are_deterministic_algorithms_enabled())
        seen: dict[int, int] = {}
        for leaf in leaves:
            if isinstance(leaf, ShardTensor):
                key += (
                    leaf._layout,
                    leaf._dtype,
                    leaf._device,
                    leaf.requires_grad,
                    seen.setdefault(id(leaf), len(seen)),
                )
            elif isinstance(leaf, Tensor):
                key += (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, seen.setdefault(id(leaf), len(seen)))
            else:
                key += (type(leaf), _static_key(leaf))
        return tuple(key)

    def _trace(self, key: tuple, leaves: list[Any], spec: Any) -> Program | None:
        if self.traces - self._old_traces >= self._retraces:
            # Without its key: sizes that change in every step would add one for each.
            self._fall_back(
                None,
                [],
                f"it was traced {self.traces} times already, for other layouts, shapes, flags or non-tensor arguments. "
                "Pass a number that changes from call to call as a tensor, and round up sizes that change, as "
                "`MeshDataset(..., bucket=1.25)` does",
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
        if self._graphs:
            program.use_graphs(self._fullgraph)
        self._programs.setdefault(key, []).insert(0, program)
        return program

    def _build_program(self, leaves: list[Any], spec: Any) -> Program:
        """Trace a program. If the trace needs tensor values, trace again with integer tensors as constants."""
        captured = Captured(self._target, leaves)
        inputs = leaves, spec, self._backend, self._passes
        last = self._last_signature
        try:
            return Program(self._target, ModuleState(captured), *inputs, constant_indices=False, last_signature=last)
        except Untraceable as error:
            state = ModuleState(captured, constant_indices=True)
            indices = state.constants or any(isinstance(x, Tensor) and is_index(x) for x in leaves)
            if not (indices and error.needs_values):
                raise
            return Program(self._target, state, *inputs, constant_indices=True, last_signature=last)

    def _fall_back(self, key: tuple | None, leaves: list[Any], reason: str) -> None:
        if self._fullgraph:
            raise Untraceable(f"compile: {self.__qualname__}: {reason}")
        if not self._eager:
            warnings.warn(f"{self.__qualname__} runs uncompiled: {reason}", stacklevel=4)
        self._eager[key] = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]


def _static_key(value: Any) -> Any:
    """Return the cache key of a non-tensor argument. Programs keep the argument alive, so that an id stays unique."""
    if isinstance(value, float):
        return value.hex()  # distinguishes 0.0 from -0.0, and nan equals nan
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
