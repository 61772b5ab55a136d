"""One compiled program: a callable traced for one combination of layouts, shapes and flags.

A program is a function of local tensors: those of the modules first, then those among the arguments. AOTAutograd traces
it into a forward and a backward graph of local ops and collectives (`collective_ops`). `run` unwraps the ShardTensors,
runs the graphs, and wraps the results in the layouts of the trace.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import runtime, trace_state
from .._compat.aot import aot_compile, is_data_dependent_error, is_written
from .._compat.autocast import autocast_state
from .._compat.storage import storage_id
from ..comm.collectives import device_of
from ..dispatch.arguments import mark_consumed
from ..dispatch.torch_aliases import function_name
from ..errors import ShardfieldError, Untraceable
from ..layout import Layout
from ..shard_utils.halo_blocks import halo_block_forward, install_halo_blocks
from ..tensor import ShardTensor, wrap
from . import rendezvous
from .attribution import TracedCalls
from .backends import Backend
from .collective_ops import CollectiveTracer
from .graphs import ProgramGraph, check_device, check_messages
from .lowering import MAX_REDUNDANCY, Passes
from .module_state import ModuleState, is_index, to_local, version
from .pytree import contains_tensors, flatten, unflatten
from .trace_consensus import TraceConsensus
from .trace_facts import TraceMode

LIBRARY_PATHS = (*torch.__path__, str(Path(__file__).parents[1]))  # their lines are not shown in errors


class Static:
    """A non-tensor argument or result, which is a constant of the program."""

    def __init__(self, value: Any):
        self.value = value

    def guards_pass(self, value: Any) -> bool:
        """Return True: the cache key has already compared the argument."""
        return True


class ConstantTensor(Static):
    """A tensor argument that is a constant of the program. Its guard: the same tensor, not written since the trace."""

    def __init__(self, value: Tensor):
        super().__init__(value)
        self._version = version(value)

    def guards_pass(self, value: Any) -> bool:
        return value is self.value and version(value) == self._version


def classify(value: Any, constant_indices: bool = False) -> Any:
    """Return how a program treats an argument or result: its Layout, None for a plain tensor, or a `Static`."""
    if not isinstance(value, Tensor):
        return Static(value)
    if constant_indices and is_index(value):
        return ConstantTensor(value)
    return value._layout if isinstance(value, ShardTensor) else None


class Program:
    """A callable, compiled as a function of local tensors.

    `constant_indices`: integer tensors are constants, so that the program is valid for these tensors only.
    """

    def __init__(
        self,
        target: Callable,
        state: ModuleState,
        leaves: Sequence[Any],
        spec: Any,
        backend: Backend,
        passes: Passes,
        constant_indices: bool,
        last_signature: Sequence[str] = (),
    ):
        self.state = state
        self._spec = spec
        self._name = _qualname(target)
        self._results: list[Any] = []
        self._result_spec: Any = None
        self._kinds = [classify(x, constant_indices) for x in leaves]
        self._state_kinds = [classify(t) for t in state.tensors()]
        self._marks = [getattr(t, "_averaged_later", None) for t in state.tensors()]
        # Elements of an expanded tensor share memory, so an input with stride 0 could not be filled on another call.
        locals_ = [t.contiguous() if 0 in t.stride() else t for t in self._inputs(leaves)]
        self._strides = [t.stride() for t in locals_]
        self._mutated_inputs: list[int] = []
        layouts = [k for k in [*self._kinds, *self._state_kinds] if isinstance(k, Layout)]
        layouts += [k.value._layout for k in self._kinds if isinstance(getattr(k, "value", None), ShardTensor)]
        mesh_args = [k.value for k in self._kinds if isinstance(k, Static) and isinstance(k.value, DeviceMesh)]
        # Plain tensors have no mesh: the ranks of the meshes that the callable captures trace together.
        self._meshes = list(dict.fromkeys([*(x.mesh for x in layouts), *mesh_args] or state.meshes))
        self._constant_args = [k.value for k in self._kinds if isinstance(k, ConstantTensor)]
        self._constants = [*self._constant_args, *(tensor for _, _, tensor, _ in state.constants)]
        self._calls = TracedCalls(target)
        self._tracer = CollectiveTracer(self._calls)
        self._shares_halos = "halos" in passes.enabled
        self.signature, self._last_signature = self._describe_signature(leaves, state), last_signature
        self._run = self._trace_graphs(target, locals_, backend, passes)
        self.state.guards.finalize()
        self._aliasing = _shared_memory(locals_) if self._mutated_inputs else []

    def _describe_signature(self, leaves: Sequence[Any], state: ModuleState) -> list[str]:
        """Return lines that describe the inputs of the program; they must be equal on all ranks."""
        modes = [
            name
            for name, on in (("grad", torch.is_grad_enabled()), ("inference", torch.is_inference_mode_enabled()))
            if on
        ]
        lines = [f"mode {' '.join([*modes, *map(str, autocast_state())]) or 'no grad'}"]
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, ShardTensor):
                needs = "requires" if leaf.requires_grad else "does not require"
                lines.append(
                    f"argument {i} is {leaf.dtype} {tuple(leaf.shape)} as {leaf.placements} and {needs} gradients"
                )
        needed = "".join("01"[t.requires_grad] for t in state.tensors())
        return [*lines, f"{needed.count('1')} of {len(needed)} tensors of modules require gradients ({needed})"]

    def _inputs(self, leaves: Sequence[Any]) -> list[Tensor]:
        of_modules = [to_local(t) for t in self.state.tensors()]
        return of_modules + [to_local(x) for x, k in zip(leaves, self._kinds, strict=True) if not isinstance(k, Static)]

    def use_graphs(self, strict: bool) -> None:
        """Run the program as CUDA graphs from now on. If it cannot: raise, or warn if not `strict`."""
        groups = list(dict.fromkeys(g for mesh in self._meshes for g in mesh.get_all_groups() if g.size() > 1))
        try:
            for device in {device_of(mesh) for mesh in self._meshes}:
                check_device(device)
                check_messages(groups, device)
            if self._tracer.checks:
                raise Untraceable(f"a value is checked on the host ({self._tracer.checks[0]})")
        except Untraceable as error:
            if strict:
                raise Untraceable(f"compile: graphs=True: {error}") from None
            warnings.warn(f"{self._name} runs without CUDA graphs: {error}", stacklevel=5)
            return
        self._run = ProgramGraph(self._run, len(self._state_kinds), self._mutated_inputs, groups, strict)

    def guards_pass(self, leaves: Sequence[Any]) -> bool:
        """Return whether the program is valid for these arguments, whose cache key matches, and the modules' state."""
        if self._constant_args and not all(
            k.guards_pass(x) for x, k in zip(leaves, self._kinds, strict=True) if isinstance(k, ConstantTensor)
        ):
            return False
        return self.state.guards_pass() and (
            not self._mutated_inputs or _shared_memory(self._inputs(leaves)) == self._aliasing
        )

    # ------------------------------------------------------------------ tracing

    def _trace_graphs(self, target: Callable, locals_: list[Tensor], backend: Backend, passes: Passes) -> Callable:
        def end_trace() -> None:
            runtime.active.tracer = None

        def body(*flat: Tensor) -> tuple[Tensor, ...]:
            return tuple(self._body(target, flat))

        consensus = TraceConsensus(self._meshes)
        self._calls.groups = consensus.groups
        mismatch = rendezvous.sync_trace(_qualname(target), self.signature, self._last_signature, consensus.groups)
        partition, compilers = passes.make_compilers(backend, self._tracer, self._calls, consensus, end_trace)
        before = set(runtime.active.write_observers)
        runtime.active.tracer = self._tracer
        try:
            if mismatch:
                raise Untraceable(mismatch)
            with consensus.checking_collectives(), self._calls.recording(), self.state.guards.recording():
                compiled = aot_compile(body, locals_, partition, compilers, backend.decompositions(), backend.mutates)
                consensus.check_programs()
            return compiled
        except Exception as error:
            end_trace()
            with self._calls.recording():
                trace_error = _to_trace_error(target, error, consensus)
            if trace_error is error:
                raise
            raise trace_error from error
        finally:
            end_trace()
            observers = runtime.active.write_observers
            for observer in set(observers) - before:  # lazy values of the trace alias no tensor outside it
                observers.discard(observer)

    def _body(self, target: Callable, flat: Sequence[Tensor]) -> list[Tensor]:
        self._tracer.reset()
        n = len(self._state_kinds)
        of_modules = [
            x if layout is None else wrap(x, layout) for x, layout in zip(flat[:n], self._state_kinds, strict=True)
        ]
        for tensor, mark in zip(of_modules, self._marks, strict=True):
            if mark is not None:
                tensor._averaged_later = mark
        rest = iter(flat[n:])
        leaves = [
            k.value if isinstance(k, Static) else next(rest) if k is None else wrap(next(rest), k) for k in self._kinds
        ]
        args, kwargs = arguments = unflatten(leaves, self._spec)
        with self.state.with_tensors(of_modules), TraceMode(self._constants):
            if self._shares_halos:
                install_halo_blocks(self.state.modules, MAX_REDUNDANCY, only_if_fewer_bytes=True)
                if getattr(target, "__func__", None) is nn.Sequential.forward:
                    target = partial(
                        halo_block_forward,
                        target.__self__,  # type: ignore[attr-defined]
                        redundancy=MAX_REDUNDANCY,
                        only_if_fewer_bytes=True,
                    )  # noqa: B009
            out = target(*args, **kwargs)
        self._check_arguments(leaves, arguments, flat[n:])
        self._mutated_inputs = [i for i, t in enumerate(flat) if is_written(t)]
        results, self._result_spec = flatten(out)
        for result in results:
            if not isinstance(result, Tensor) and contains_tensors(result):
                raise Untraceable(
                    f"compile: {_qualname(target)} returns a {type(result).__name__} that holds tensors: return them "
                    "in a tuple, dict or dataclass"
                )
        results = [r.clone() if isinstance(r, Tensor) and _needs_copy(to_local(r), flat) else r for r in results]
        self._results = [classify(r) for r in results]
        self._tracer.forward_count = self._tracer.count
        return [to_local(r) for r in results if isinstance(r, Tensor)]

    def _check_arguments(self, leaves: list[Any], arguments: Any, flat: Sequence[Tensor]) -> None:
        """Raise if the callable changed a container, the data pointer or the layout of an argument.

        In-place writes are part of the graph; these changes are not.
        """
        now, spec = flatten(arguments)
        if spec != self._spec or any(a is not b for a, b in zip(now, leaves, strict=True)):
            raise Untraceable("compile: the callable changes a container among its arguments: return the value instead")
        rest = iter(flat)
        for leaf, kind in zip(leaves, self._kinds, strict=True):
            if isinstance(kind, Static):
                continue
            local = next(rest)
            if isinstance(kind, Layout) and leaf._layout == kind and leaf._local_tensor is not local:
                raise Untraceable("compile: an argument is assigned other data: write in place, or return it")
            if isinstance(kind, Layout) and leaf._layout != kind:
                raise Untraceable(
                    f"compile: an in-place write into an argument changes its layout from {kind} to {leaf._layout}. "
                    "Redistribute it before the call, or return the result"
                )

    # ------------------------------------------------------------------ running

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run the program. The arguments must match its cache key and pass its guards."""
        inputs = self._inputs(leaves)
        mark_consumed(leaves)
        write_back = []
        for i, (tensor, stride) in enumerate(zip(inputs, self._strides, strict=True)):
            if tensor.stride() != stride:  # the graphs assume the strides of the trace
                inputs[i] = tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)
                if i in self._mutated_inputs:
                    write_back.append((tensor, inputs[i]))
        results = iter(self._run(*inputs))
        for tensor, copied in write_back:
            tensor.copy_(copied)
        wrapped = [
            k.value if isinstance(k, Static) else next(results) if k is None else wrap(next(results), k)
            for k in self._results
        ]
        mark_consumed(wrapped)  # backward of the program may have saved them
        return unflatten(wrapped, self._result_spec)


def _shared_memory(inputs: Sequence[Tensor]) -> list[tuple]:
    """Return which inputs alias each other, with offsets and strides. A program that writes an input depends on it."""
    by_storage: dict[int, list[int]] = {}
    for i, tensor in enumerate(inputs):
        by_storage.setdefault(storage_id(tensor), []).append(i)
    shared = [i for members in by_storage.values() if len(members) > 1 for i in members]
    return [
        (i, storage_id(inputs[i]) == storage_id(inputs[shared[0]]), inputs[i].storage_offset(), inputs[i].stride())
        for i in shared
    ]


def _needs_copy(result: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Return whether a result must be copied before it is returned.

    A constant of the program must. So must a tensor with overlapping elements (a window view, for example), unless it
    is a view of an input: AOTAutograd gives its gradient the same strides, and loses values where elements overlap.
    """
    if trace_state.is_concrete(result):
        return True
    extent = 0  # largest offset of the dims so far
    for stride, size in sorted(zip(result.stride(), result.shape, strict=True)):
        if stride and size > 1:
            if stride <= extent:
                return not any(trace_state.same_memory(result, x) for x in inputs)
            extent += stride * (size - 1)
    return False


def _to_trace_error(target: Callable, error: Exception, consensus: TraceConsensus) -> Exception:
    """Return the exception that a failed trace raises. A collective: all ranks call it and agree on the reason."""
    is_user_error = isinstance(error, ShardfieldError) and not isinstance(error, Untraceable)
    trace_error = error if isinstance(error, ShardfieldError) else _make_untraceable(target, error)
    reason = consensus.report_failure(is_data_dependent_error(error), is_user_error, str(trace_error))
    if consensus.peer_failed or (is_user_error and not consensus.all_user_errors):
        trace_error = Untraceable(f"compile: {_qualname(target)} cannot be traced on all ranks. {reason}")
    if isinstance(trace_error, Untraceable):
        trace_error.needs_values = consensus.needs_values
    return trace_error


def _make_untraceable(target: Callable, error: Exception) -> Untraceable:
    location = _failing_op(error)
    reason = str(error).strip().splitlines() or [""]
    return Untraceable(
        f"compile: {_qualname(target)} cannot be traced{f', at {location}' if location else ''}: "
        f"{type(error).__name__}: {reason[0]}"
    )


def _qualname(target: Callable) -> str:
    return getattr(target, "__qualname__", type(target).__name__)


def _failing_op(error: BaseException) -> str:
    """Return the torch function in which a trace failed, with the enclosing module and the line of user code."""
    func, module, line, entry = None, "", "", error.__traceback__
    while entry is not None:
        code, scope = entry.tb_frame.f_code, entry.tb_frame.f_locals
        if func is None:
            intercepted = code.co_name == "__torch_function__" and isinstance(scope.get("self"), TraceMode)
            if intercepted or (code.co_name == "torch_function" and "func" in scope and "types" in scope):
                func = scope.get("func")
            elif not code.co_filename.startswith(LIBRARY_PATHS):
                line = f"line {entry.tb_lineno} of {code.co_name}"
        if code.co_name == "_call_impl" and isinstance(scope.get("self"), nn.Module):
            module = type(scope["self"]).__name__
        entry = entry.tb_next
    op = function_name(func) if func is not None else ""
    within = "" if module in ("", "Body") else f" in {module}"  # "Body" is the module that AOTAutograd traces
    location = f"{op}{within}" if op else within.removeprefix(" in ")
    return f"{location} ({line})" if location and line else location or line
