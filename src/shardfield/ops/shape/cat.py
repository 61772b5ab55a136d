"""Several tensors in one: cat, stack and their kin.

Operands meet in the cuts of the largest. Along the joined dim, the cut of the result is chosen so that few rows change
hands: each operand is then cut where the result is, which moves those rows and no others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import composed, rule
from ...layout import DimSharding, Layout, balanced, shard_sizes_of, starts
from ...redistribute import unmerge_dims
from .split import narrow_sharding
from .view import meta_tensor


def common_shardings(layouts: Sequence[Layout]) -> dict[int, tuple[DimSharding, ...]]:
    """For tensors alike in all but one dim: the dims' cuts, each from the largest that cuts it with axes still free."""
    used: set[int] = set()
    found: dict[int, tuple[DimSharding, ...]] = {}
    for layout in sorted(layouts, key=lambda x: -x.numel):
        for dim, factors in enumerate(layout.dims):
            axes = set(layout.axes_of(dim))
            if axes and dim not in found and not axes & used:
                found[dim] = factors
                used |= axes
    return found


def common_partial(operands: Sequence[Operand]) -> tuple[tuple[int, str], ...]:
    """What all operands are still to be reduced by, if that is the same for all; else nothing is left to reduce."""
    first = operands[0]
    alike = all(t.layout.partial == first.layout.partial and t.dtype == first.dtype for t in operands)
    busy = {a for t in operands for a in t.layout.shard_axes} & set(first.layout.partial_axes)
    return first.layout.partial if alike and not busy else ()


# ---------------------------------------------------------------------- cat


class CatOperand(NamedTuple):
    """An operand along the joined dim: where it begins in the result, its size, and its cut (none: it is anywhere)."""

    offset: int
    size: int
    shard_sizes: tuple[int, ...] | None

    def rows_moved(self, target: DimSharding) -> int:
        """How many of its rows change hands where the result is cut as `target`."""
        if self.shard_sizes is None:
            return 0
        goal = narrow_sharding(target, self.offset, self.offset + self.size).shard_sizes
        stay = [
            max(0, min(a + m, b + n) - max(a, b))
            for a, m, b, n in zip(starts(self.shard_sizes), self.shard_sizes, starts(goal), goal, strict=True)
        ]
        return self.size - sum(stay)


def choose_cat_sharding(rows: Sequence[CatOperand], axes: tuple[int, ...], parts: int) -> DimSharding:
    """The cut of the joined dim that moves the fewest rows without loading one rank with much more than before."""
    total = sum(r.size for r in rows)
    lying = [r for r in rows if r.shard_sizes is not None]
    loose = balanced(sum(r.size for r in rows if r.shard_sizes is None), parts)
    sums = tuple(n + sum(r.shard_sizes[c] for r in lying if r.shard_sizes) for c, n in enumerate(loose))
    most = max(lying, key=lambda r: r.size)
    assert most.shard_sizes is not None
    marks = [0, *(most.offset + s for s in starts(most.shard_sizes)[1:]), total]  # the largest stays where it is
    anchored = tuple(b - a for a, b in zip(marks, marks[1:], strict=False))
    found = [DimSharding(total, axes, cut) for cut in (anchored, sums, balanced(total, parts))]
    bearable = math.ceil(1.25 * max(max(sums), -(-total // parts)))  # a single row more is, always
    fit = [f for f in found if max(f.shard_sizes) <= bearable]
    return min(fit, key=lambda f: sum(r.rows_moved(f) for r in rows))


@rule("cat", "concat", "concatenate", partial=True, merged=True)
def cat(tensors, dim=0, *, fn):
    """Along an uncut dim, local; along a cut one, after each operand is cut where the result is."""
    whole = fn([meta_tensor(t) for t in tensors], dim)
    if not isinstance(tensors, (tuple, list)):
        return None
    dim %= whole.ndim
    skipped = {i for i, t in enumerate(tensors) if t.ndim != whole.ndim}  # torch takes an empty vector for nothing
    live = [t for i, t in enumerate(tensors) if i not in skipped]
    partial = common_partial(live)
    layouts = [unmerge_dims(t.layout, [dim]) for t in live]
    cuts = common_shardings(layouts)
    rows, at = [], 0
    for layout in layouts:
        axes = cuts[dim][0].axes if dim in cuts else ()
        same = axes and layout.axes_of(dim) == axes
        rows.append(CatOperand(at, layout.shape[dim], layout.shard_sizes(dim) if same else None))
        at += layout.shape[dim]
    joined = DimSharding(at)
    if dim in cuts:
        (first,) = cuts[dim]
        joined = choose_cat_sharding(rows, first.axes, len(first.shard_sizes))

    def placed(factor: DimSharding) -> Layout:
        dims = [(factor,) if d == dim else cuts.get(d, (DimSharding(n),)) for d, n in enumerate(whole.shape)]
        return Layout.make(live[0].layout.mesh, dims, partial)

    targets = iter([placed(narrow_sharding(joined, r.offset, r.offset + r.size)) for r in rows])
    nothing = Layout.replicate(live[0].layout.mesh, (0,))  # a cut of it would count as divided work
    dtype, vectors = whole.dtype, whole.ndim == 1

    def local(tensors):
        if not vectors:
            out = torch.cat(tensors, dim)
            return out if out.dtype is dtype else out.to(dtype)
        # torch drops an empty vector from the graph, and a rank without its part would miss moves in double backward
        return torch.cat([t.unsqueeze(0) for t in tensors], 1).squeeze(0).to(dtype)

    return Plan(
        local=local,
        operands={"tensors": [nothing if i in skipped else next(targets) for i in range(len(tensors))]},
        layout=placed(joined),
    )


# ---------------------------------------------------------------------- stack


@rule("stack", partial=True, merged=True)
def stack(tensors, dim=0, *, fn):
    """Operands meet in one layout, and a new dim is whole; but rows that single ranks hold stay there."""
    whole = fn([meta_tensor(t) for t in tensors], dim)
    if not isinstance(tensors, (tuple, list)):
        return None
    dim %= whole.ndim
    partial = common_partial(tensors)
    mesh = tensors[0].layout.mesh
    held = _single_owner_coords([t.layout for t in tensors]) if not partial else None
    if held is not None:
        return _stack_by_owner([t.layout for t in tensors], dim, *held)
    cuts = common_shardings([t.layout for t in tensors])
    dims = [cuts.get(d, (DimSharding(n),)) for d, n in enumerate(tensors[0].shape)]
    target = Layout.make(mesh, dims, partial)
    return Plan(
        local=lambda tensors: torch.stack(tensors, dim),
        operands={"tensors": [target] * len(tensors)},
        layout=target.insert(dim, len(tensors)),
    )


def _single_owner_coords(layouts: Sequence[Layout]) -> tuple[int, int, list[int]] | None:
    """(dim, axis, coord of every layout) where each is one piece on one coord of the same axis, else None."""
    cuts = {(d, layout.axes_of(d)) for layout in layouts for d in layout.sharded_dims}
    if len(cuts) != 1 or any(len(layout.sharded_dims) != 1 or layout.partial for layout in layouts):
        return None
    ((dim, axes),) = cuts
    if len(axes) != 1 or any(sum(n > 0 for n in shard_sizes_of(layout.dims[dim][-1])) != 1 for layout in layouts):
        return None
    coords = [next(c for c, n in enumerate(layout.shard_sizes(dim)) if n) for layout in layouts]
    return (dim, axes[0], coords) if len(set(coords)) > 1 else None


def _stack_by_owner(layouts: Sequence[Layout], dim: int, cut: int, axis: int, coords: Sequence[int]) -> Plan:
    """Rows on different ranks: the new dim is cut, and as many rows as a rank has now lie there."""
    parts, size = layouts[0].mesh.size(axis), layouts[0].shape[cut]
    counts = tuple(sum(c == coord for c in coords) for coord in range(parts))

    def on(coord: int) -> Layout:
        return layouts[0].with_dim(cut, DimSharding(size, (axis,), tuple(size * (c == coord) for c in range(parts))))

    owners = sorted(coords)
    result = layouts[0].unshard([cut]).insert(dim).with_dim(dim, DimSharding(len(layouts), (axis,), counts))
    rest = result.shape[:dim] + result.shape[dim + 1 :]
    shapes = [(*rest[:dim], int(owner == layouts[0].coords[axis]), *rest[dim:]) for owner in owners]
    return Plan(
        local=lambda tensors: torch.cat([t.reshape(s) for t, s in zip(tensors, shapes, strict=True)], dim),
        operands={"tensors": [on(owner) for owner in owners]},
        layout=result,
    )


# ---------------------------------------------------------------------- made of these


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
    """Rows of blocks, each padded to the full width."""
    blocks = torch.atleast_2d(list(tensors[0] if isinstance(tensors[0], (tuple, list)) else tensors))
    for i, block in enumerate(blocks):
        if block.ndim != 2:
            raise RuntimeError(f"block_diag: tensors must have 2 or fewer dims; number {i} has {block.ndim}")
    width, at, rows = sum(b.shape[1] for b in blocks), 0, []
    for block in blocks:
        rows.append(F.pad(block, (at, width - at - block.shape[1])))
        at += block.shape[1]
    return torch.cat(rows, 0)


@composed("meshgrid")
def meshgrid(*tensors, indexing=None):
    """Views: each tensor lies along a dim of its own and is expanded along the others."""
    if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
        tensors = tuple(tensors[0])
    chosen = {} if indexing is None else {"indexing": indexing}
    ghosts = torch.meshgrid(*(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors), **chosen)
    turned = indexing == "xy" and len(tensors) > 1
    found = []
    for i, (t, whole) in enumerate(zip(tensors, ghosts, strict=True)):
        along = 1 - i if turned and i < 2 else i
        shape = [t.numel() if d == along else 1 for d in range(whole.ndim)]
        found.append(t.reshape(shape).expand(whole.shape))
    return tuple(found)


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
