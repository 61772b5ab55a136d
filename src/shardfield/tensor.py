"""ShardTensor: a torch.Tensor that is sharded over the ranks of a device mesh.

A ShardTensor has a layout and either a local tensor or a `Deferred` value, which computes the local tensor when it is
first read. The wrapper takes no part in autograd: the local tensor carries the graph and all gradient state. Calls on
ShardTensors are dispatched to the handlers of `runtime.Registry`, which `dispatch/registry.py` fills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from . import runtime
from ._compat import dynamo_disable, make_wrapper
from .comm import autograd_collectives
from .dispatch.plan import process_groups
from .dispatch.promotion import TensorPromotionMode, check_promotion
from .dispatch.write_tracking import INCOMPLETE_GRAD, ViewConsensus, WriteObserver, expose_local, write_is_lost
from .errors import ShardingError
from .layout import Layout
from .pickling import layout_values, rebuild_layout
from .redistribute import redistribute, unmerge_dims
from .spec import ShardTensorSpec, infer_layout, layout_from_shapes, target_layout


@dynamo_disable
def torch_function(cls, func, types, args=(), kwargs=None):
    """Dispatch a torch call on ShardTensors to the registered handler of the function: `__torch_function__`."""
    rt = runtime.active
    if rt.promotion is not None:
        check_promotion(rt.promotion, func, args, kwargs)
        with runtime.observing(promotion=None):  # calls that the handler makes are its own
            return torch_function(cls, func, types, args, kwargs)
    found: Any = rt.handlers.get(func)
    if found is None:
        found = rt.resolved[func]
        if found is None:
            found = rt.resolved[func] = rt.registry.resolve(func)
    if rt.observer is not None:
        return rt.observer.run_call(func, found, types, args, kwargs or {})
    if kwargs is None:
        kwargs = {}
    if found is rt.registry.elementwise and len(args) == 1 and not kwargs:
        x = args[0]
        if x.__class__ is cls and not x._layout.partial:
            return wrap(func(x._local_tensor), x._layout)  # same result as the handler, with one Python call less
    return found(func, types, args, kwargs)


# ---------------------------------------------------------------------- deferred values


class Deferred(WriteObserver):
    """A value that is computed when its local tensor is first read: a lazy spectrum, a lazily padded field.

    A deferred value holds its source. `before_write` and `before_export` (see `WriteObserver`) let it take a snapshot
    before the source is written; both must send nothing, since ranks may differ in which deferred values are alive.
    """

    layout: Layout  # of the value
    volatile = False  # computed at every read, not once
    version: Any = 0

    @property
    def requires_grad(self) -> bool:
        """Whether the value will require grad; must be the same on all ranks, without a message."""
        raise NotImplementedError

    def materialize(self) -> ShardTensor:
        """Compute the value in `layout`. Communicates: all ranks must call it."""
        raise NotImplementedError


class StartedSum(Deferred):
    """The sum over ranks of a single number, in flight: a loss. Every rank has started it, so one alone may read it.

    Backward does not wait for the sum: `local` has the graph before it has the value.
    """

    def __init__(self, partial_sum: Tensor, layout: Layout):
        groups = process_groups(layout, layout.partial_axes)
        self.layout = layout.with_partial(())
        self.local, self._pending = autograd_collectives.start_reduce(partial_sum, groups)

    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    def materialize(self) -> ShardTensor:
        """Wait for the sum. Sends nothing."""
        with torch.inference_mode(self.local.is_inference()):  # landing may write into `local`
            self._pending.wait()
        return wrap(self.local, self.layout)


# Attributes of a deferred tensor that are read without materializing it. Every other read of its local tensor
# materializes, which communicates: all ranks must then read it.
DEFERRED_ATTRIBUTES: Mapping[str, Callable[[Deferred], Any]] = MappingProxyType(
    {
        "requires_grad": lambda deferred: deferred.requires_grad,
        "is_leaf": lambda deferred: not deferred.requires_grad,
        "grad": lambda deferred: None,
        "retains_grad": lambda deferred: False,
        "_version": lambda deferred: deferred.version,
    }
)


class _MaterializeOnRead:
    """The descriptor `_local_tensor`: it materializes a deferred value when the local tensor is first read.

    It is not a data descriptor, so a local tensor in `__dict__` takes precedence and is read at no extra cost. A
    `__getattr__` would slow down every attribute of every ShardTensor.
    """

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        deferred = None if tensor is None else tensor._deferred
        if deferred is None:
            raise AttributeError(f"{owner.__name__!r} object has no attribute '_local_tensor'")
        local = deferred.materialize()._local_tensor
        if deferred.volatile:
            return local
        tensor._local_tensor = local
        del tensor.__dict__["_deferred"]
        return local


def _local_attribute(name: str, doc: str) -> property:
    """Build the property that reads `name` from the local tensor, or from the deferred value if that has it."""
    read, answer = attrgetter(f"_local_tensor.{name}"), DEFERRED_ATTRIBUTES.get(name)
    if answer is None:
        return property(read, doc=f"{doc} Communicates if the tensor is deferred.")

    def get(self: ShardTensor) -> Any:
        deferred = self._deferred
        return read(self) if deferred is None else answer(deferred)

    return property(get, doc=doc)


# ---------------------------------------------------------------------- the tensor


class ShardTensor(torch.Tensor):
    """A drop-in tensor that is sharded, evenly or not, over the ranks of a `DeviceMesh`.

    Make one with `scatter_tensor` (one rank has the data) or `ShardTensor.from_local` (each rank has its shard), and
    use it as a tensor. Calls return the results and gradients of the same calls on one device, or raise a
    `ShardingError` on every rank.

    Shape, dtype, device, layout, `requires_grad` and `repr` never communicate. Reading values does: `item`, `tolist`,
    `numpy`, `bool`, `int`, `float`, `full_tensor`. A lazy spectrum (`torch.fft` of a sharded dim) or a lazily padded
    field (`F.pad` of a sharded field) communicates when its local tensor is first read, by `to_local` say.
    """

    _local_tensor: Tensor = _MaterializeOnRead()  # type: ignore[assignment]
    _deferred: Deferred | None = None  # in the place of a local tensor
    _layout: Layout
    _dtype: torch.dtype  # dtype and device of the local tensor; reading them from it takes longer
    _device: torch.device
    # torch would have returned a view here and this is a copy: a write would be lost
    _copied_view: bool | ViewConsensus = False
    _narrowed = False  # a slice along a sharded dim
    _grad_incomplete = False  # its consumers were fused with its source, so its `.grad` is incomplete
    # version of the local tensor, and the reduced value of a Partial, computed at that version
    _reduced_cache: tuple[int, ShardTensor] | None = None

    @staticmethod
    def __new__(cls, local_tensor: Tensor, spec: Layout | ShardTensorSpec, *, requires_grad: bool = False):
        layout = spec.layout if isinstance(spec, ShardTensorSpec) else spec
        if local_tensor.shape != layout.local_shape:
            raise ShardingError(
                f"a local tensor of shape {tuple(local_tensor.shape)} is not this rank's shard of {layout}, which has "
                f"shape {tuple(layout.local_shape)}"
            )
        return wrap(expose_local(local_tensor.requires_grad_() if requires_grad else local_tensor), layout)

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    __torch_function__ = classmethod(torch_function)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return runtime.active.registry.torch_dispatch(cls, func, types, args, kwargs or {})

    # ------------------------------------------------------------------ metadata, read without dispatch

    shape = property(attrgetter("_layout.shape"), doc="Global shape.")
    ndim = property(attrgetter("_layout.ndim"))
    dtype = property(attrgetter("_dtype"))
    device = property(attrgetter("_device"), doc="Device of the local tensor.")
    device_mesh = property(attrgetter("_layout.mesh"))
    placements = property(attrgetter("_layout.placements"), doc="One placement per mesh axis.")

    @property
    def _spec(self) -> ShardTensorSpec:
        return ShardTensorSpec(self._layout, self)

    def size(self, dim: int | None = None):
        return self._layout.shape if dim is None else self._layout.shape[dim]

    def dim(self) -> int:
        return self._layout.ndim

    ndimension = dim

    def numel(self) -> int:
        return self._layout.numel

    nelement = numel

    def __len__(self) -> int:
        if not self._layout.ndim:
            raise TypeError("len() of a 0-d tensor")
        return self._layout.shape[0]

    def stride(self, dim: int | None = None):
        """Return strides for the global tensor: contiguous, with its dims in the memory order of the local tensor's.

        Communicates if the tensor is deferred.
        """
        order = sorted(range(self.ndim), key=lambda d: (-self._local_tensor.stride(d), d))
        strides, step = [0] * self.ndim, 1
        for d in reversed(order):
            strides[d], step = step, step * max(self.shape[d], 1)
        return tuple(strides) if dim is None else strides[dim]

    def _metadata_local(self) -> Tensor:
        """Return a tensor with the metadata of the local one; a deferred value is not materialized for it."""
        if self._deferred is not None:
            return torch.empty((1,) * self.ndim, dtype=self._dtype, device=self._device)
        return self._local_tensor

    # ------------------------------------------------------------------ autograd, on the local tensor

    is_leaf = _local_attribute("is_leaf", "Whether the local tensor is a leaf.")
    retains_grad = _local_attribute("retains_grad", "Whether `retain_grad` was called.")
    output_nr = _local_attribute("output_nr", "Index among the outputs of `grad_fn`.")
    _version = _local_attribute("_version", "Number of writes into the local tensor.")

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are computed for this tensor."""
        deferred = self._deferred
        return self._local_tensor.requires_grad if deferred is None else DEFERRED_ATTRIBUTES["requires_grad"](deferred)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._local_tensor.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> ShardTensor:
        """Set `requires_grad` of the local tensor. Communicates if the tensor is deferred."""
        self._local_tensor.requires_grad_(requires_grad)
        return self

    @property
    def grad_fn(self) -> Any:
        """The node that computed the local tensor. Communicates if the tensor is deferred and requires grad."""
        return self._local_tensor.grad_fn if self.requires_grad else None

    @property
    def grad(self) -> ShardTensor | None:
        """The gradient, sharded as this tensor; Replicate where this tensor is Partial."""
        if self._deferred is not None:
            return DEFERRED_ATTRIBUTES["grad"](self._deferred)
        grad = self._local_tensor.grad
        return None if grad is None else wrap(grad, self._grad_layout)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            local, layout = as_operand(value, self._layout.mesh)
            value = redistribute(local, layout, self._grad_layout)
        self._local_tensor.grad = value

    @grad.deleter
    def grad(self) -> None:
        self._local_tensor.grad = None

    @property
    def _grad_layout(self) -> Layout:
        """Layout of the gradient: that of the tensor, with Partial axes Replicate."""
        return self._layout.with_partial(()) if self._layout.partial else self._layout

    def retain_grad(self) -> None:
        """Keep the gradient of a non-leaf tensor. Communicates if the tensor is deferred."""
        self._local_for_grad().retain_grad()

    def register_hook(self, hook: Callable[[ShardTensor], Tensor | None]) -> Any:
        """Call `hook` with the gradient as a ShardTensor; it may return another one.

        Communicates if the tensor is deferred.
        """
        layout = self._grad_layout
        return self._local_for_grad().register_hook(_wrap_hook(hook, layout))

    def _local_for_backward(self) -> Tensor:
        """Return the local tensor for its graph alone: a sum in flight is not waited for."""
        deferred = self._deferred
        return deferred.local if isinstance(deferred, StartedSum) else self._local_tensor

    def _local_for_grad(self) -> Tensor:
        """Return the local tensor; raise if its gradient would be incomplete."""
        if self._grad_incomplete:
            raise ShardingError(INCOMPLETE_GRAD)
        return self._local_tensor

    def register_post_accumulate_grad_hook(self, hook: Callable[[ShardTensor], None]) -> Any:
        """Call `hook` with this tensor after its gradient was accumulated."""
        return self._local_tensor.register_post_accumulate_grad_hook(lambda _: hook(self))

    def backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None) -> None:
        """Compute gradients, as on a tensor; `gradient` may be a ShardTensor in any layout or a plain global tensor."""
        runtime.active.registry.run_backward([self], [gradient], retain_graph, create_graph, inputs)

    # ------------------------------------------------------------------ construction and redistribution

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sharding_shapes: str | Mapping[int, Sequence[Sequence[int]]] | Sequence[Sequence[Sequence[int]]] = "infer",
        global_shape: Sequence[int] | None = None,
        run_check: bool = False,
        **kwargs: Any,
    ) -> ShardTensor:
        """Return the ShardTensor whose shard on this rank is `local_tensor`. Differentiable.

        `sharding_shapes`: "infer" exchanges the local shapes between ranks (one small message), "chunk" assumes the
        shard sizes of torch.chunk, and a dict `{mesh axis: local shape on each coordinate}` or a list of these, axis by
        axis, states them; the last two send nothing. Only the sizes of the sharded dims are read, so a result that is
        sharded as `x` takes `x._spec.sharding_shapes()`, whatever its other sizes are. A single number that is
        Partial starts its sum over ranks.
        """
        if device_mesh is None:
            raise ShardingError("from_local: device_mesh is needed")
        placed = list(placements) if placements is not None else [Replicate()] * device_mesh.ndim
        if sharding_shapes == "infer":
            layout = infer_layout(local_tensor, device_mesh, placed, global_shape)
        else:
            layout = layout_from_shapes(local_tensor, device_mesh, placed, sharding_shapes, global_shape)
        made = wrap(expose_local(local_tensor), layout)
        if is_single_sum(layout) and not local_tensor.is_inference():
            made._reduced_cache = (local_tensor._version, wrap_sum(local_tensor, layout))
        return made

    @staticmethod
    def from_dtensor(dtensor: DTensor, **kwargs: Any) -> ShardTensor:
        """Return the ShardTensor with the shards and the mesh of a DTensor; gradients flow back into the DTensor.

        The gradient of a leaf is in both: the DTensor's `grad` and the ShardTensor's.
        """
        placements = dtensor.placements
        layout = Layout.of(dtensor.device_mesh, placements, dtensor.shape)
        grads = [Replicate() if isinstance(p, Partial) else p for p in placements]
        local = dtensor.to_local(grad_placements=grads)
        if dtensor.is_leaf and local.requires_grad and not local.is_leaf:
            local.retain_grad()
        return wrap(expose_local(local), layout)

    def to_dtensor(self) -> DTensor:
        """Return a DTensor. Communicates where the shard sizes are not those of torch.chunk, which DTensor needs."""
        value = self.redistribute(placements=self.placements, sharding_shapes="chunk")
        return DTensor.from_local(
            expose_local(value._local_tensor),
            self.device_mesh,
            self.placements,
            shape=self.shape,
            stride=self.stride(),
            run_check=False,
        )

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        sharding_shapes: str | Mapping[int, Sequence[Any]] | Sequence[Sequence[Any]] | None = None,
        async_op: bool = False,
    ) -> ShardTensor:
        """Return the same value in another layout. Differentiable.

        `sharding_shapes` sets the shard sizes: None keeps those of a dim that is sharded already and chunks the others,
        "chunk" and "balanced" apply to every sharded dim, `{mesh axis: shard sizes or local shapes}` (or a list, axis
        by axis) states them.
        """
        if device_mesh is not None and device_mesh != self._layout.mesh:
            raise ShardingError(
                f"redistribute: moving from {self._layout.mesh} to another mesh {device_mesh} is not supported"
            )
        if runtime.active.observer is not None:
            how = {"sharding_shapes": sharding_shapes}
            return _observed(ShardTensor.redistribute, ShardTensor._redistributed, self, placements, **how)
        return self._redistributed(placements, sharding_shapes)

    def _redistributed(self, placements: Any, sharding_shapes: Any) -> ShardTensor:
        target = target_layout(self._layout, placements, sharding_shapes)
        local = redistribute(self._local_tensor, self._layout, target)
        if target.bare is not self._layout.bare and local._is_view() and not local.requires_grad:
            local = local.clone()  # else a write into the result would reach this tensor
        return wrap(local, target)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's shard as a plain tensor in the same graph. Communicates if the tensor is deferred.

        Its gradient must be placed as the layout says: a shard for Shard, the full gradient for Replicate and Partial.
        State `Partial()` in `grad_placements` for mesh axes on which ranks make different contributions to it.
        """
        local = expose_local(self._local_tensor)
        if grad_placements is None:
            return local
        summed = [a for a, p in enumerate(grad_placements) if isinstance(p, Partial)]
        for axis, (placed, grad) in enumerate(zip(self.placements, grad_placements, strict=True)):
            if axis not in summed and grad != (Replicate() if isinstance(placed, Partial) else placed):
                raise ShardingError(f"to_local: a gradient placed {grad} for a value placed {placed} is not supported")
            if axis in summed and placed.is_shard():
                raise ShardingError(f"to_local: a Partial gradient for a value placed {placed} is not supported")
        return autograd_collectives.replicate_in([local], process_groups(self._layout, summed))[0]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the global value as a plain tensor on every rank. Communicates."""
        target = Layout.replicate(self._layout.mesh, self._layout.shape)
        if runtime.active.observer is not None and target is not self._layout:
            full = _observed(ShardTensor.full_tensor, ShardTensor._redistribute_to, self, target)
            return full.to_local(grad_placements=grad_placements)
        return self._redistribute_to(target).to_local(grad_placements=grad_placements)

    def offsets(self, mesh_dim: int | None = None) -> tuple[int, ...] | int:
        """Return the global index of this rank's first element; with `mesh_dim`, along the dim sharded by that axis."""
        offsets = self._layout.offsets()
        if mesh_dim is None:
            return offsets
        placed = self.placements[mesh_dim]
        return offsets[placed.dim] if placed.is_shard() else 0

    def _redistribute_to(self, target: Layout) -> ShardTensor:
        if target is self._layout:
            return self
        return wrap(redistribute(self._local_tensor, self._layout, target), target)

    def _reduced_value(self) -> ShardTensor:
        """Return this value without Partial axes. Communicates; the result is cached until the next write."""
        if not self._layout.partial:
            return self
        local = self._local_tensor
        if local.is_inference() or self._deferred is not None:  # the version does not tell if it has changed
            return self._redistribute_to(self._layout.with_partial(()))
        cached = self._reduced_cache
        # Without a graph, a cached value serves only where none is recorded.
        if cached is not None and cached[0] == local._version:
            if cached[1].requires_grad == local.requires_grad or not torch.is_grad_enabled():
                return cached[1]
        reduced = self._redistribute_to(self._layout.with_partial(()))
        self._reduced_cache = (local._version, reduced)
        return reduced

    def _read_value(self) -> Tensor:
        """Return the global value for reading numbers, without a graph. It must not be returned to the user."""
        with torch.no_grad():
            value = self._reduced_value() if self._layout.numel == 1 else self
            layout = value._layout
            if runtime.active.observer is not None and (layout.shard_axes or layout.partial):
                return _observed(ShardTensor.item if layout.numel == 1 else ShardTensor.tolist, to_full_tensor, value)
            return to_full_tensor(value).detach()

    def _settled(self) -> ShardTensor:
        """Return this tensor, or its present value if that is computed at every read."""
        deferred = self._deferred
        return wrap(self._local_tensor, self._layout) if deferred is not None and deferred.volatile else self

    def _unmerged_value(self) -> ShardTensor:
        """Return this value without Partial axes and without merged dims. Communicates."""
        value = self._reduced_value()
        return value if value._layout.is_simple else value._redistribute_to(unmerge_dims(value._layout))

    def _write(self, value: ShardTensor) -> ShardTensor:
        """Write a value of this shape, in any layout, into the local tensor."""
        self._check_writable()
        self._local_tensor.copy_(redistribute(value._local_tensor, value._layout, self._layout))
        return self

    def _check_writable(self) -> None:
        """Notify the write observers of a write into the local tensor; raise if the write would be lost."""
        observers = runtime.active.write_observers
        for observer in list(observers) if observers else ():
            observer.before_write(self._local_tensor)
        if self._copied_view and write_is_lost(self._copied_view):
            raise ShardingError(
                "writing into this tensor would be lost, or reach its source on some ranks only: on one device it is "
                f"a view of its source, here shards were moved or copied ({self._layout}). Write into the source by "
                "index, or clone() this tensor first"
            )

    # ------------------------------------------------------------------ handlers of users

    @classmethod
    def register_function_handler(
        cls, func: Any, handler: Callable | None = None, *, function_handler: Callable | None = None
    ) -> None:
        """Dispatch calls of `func` on ShardTensors to `handler(func, types, args, kwargs)`.

        One handler serves all spellings of a torch function: that of `torch.sin` also gets `x.sin()`. Its argument
        `func` is the one that was called. `function_handler` is another name of `handler`.
        """
        runtime.active.registry.register_spellings(func, _either("handler", handler, function_handler))

    @classmethod
    def register_named_function_handler(
        cls,
        func_name: str | None = None,
        handler: Callable | None = None,
        *,
        name: str | None = None,
        function_handler: Callable | None = None,
    ) -> None:
        """Dispatch by name: `"mylib.op.default"` of a custom op, or a function's qualified name.

        The handler of a custom op's overload also gets the calls `torch.ops.mylib.op(x)` that select this overload.
        `name` and `function_handler` are other names of the arguments.
        """
        found = _either("handler", handler, function_handler)
        runtime.active.registry.register_named(_either("func_name", func_name, name), found)

    @classmethod
    def register_dispatch_handler(
        cls, op: Any, handler: Callable | None = None, *, function_handler: Callable | None = None
    ) -> None:
        """Dispatch calls of the operator `op`, such as `torch.ops.aten.add.Tensor`, to `handler(*args, **kwargs)`.

        `function_handler` is another name of `handler`.
        """
        runtime.active.registry.register_dispatch(op, _either("handler", handler, function_handler))

    # ------------------------------------------------------------------ plain tensors in calls

    @classmethod
    def patches_enabled(cls) -> bool:
        """Return True: the rules are part of dispatch, and nothing has to be patched for them."""
        return True

    @classmethod
    def get_promotion_mode(cls) -> TensorPromotionMode:
        """Return what happens to plain tensors that meet ShardTensors in a call."""
        return runtime.active.promotion or TensorPromotionMode.SILENT

    @classmethod
    def set_promotion_mode(cls, mode: TensorPromotionMode | str) -> None:
        """Set what happens to plain tensors that meet ShardTensors in a call: a mode, or its name in lower case."""
        mode = TensorPromotionMode(mode)
        runtime.active.promotion = None if mode is TensorPromotionMode.SILENT else mode

    @classmethod
    @contextmanager
    def promotion_mode(cls, mode: TensorPromotionMode | str) -> Iterator[None]:
        """Set the promotion mode inside the body."""
        mode = TensorPromotionMode(mode)
        with runtime.observing(promotion=None if mode is TensorPromotionMode.SILENT else mode):
            yield

    # ------------------------------------------------------------------ torch.distributed.checkpoint

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """Return the chunks that this rank writes. Communicates if the tensor is deferred."""
        from . import dcp  # torch's checkpoints take long to import

        return dcp.write_items(fqn, self._local_tensor, self._layout)

    def __create_chunk_list__(self) -> list[Any]:
        """Return the chunks to load into this tensor."""
        from . import dcp

        self._check_writable()
        return dcp.chunk_list(self._layout)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the chunk at `index.offset`, a view of the local tensor."""
        from . import dcp

        return dcp.chunk_at(index.offset, self._local_tensor, self._layout)

    # ------------------------------------------------------------------ Python protocols

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Describe layout, dtype and the local tensor. Never communicates, so one rank alone may print it."""
        deferred = self._deferred
        local = self._local_tensor if deferred is None else f"deferred {type(deferred).__name__}"
        return f"ShardTensor({self._layout}, dtype={self._dtype}, local={local})"

    def __str__(self) -> str:
        """Return the value of a tensor of no dims, which communicates; `repr` of any other."""
        if self.numel() == 1 and self.ndim == 0:
            return f"ShardTensor({self.item()}, {self._layout})"
        return repr(self)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.ndim == 0 else object.__format__(str(self), spec)

    def item(self) -> Any:
        """Return the value of a tensor with one element, the same on every rank. Communicates unless Replicate."""
        return self._read_value().item()

    def tolist(self) -> Any:
        """Return the global value as nested lists. Communicates unless Replicate."""
        return self._read_value().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the global value as an array on every rank. Communicates unless Replicate."""
        return to_full_tensor(self).numpy(force=force)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        full = to_full_tensor(self).numpy()
        return full if dtype is None else full.astype(dtype, copy=False)

    def __bool__(self) -> bool:
        return bool(self._read_value())

    def __int__(self) -> int:
        return int(self._read_value())

    def __float__(self) -> float:
        return float(self._read_value())

    def __complex__(self) -> complex:
        return complex(self._read_value())

    def __index__(self) -> int:
        return self._read_value().__index__()

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    def __iter__(self):
        if not self.ndim:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    def __deepcopy__(self, memo: dict) -> ShardTensor:
        import copy

        return memo.setdefault(id(self), wrap(copy.deepcopy(self._local_tensor, memo), self._layout))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild, (self._local_tensor, *layout_values(self._layout))

    __hash__ = object.__hash__


def _either(name: str, value: Any, other: Any) -> Any:
    """Return an argument that has two names."""
    if (value is None) == (other is None):
        raise TypeError(f"pass {name}, once")
    return other if value is None else value


def rebuild(local: Tensor, *saved_layout: Any) -> ShardTensor:
    """Return a ShardTensor that was pickled or saved with torch.save; all ranks load together, each its own shard."""
    layout = rebuild_layout(*saved_layout)
    if local.shape != layout.local_shape or local.device.type != layout.mesh.device_type:
        raise ShardingError(
            f"the saved shard has shape {tuple(local.shape)} and is loaded to {local.device.type}: {layout} holds "
            f"{tuple(layout.local_shape)} on {layout.mesh.device_type} here"
        )
    return wrap(local, layout)


# torch.load reads only these with weights_only=True, its default.
torch.serialization.add_safe_globals([rebuild])


def _observed(name: Callable, run: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run a method that communicates and is no torch call, as a call that `explain` and `lockstep` see."""

    def found(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return run(*args, **kwargs)

    return runtime.active.observer.run_call(name, found, (ShardTensor,), args, kwargs)


def wrap(local: Tensor, layout: Layout) -> ShardTensor:
    """Return the ShardTensor with this local tensor under this layout; nothing is checked."""
    dtype, device = local.dtype, local.device
    # Positional (strides, offset and memory format are None): keyword arguments take a third longer.
    made = make_wrapper(ShardTensor, layout.shape, None, None, None, dtype, torch.strided, device)
    made.__dict__ = {"_local_tensor": local, "_layout": layout, "_dtype": dtype, "_device": device}
    return made


def wrap_deferred(deferred: Deferred, dtype: torch.dtype, device: torch.device) -> ShardTensor:
    """Return the ShardTensor of a deferred value, which has no local tensor until one is read."""
    layout = deferred.layout
    made = make_wrapper(ShardTensor, layout.shape, None, None, None, dtype, torch.strided, device)
    made.__dict__ = {"_deferred": deferred, "_layout": layout, "_dtype": dtype, "_device": device}
    return made


def is_single_sum(layout: Any) -> bool:
    """Return whether a layout is that of a single number of which each rank has a part."""
    if not isinstance(layout, Layout) or not layout.partial or layout.numel != 1 or layout.shard_axes:
        return False
    return all(op == "sum" for _, op in layout.partial)


def _is_capturing(tensor: Tensor) -> bool:
    """Return whether a device graph is captured: a message that is not waited for inside it would be an error."""
    if tensor.device.type == "cpu":
        return False
    return getattr(torch.get_device_module(tensor.device), "is_current_stream_capturing", bool)()


def wrap_sum(partial_sum: Tensor, layout: Layout) -> ShardTensor:
    """Return the sum of a single number over the Partial axes of `layout`. Its message starts here."""
    groups = process_groups(layout, layout.partial_axes)
    if not groups or runtime.active.tracer is not None or _is_capturing(partial_sum):
        return wrap(autograd_collectives.reduce(partial_sum, groups), layout.with_partial(()))
    return wrap_deferred(StartedSum(partial_sum, layout), partial_sum.dtype, partial_sum.device)


# ---------------------------------------------------------------------- any tensor as (local tensor, layout)


def as_operand(value: Tensor, mesh: Any, partial: bool = False, merged: bool = False) -> tuple[Tensor, Layout]:
    """Return (local tensor, layout) on `mesh` of a tensor argument: a plain tensor is Replicate, a DTensor converted.

    Partial axes are reduced and merged dims are resharded first (which communicates), unless the flags allow them.
    """
    if not isinstance(value, ShardTensor):
        if not isinstance(value, DTensor):
            return value, Layout.replicate(mesh, value.shape)
        value = ShardTensor.from_dtensor(value)
    layout = value._layout
    if layout.mesh is not mesh and layout.mesh is not runtime.mesh_state(mesh).mesh:
        if layout.mesh == mesh:
            raise ShardingError(f"a tensor of {layout} belongs to a world that has ended: make it anew on the new mesh")
        raise ShardingError(f"tensors on different meshes meet: {mesh} and {layout.mesh}")
    if layout.partial and not partial:
        value = value._reduced_value()
        layout = value._layout
    if not merged and not layout.is_simple:
        goal = unmerge_dims(layout)
        return redistribute(value._local_tensor, layout, goal), goal
    return value._local_tensor, layout


def to_full_tensor(value: Any) -> Tensor:
    """Return the global value of a ShardTensor or DTensor as a plain tensor. Communicates unless Replicate."""
    if isinstance(value, DTensor):
        value = ShardTensor.from_dtensor(value)
    goal = Layout.replicate(value._layout.mesh, value._layout.shape)
    return redistribute(value._local_tensor, value._layout, goal)


def _wrap_hook(hook: Callable, layout: Layout) -> Callable[[Tensor], Tensor | None]:
    """Turn a hook on ShardTensors of this layout into a hook on their local tensors."""

    def run(grad: Tensor) -> Tensor | None:
        changed = hook(wrap(grad, layout))
        if changed is None:
            return None
        local, now = as_operand(changed, layout.mesh)
        return redistribute(local, now, layout)

    return run
