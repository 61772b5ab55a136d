"""cat, stack and the functions composed of them.

All operands are redistributed to one common sharding, taken from the largest operand. Along the concatenated dim,
`choose_cat_sharding` picks shard sizes for the result that move few rows between ranks. Each operand is then resharded
to its slice of the result's sharding, and the local work is `torch.cat`. The adjoint splits the gradient and reshards
each part back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat.autocast import concatenate
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import composed, rule
from ...layout import DimSharding, Layout, balanced, nested_balanced, shard_sizes_of, starts
from ...redistribute import redistribute, unmerge_dims, without_partial
from .._common.broadcast import evened, with_origins_of
from .._common.probe import meta_tensor
from .split import narrow_sharding


def common_shardings(layouts: Sequence[Layout], keep_partial: bool) -> dict[int, tuple[DimSharding, ...]]:
    """Return the sharding of each sharded dim, from the largest layout whose mesh axes for it are not used yet.

    Partial layouts, unless they stay Partial, come last: they are sharded as `without_partial` chooses. Where this
    leaves out a mesh axis that shards an operand, another layout comes first that uses more of them, or the axis shards
    the shards of its dim: the result would be on every rank of the axis.
    """
    ordered = sorted(layouts, key=lambda x: (bool(x.partial), -x.numel, bool(x.former_shardings)))
    ordered = [without_partial(x) if x.partial and not keep_partial else x for x in ordered]
    wanted = {a for x in ordered for a in x.nontrivial_axes(x.shard_axes)}
    shardings: dict[int, tuple[DimSharding, ...]] = {}
    for first in dict.fromkeys(ordered):
        found = _shardings_in_order([first, *ordered])
        if len(_axes_in(found)) > len(_axes_in(shardings)):
            shardings = found
        if wanted <= _axes_in(shardings):
            return shardings
    for layout in ordered:
        for dim, factors in enumerate(layout.dims):
            left = [a for a in layout.axes_of(dim) if a in wanted - _axes_in(shardings)]
            held = shardings.get(dim, ())
            if left and len(factors) == len(held) == 1:
                shardings[dim] = (_with_inner_axes(held[0], left, layout.axis_sizes),)
    return shardings


def _shardings_in_order(layouts: Sequence[Layout]) -> dict[int, tuple[DimSharding, ...]]:
    """Return the sharding of each sharded dim, from the first layout whose mesh axes for it are not used yet."""
    shardings: dict[int, tuple[DimSharding, ...]] = {}
    for layout in layouts:
        for dim, factors in enumerate(layout.dims):
            axes = set(layout.axes_of(dim))
            if axes and dim not in shardings and not axes & _axes_in(shardings):
                shardings[dim] = factors
    return shardings


def _axes_in(shardings: dict[int, tuple[DimSharding, ...]]) -> set[int]:
    return {a for factors in shardings.values() for f in factors for a in f.axes}


def _with_inner_axes(sharding: DimSharding, axes: Sequence[int], axis_sizes: Sequence[int]) -> DimSharding:
    """Return a sharding whose shards are sharded evenly over more mesh axes."""
    parts = [axis_sizes[a] for a in axes]
    sizes = tuple(n for size in shard_sizes_of(sharding) for n in nested_balanced(size, parts))
    return DimSharding(sharding.size, (*sharding.axes, *axes), sizes)


def common_partial(operands: Sequence[Operand]) -> tuple[tuple[int, str], ...]:
    """Return the Partial axes common to all operands, or `()` if they or the dtypes differ."""
    first = operands[0]
    equal = all(t.layout.partial == first.layout.partial and t.dtype == first.dtype for t in operands)
    sharding_axes = {a for t in operands for a in t.layout.shard_axes} & set(first.layout.partial_axes)
    return first.layout.partial if equal and not sharding_axes else ()


# ---------------------------------------------------------------------- cat


class CatOperand(NamedTuple):
    """An operand along the concatenated dim: its offset in the result, its size, its shard sizes (None: replicated)."""

    offset: int
    size: int
    shard_sizes: tuple[int, ...] | None

    def rows_moved(self, target: DimSharding) -> int:
        """Return the number of rows that change ranks if the result is sharded as `target`."""
        if self.shard_sizes is None:
            return 0
        target_sizes = narrow_sharding(target, self.offset, self.offset + self.size).shard_sizes
        kept_rows = [
            max(0, min(a + m, b + n) - max(a, b))
            for a, m, b, n in zip(
                starts(self.shard_sizes), self.shard_sizes, starts(target_sizes), target_sizes, strict=True
            )
        ]
        return self.size - sum(kept_rows)


def choose_cat_sharding(rows: Sequence[CatOperand], axes: tuple[int, ...], parts: int) -> DimSharding:
    """Choose the sharding of the concatenated dim that moves the fewest rows and keeps the largest shard small."""
    total = sum(r.size for r in rows)
    sharded_rows = [r for r in rows if r.shard_sizes is not None]
    if not sharded_rows:  # Partial operands are scattered along this dim
        return DimSharding(total, axes, balanced(total, parts))
    replicated_sizes = balanced(sum(r.size for r in rows if r.shard_sizes is None), parts)
    summed_sizes = tuple(
        n + sum(r.shard_sizes[c] for r in sharded_rows if r.shard_sizes) for c, n in enumerate(replicated_sizes)
    )
    largest = max(sharded_rows, key=lambda r: r.size)
    assert largest.shard_sizes is not None
    # the shard boundaries of the largest operand, which then does not move
    bounds = [0, *(largest.offset + s for s in starts(largest.shard_sizes)[1:]), total]
    anchored = tuple(b - a for a, b in zip(bounds, bounds[1:], strict=False))
    candidates = [DimSharding(total, axes, sizes) for sizes in (anchored, summed_sizes, balanced(total, parts))]
    limit = math.ceil(1.25 * max(max(summed_sizes), -(-total // parts)))  # the ceiling always allows one extra row
    allowed = [f for f in candidates if max(f.shard_sizes) <= limit]
    return min(allowed, key=lambda f: sum(r.rows_moved(f) for r in rows))


class Concatenated(NamedTuple):
    """Shape and dtype of a concatenation."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


def _cat_alike(tensors: Any, dim: Any) -> Concatenated | None:
    """Return the result of operands of one dtype whose sizes match; None for all others, also those that torch refuses.

    torch's own answer, from meta tensors, takes half the time of a plan.
    """
    if not isinstance(tensors, (tuple, list)) or not tensors or dim.__class__ is not int:
        return None
    shapes, dtype = [tuple(t.shape) for t in tensors], tensors[0].dtype
    ndim = len(shapes[0])
    if not -ndim <= dim < ndim or any(len(s) != ndim for s in shapes) or any(t.dtype is not dtype for t in tensors):
        return None
    dim %= ndim
    if ndim == 1 or any(s[:dim] + s[dim + 1 :] != shapes[0][:dim] + shapes[0][dim + 1 :] for s in shapes):
        return None
    return Concatenated((*shapes[0][:dim], sum(s[dim] for s in shapes), *shapes[0][dim + 1 :]), dtype)


@rule("cat", "concat", "concatenate", partial=True, merged=True)
def cat(tensors, dim=0, *, fn):
    """Concatenate locally; along a sharded dim, each operand is first resharded to its slice of the result."""
    global_out = _cat_alike(tensors, dim) or fn([meta_tensor(t) for t in tensors], dim)
    if not isinstance(tensors, (tuple, list)):
        return None
    dim %= global_out.ndim
    skipped = {i for i, t in enumerate(tensors) if t.ndim != global_out.ndim}  # torch.cat ignores an empty vector
    live = [t for i, t in enumerate(tensors) if i not in skipped]
    partial = common_partial(live)
    layouts = [unmerge_dims(t.layout, [dim]) for t in live]
    shardings = common_shardings(layouts, bool(partial))
    rows, offset = [], 0
    for layout in layouts:
        axes = shardings[dim][0].axes if dim in shardings else ()
        same_axes = axes and layout.axes_of(dim) == axes
        rows.append(CatOperand(offset, layout.shape[dim], layout.shard_sizes(dim) if same_axes else None))
        offset += layout.shape[dim]
    cat_sharding = DimSharding(offset)
    if dim in shardings:
        (first,) = shardings[dim]
        cat_sharding = choose_cat_sharding(rows, first.axes, len(first.shard_sizes))

    def layout_with(factor: DimSharding) -> Layout:
        dims = [(factor,) if d == dim else shardings.get(d, (DimSharding(n),)) for d, n in enumerate(global_out.shape)]
        return Layout.make(live[0].layout.mesh, dims, partial)

    targets = iter([layout_with(narrow_sharding(cat_sharding, r.offset, r.offset + r.size)) for r in rows])
    empty = Layout.replicate(live[0].layout.mesh, (0,))  # if sharded, its axes would count as dividing the work
    dtype, is_vector = global_out.dtype, global_out.ndim == 1

    def local(tensors):
        if not is_vector:
            out = torch.cat(tensors, dim)
            return out if out.dtype is dtype else out.to(dtype)
        # torch.cat drops an empty vector from the graph; a rank with an empty shard would then skip a collective in
        # double backward
        return torch.cat([t.unsqueeze(0) for t in tensors], 1).squeeze(0).to(dtype)

    return Plan(
        local=local,
        operands={"tensors": [empty if i in skipped else next(targets) for i in range(len(tensors))]},
        layout=with_origins_of(layout_with(cat_sharding), layouts),
    )


# ---------------------------------------------------------------------- stack


@rule("stack", partial=True, merged=True)
def stack(tensors, dim=0, *, fn):
    """Stack locally along a new unsharded dim; operands that are each on one rank stay there (`_stack_by_owner`).

    If one rank has all of them, as the states of a scan along a sharded dim, the stack is shared by all.
    """
    global_out = fn([meta_tensor(t) for t in tensors], dim)
    if not isinstance(tensors, (tuple, list)):
        return None
    dim %= global_out.ndim
    partial = common_partial(tensors)
    mesh = tensors[0].layout.mesh
    owned = _owned_rows([t.layout for t in tensors]) if not any(t.layout.partial for t in tensors) else None
    if owned is not None:
        return _stack_by_owner([t.layout for t in tensors], dim, owned)
    shardings = common_shardings([t.layout for t in tensors], bool(partial))
    dims = [shardings.get(d, (DimSharding(n),)) for d, n in enumerate(tensors[0].shape)]
    target = Layout.make(mesh, dims, partial)
    even = Layout.make(mesh, [evened(f, target, global_out.numel()) for f in target.dims], partial)
    stacked = target.insert(dim, len(tensors))
    result = with_origins_of(even, [t.layout for t in tensors]).insert(dim, len(tensors))

    def local(tensors):
        out = torch.stack(tensors, dim)
        return out if even is target else redistribute(out, stacked, result)

    return Plan(local=local, operands={"tensors": [target] * len(tensors)}, layout=result)


class OwnedRows(NamedTuple):
    """Operands of `stack` that are each on the ranks of one coordinate on some mesh axes, as rows of a sharded dim are.

    dim: the dim of the operands that these axes shard. axes: the axes on which one coordinate has non-empty shards.
    coords: the flat coordinate over them, for each operand. left: the sharding of the dim over its other axes.
    """

    dim: int
    axes: tuple[int, ...]
    coords: list[int]
    left: DimSharding


def _owned_rows(layouts: Sequence[Layout]) -> OwnedRows | None:
    """Return how the operands are held; None if one coordinate holds all of them, or if they are sharded otherwise."""
    first = layouts[0]
    for dim in first.sharded_dims:
        held = [_held_by_one_coord(layout, dim) for layout in layouts]
        others = {(layout.dims[:dim], layout.dims[dim + 1 :], layout.partial) for layout in layouts}
        if len(others) > 1 or None in held or len({(h[0], h[2]) for h in held if h}) > 1:
            continue
        coords = [h[1] for h in held if h]
        if len(set(coords)) > 1:
            assert held[0] is not None
            return OwnedRows(dim, held[0][0], coords, held[0][2])
    return None


def _held_by_one_coord(layout: Layout, dim: int) -> tuple[tuple[int, ...], int, DimSharding] | None:
    """Return the axes on which one coordinate has all of a dim, this coordinate, and the sharding over other axes."""
    if len(layout.dims[dim]) > 1 or not layout.is_sharded(dim):
        return None
    factor, counts = layout.dims[dim][0], [layout.mesh.size(a) for a in layout.axes_of(dim)]
    places = list(itertools.product(*map(range, counts)))
    filled = [place for place, n in zip(places, factor.shard_sizes, strict=True) if n]
    owner = [i for i, n in enumerate(counts) if n > 1 and len({place[i] for place in filled}) == 1]
    if not owner:
        return None
    coord = 0
    for i in owner:
        coord = coord * counts[i] + filled[0][i]
    rest = [i for i in range(len(counts)) if i not in owner]
    pairs = zip(places, factor.shard_sizes, strict=True)
    sizes = [n for place, n in pairs if all(place[i] == filled[0][i] for i in owner)]
    left = DimSharding(factor.size, tuple(factor.axes[i] for i in rest), tuple(sizes) if rest else ())
    return tuple(factor.axes[i] for i in owner), coord, left


def _stack_by_owner(layouts: Sequence[Layout], dim: int, rows: OwnedRows) -> Plan:
    """Shard the new dim by owner: each rank's shard consists of the operands that the rank holds."""
    first, (factor,) = layouts[0], layouts[0].dims[rows.dim]
    after = rows.left.with_origins(first.origins(rows.dim))
    counts = [first.mesh.size(a) for a in rows.axes]
    shard_sizes = tuple(sum(c == coord for c in rows.coords) for coord in range(math.prod(counts)))

    def owned_by(coord: int) -> Layout:
        sizes, left = [], iter(shard_sizes_of(rows.left))
        for place in itertools.product(*(range(first.mesh.size(a)) for a in factor.axes)):
            at = 0
            for axis, count in zip(rows.axes, counts, strict=True):
                at = at * count + place[factor.axes.index(axis)]
            sizes.append(next(left) if at == coord else 0)
        return first.with_dim(rows.dim, DimSharding(factor.size, factor.axes, tuple(sizes)))

    owners, here = sorted(rows.coords), first.index(rows.axes)
    result = (
        first.with_dim(rows.dim, after).insert(dim).with_dim(dim, DimSharding(len(layouts), rows.axes, shard_sizes))
    )
    kept_shape = result.local_shape[:dim] + result.local_shape[dim + 1 :]
    shapes = [(*kept_shape[:dim], int(owner == here), *kept_shape[dim:]) for owner in owners]
    return Plan(
        local=lambda tensors: torch.cat([t.reshape(s) for t, s in zip(tensors, shapes, strict=True)], dim),
        operands={"tensors": [owned_by(owner) for owner in owners]},
        layout=result,
    )


# ---------------------------------------------------------------------- composed functions


@composed("hstack")
def hstack(tensors):
    tensors = torch.atleast_1d(list(tensors))
    return torch.cat(tensors, 0 if tensors[0].ndim == 1 else 1)


@composed("vstack", "row_stack")
def vstack(tensors):
    return torch.cat(torch.atleast_2d(list(tensors)), 0)


@composed("dstack")
def dstack(tensors):
    return torch.cat(torch.atleast_3d(list(tensors)), 2)


@composed("column_stack")
def column_stack(tensors):
    return torch.hstack([t.reshape(t.numel(), 1) if t.ndim < 2 else t for t in tensors])


@composed("block_diag")
def block_diag(*tensors):
    """Pad every block to the full width and concatenate the rows."""
    blocks = torch.atleast_2d(list(tensors[0] if isinstance(tensors[0], (tuple, list)) else tensors))
    for i, block in enumerate(blocks):
        if block.ndim != 2:
            raise RuntimeError(f"block_diag: tensors must have 2 or fewer dims; number {i} has {block.ndim}")
    width, at, rows = sum(b.shape[1] for b in blocks), 0, []
    for block in blocks:
        rows.append(F.pad(block, (at, width - at - block.shape[1])))
        at += block.shape[1]
    return concatenate(rows, 0)


@composed("meshgrid")
def meshgrid(*tensors, indexing=None):
    """Reshape each tensor to vary along its own dim only and expand it as a view."""
    if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
        tensors = tuple(tensors[0])
    options = {} if indexing is None else {"indexing": indexing}
    metas = torch.meshgrid(*(meta_tensor(t) for t in tensors), **options)
    swapped = indexing == "xy" and len(tensors) > 1
    grids = []
    for i, (t, meta) in enumerate(zip(tensors, metas, strict=True)):
        along = 1 - i if swapped and i < 2 else i
        shape = [t.numel() if d == along else 1 for d in range(meta.ndim)]
        grids.append(t.reshape(shape).expand(meta.shape))
    return tuple(grids)


@composed("cartesian_prod")
def cartesian_prod(*tensors: Tensor):
    if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
        tensors = tuple(tensors[0])
    for t in tensors:
        if t.ndim != 1:
            raise RuntimeError(f"Expect a 1D vector, but got shape {list(t.shape)}")
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack([grid.flatten() for grid in torch.meshgrid(*tensors, indexing="ij")], -1)
