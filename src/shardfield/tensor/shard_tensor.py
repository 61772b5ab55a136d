"""ShardTensor, and the functions that wrap a local tensor as one and unwrap any tensor argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from .. import runtime
from .._compat import dynamo_disable, make_wrapper, saved_tensor_hooks
from .._compat.patches import safe_globals
from ..comm import autograd_collectives
from ..dispatch.lost_sharding import examine, examined
from ..dispatch.plan import process_groups
from ..dispatch.promotion import check_promotion
from ..dispatch.write_tracking import ViewConsensus, expose_local, note_write, write_is_lost
from ..errors import ShardingError
from ..layout import Layout
from ..pickling import layout_values, rebuild_layout
from ..redistribute import redistribute, unmerge_dims
from ..spec import ShardTensorSpec, infer_layout, layout_from_shapes, target_layout
from ..trace_state import same_memory
from .autograd import LocalAutograd
from .checkpoint import Checkpointed
from .deferred import Deferred
from .handlers import Handlers
from .values import Values, observed_call


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
    vars(deferred).setdefault("saved_hooks", saved_tensor_hooks())
    made = make_wrapper(ShardTensor, layout.shape, None, None, None, dtype, torch.strided, device)
    made.__dict__ = {"_deferred": deferred, "_layout": layout, "_dtype": dtype, "_device": device}
    return made


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
            raise ShardingError(f"a tensor of {layout} is of a world that has ended: create it again on the new mesh")
        raise ShardingError(f"one call has tensors on different meshes: {mesh} and {layout.mesh}")
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
    return value._full_local()


def localize(value: Tensor, layout: Layout) -> Tensor:
    """Return the local tensor under `layout` of a plain tensor, DTensor or ShardTensor in any layout."""
    local, now = as_operand(value, layout.mesh)
    return redistribute(local, now, layout)


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
        return rt.observer.run_call(func, partial(examined, found), types, args, kwargs or {})
    if kwargs is None:
        kwargs = {}
    if found is rt.registry.elementwise and len(args) == 1 and not kwargs:
        x = args[0]
        if x.__class__ is cls and not x._layout.partial:
            return wrap(func(x._local_tensor), x._layout)  # same result as the handler, with one Python call less
    plans = rt.plans_made
    out = found(func, types, args, kwargs)
    if rt.plans_made != plans:
        examine(func, args, kwargs, out)
    return out


class ShardTensor(Values, LocalAutograd, Checkpointed, Handlers, torch.Tensor):
    """A drop-in tensor that is sharded, evenly or not, over the ranks of a `DeviceMesh`.

    Make one with `scatter_tensor` (one rank has the data) or `ShardTensor.from_local` (each rank has its shard), and
    use it as a tensor. Calls return the results and gradients of the same calls on one device, or raise a
    `ShardingError` on every rank.

    Shape, dtype, device, layout, `requires_grad` and `repr` never communicate. Reading values does: `item`, `tolist`,
    `numpy`, `bool`, `int`, `float`, `full_tensor`. A lazy spectrum (`torch.fft` of a sharded dim) or a lazily padded
    field (`F.pad` of a sharded field) communicates when its local tensor is first read, for example by `to_local`.
    """

    # torch would have returned a view here and this is a copy: a write would be lost
    _copied_view: bool | ViewConsensus = False
    _narrowed = False  # a slice along a sharded dim
    _consumed = False  # a call has read it, and may have saved it for backward; or it is a view
    # of a Partial or deferred value as large as a rank's share of what it is computed from: mesh axis -> this share
    _pending_shares: Mapping[int, int] | None = None
    _slice_of: ShardTensor | None = None  # the tensor that this is a slice of, along dims that are not sharded
    _wrap_local, _localize = staticmethod(wrap), staticmethod(localize)

    @staticmethod
    def __new__(cls, local_tensor: Tensor, spec: Layout | ShardTensorSpec, *, requires_grad: bool = False):
        layout = spec.layout if isinstance(spec, ShardTensorSpec) else spec
        if local_tensor.shape != layout.local_shape:
            raise ShardingError(
                f"a local tensor of shape {tuple(local_tensor.shape)} is not this rank's shard of {layout}, which has "
                f"shape {tuple(layout.local_shape)}"
            )
        made = wrap(expose_local(local_tensor.requires_grad_() if requires_grad else local_tensor), layout)
        if cls is not ShardTensor:
            made.__class__ = cls  # a subclass; what ops return are ShardTensors
        return made

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    __torch_function__ = classmethod(torch_function)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return runtime.active.registry.torch_dispatch(cls, func, types, args, kwargs or {})

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
            groups = process_groups(layout, layout.partial_axes)
            made._reduced_cache = (local_tensor._version, wrap_sum(local_tensor, layout.with_partial(()), groups))
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
        """Return the same value in another layout. Differentiable. `[Replicate()]` alone means every mesh axis.

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
            return observed_call(ShardTensor.redistribute, ShardTensor._redistributed, self, placements, **how)
        return self._redistributed(placements, sharding_shapes)

    def _redistributed(self, placements: Any, sharding_shapes: Any) -> ShardTensor:
        target = target_layout(self._layout, placements, sharding_shapes)
        local = redistribute(self._local_tensor, self._layout, target)
        if target.bare is not self._layout.bare and same_memory(local, self._local_tensor):
            if local is self._local_tensor or not local.requires_grad:  # autograd refuses a write into a view
                local = local.clone()  # else a write into the result would reach this tensor
        return wrap(local, target)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's shard as a plain tensor in the same graph. Communicates if the tensor is deferred.

        Its gradient must have the placement of the layout: a shard for Shard, the full gradient for Replicate and
        Partial. State `Partial()` in `grad_placements` for mesh axes on which ranks make different contributions to it.
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
            full = observed_call(ShardTensor.full_tensor, ShardTensor._redistribute_to, self, target)
            return full.to_local(grad_placements=grad_placements)
        return self._redistribute_to(target).to_local(grad_placements=grad_placements)

    def _redistribute_to(self, target: Layout) -> ShardTensor:
        if target is self._layout:
            return self
        made = wrap(redistribute(self._local_tensor, self._layout, target), target)
        self._consumed = made._consumed = True  # some ranks may have nothing to move, and return the local tensor
        return made

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
        if self._copied_view is True:  # before observers change anything
            self._refuse_write()
        if self._consumed:
            note_write(self._local_tensor, self._layout.mesh)
        observers = runtime.active.write_observers
        # Read once: an observer may turn this tensor into a deferred value, and to read that one communicates, on the
        # ranks that have further observers alone. A deferred value is read on every rank: one rank may still have an
        # observer, of a tensor that is garbage, where another has none.
        local = self._local_tensor if observers or self._deferred is not None else None
        for observer in list(observers) if local is not None else ():
            observer.before_write(local)
        if self._copied_view and write_is_lost(self._copied_view):  # an observer may have made a part of a spectrum
            self._refuse_write()

    def _refuse_write(self) -> None:
        raise ShardingError(
            "writing into this tensor would be lost, or reach its source on some ranks only: on one device it is a "
            f"view of its source, here shards were moved or copied ({self._layout}). Write into the source by index, "
            "or clone() this tensor first"
        )

    # ------------------------------------------------------------------ Python protocols

    def __deepcopy__(self, memo: dict) -> ShardTensor:
        import copy

        return memo.setdefault(id(self), wrap(copy.deepcopy(self._local_tensor, memo), self._layout))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild, (self._local_tensor, *layout_values(self._layout))


def rebuild(local: Tensor, *saved_layout: Any) -> ShardTensor:
    """Return a ShardTensor that was pickled or saved with torch.save; all ranks load together, each its own shard."""
    layout = rebuild_layout(*saved_layout)
    if local.shape != layout.local_shape or local.device.type != layout.mesh.device_type:
        raise ShardingError(
            f"the saved shard has shape {tuple(local.shape)} and is loaded to {local.device.type}: {layout} holds "
            f"{tuple(layout.local_shape)} on {layout.mesh.device_type} here"
        )
    return wrap(local, layout)


rebuild.__module__ = __package__  # saved files name it: they must not depend on the modules of the package
safe_globals.declare(rebuild)


class StartedSum(Deferred):
    """The sum over ranks of a single number, in flight: a loss. Every rank has started it, so one alone may read it.

    The adjoint of the sum is the identity: backward starts at `graph_local`, this rank's part, without the sum.
    """

    graph_local: Tensor

    def __init__(self, part: Tensor, layout: Layout, groups: autograd_collectives.Groups, owned: bool):
        self.graph_local, self.layout, self._groups = part, layout, groups
        self._pending = autograd_collectives.start_reduce(part, groups, owned)

    @property
    def requires_grad(self) -> bool:
        return self.graph_local.requires_grad

    def materialize(self) -> ShardTensor:
        """Wait for the sum. Sends nothing."""
        with torch.inference_mode(self.graph_local.is_inference()):  # False records a graph, also inside no_grad
            reduced = autograd_collectives.attach_reduced(self.graph_local, self._pending.wait(), self._groups)
        return wrap(reduced, self.layout)


def is_single_sum(layout: Any) -> bool:
    """Return whether a layout is that of a single number of which each rank has a part."""
    if not isinstance(layout, Layout) or not layout.partial or layout.numel != 1 or layout.shard_axes:
        return False
    return all(op == "sum" for _, op in layout.partial)


def _is_capturing(device: torch.device) -> bool:
    """Return whether a device graph is captured: a message that is not waited for inside it would be an error."""
    return getattr(torch.get_device_module(device), "is_current_stream_capturing", bool)()


def wrap_sum(part: Tensor, layout: Layout, groups: autograd_collectives.Groups, owned: bool = False) -> ShardTensor:
    """Return the sum of a single number over the groups, in `layout`. Its message starts here.

    `owned`: the number may be overwritten, which saves a copy.
    """
    device = part.device
    if not groups or runtime.active.tracer is not None or (device.type != "cpu" and _is_capturing(device)):
        return wrap(autograd_collectives.reduce(part, groups), layout)
    return wrap_deferred(StartedSum(part, layout, groups, owned), part.dtype, device)
