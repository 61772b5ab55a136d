"""The result of a rule: operand layouts, the local computation, the result layout, and how the result aliases.

A rule is pure. It is called with `Operand`s in place of tensors and returns a `Plan`. It raises a ShardingError to
refuse the call (all ranks plan the same, so all raise), and returns None to fall back to a gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..layout import Layout


class Operand:
    """A tensor argument as a rule sees it: layout, dtype and device, no data."""

    __slots__ = ("layout", "dtype", "device", "position")

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, at: int):
        self.layout, self.dtype, self.device, self.position = layout, dtype, device, at

    @property
    def shape(self) -> torch.Size:
        return self.layout.shape

    @property
    def ndim(self) -> int:
        return self.layout.ndim

    def dim(self) -> int:
        return self.layout.ndim

    def size(self, dim: int | None = None):
        return self.layout.shape if dim is None else self.layout.shape[dim]

    def numel(self) -> int:
        return self.layout.numel

    def __repr__(self) -> str:
        return repr(self.layout)


class Returns(Enum):
    """How the result of a function on one device relates to the memory of its first tensor."""

    NEW = "a new tensor"
    VIEW = "a view"
    VIEW_OR_COPY = "a view where the strides allow it, else a copy"
    LOST_VIEW = "a view, of which this plan returns a copy: writing into the result is refused"


@dataclass(frozen=True)
class ViewKind:
    """How a result aliases the first tensor of the call, compared with the same call on one device.

    returns: what torch returns. For VIEW, a local result in other memory counts as LOST_VIEW.
    of_slice: the results are slices along a sharded dim, so a local view does not prove that the global one exists.
    merged: groups of dims of the first tensor that become one dim. Strides decide whether that is a view.
    ranks_differ: local strides may decide differently on different ranks; a write then needs a consensus.
    splits: dims are split and none are joined: a reshape of the result is the first tensor.
    """

    returns: Returns = Returns.NEW
    of_slice: bool = False
    merged: Sequence[Sequence[int]] = ()
    ranks_differ: bool = False
    splits: bool = False

    @staticmethod
    def view(*, lost: bool = False, of_slice: bool = False, ranks_differ: bool = False) -> ViewKind:
        """Return the ViewKind of a function that returns a view. `lost`: this plan returns a copy instead."""
        return ViewKind(Returns.LOST_VIEW if lost else Returns.VIEW, of_slice=of_slice, ranks_differ=ranks_differ)


NEW_TENSOR = ViewKind()


@dataclass(frozen=True)
class Plan:
    """The plan of one call.

    local: function of the local tensors; its parameters are a subset of the rule's, under the same names.
    takes: names of the arguments of `local`, in order, where `local` is a function of torch without a signature.
    layout: layout of the result: a Layout, a tuple of Layouts for several tensors, None if the result is not a tensor.
    operands: parameter name -> layout to which its tensor is redistributed first (a sequence for a list of tensors);
        the other operands keep their layouts.
    complete_grads: names of Replicate operands whose gradients `local` leaves complete on every rank. The gradients of
        all other Replicate operands are summed over the axes on which the work differs from rank to rank.
    view: how the result aliases the first tensor; a new tensor by default.
    saves_views: backward of `local` may save a view of an operand where strides allow one, a copy elsewhere. A rank
        with an empty operand, whose strides allow any view, computes with a copy of it.
    own: `local` differs from torch's function even on a mesh of one rank, as for random numbers by global index.
    unshared: nothing but the caller of `local` refers to its result, not even the graph, so that it may be overwritten.
    """

    local: Callable[..., Any]
    layout: Layout | Sequence[Layout | None] | None
    operands: Mapping[str, Layout | Sequence[Layout]] = field(default_factory=dict)
    complete_grads: Sequence[str] = ()
    view: ViewKind = NEW_TENSOR
    takes: Sequence[str] = ()
    saves_views: bool = False
    own: bool = False
    unshared: bool = False


def process_groups(layout: Layout, axes: Sequence[int]) -> tuple[ProcessGroup, ...]:
    """Return the process groups of the `axes` that have more than one rank."""
    return tuple([layout.group(a) for a in layout.nontrivial_axes(axes)])
