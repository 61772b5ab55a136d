"""One program: a callable traced for one set of layouts, shapes and flags, as local graphs with messages in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import trace_state
from .._compat import autocast_state, storage_id
from .._compat.aot import aot_compile, is_data_dependent_error, is_written
from ..dispatch.torch_aliases import function_name
from ..dispatch.write_tracking import WRITE_OBSERVERS
from ..errors import ShardfieldError, Untraceable
from ..layout import Layout
from ..ops.indexing import result_placement
from ..ops.spectral import lazy_forward
from ..shard_utils.halo_blocks import halo_block_forward, install_halo_blocks
from ..tensor import ShardTensor, wrap
from . import rendezvous
from .attribution import TracedCalls
from .backends import Backend
from .collective_ops import CollectiveTracer
from .lowering import MAX_REDUNDANCY, Passes
from .module_state import ModuleState, is_index, to_local, version
from .pytree import contains_tensors, flatten, unflatten
from .trace_consensus import TraceConsensus
from .trace_facts import TraceMode

LIBRARY_PATHS = (*torch.__path__, str(Path(__file__).parents[1]))  # whose lines say nothing to a user
RULE_CACHES: tuple[dict, ...] = (
    result_placement._SHARDING_BY_SIZE,
    lazy_forward.FIELD_LAYOUTS,
)  # what rules remember of calls, the same on all ranks


class Static:
    """An argument, or a result, that is no tensor: part of the program."""

    def __init__(self, value: Any):
        self.value = value

    def guards_pass(self, value: Any) -> bool:
        """Whether an argument is the one that is part of the program; the key under which it is found says so."""
        return True


class ConstantTensor(Static):
    """An argument that is a tensor and part of the program: the same one, and not written since."""

    def __init__(self, value: Tensor):
        super().__init__(value)
        self._version = version(value)

    def guards_pass(self, value: Any) -> bool:
        return value is self.value and version(value) == self._version


def classify(value: Any, constant_indices: bool = False) -> Any:
    """What an argument or result is to a program: a layout, a plain tensor (None), or something static."""
    if not isinstance(value, Tensor):
        return Static(value)
    if constant_indices and is_index(value):
        return ConstantTensor(value)
    return value._layout if isinstance(value, ShardTensor) else None


class Program:
    """A callable as a function of local tensors: first those of its modules, then those among its arguments.

    `constant_indices`: tensors of integers are part of the program, which is then good for these tensors alone.
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
        self._results: list[Any] = []
        self._result_spec: Any = None
        self._kinds = [classify(x, constant_indices) for x in leaves]
        self._state_kinds = [classify(t) for t in state.tensors()]
        self._marks = [getattr(t, "_averaged_later", None) for t in state.tensors()]
        # one whose elements share memory could not be written with others
        locals_ = [t.contiguous() if 0 in t.stride() else t for t in self._inputs(leaves)]
        self._strides = [t.stride() for t in locals_]
        self._mutated_inputs: list[int] = []
        layouts = [k for k in [*self._kinds, *self._state_kinds] if isinstance(k, Layout)]
        layouts += [k.value._layout for k in self._kinds if isinstance(getattr(k, "value", None), ShardTensor)]
        given = [k.value for k in self._kinds if isinstance(k, Static) and isinstance(k.value, DeviceMesh)]
        self._meshes = list(dict.fromkeys([*(x.mesh for x in layouts), *given]))
        self._constant_args = [k.value for k in self._kinds if isinstance(k, ConstantTensor)]
        self._constants = [*self._constant_args, *(tensor for _, _, tensor, _ in state.constants)]
        self._calls = TracedCalls(target)
        self._writer = CollectiveTracer(self._calls)
        self._shares_halos = "halos" in passes.enabled
        self.signature, self._last_signature = self._describe_signature(leaves, state), last_signature
        self._run = self._trace_graphs(target, locals_, backend, passes)
        self.state.guards.finalize()
        self._aliasing = _shared_memory(locals_) if self._mutated_inputs else []

    def _describe_signature(self, leaves: Sequence[Any], state: ModuleState) -> list[str]:
        """What the program is for, as far as that must be the same on all ranks."""
        modes = [
            name
            for name, on in (("grad", torch.is_grad_enabled()), ("inference", torch.is_inference_mode_enabled()))
            if on
        ]
        found = [f"mode {' '.join([*modes, *map(str, autocast_state())]) or 'no grad'}"]
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, ShardTensor):
                needs = "requires" if leaf.requires_grad else "does not require"
                found.append(
                    f"argument {i} is {leaf.dtype} {tuple(leaf.shape)} as {leaf.placements} and {needs} gradients"
                )
        needed = "".join("01"[t.requires_grad] for t in state.tensors())
        return [*found, f"{needed.count('1')} of {len(needed)} tensors of modules require gradients ({needed})"]

    def _inputs(self, leaves: Sequence[Any]) -> list[Tensor]:
        given = [to_local(t) for t in self.state.tensors()]
        return given + [to_local(x) for x, k in zip(leaves, self._kinds, strict=True) if not isinstance(k, Static)]

    def guards_pass(self, leaves: Sequence[Any]) -> bool:
        """Whether the program is for these arguments, of all with the same key, and for its modules as they are."""
        if self._constant_args and not all(
            k.guards_pass(x) for x, k in zip(leaves, self._kinds, strict=True) if isinstance(k, ConstantTensor)
        ):
            return False
        return self.state.guards_pass() and (
            not self._mutated_inputs or _shared_memory(self._inputs(leaves)) == self._aliasing
        )

    # ------------------------------------------------------------------ tracing

    def _trace_graphs(self, target: Callable, locals_: list[Tensor], backend: Backend, passes: Passes) -> Callable:
        def done() -> None:
            trace_state.tracer = None

        def body(*flat: Tensor) -> tuple[Tensor, ...]:
            return tuple(self._body(target, flat))

        together = TraceConsensus(self._meshes)
        self._calls.groups = together.groups
        different = rendezvous.sync_trace(_qualname(target), self.signature, self._last_signature, together.groups)
        partition, compilers = passes.make_compilers(backend, self._writer, self._calls, together, done)
        before, remembered = set(WRITE_OBSERVERS), [dict(table) for table in RULE_CACHES]
        trace_state.tracer = self._writer
        try:
            if different:
                raise Untraceable(different)
            with together.checking_collectives(), self._calls.recording(), self.state.guards.recording():
                made = aot_compile(body, locals_, partition, compilers, backend.decompositions(), backend.mutates)
                together.check_programs()
            return made
        except Exception as error:
            done()
            with self._calls.recording():
                found = _to_trace_error(target, error, together)
            for table, entries in zip(RULE_CACHES, remembered, strict=True):  # ranks may have come to different places
                table.clear()
                table.update(entries)
            if found is error:
                raise
            raise found from error
        finally:
            done()
            for waiting in set(WRITE_OBSERVERS) - before:  # what waits in the trace waits for nothing outside it
                WRITE_OBSERVERS.discard(waiting)

    def _body(self, target: Callable, flat: Sequence[Tensor]) -> list[Tensor]:
        self._writer.reset()
        n = len(self._state_kinds)
        mine = [x if layout is None else wrap(x, layout) for x, layout in zip(flat[:n], self._state_kinds, strict=True)]
        for tensor, mark in zip(mine, self._marks, strict=True):
            if mark is not None:
                tensor._averaged_later = mark
        rest = iter(flat[n:])
        leaves = [
            k.value if isinstance(k, Static) else next(rest) if k is None else wrap(next(rest), k) for k in self._kinds
        ]
        args, kwargs = given = unflatten(leaves, self._spec)
        with self.state.with_tensors(mine), TraceMode(self._constants):
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
        self._check_arguments(leaves, given, flat[n:])
        self._mutated_inputs = [i for i, t in enumerate(flat) if is_written(t)]
        results, self._result_spec = flatten(out)
        for result in results:
            if not isinstance(result, Tensor) and contains_tensors(result):
                raise Untraceable(
                    f"compile: {_qualname(target)} returns a {type(result).__name__} that holds tensors: return them "
                    "in a tuple, a dict or a dataclass"
                )
        results = [r.clone() if isinstance(r, Tensor) and _needs_copy(to_local(r), flat) else r for r in results]
        self._results = [classify(r) for r in results]
        found = [to_local(r) for r in results if isinstance(r, Tensor)]
        self._writer.forward = self._writer.count
        return found

    def _check_arguments(self, leaves: list[Any], given: Any, flat: Sequence[Tensor]) -> None:
        """What is written into an argument is written in the program; that an argument is changed is not."""
        now, spec = flatten(given)
        if spec != self._spec or any(a is not b for a, b in zip(now, leaves, strict=True)):
            raise Untraceable("compile: a container among the arguments is changed: return what it should hold instead")
        rest = iter(flat)
        for leaf, kind in zip(leaves, self._kinds, strict=True):
            if isinstance(kind, Static):
                continue
            mine = next(rest)
            if isinstance(kind, Layout) and leaf._layout == kind and leaf._local_tensor is not mine:
                raise Untraceable("compile: an argument is given other data: write into it in place, or return it")
            if isinstance(kind, Layout) and leaf._layout != kind:
                raise Untraceable(
                    f"compile: a write into an argument gives it another layout, {leaf._layout} in place of {kind}: do "
                    "that before the call, or return the result"
                )

    # ------------------------------------------------------------------ running

    def run(self, leaves: Sequence[Any]) -> Any:
        """The callable's result for arguments like those it was traced with."""
        given = self._inputs(leaves)
        moved = []
        for i, (tensor, stride) in enumerate(zip(given, self._strides, strict=True)):
            if tensor.stride() != stride:
                given[i] = tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)
                if i in self._mutated_inputs:
                    moved.append((tensor, given[i]))
        results = iter(self._run(*given))
        for tensor, stand_in in moved:
            tensor.copy_(stand_in)
        found = [
            k.value if isinstance(k, Static) else next(results) if k is None else wrap(next(results), k)
            for k in self._results
        ]
        return unflatten(found, self._result_spec)


def _shared_memory(inputs: Sequence[Tensor]) -> list[tuple]:
    """Which inputs share memory, and where they lie in it: a program that writes into one of them depends on that."""
    found: dict[int, list[int]] = {}
    for i, tensor in enumerate(inputs):
        found.setdefault(storage_id(tensor), []).append(i)
    shared = [i for members in found.values() if len(members) > 1 for i in members]
    return [
        (i, storage_id(inputs[i]) == storage_id(inputs[shared[0]]), inputs[i].storage_offset(), inputs[i].stride())
        for i in shared
    ]


def _needs_copy(result: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Whether a result must be made a tensor of its own: it is part of the program, or its elements share memory, as
    windows do, and it is no view of an input. AOTAutograd takes gradients to lie as results do, and loses some there.
    """
    if trace_state.is_concrete(result):
        return True
    reach = 0  # of the elements so far, in memory
    for stride, size in sorted(zip(result.stride(), result.shape, strict=True)):
        if stride and size > 1:
            if stride <= reach:
                return not any(trace_state.same_memory(result, x) for x in inputs)
            reach += stride * (size - 1)
    return False


def _to_trace_error(target: Callable, error: Exception, together: TraceConsensus) -> Exception:
    """What a failed trace is raised as; all ranks ask."""
    own = isinstance(error, ShardfieldError) and not isinstance(error, Untraceable)  # an error of the step itself
    found = error if isinstance(error, ShardfieldError) else _make_untraceable(target, error)
    reason = together.report_failure(is_data_dependent_error(error), own, str(found))
    if together.peer_failed or (own and not together.all_user_errors):
        found = Untraceable(f"compile: {_qualname(target)} cannot be traced on all ranks. {reason}")
    if isinstance(found, Untraceable):
        found.values = together.values
    return found


def _make_untraceable(target: Callable, error: Exception) -> Untraceable:
    where = _failing_op(error)
    reason = str(error).strip().splitlines() or [""]
    return Untraceable(
        f"compile: {_qualname(target)} cannot be traced{f', at {where}' if where else ''}: "
        f"{type(error).__name__}: {reason[0]}"
    )


def _qualname(target: Callable) -> str:
    return getattr(target, "__qualname__", type(target).__name__)


def _failing_op(error: BaseException) -> str:
    """The torch function that was being called when a trace failed, the module it was in, and the user's line."""
    func, module, line, step = None, "", "", error.__traceback__
    while step is not None:
        code, scope = step.tb_frame.f_code, step.tb_frame.f_locals
        if func is None:
            watched = code.co_name == "__torch_function__" and isinstance(scope.get("self"), TraceMode)
            if watched or (code.co_name == "torch_function" and "func" in scope and "types" in scope):
                func = scope.get("func")
            elif not code.co_filename.startswith(LIBRARY_PATHS):
                line = f"line {step.tb_lineno} of {code.co_name}"
        if code.co_name == "_call_impl" and isinstance(scope.get("self"), nn.Module):
            module = type(scope["self"]).__name__
        step = step.tb_next
    said = function_name(func) if func is not None else ""
    within = "" if module in ("", "Body") else f" in {module}"  # what AOTAutograd is given is no module of the user's
    found = f"{said}{within}" if said else within.removeprefix(" in ")
    return f"{found} ({line})" if found and line else found or line
