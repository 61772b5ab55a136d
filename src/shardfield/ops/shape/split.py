"""A tensor in several: split, chunk, unbind and their kin. A rank keeps its overlap with each part; nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dispatch.plan import NEW_TENSOR, Operand, Plan, ViewKind
from ...dispatch.registry import HANDLERS, handler, rule
from ...layout import DimSharding, Layout, Span, shard_sizes_of, starts
from ...redistribute import unmerge_dims
from ...tensor import ShardTensor
from .permute import drop_dims
from .view import loses_writes, meta_tensor, single_element


def narrow_sharding(factor: DimSharding, start: int, stop: int) -> DimSharding:
    """The factor of a slice: every piece keeps what falls into it.

    >>> narrow_sharding(DimSharding(7, (0,), (3, 4)), 1, 5)
    DimSharding(size=4, axes=(0,), shard_sizes=(2, 2))
    """
    begins = zip(starts(shard_sizes_of(factor)), shard_sizes_of(factor), strict=True)
    cut = tuple(max(0, min(stop, lo + n) - max(start, lo)) for lo, n in begins)
    return DimSharding(stop - start, factor.axes, cut if factor.axes else ())


def narrow_layout(layout: Layout, dim: int, start: int, stop: int) -> tuple[Layout, Span]:
    """The layout of a slice of a simple dim, and where in this rank's part it lies."""
    (factor,) = layout.dims[dim]
    lo, hi = layout.span(dim)
    first = min(max(start, lo), hi)
    return layout.with_dim(dim, narrow_sharding(factor, start, stop)), Span(first - lo, max(first, min(stop, hi)) - lo)


def split_ranges(input: Operand, outs: Sequence[Tensor], strides: Sequence[int]) -> tuple[int, list[Span]]:
    """The dim that was split and the range of every part, read off the offsets of a split of a ghost."""
    dim = 0
    spans: list[Span] = []
    for d, step in enumerate(strides):
        before = [out.storage_offset() % (strides[d - 1] if d else step * (input.shape[d] + 1)) for out in outs]
        found = [Span(at // step, at // step + out.shape[d]) for at, out in zip(before, outs, strict=True)]
        if any(span != (0, input.shape[d]) for span in found) or not spans:
            dim, spans = d, found
    if len(outs) > 1 and all(out.shape == input.shape for out in outs):  # parts of nothing: of a dim of size 0
        dim = input.shape.index(0)
        spans = [Span(0, 0)] * len(outs)
    return dim, spans


# Those that torch records as one function of many outputs, none of which may be written while it needs a gradient.
MULTI_OUTPUT_SPLITS = {
    "split": torch.split,
    "chunk": torch.split,
    "split_with_sizes": torch.split,
    "unsafe_split": torch.unsafe_split_with_sizes,
    "unsafe_chunk": torch.unsafe_split_with_sizes,
    "unsafe_split_with_sizes": torch.unsafe_split_with_sizes,
}


@rule(*MULTI_OUTPUT_SPLITS, "tensor_split", "hsplit", "vsplit", "dsplit", partial=True, merged=True)
def split(input: Operand, *args, fn, **kwargs):
    """Parts along one dim; where it is cut, they lie on the ranks that have them."""
    strides, step = [0] * input.ndim, 1
    for d in reversed(range(input.ndim)):
        strides[d], step = step, step * (input.shape[d] + 1)  # so that an offset tells every start, also one at the end
    outs = fn(meta_tensor(input, strides), *args, **kwargs)
    dim, spans = split_ranges(input, outs, strides)
    source = unmerge_dims(input.layout, [dim])
    found = [narrow_layout(source, dim, *span) for span in spans]
    lengths = [stop - start for _, (start, stop) in found]
    together = MULTI_OUTPUT_SPLITS.get(fn.__name__)
    if together is not None:
        local = lambda input: together(input, lengths, dim)  # noqa: E731
    else:
        local = lambda input: tuple(input.narrow(dim, start, stop - start) for _, (start, stop) in found)  # noqa: E731
    return Plan(
        local=local,
        operands={"input": source},
        layout=tuple(layout for layout, _ in found),
        view=NEW_TENSOR
        if "unsafe" in fn.__name__
        else ViewKind.view(lost=loses_writes(input.layout, source), of_slice=source.is_sharded(dim)),
    )


_run_tensor_split = HANDLERS[torch.tensor_split]


@handler("tensor_split")
def tensor_split(func, types, args, kwargs):
    """The places to split at may come as a tensor, whose values decide the shapes."""
    args = [a.tolist() if i and isinstance(a, Tensor) else a for i, a in enumerate(args)]
    kwargs = {k: v.tolist() if isinstance(v, Tensor) and k != "input" else v for k, v in kwargs.items()}
    where = kwargs.pop("tensor_indices_or_sections", None)
    args = tuple(args) if where is None else (args[0], where, *args[1:])
    sharded = isinstance(kwargs.get("input", args[0] if args else None), ShardTensor)
    return _run_tensor_split(func, types, args, kwargs) if sharded else func(*args, **kwargs)


@rule("unbind", partial=True, merged=True)
def unbind(input: Operand, dim=0):
    """Rows. One of a cut dim stays with the rank that has it; as a scalar, it is that rank's addend."""
    meta_tensor(input).unbind(dim)
    dim %= input.ndim
    source = input.layout
    if not source.is_sharded(dim):
        kept = source.drop_dims([dim])
        return Plan(
            local=lambda input: input.unbind(dim),
            layout=(kept,) * input.shape[dim],
            view=ViewKind.view(lost=bool(source.partial)),
        )
    source = unmerge_dims(source, [dim])
    rows = [narrow_layout(source, dim, i, i + 1) for i in range(input.shape[dim])]
    summed = [(a, "sum") for a in source.nontrivial_axes(source.axes_of(dim))]
    scalar = Layout.make(source.mesh, [], [*source.partial, *summed])
    layouts = [scalar if input.ndim == 1 else drop_dims(layout, [dim]) or scalar for layout, _ in rows]
    shapes = [layout.local_shape for layout in layouts]

    def local(input):
        cut = [input.narrow(dim, start, stop - start) for _, (start, stop) in rows]
        if input.ndim == 1:
            return tuple(single_element(row) for row in cut)
        return tuple(row.reshape(shape) for row, shape in zip(cut, shapes, strict=True))

    return Plan(
        local=local,
        operands={"input": source},
        layout=tuple(layouts),
        view=ViewKind.view(lost=input.ndim == 1 or loses_writes(input.layout, source), of_slice=True),
    )
