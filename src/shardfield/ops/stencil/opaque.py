"""Plan a user's function whose body is opaque: a CUDA or Triton kernel, an operator of another library.

The user states how far from its own cell an output reads along each dim. Each rank receives the cells that its outputs
read, calls the function on this block, and drops the outputs of cells that it does not own. The rest is found by
calling the function once on stand-ins when a call is planned: shapes and dtypes of the results, their dependence on the
arguments, and its errors, which are then raised on all ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.empty_shards import connected
from ...dispatch.plan import Operand, Plan
from ...errors import ShardingError
from ...layout import DimSharding, Layout, shard_sizes_of
from ...redistribute import unmerge_dims
from .._common.blockwise import nested_balanced
from .._common.probe import stand_in
from .._common.together import empty_result_of, together
from .clipped import ClippedWindow
from .pad import DimPadding
from .padded_block import PaddedBlockPlan
from .window import Window, shard_spans

EDGES = ("same", "valid", "periodic")


class Reach(NamedTuple):
    """How far an output reads along one dim, and what the function does at the edge of the field."""

    before: int
    after: int
    edge: str = "same"

    @property
    def is_local(self) -> bool:
        return not self.before and not self.after

    def outputs(self, cells: int) -> int:
        """Return the number of outputs of a call on `cells` cells."""
        return cells - self.before - self.after if self.edge == "valid" else cells

    def window(self, size: int) -> Any:
        """Return the window along a dim of `size` cells; for a periodic dim, along the dim extended at both ends."""
        full = self.before + self.after + 1
        if self.edge == "same":
            return ClippedWindow(size, self.before, self.after, full)
        extended = size if self.edge == "valid" else size + full - 1
        return Window(extended, extended - full + 1, full)

    def can_exchange(self, size: int) -> bool:
        """Return whether a sharded dim of `size` can be exchanged; the function gets a smaller dim in full."""
        if self.edge == "valid":
            return size > self.before + self.after
        return self.edge == "same" or max(self.before, self.after) <= size


class FieldCall(NamedTuple):
    """What the user stated about a call: the reach along each dim, the fields, and the dims of the results."""

    name: str
    reach: Mapping[int, Reach]  # dim of the fields -> reach
    fields: Sequence[str]
    out_dims: Mapping[int, int]  # dim of the fields -> dim of the results


def plan_opaque(function: Callable, call: FieldCall, signature: inspect.Signature, bound: dict[str, Any]) -> Plan:
    """Plan `function` on the operands `bound`, by parameter name."""
    fields = {name: _field(call, name, bound) for name in call.fields if bound.get(name) is not None}
    first = next(iter(fields.values()))
    reach = {d % first.ndim: r for d, r in call.reach.items()}
    layout = place_axes(first.layout, reach)
    layouts = {name: _like(call, first, layout, name, field) for name, field in fields.items()}
    blocks = {name: _block_plan(call, layouts[name]) for name in fields}
    made = _probe(function, call, signature, bound, layouts)
    result = [_result_layout(call, m, layout, first.ndim) for m in made.outputs]
    operands: dict[str, Any] = dict(layouts)
    for name, value in bound.items():
        if name not in fields:
            listed = isinstance(value, (list, tuple)) and any(isinstance(v, Operand) for v in value)
            if isinstance(value, Operand):
                operands[name] = Layout.replicate(layout.mesh, value.shape)
            elif listed and all(isinstance(v, Operand) for v in value):
                operands[name] = [Layout.replicate(layout.mesh, v.shape) for v in value]
    names = list(bound)
    crops = [_crops(call, blocks[next(iter(fields))], layout, m, first.ndim) for m in made.outputs]
    owns_nothing = any(0 in r.local_shape for r in result)

    def run(*values: Any) -> Any:
        given = dict(zip(names, values, strict=True))
        for name, block_plan in blocks.items():
            given[name] = block_plan.gather_block(given[name])
        given, tensors = _join(given)
        if not made.has_backward and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise NotImplementedError(f"{call.name}: has no backward; call it without gradients")  # on every rank
        out = compute(tensors, given)
        return out[0] if made.single else made.rebuild(out)

    def on_tensors(tensors: list[Tensor], given: dict[str, Any]) -> list[Tensor]:
        if owns_nothing:
            out = [
                empty_result_of([tensors[i] for i in m.reads], r.local_shape, m.dtype, tensors[0])
                for m, r in zip(made.outputs, result, strict=True)
            ]
        else:
            out = _as_list(_apply(function, signature, given))
            out = [_crop(t, c) for t, c in zip(out, crops, strict=True)]
        return out

    compute = connected(on_tensors, [*layouts.values(), *result])
    layout_of_result: Any = result[0] if made.single else tuple(result)
    return Plan(local=run, takes=names, operands=operands, layout=layout_of_result)


# ---------------------------------------------------------------------- layouts


def _field(call: FieldCall, name: str, bound: dict[str, Any]) -> Operand:
    if not isinstance(bound[name], Operand):
        raise ShardingError(f"{call.name}: the field {name!r} must be a tensor, not {type(bound[name]).__name__}")
    field = bound[name]
    for dim in call.reach:
        if not -field.ndim <= dim < field.ndim:
            raise ShardingError(f"{call.name}: radius names dim {dim}, and {name!r} has {field.ndim} dims")
    return field


def place_axes(layout: Layout, reach: Mapping[int, Reach]) -> Layout:
    """Return the layout in which the function can be called: sharded along dims of `reach` only.

    A dim with a radius keeps one mesh axis. Other axes move to an unsharded dim of `reach` that is long enough, else
    the tensor is replicated over them.
    """
    layout = unmerge_dims(layout, range(layout.ndim))
    moved: list[int] = []
    for dim in range(layout.ndim):
        (factor,) = layout.dims[dim]
        known = reach.get(dim)
        if known is not None and (known.is_local or not layout.is_sharded(dim)):
            continue
        depth = 0
        if known is not None and known.can_exchange(layout.shape[dim]):
            depth = factor.axes.index(layout.nontrivial_axes(factor.axes)[0]) + 1
        inner = factor.axes[depth:]
        parts = math.prod(layout.mesh.size(a) for a in inner)
        sizes = shard_sizes_of(factor)
        outer = tuple(sum(sizes[i : i + parts]) for i in range(0, len(sizes), parts)) if depth else ()
        layout = layout.with_dim(dim, DimSharding(factor.size, factor.axes[:depth], outer))
        moved += layout.nontrivial_axes(inner)
    for axis in moved:
        parts = layout.mesh.size(axis)
        free = [d for d in reach if not layout.is_sharded(d) and layout.shape[d] >= parts]
        free = [d for d in free if reach[d].can_exchange(layout.shape[d])]
        if free:
            dim = max(free, key=lambda d: layout.shape[d])
            sizes = tuple(nested_balanced(layout.shape[dim], [parts]))
            layout = layout.with_dim(dim, DimSharding(layout.shape[dim], (axis,), sizes))
    return layout


def _like(call: FieldCall, first: Operand, layout: Layout, name: str, field: Operand) -> Layout:
    """Return the layout of another field: sharded as the first one along the dims of the call."""
    dims: list[tuple[DimSharding, ...]] = [(DimSharding(n),) for n in field.shape]
    for dim in call.reach:
        here, there = dim % field.ndim, dim % first.ndim
        if field.shape[here] != first.shape[there]:
            raise ShardingError(
                f"{call.name}: the fields must have equal sizes along dim {dim}; {name!r} has {field.shape[here]}, "
                f"{call.fields[0]!r} has {first.shape[there]}"
            )
        dims[here] = layout.dims[there]
    return Layout.make(layout.mesh, dims)


def _block_plan(call: FieldCall, layout: Layout) -> PaddedBlockPlan:
    windows, sizes, paddings = {}, {}, {}
    for stated, reach in call.reach.items():
        dim = stated % layout.ndim
        if reach.is_local or not layout.is_sharded(dim):
            continue
        size = layout.shape[dim]
        windows[dim] = reach.window(size)
        sizes[dim] = _owned(reach, layout, dim)
        if reach.edge == "periodic":
            paddings[dim] = DimPadding("circular", reach.before, reach.after, size)
    return PaddedBlockPlan(layout, windows, sizes, paddings)


def _owned(reach: Reach, layout: Layout, dim: int) -> tuple[int, ...]:
    """Return the shard sizes of the outputs."""
    sizes = layout.shard_sizes(dim)
    return reach.window(layout.shape[dim]).owned(sizes) if reach.edge == "valid" else sizes


def _result_layout(call: FieldCall, made: Made, layout: Layout, ndim: int) -> Layout:
    dims: list[tuple[DimSharding, ...]] = [(DimSharding(n),) for n in made.shape]
    for stated, reach in call.reach.items():
        dim, out = stated % ndim, call.out_dims[stated] % len(made.shape)
        (factor,) = layout.dims[dim]
        sizes = _owned(reach, layout, dim) if factor.axes else ()
        dims[out] = (DimSharding(reach.outputs(factor.size), factor.axes, sizes),)
    return Layout.make(layout.mesh, dims)


def _crops(
    call: FieldCall, block_plan: PaddedBlockPlan, layout: Layout, made: Made, ndim: int
) -> list[tuple[int, int, int]]:
    """Return (dim, start, length) of this rank's outputs in the result of the local call."""
    found = []
    for stated, reach in call.reach.items():
        dim, out = stated % ndim, call.out_dims[stated] % len(made.shape)
        if dim in block_plan.windows:
            first, stop = block_plan.owned[dim]
            skip = first - block_plan.block_starts[dim] if reach.edge == "same" else 0
            skip = reach.before if reach.edge == "periodic" else skip
            found.append((out, skip, stop - first))
    return found


def _crop(out: Tensor, crops: Sequence[tuple[int, int, int]]) -> Tensor:
    for dim, start, length in crops:
        if out.shape[dim] != length:
            out = out.narrow(dim, start, length)
    return out


# ---------------------------------------------------------------------- the function


class Made(NamedTuple):
    """One result of the function: its shape, dtype, and the tensors (by position) that its gradient reaches."""

    shape: Sequence[int]
    dtype: torch.dtype
    reads: Sequence[int]


class Results(NamedTuple):
    outputs: list[Made]
    single: bool
    rebuild: Callable[[list[Tensor]], Any]
    has_backward: bool


def _probe(
    function: Callable,
    call: FieldCall,
    signature: inspect.Signature,
    bound: dict[str, Any],
    layouts: Mapping[str, Layout],
) -> Results:
    """Call the function on stand-ins as large as the largest block; refuse what a sharded call cannot do.

    A function that has no backward on this device is called without gradients.
    """
    try:
        return _probe_with(function, call, signature, bound, layouts, grad=True)
    except NotImplementedError:
        return _probe_with(function, call, signature, bound, layouts, grad=False)


def _probe_with(
    function: Callable,
    call: FieldCall,
    signature: inspect.Signature,
    bound: dict[str, Any],
    layouts: Mapping[str, Layout],
    *,
    grad: bool,
) -> Results:
    leaves: list[Tensor] = []
    passed: list[Tensor] = []

    def replace(value: Any, shape: Sequence[int] | None = None) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(v, Operand) for v in value):
            return [replace(v) for v in value]
        if not isinstance(value, Operand):
            return value
        made = stand_in(value, value.shape if shape is None else shape)
        leaves.append(made.requires_grad_(grad and (made.is_floating_point() or made.is_complex())))
        passed.append(made.clone())  # torch refuses a write into a leaf with an error of its own
        return passed[-1]

    # Hooks of the caller (a checkpoint) must not see what is saved here: a recomputation finds the plan cached. In
    # inference mode stand-ins would have neither gradients nor versions, and the plan serves later calls outside it.
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch.inference_mode(False), torch.enable_grad(), hooks:
        given = {
            name: replace(value, _probe_shape(call, layouts[name]) if name in layouts else None)
            for name, value in bound.items()
        }
        versions = [t._version for t in passed]
        out = _apply(function, signature, given)
    if [t._version for t in passed] != versions:
        raise ShardingError(f"{call.name}: writes into an argument, which would be a copy; return a new tensor")
    outputs = _as_list(out)
    if not outputs or not all(isinstance(t, Tensor) for t in outputs):
        raise ShardingError(f"{call.name}: returns {type(out).__name__}; it must return a tensor or a list of tensors")
    (sizes, *_) = (_probe_shape(call, layout) for layout in layouts.values())
    ndim = next(iter(layouts.values())).ndim
    made = []
    for t in outputs:
        for stated, reach in call.reach.items():
            dim, cells = call.out_dims[stated], sizes[stated % ndim]
            if not -t.ndim <= dim < t.ndim or t.shape[dim] != reach.outputs(cells):
                raise ShardingError(
                    f"{call.name}: {cells} cells along dim {stated} gave a result of shape {tuple(t.shape)}; "
                    f"edge={reach.edge!r} needs {reach.outputs(cells)} along dim {dim} (out_dims names the dim)"
                )
        made.append(Made(tuple(t.shape), t.dtype, _reached(call, t, leaves)))
    rebuild = type(out) if isinstance(out, (list, tuple)) and type(out) in (list, tuple) else tuple
    return Results(made, isinstance(out, Tensor), rebuild, grad)


def _probe_shape(call: FieldCall, layout: Layout) -> list[int]:
    """Return the largest block of a field; one cell along a dim without neighbors."""
    shape = list(layout.shape)
    for stated, reach in call.reach.items():
        dim = stated % layout.ndim
        if reach.is_local:
            shape[dim] = min(shape[dim], 1)
        elif layout.is_sharded(dim):
            window = reach.window(layout.shape[dim])
            spans = [window.receptive_field(*o) for o in shard_spans(_owned(reach, layout, dim)) if o.start < o.stop]
            shape[dim] = max((stop - start for start, stop in spans), default=shape[dim])
    return shape


def _reached(call: FieldCall, out: Tensor, leaves: Sequence[Tensor]) -> list[int]:
    """Return the positions of the tensors that a result's gradient reaches; refuse others that need a gradient."""
    found, seen, todo = set(), set(), [out.grad_fn]
    position = {id(t): i for i, t in enumerate(leaves)}
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            if id(node.variable) not in position:
                raise ShardingError(
                    f"{call.name}: reads a tensor of shape {tuple(node.variable.shape)} that requires grad and is not "
                    "an argument, so its gradient would not be summed over ranks; make it an argument"
                )
            found.add(position[id(node.variable)])
        todo += [following for following, _ in node.next_functions]
    return sorted(found)


def _as_list(out: Any) -> list[Any]:
    return [out] if isinstance(out, Tensor) else list(out) if isinstance(out, (list, tuple)) else []


def _apply(function: Callable, signature: inspect.Signature, given: dict[str, Any]) -> Any:
    arguments: Any = given
    bound = inspect.BoundArguments(signature, arguments)
    return function(*bound.args, **bound.kwargs)


def _join(given: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the arguments with all tensors passed through one node of the graph, and these tensors in order."""
    found: list[Tensor] = []
    for value in given.values():
        found += [t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, Tensor)]
    joined = together(found)
    rest = iter(joined)

    def replace(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            return [replace(v) for v in value]
        return next(rest) if isinstance(value, Tensor) else value

    return {name: replace(value) for name, value in given.items()}, joined
