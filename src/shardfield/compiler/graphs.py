"""CUDA graphs: capture the kernels and messages of a call once, and launch them together in later calls.

A graph reads and writes fixed memory. Parameters and buffers are used where they are, arguments are copied into static
tensors before a launch, and results are copied out after it, so that no caller sees memory that a later launch
overwrites. Everything else that a call decides (layouts, plans, peers of messages) is decided when it is captured.

What a graph cannot contain is refused when it is captured, on all ranks: tensors on another device, messages staged
through host memory, values read on the host, random numbers of the host's generator.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from .. import runtime
from .._compat import DispatchMode, function_apply
from .._compat.storage import storage_id
from ..comm.consensus import any_rank
from ..comm.transport import HostStagedTransport, transport_for
from ..debug.explain import Unreported
from ..errors import Untraceable
from ..tensor import ShardTensor, wrap
from .pytree import flatten, unflatten
from .static_tensors import Packed, copies, copy_into

T = TypeVar("T")
WARMUPS = 3  # calls before a capture: libraries, communicators and caches initialize in them
PROBES = 3  # calls after the warm-up that may read a value on the host, to fill a cache, before a graph is refused
RECAPTURES = 4  # captures of one program because its parameters are elsewhere in memory


def check_device(device: torch.device) -> None:
    """Raise unless calls on this device can be captured."""
    if device.type != "cuda":
        raise Untraceable(f"a CUDA graph needs tensors on a CUDA device, and these are on {device}")


def check_messages(groups: Sequence[ProcessGroup], device: torch.device) -> None:
    """Raise if the messages of a group are staged through host memory. All ranks of the groups call it."""
    for group in groups:
        if isinstance(transport_for(torch.empty(1, device=device), group), HostStagedTransport):
            raise Untraceable(
                f"the messages of group {group.group_name} are staged through host memory, which a CUDA graph cannot "
                "contain: start the process group with NCCL"
            )


def record(call: Callable[[], T], pool: Any, graph: torch.cuda.CUDAGraph | None = None) -> tuple[T, Callable[[], None]]:
    """Capture a call; return its results, in static memory of the pool, and the function that launches the graph."""
    # Any CUDA call in another thread, of a loader that pins memory for example, is allowed meanwhile.
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    graph = graph or torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=_capture_stream(), capture_error_mode="thread_local"):
            result = call()
    except Exception:
        generator.graphsafe_set_state(before)  # a failed capture leaves the generator in capture mode
        raise
    return result, graph.replay


def memory_pool() -> Any:
    """Return a new memory pool for graphs."""
    return torch.cuda.graph_pool_handle()


def _capture_stream() -> torch.cuda.Stream:
    """Return the stream of warm-up calls and captures, one per device: gradients are accumulated on the same stream."""
    streams = runtime.active.capture_streams
    device = torch.cuda.current_device()
    if device not in streams:
        streams[device] = torch.cuda.Stream()
    return streams[device]


def run_on_capture_stream(call: Callable[[], T]) -> T:
    """Run a call on the stream of the captures."""
    stream, current = _capture_stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = call()
    current.wait_stream(stream)
    return result


def find_host_reads(call: Callable[[], T]) -> tuple[T, str | None]:
    """Run a call; return its result and why a graph cannot contain it, if it reads values or draws on the host."""
    before = torch.get_rng_state()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            return (
                result,
                f"{warning.filename}, line {warning.lineno}, waits for the device or reads a value on the host",
            )
    if not torch.equal(before, torch.get_rng_state()):
        return result, "it draws random numbers from the generator of the host"
    return result, None


class HoldInputs(DispatchMode):
    """Keep alive the memory of tensors that calls read but did not create, for example those that a module caches."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, Any] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in self._tensors((args, kwargs)):
            if storage_id(tensor) not in self._made:
                self.held.setdefault(storage_id(tensor), tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        self._made.update(storage_id(tensor) for tensor in self._tensors(result) if storage_id(tensor) not in self.held)
        return result

    @staticmethod
    def _tensors(tree: Any) -> list[Tensor]:
        leaves = [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]
        return [getattr(leaf, "_local_tensor", leaf) for leaf in leaves]  # of a DTensor


def agree(reason: str | None, groups: Sequence[ProcessGroup]) -> str | None:
    """Return a rank's own reason, or that another rank has one; None if no rank has a reason."""
    refused = any_rank([reason is not None], groups)[0] if groups else reason is not None
    return (reason or "it cannot be captured on another rank") if refused else None


def _is_observed() -> bool:
    """Return whether calls are reported one by one; a graph has none to report."""
    rt = runtime.active
    return rt.observer not in (None, Unreported) or rt.meter is not None or rt.tracer is not None


class StepGraph:
    """Run a step, a function of trees of tensors, as CUDA graphs: one for each combination of layouts and shapes.

    The function may do anything that a graph can contain: forward, backward, the optimizer. All that it reads other
    than its arguments must keep its place in memory, and it returns plain tensors. If a graph cannot contain it,
    `refused` is the reason, on all ranks, and the function is called without a graph.
    """

    def __init__(self, function: Callable[..., Any], groups: Sequence[ProcessGroup] = ()):
        self._function, self._groups = function, groups
        self._calls: dict[Any, int] = {}
        self._clean: set[Any] = set()  # keys of calls that a graph can contain
        self._graphs: dict[Any, tuple[list[Tensor], list[Tensor], Any, Callable[[], None]]] = {}
        self._held: list[Any] = []  # memory that graphs read
        self.refused: str | None = None

    def __call__(self, *args: Any) -> Any:
        if self.refused is not None or _is_observed():
            return self._function(*args)
        leaves, spec = flatten(args)
        key = (spec, *map(_leaf_key, leaves))
        if key not in self._graphs:
            calls = self._calls[key] = self._calls.get(key, 0) + 1
            if calls <= WARMUPS or key not in self._clean:
                return self._warm_up(key, args, calls)
            if not self._capture(key, leaves, spec):
                return self._function(*args)
        inputs, results, result_spec, replay = self._graphs[key]
        copy_into(inputs, _locals(leaves))
        replay()
        return unflatten(copies(results), result_spec)

    def _warm_up(self, key: Any, args: Any, calls: int) -> Any:
        if calls < WARMUPS:
            return run_on_capture_stream(lambda: self._function(*args))
        result, reason = run_on_capture_stream(lambda: find_host_reads(lambda: self._function(*args)))
        reason = agree(reason, self._groups)
        if reason is None:
            self._clean.add(key)
        elif calls >= WARMUPS + PROBES:
            self.refused = reason
        return result

    def _capture(self, key: Any, leaves: Sequence[Any], spec: Any) -> bool:
        static = [_static_copy(leaf) for leaf in leaves]
        hold, reason = HoldInputs(), None

        def call() -> Any:
            with hold:
                return self._function(*unflatten(static, spec))

        try:
            result, replay = record(call, memory_pool())
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        self.refused = agree(reason, self._groups)
        if self.refused is None:
            results, result_spec = flatten(result)
            self._graphs[key] = (_locals(static), results, result_spec, replay)
            self._held.append(hold.held)
        return self.refused is None


def _leaf_key(leaf: Any) -> tuple:
    if isinstance(leaf, ShardTensor):
        return leaf._layout, leaf._dtype, leaf._device, leaf.requires_grad, leaf._local_tensor.stride()
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, leaf.stride()
    return type(leaf), leaf


def _locals(leaves: Sequence[Any]) -> list[Tensor]:
    return [x._local_tensor if isinstance(x, ShardTensor) else x for x in leaves if isinstance(x, Tensor)]


def _static_copy(leaf: Any) -> Any:
    if isinstance(leaf, ShardTensor):
        return wrap(leaf._local_tensor.detach().clone(), leaf._layout)
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


class Lease:
    """Alive until the backward of a launch has run or can no longer run; no other launch happens before that."""


class ProgramGraph:
    """Run a compiled program of local tensors as two CUDA graphs, forward and backward, with gradients.

    `state` is the number of its first inputs, the tensors of modules, which are used where they are; `written` are the
    inputs that it writes. A call runs without a graph while the backward of an earlier call can still run.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        state: int,
        written: Sequence[int],
        groups: Sequence[ProcessGroup] = (),
        strict: bool = True,
    ):
        self._run, self._state, self._groups, self._strict = run, state, groups, strict
        self._written = [i for i in written if i >= state]
        self._calls = self.captures = self.launches = 0
        self._places: list[int] = []  # addresses of the tensors of modules at the capture
        self._lease: Callable[[], Lease | None] = lambda: None
        self.refused: str | None = None

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        if self.refused is not None or _is_observed() or self._lease() is not None:
            return self._run(*inputs)
        self._calls += 1
        if self._calls <= WARMUPS:
            return run_on_capture_stream(lambda: self._run(*inputs))
        places = [t.data_ptr() for t in inputs[: self._state]]
        if places != self._places:
            if not self._capture(inputs):
                return self._run(*inputs)
            self._places = places
        self.launches += 1
        results = _Launch.apply(self, *inputs) if self._tangents else self._launch(inputs)
        if self._written:
            copy_into([inputs[i] for i in self._written], [self._inputs[i] for i in self._written])
        return results

    def _capture(self, inputs: Sequence[Tensor]) -> bool:
        if self.captures > RECAPTURES:
            return self._refuse(f"the parameters were elsewhere in memory in {self.captures} calls, as FSDP's are")
        self.captures += 1
        self._inputs = [
            (t.detach() if i < self._state else t.detach().clone()).requires_grad_(t.requires_grad)
            for i, t in enumerate(inputs)
        ]
        reason, cause = None, None
        try:
            pool = memory_pool()
            self._results, self._forward = record(self._run_static, pool)
            differentiable = [t for t in self._results if t.requires_grad]
            self._tangents = [torch.zeros_like(t) for t in differentiable]
            if differentiable:
                self._wanted = [i for i, t in enumerate(self._inputs) if t.requires_grad]
                self._grads, self._backward = record(self._differentiate_static, pool)
        except Exception as error:
            reason, cause = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", error
        refused = agree(reason, self._groups)
        return refused is None or self._refuse(f"the program cannot be captured: {refused}", cause)

    def _refuse(self, reason: str, cause: Exception | None = None) -> bool:
        if self._strict:
            raise Untraceable(f"compile: graphs=True: {reason}") from cause
        self.refused = reason
        warnings.warn(f"a program runs without CUDA graphs: {reason}", stacklevel=6)
        return False

    def _run_static(self) -> list[Tensor]:
        self._live = list(self._run(*self._inputs))
        return self._live

    def _differentiate_static(self) -> list[Tensor]:
        grads = torch.autograd.grad(
            [t for t in self._live if t.requires_grad],
            [self._inputs[i] for i in self._wanted],
            self._tangents,
            allow_unused=True,
        )
        self._packed = Packed(grads)
        return self._packed.pack(grads)

    def _launch(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        copy_into(self._inputs[self._state :], inputs[self._state :])
        self._forward()
        return copies(self._results)

    def _launch_backward(self, tangents: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of all inputs."""
        copy_into(self._tangents, tangents)
        self._backward()
        found: list[Tensor | None] = [None] * len(self._inputs)
        for i, grad in zip(self._wanted, self._packed.copies(self._grads), strict=True):
            found[i] = grad
        return found


class _Launch(torch.autograd.Function):
    """Launch the forward graph. Adjoint: launch the backward graph."""

    apply = function_apply

    @staticmethod
    def forward(ctx: Any, graph: ProgramGraph, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = graph._launch(inputs)
        ctx.graph, ctx.lease, ctx.launched = graph, Lease(), False
        graph._lease = weakref.ref(ctx.lease)
        ctx.needed = [t.requires_grad for t in graph._results]
        ctx.mark_non_differentiable(*(r for r, needed in zip(results, ctx.needed, strict=True) if not needed))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.launched:  # the first launch has reused the memory of saved tensors
            raise RuntimeError("compile: graphs=True: backward() of a launch can run once: compile without graphs")
        needed = [t for t, needed in zip(tangents, ctx.needed, strict=True) if needed]
        grads = ctx.graph._launch_backward(needed)
        ctx.launched, ctx.lease = True, None
        return None, *grads
