"""ShardTensor: a torch.Tensor that lies in pieces on the ranks of a device mesh.

The wrapper takes no part in autograd: `_local_tensor` carries the graph, and everything about gradients is asked of
it. What a call on a ShardTensor does is decided in `dispatch/registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from ._compat import make_wrapper
from .comm import autograd_collectives
from .dispatch import arguments, registry
from .dispatch.plan import process_groups
from .dispatch.write_tracking import INCOMPLETE_GRAD, WRITE_OBSERVERS, ViewConsensus, expose_local, write_is_lost
from .errors import ShardingError
from .layout import Layout
from .redistribute import redistribute, unmerge_dims
from .spec import ShardTensorSpec, infer_layout, layout_from_shapes, target_layout


class ShardTensor(torch.Tensor):
    """A drop-in tensor cut into pieces, of any sizes, over the ranks of a `DeviceMesh`.

    Make one with `scatter_tensor` (one rank has the data) or `ShardTensor.from_local` (each rank has its piece), and
    use it as a tensor. Calls give what the same calls give on one device, forward and backward, or raise a
    `ShardingError` on every rank.
    """

    _local_tensor: Tensor
    _layout: Layout
    _dtype: torch.dtype  # the local tensor's, and so is the device: asking it takes longer
    _device: torch.device
    # torch would have returned a view here and this is a copy: writing would be lost
    _copied_view: bool | ViewConsensus = False
    _narrowed = False  # a slice of a cut dim
    _unsent = False  # filled with a number on this rank: no message has ever held its memory
    _grad_incomplete = False  # it was read before it was made, so that gradients do not go through it
    _reduced_cache: tuple[tuple[int, bool], ShardTensor] | None = (
        None  # what a Partial sums to, and the version it was taken at
    )

    @staticmethod
    def __new__(cls, local_tensor: Tensor, spec: Layout | ShardTensorSpec, *, requires_grad: bool = False):
        layout = spec.layout if isinstance(spec, ShardTensorSpec) else spec
        if local_tensor.shape != layout.local_shape:
            raise ShardingError(
                f"a local tensor of shape {tuple(local_tensor.shape)} is not this rank's part of {layout}"
            )
        return wrap(expose_local(local_tensor.requires_grad_() if requires_grad else local_tensor), layout)

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    __torch_function__ = classmethod(registry.torch_function)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return registry.torch_dispatch(cls, func, types, args, kwargs or {})

    # ------------------------------------------------------------------ what it is; read without dispatch

    shape = property(attrgetter("_layout.shape"))
    ndim = property(attrgetter("_layout.ndim"))
    dtype = property(attrgetter("_dtype"))
    device = property(attrgetter("_device"))
    device_mesh = property(attrgetter("_layout.mesh"))
    placements = property(attrgetter("_layout.placements"))

    @property
    def _spec(self) -> ShardTensorSpec:
        return ShardTensorSpec(self._layout, self._local_tensor)

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
        """The strides of the whole tensor, stored in the order this rank's part is stored in."""
        order = sorted(range(self.ndim), key=lambda d: (-self._local_tensor.stride(d), d))
        strides, step = [0] * self.ndim, 1
        for d in reversed(order):
            strides[d], step = step, step * max(self.shape[d], 1)
        return tuple(strides) if dim is None else strides[dim]

    # ------------------------------------------------------------------ autograd: asked of the local tensor

    @property
    def requires_grad(self) -> bool:
        return self._local_tensor.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._local_tensor.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> ShardTensor:
        self._local_tensor.requires_grad_(requires_grad)
        return self

    is_leaf = property(attrgetter("_local_tensor.is_leaf"))
    grad_fn = property(attrgetter("_local_tensor.grad_fn"))
    retains_grad = property(attrgetter("_local_tensor.retains_grad"))
    output_nr = property(attrgetter("_local_tensor.output_nr"))
    _version = property(attrgetter("_local_tensor._version"))

    @property
    def grad(self) -> ShardTensor | None:
        grad = self._local_tensor.grad
        return None if grad is None else wrap(grad, self._grad_layout)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            local, layout = arguments.as_operand(value, self._layout.mesh)
            value = redistribute(local, layout, self._grad_layout)
        self._local_tensor.grad = value

    @grad.deleter
    def grad(self) -> None:
        self._local_tensor.grad = None

    @property
    def _grad_layout(self) -> Layout:
        """A Partial's gradient is the whole gradient; any other's lies like itself."""
        return self._layout.with_partial(()) if self._layout.partial else self._layout

    def retain_grad(self) -> None:
        self._local_for_grad().retain_grad()

    def register_hook(self, hook: Callable[[ShardTensor], Tensor | None]) -> Any:
        """`hook` gets the gradient as a ShardTensor and may return another."""
        layout = self._grad_layout
        return self._local_for_grad().register_hook(_wrap_hook(hook, layout))

    def _local_for_grad(self) -> Tensor:
        """The local tensor, for one who asks for its gradient."""
        if self._grad_incomplete:
            raise ShardingError(INCOMPLETE_GRAD)
        return self._local_tensor

    def register_post_accumulate_grad_hook(self, hook: Callable[[ShardTensor], None]) -> Any:
        return self._local_tensor.register_post_accumulate_grad_hook(lambda _: hook(self))

    def backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None) -> None:
        """As on a tensor; `gradient` may be a ShardTensor in any layout or a plain whole tensor."""
        registry.run_backward([self], [gradient], retain_graph, create_graph, inputs)

    # ------------------------------------------------------------------ moving

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sharding_shapes: str | Mapping[int, Sequence[Sequence[int]]] = "infer",
        global_shape: Sequence[int] | None = None,
        run_check: bool = False,
        **kwargs: Any,
    ) -> ShardTensor:
        """The ShardTensor whose piece on this rank is `local_tensor`. Differentiable.

        `sharding_shapes`: "infer" asks the other ranks for their shapes (one small message), "chunk" trusts that the
        pieces are cut as torch.chunk would, and a dict `{mesh axis: shape of each coord's piece}` states them; the
        last two send nothing.
        """
        if device_mesh is None:
            raise ShardingError("from_local: device_mesh is needed")
        placed = list(placements) if placements is not None else [Replicate()] * device_mesh.ndim
        if sharding_shapes == "infer":
            layout = infer_layout(local_tensor, device_mesh, placed, global_shape)
        else:
            layout = layout_from_shapes(local_tensor, device_mesh, placed, sharding_shapes, global_shape)
        return wrap(expose_local(local_tensor), layout)

    @staticmethod
    def from_dtensor(dtensor: DTensor, **kwargs: Any) -> ShardTensor:
        """A DTensor taken over: same pieces, same mesh, gradients flow back into it."""
        placements = dtensor.placements
        layout = Layout.of(dtensor.device_mesh, placements, dtensor.shape)
        grads = [Replicate() if isinstance(p, Partial) else p for p in placements]
        return wrap(expose_local(dtensor.to_local(grad_placements=grads)), layout)

    def to_dtensor(self) -> DTensor:
        """A DTensor with the same pieces where torch.chunk cuts so, else after moving to such a cut."""
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
        sharding_shapes: str | Mapping[int, Sequence[Any]] | None = None,
        async_op: bool = False,
    ) -> ShardTensor:
        """The same value in another layout. Differentiable.

        `sharding_shapes` says how sharded dims are cut: None keeps a cut that is already there and chunks others,
        "chunk" and "balanced" do so for every dim, a dict `{mesh axis: lengths or shapes}` states them.
        """
        if device_mesh is not None and device_mesh != self._layout.mesh:
            raise ShardingError(
                f"redistribute: moving from {self._layout.mesh} to another mesh {device_mesh} is not supported"
            )
        target = target_layout(self._layout, placements, sharding_shapes)
        local = redistribute(self._local_tensor, self._layout, target)
        if target is not self._layout and local._is_view() and not local.requires_grad:
            local = local.clone()  # else writing into the result would write into this tensor
        return wrap(local, target)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's piece, as a plain tensor in the same graph.

        Its gradient is expected as the layout has it: a slice for Shard, the whole for Replicate and Partial. State
        `Partial()` in `grad_placements` for mesh axes on which ranks make different contributions to it.
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
        """The whole value as a plain tensor on every rank."""
        target = Layout.replicate(self._layout.mesh, self._layout.shape)
        return self._redistribute_to(target).to_local(grad_placements=grad_placements)

    def offsets(self, mesh_dim: int | None = None) -> tuple[int, ...] | int:
        """The global index of this rank's first element; with `mesh_dim`, along the dim that axis cuts."""
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
        """This value with nothing left to reduce; taken once, however many ops ask."""
        if not self._layout.partial:
            return self
        local = self._local_tensor
        if local.is_inference():  # nobody counts its writes
            return self._redistribute_to(self._layout.with_partial(()))
        key = (local._version, torch.is_grad_enabled())
        known = self._reduced_cache
        if known is None or known[0] != key:
            known = self._reduced_cache = (key, self._redistribute_to(self._layout.with_partial(())))
        return known[1]

    def _unmerged_value(self) -> ShardTensor:
        """This value with nothing left to reduce and no merged dims."""
        value = self._reduced_value()
        return value if value._layout.is_simple else value._redistribute_to(unmerge_dims(value._layout))

    def _write(self, value: ShardTensor) -> ShardTensor:
        """Write a whole value of this shape into this tensor's pieces."""
        self._check_writable()
        self._local_tensor.copy_(redistribute(value._local_tensor, value._layout, self._layout))
        return self

    def _check_writable(self) -> None:
        for borrower in list(WRITE_OBSERVERS) if WRITE_OBSERVERS else ():
            borrower.before_write(self._local_tensor)
        if self._copied_view and write_is_lost(self._copied_view):
            raise ShardingError(
                "writing into this tensor would be lost, or reach what it was made from on some ranks only: on one "
                f"device it is a view, here pieces of it were moved or copied ({self._layout}). Write into the "
                "original by index, or clone() first"
            )

    # ------------------------------------------------------------------ users' own ops

    @classmethod
    def register_function_handler(cls, func: Any, function_handler: Callable) -> None:
        """Calls of `func` on ShardTensors go to `function_handler(func, types, args, kwargs)`."""
        registry.register(func, function_handler)

    @classmethod
    def register_named_function_handler(cls, name: str, function_handler: Callable) -> None:
        """The same for a function known by name, as `"mylib.op.default"` of a custom op or its qualified name."""
        registry.register_named(name, function_handler)

    @classmethod
    def register_dispatch_handler(cls, op: Any, function_handler: Callable) -> None:
        """Calls that reach torch's dispatcher as the aten operator `op` go to `function_handler(*args, **kwargs)`."""
        registry.DISPATCH_HANDLERS[op] = function_handler

    # ------------------------------------------------------------------ as an object

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        local = self.__dict__.get("_local_tensor", "not made yet")
        return f"ShardTensor({self._layout}, dtype={self.dtype}, local={local})"

    def __str__(self) -> str:
        if self.numel() == 1 and self.ndim == 0:
            return f"ShardTensor({self.item()}, {self._layout})"
        return repr(self)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.ndim == 0 else object.__format__(str(self), spec)

    def item(self) -> Any:
        """The value of a tensor with one element, the same on every rank."""
        return arguments.to_full_tensor(self).item()

    def tolist(self) -> Any:
        return arguments.to_full_tensor(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole value as an array on every rank."""
        return arguments.to_full_tensor(self).numpy(force=force)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        whole = arguments.to_full_tensor(self).numpy()
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __bool__(self) -> bool:
        return bool(arguments.to_full_tensor(self).detach())

    def __int__(self) -> int:
        return int(arguments.to_full_tensor(self).detach())

    def __float__(self) -> float:
        return float(arguments.to_full_tensor(self).detach())

    def __complex__(self) -> complex:
        return complex(arguments.to_full_tensor(self).detach())

    def __index__(self) -> int:
        return arguments.to_full_tensor(self).__index__()

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
        return _rebuild, (self._local_tensor, self._layout)

    __hash__ = object.__hash__


def _rebuild(local: Tensor, layout: Layout) -> ShardTensor:
    return wrap(local, layout)


def wrap(local: Tensor, layout: Layout) -> ShardTensor:
    """The ShardTensor with this local tensor under this layout; nothing is checked."""
    dtype, device = local.dtype, local.device
    # by position (strides, offset and memory format are None): torch takes a third longer to read names
    made = make_wrapper(ShardTensor, layout.shape, None, None, None, dtype, torch.strided, device)
    made.__dict__ = {"_local_tensor": local, "_layout": layout, "_dtype": dtype, "_device": device}
    return made


def _wrap_hook(hook: Callable, layout: Layout) -> Callable[[Tensor], Tensor | None]:
    def run(grad: Tensor) -> Tensor | None:
        changed = hook(wrap(grad, layout))
        if changed is None:
            return None
        local, now = arguments.as_operand(changed, layout.mesh)
        return redistribute(local, now, layout)

    return run


arguments.ShardTensor, arguments.wrap = ShardTensor, wrap
