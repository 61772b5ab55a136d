"""Looking values up in others. Values that are cut stay; a cut table is asked on every rank and answers are summed."""

from __future__ import annotations

from typing import Any

import torch

from ...comm import collectives
from ...dispatch.plan import Operand, Plan, process_groups
from ...dispatch.registry import rule
from ...layout import DimSharding, Layout
from ...redistribute import redistribute
from .._common.probe import probe


@rule("searchsorted")
def searchsorted(sorted_sequence: Operand, input, *, out_int32=False, right=False, side=None, sorter=None, fn):
    """How many of a row lie below a value is the sum of how many of each block do."""
    options = {"out_int32": out_int32, "right": right, "side": side}
    probe(fn, sorted_sequence, input, **options)
    table, values, result = _align_table_layouts(sorted_sequence, input)
    if sorter is not None and (sorter.shape != sorted_sequence.shape or sorter.dtype is not torch.int64):
        raise RuntimeError("torch.searchsorted(): sorter must have the shape of boundaries and dtype long")
    operands = {"sorted_sequence": table} | ({"input": values} if isinstance(input, Operand) else {})
    follows = sorter is not None and not table.is_sharded(table.ndim - 1)
    if follows:
        operands["sorter"] = table

    def local(sorted_sequence, input, sorter):
        if follows:
            return fn(_contiguous(sorted_sequence), _contiguous(input), **options, sorter=_contiguous(sorter))
        if sorter is not None:
            # the order of the whole says nothing about a block, but a count asks for no order of its own: any will do
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
    """Contiguous: torch warns of others, and a piece of a contiguous tensor may be one."""
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def _align_table_layouts(table: Operand, values: Any) -> tuple[Layout, Layout, Layout]:
    """Where the table and the values must lie, and the result: Partial over the axes that cut the table's rows.

    Leading dims are cut alike, as the larger of the two has them. An axis that cuts both the table's rows and the
    values makes the smaller of them whole.
    """
    have = table.layout
    want = values.layout if isinstance(values, Operand) else Layout.replicate(have.mesh, ())
    lead = table.ndim - 1
    if lead and have.shape[:-1] != want.shape[:-1]:
        raise RuntimeError(
            "torch.searchsorted(): boundaries tensor should be 1 dimension or the first N-1 dimensions of boundaries "
            f"tensor and input value tensor must match, but we got boundaries {list(have.shape)} and input "
            f"{list(want.shape)}"
        )
    large, small = (have, want) if have.numel > want.numel else (want, have)
    dims: list[tuple[DimSharding, ...]] = []
    used: set[int] = set()
    for d in range(lead):
        options = [x.dims[d] for x in (large, small) if x.axes_of(d) and not used & set(x.axes_of(d))]
        dims.append(options[0] if options else (DimSharding(have.shape[d]),))
        used |= {a for f in dims[-1] for a in f.axes}

    def rest(layout: Layout, start: int, taken: set[int]) -> list[tuple[DimSharding, ...]]:
        tail = range(start, layout.ndim)
        return [(DimSharding(layout.shape[d]),) if taken & set(layout.axes_of(d)) else layout.dims[d] for d in tail]

    if large is have:
        rows = rest(have, lead, used)
        tail = rest(want, lead, used | {a for f in rows[0] for a in f.axes})
    else:
        tail = rest(want, lead, used)
        rows = rest(have, lead, used | {a for d in tail for f in d for a in f.axes})
    summed = have.nontrivial_axes(a for f in rows[0] for a in f.axes)
    placed = [Layout.make(have.mesh, dims + last) for last in (rows, tail)]
    return placed[0], placed[1], placed[1].with_partial(summed)


@rule("isin", merged=True)
def isin(elements, test_elements, *, assume_unique=False, invert=False, fn):
    """The elements stay. Where the others are cut, each rank looks among its part, and any find counts."""
    probe(fn, elements, test_elements, assume_unique=assume_unique, invert=invert)
    mesh = (elements if isinstance(elements, Operand) else test_elements).layout.mesh
    held, among = (
        x.layout if isinstance(x, Operand) else Layout.replicate(mesh, ()) for x in (elements, test_elements)
    )
    shared = set(held.nontrivial_axes(held.shard_axes)) & set(among.shard_axes)
    target = held
    if shared and among.numel <= held.numel:
        among = among.unshard([d for d in range(among.ndim) if shared & set(among.axes_of(d))])
    elif shared:
        target = held.unshard([d for d in range(held.ndim) if shared & set(held.axes_of(d))])
    over = process_groups(among, among.shard_axes)

    def local(elements, test_elements):
        found = fn(elements, test_elements, assume_unique=assume_unique, invert=invert and not over)
        for group in over:
            found = collectives.all_reduce(found, group, "max")
        return redistribute(~found if over and invert else found, target, held)

    operands = {"elements": target, "test_elements": among}
    given = {"elements": elements, "test_elements": test_elements}
    return Plan(local=local, operands={k: v for k, v in operands.items() if isinstance(given[k], Operand)}, layout=held)
