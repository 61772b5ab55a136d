"""split, chunk, tensor_split and unbind. Each rank keeps its overlap with every part; nothing is communicated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dispatch.plan import NEW_TENSOR, Operand, Plan, ViewKind
from ...dispatch.registry import handler, handler_of, rule
from ...layout import DimSharding, Layout, Span, shard_sizes_of, starts
from ...redistribute import unmerge_dims
from ...tensor import ShardTensor
from .._common.probe import meta_tensor
from .permute import drop_dims
from .view import loses_writes, single_element


def narrow_sharding(factor: DimSharding, start: int, stop: int) -> DimSharding:
    """Return the sharding of a slice: every shard keeps its overlap with `start` to `stop`.

    >>> narrow_sharding(DimSharding(7, (0,), (3, 4)), 1, 5)
    DimSharding(size=4, axes=(0,), shard_sizes=(2, 2))
    """
    shards = zip(starts(shard_sizes_of(factor)), shard_sizes_of(factor), strict=True)
    sizes = tuple(max(0, min(stop, lo + n) - max(start, lo)) for lo, n in shards)
    return DimSharding(stop - start, factor.axes, sizes if factor.axes else ())


def narrow_layout(layout: Layout, dim: int, start: int, stop: int) -> tuple[Layout, Span]:
    """Return the layout of a slice of a simple dim, and the slice's range within this rank's shard."""
    (factor,) = layout.dims[dim]
    lo, hi = layout.span(dim)
    first = min(max(start, lo), hi)
    return layout.with_dim(dim, narrow_sharding(factor, start, stop)), Span(first - lo, max(first, min(stop, hi)) - lo)


def split_ranges(input: Operand, outs: Sequence[Tensor], strides: Sequence[int]) -> tuple[int, list[Span]]:
    """Return the split dim and the range of every part, from the storage offsets of a split meta tensor."""
    dim = 0
    spans: list[Span] = []
    for d, step in enumerate(strides):
        offsets = [out.storage_offset() % (strides[d - 1] if d else step * (input.shape[d] + 1)) for out in outs]
        dim_spans = [Span(at // step, at // step + out.shape[d]) for at, out in zip(offsets, outs, strict=True)]
        if any(span != (0, input.shape[d]) for span in dim_spans) or not spans:
            dim, spans = d, dim_spans
    if len(outs) > 1 and all(out.shape == input.shape for out in outs):  # every part is empty: the split dim has size 0
        dim = input.shape.index(0)
        spans = [Span(0, 0)] * len(outs)
    return dim, spans


# torch records these as one function of many outputs; no output may be written in place while it requires grad.
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
    """Narrow the local tensor to its overlap with every part."""
    strides, step = [0] * input.ndim, 1
    for d in reversed(range(input.ndim)):
        # + 1: the storage offset then identifies every start, also one at the end of a dim
        strides[d], step = step, step * (input.shape[d] + 1)
    outs = fn(meta_tensor(input, strides), *args, **kwargs)
    dim, spans = split_ranges(input, outs, strides)
    source = unmerge_dims(input.layout, [dim])
    parts = [narrow_layout(source, dim, *span) for span in spans]
    local_sizes = [stop - start for _, (start, stop) in parts]
    multi_output = MULTI_OUTPUT_SPLITS.get(fn.__name__)
    if multi_output is not None:
        local = lambda input: multi_output(input, local_sizes, dim)  # noqa: E731
    else:
        local = lambda input: tuple(input.narrow(dim, start, stop - start) for _, (start, stop) in parts)  # noqa: E731
    return Plan(
        local=local,
        operands={"input": source},
        layout=tuple(layout for layout, _ in parts),
        view=NEW_TENSOR
        if "unsafe" in fn.__name__
        else ViewKind.view(lost=loses_writes(input.layout, source), of_slice=source.is_sharded(dim)),
    )


_run_tensor_split = handler_of(torch.tensor_split)


@handler("tensor_split")
def tensor_split(func, types, args, kwargs):
    """Read split points that are passed as a tensor: their values decide the shapes."""
    args = [a.tolist() if i and isinstance(a, Tensor) else a for i, a in enumerate(args)]
    kwargs = {k: v.tolist() if isinstance(v, Tensor) and k != "input" else v for k, v in kwargs.items()}
    sections = kwargs.pop("tensor_indices_or_sections", None)
    args = tuple(args) if sections is None else (args[0], sections, *args[1:])
    sharded = isinstance(kwargs.get("input", args[0] if args else None), ShardTensor)
    return _run_tensor_split(func, types, args, kwargs) if sharded else func(*args, **kwargs)


@rule("unbind", partial=True, merged=True)
def unbind(input: Operand, dim=0):
    """Return the rows. A row of a sharded dim stays on its rank; a scalar row is a partial sum over the axes."""
    meta_tensor(input).unbind(dim)
    dim %= input.ndim
    source = input.layout
    if not source.is_sharded(dim):
        row_layout = source.drop_dims([dim])
        return Plan(
            local=lambda input: input.unbind(dim),
            layout=(row_layout,) * input.shape[dim],
            view=ViewKind.view(lost=bool(source.partial)),
        )
    source = unmerge_dims(source, [dim])
    rows = [narrow_layout(source, dim, i, i + 1) for i in range(input.shape[dim])]
    partial = [(a, "sum") for a in source.nontrivial_axes(source.axes_of(dim))]
    scalar = Layout.make(source.mesh, [], [*source.partial, *partial])
    layouts = [scalar if input.ndim == 1 else drop_dims(layout, [dim]) or scalar for layout, _ in rows]
    shapes = [layout.local_shape for layout in layouts]

    def local(input):
        slices = [input.narrow(dim, start, stop - start) for _, (start, stop) in rows]
        if input.ndim == 1:
            return tuple(single_element(row) for row in slices)
        return tuple(row.reshape(shape) for row, shape in zip(slices, shapes, strict=True))

    return Plan(
        local=local,
        operands={"input": source},
        layout=tuple(layouts),
        view=ViewKind.view(lost=input.ndim == 1 or loses_writes(input.layout, source), of_slice=True),
    )
