"""searchsorted, bucketize and isin.

Sharded values stay where they are. If the table is sharded along its rows, each rank searches its shard for all values,
and the counts are a partial sum.
"""

from __future__ import annotations

from typing import Any

import torch

from ...comm import collectives
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import rule
from ...layout import DimSharding, Layout
from ...redistribute import redistribute
from .._common.probe import probe
from .._common.value_checks import raise_if_any_rank


@rule("searchsorted")
def searchsorted(sorted_sequence: Operand, input, *, out_int32=False, right=False, side=None, sorter=None, fn):
    """Count the elements of a row below each value: a sum of the counts of each shard of the row."""
    options = {"out_int32": out_int32, "right": right, "side": side}
    probe(fn, sorted_sequence, input, **options)
    table, values, result = _align_table_layouts(sorted_sequence, input)
    if sorter is not None and (sorter.shape != sorted_sequence.shape or sorter.dtype is not torch.int64):
        raise RuntimeError("torch.searchsorted(): sorter must have the shape of boundaries and dtype long")
    operands = {"sorted_sequence": table} | ({"input": values} if isinstance(input, Operand) else {})
    use_sorter = sorter is not None and not table.is_sharded(table.ndim - 1)
    over = process_groups(table, table.shard_axes)
    if use_sorter:
        operands["sorter"] = table

    def local(sorted_sequence, input, sorter):
        if use_sorter:
            bad = (sorter < 0) | (sorter >= sorter.shape[-1])
            raise_if_any_rank(bad, over, RuntimeError, "torch.searchsorted(): sorter index out of range")
            return fn(_contiguous(sorted_sequence), _contiguous(input), **options, sorter=_contiguous(sorter))
        if sorter is not None:
            # `sorter` is the global order and does not apply to a shard, so the shard is sorted; counts need no global
            # order
            sorted_sequence = sorted_sequence.sort(-1)[0]
        return fn(_contiguous(sorted_sequence), _contiguous(input), **options)

    return Plan(local=local, operands=operands, layout=result)


@rule("bucketize")
def bucketize(input, boundaries: Operand, *, out_int32=False, right=False, fn):
    probe(fn, input, boundaries, out_int32=out_int32, right=right)
    table, values, result = _align_table_layouts(boundaries, input)
    return Plan(
        local=lambda input, boundaries: fn(
            _contiguous(input), _contiguous(boundaries), out_int32=out_int32, right=right
        ),
        operands={"boundaries": table} | ({"input": values} if isinstance(input, Operand) else {}),
        layout=result,
    )


def _contiguous(value: Any) -> Any:
    """Return a contiguous tensor: torch warns about others, or raises. A shard of a contiguous one may be strided."""
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def _align_table_layouts(table: Operand, values: Any) -> tuple[Layout, Layout, Layout]:
    """Return the layouts of the table, the values and the result, which is Partial over the axes of the table's rows.

    Leading dims take the sharding of the larger operand. If an axis shards both the table's rows and the values, the
    smaller of them is unsharded.
    """
    table_layout = table.layout
    value_layout = values.layout if isinstance(values, Operand) else Layout.replicate(table_layout.mesh, ())
    lead = table.ndim - 1
    if lead and table_layout.shape[:-1] != value_layout.shape[:-1]:
        raise RuntimeError(
            "torch.searchsorted(): boundaries tensor should be 1 dimension or the first N-1 dimensions of boundaries "
            f"tensor and input value tensor must match, but we got boundaries {list(table_layout.shape)} and input "
            f"{list(value_layout.shape)}"
        )
    large, small = (
        (table_layout, value_layout) if table_layout.numel > value_layout.numel else (value_layout, table_layout)
    )
    dims: list[tuple[DimSharding, ...]] = []
    used: set[int] = set()
    for d in range(lead):
        options = [x.dims[d] for x in (large, small) if x.axes_of(d) and not used & set(x.axes_of(d))]
        dims.append(options[0] if options else (DimSharding(table_layout.shape[d]),))
        used |= {a for f in dims[-1] for a in f.axes}

    def trailing_dims(layout: Layout, start: int, used_axes: set[int]) -> list[tuple[DimSharding, ...]]:
        tail = range(start, layout.ndim)
        return [(DimSharding(layout.shape[d]),) if used_axes & set(layout.axes_of(d)) else layout.dims[d] for d in tail]

    if large is table_layout:
        rows = trailing_dims(table_layout, lead, used)
        tail = trailing_dims(value_layout, lead, used | {a for f in rows[0] for a in f.axes})
    else:
        tail = trailing_dims(value_layout, lead, used)
        rows = trailing_dims(table_layout, lead, used | {a for d in tail for f in d for a in f.axes})
    partial_axes = table_layout.nontrivial_axes(a for f in rows[0] for a in f.axes)
    layouts = [Layout.make(table_layout.mesh, dims + last) for last in (rows, tail)]
    return layouts[0], layouts[1], layouts[1].with_partial(partial_axes)


@rule("isin", merged=True)
def isin(elements, test_elements, *, assume_unique=False, invert=False, fn):
    """Test each element on its rank. If `test_elements` is sharded, an all_reduce combines the ranks' results."""
    probe(fn, elements, test_elements, assume_unique=assume_unique, invert=invert)
    mesh = (elements if isinstance(elements, Operand) else test_elements).layout.mesh
    element_layout, test_layout = (
        x.layout if isinstance(x, Operand) else Layout.replicate(mesh, ()) for x in (elements, test_elements)
    )
    shared = set(element_layout.nontrivial_axes(element_layout.shard_axes)) & set(test_layout.shard_axes)
    target = element_layout
    if shared and test_layout.numel <= element_layout.numel:
        test_layout = test_layout.unshard([d for d in range(test_layout.ndim) if shared & set(test_layout.axes_of(d))])
    elif shared:
        target = element_layout.unshard(
            [d for d in range(element_layout.ndim) if shared & set(element_layout.axes_of(d))]
        )
    groups = process_groups(test_layout, test_layout.shard_axes)

    def local(elements, test_elements):
        options = {"assume_unique": assume_unique, "invert": invert and not groups}
        is_in = fn(_contiguous(elements), _contiguous(test_elements), **options)
        for group in groups:
            is_in = collectives.all_reduce(is_in, group, "max")
        return redistribute(~is_in if groups and invert else is_in, target, element_layout)

    operands = {"elements": target, "test_elements": test_layout}
    arguments = {"elements": elements, "test_elements": test_elements}
    return Plan(
        local=local,
        operands={k: v for k, v in operands.items() if isinstance(arguments[k], Operand)},
        layout=element_layout,
    )
