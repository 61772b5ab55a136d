"""What a rule returns: where operands must lie, what each rank computes, and where the result lies.

A rule is pure. It is called with `Operand`s in place of tensors and returns a `Plan`, or raises a ShardingError
(which every rank raises, since every rank plans the same), or returns None: no way without a gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..layout import Layout


class Operand:
    """A tensor argument as a rule sees it: its layout, dtype and device, no data."""

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


@dataclass(frozen=True)
class Plan:
    """One call, planned.

    local: called with local tensors; its parameters are named like the rule's (those it wants).
    takes: the names of what `local` is called with, in order, where its own parameters do not say it (torch's own
        functions, which are called with no Python in between).
    layout: of the result: a Layout, a tuple of them for several tensors, or None for what is not a tensor.
    operands: parameter name -> the layout its tensor must have first (a sequence for a list of tensors); the
        others stay where they are.
    whole: names of Replicate operands that enter replicated work only. All other Replicate operands get their
        gradients summed over the axes on which the work differs from rank to rank.
    copied: the result is a copy although torch would return a view: writing into it is refused.
    view: torch returns a view of the first tensor: where the local result is none, it counts as copied.
    may_view: torch returns a view of the first tensor or a copy, as its memory allows.
    joined: groups of dims of the first tensor that become one: whether that is a view, memory decides.
    unsure: the pieces' memory may not tell on all ranks; then ranks agree when someone writes.
    narrows: the results are slices of a cut dim of the first tensor.
    own: not what torch's function would give where one rank has all there is: random numbers by global index, say.
    """

    local: Callable[..., Any]
    layout: Layout | Sequence[Layout | None] | None
    operands: Mapping[str, Layout | Sequence[Layout]] = field(default_factory=dict)
    whole: Sequence[str] = ()
    copied: bool = False
    view: bool = False
    may_view: bool = False
    joined: Sequence[Sequence[int]] = ()
    unsure: bool = False
    narrows: bool = False
    takes: Sequence[str] = ()
    own: bool = False


def process_groups(layout: Layout, axes: Sequence[int]) -> tuple[ProcessGroup, ...]:
    """The process groups of those `axes` that have more than one rank."""
    return tuple(layout.mesh.get_group(a) for a in layout.nontrivial_axes(axes))
