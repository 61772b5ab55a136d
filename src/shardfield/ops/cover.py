"""Windows over the dims of a tensor in pieces: who makes which outputs, and what of other ranks' pieces that takes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..comm.fetch import Halo
from ..layout import Factor, Layout, Span, pieces
from .pad import Edge
from .window import Window, spans


def inside(part: Span, whole: Span) -> bool:
    """Whether a range lies in another; an empty one always does."""
    return part.start >= part.stop or (whole.start <= part.start and part.stop <= whole.stop)


class Cover:
    """This rank's part of an op that looks through a window along some dims, each cut by one axis if anything travels.

    held, owned: the inputs it has and the outputs it makes, by dim, in global indices. halos: for each cut dim, the
    exchange of what those outputs read elsewhere. factors: how the outputs are cut. edges: dims along which the field
    goes on beyond its ends; their windows look at the longer field, in whose indices `held` is.
    """

    def __init__(self, layout: Layout, windows: Mapping[int, Window], edges: Mapping[int, Edge] | None = None):
        self.layout, self.windows, self.edges = layout, dict(windows), edges or {}
        self.held: dict[int, Span] = {}
        self.owned: dict[int, Span] = {}
        self.factors: dict[int, Factor] = {}
        self.halos: list[Halo] = []
        for dim, window in self.windows.items():
            (factor,) = layout.dims[dim]
            lengths = pieces(factor)
            edge = self.edges.get(dim)
            made = window.owned(lengths if edge is None else edge.grown(lengths))
            at = layout.index(factor.axes)
            shift = 0 if edge is None else edge.before
            held = [Span(start + shift, stop + shift) for start, stop in spans(lengths)]
            self.held[dim], self.owned[dim] = held[at], spans(made)[at]
            self.factors[dim] = Factor(window.out, factor.axes, made if factor.axes else ())
            wanted = [window.reads(*span) for span in spans(made)]
            if any(not inside(want, has) for want, has in zip(wanted, held, strict=True)):
                group = layout.mesh.get_group(layout.wide(factor.axes)[0]) if layout.is_cut(dim) else None
                more = () if edge is None else (shift, edge.shown)
                self.halos.append(Halo.around(dim, lengths, wanted, at, group, *more))
        # what is copied here comes last: it does not travel as part of the corners
        self.halos.sort(key=lambda halo: halo.group is None)

    @property
    def reached(self) -> dict[int, Span]:
        """The inputs, by dim, that this rank has after `widen`: its own and those around them."""
        found = dict(self.held)
        for halo in self.halos:
            start, stop = found[halo.dim]
            found[halo.dim] = Span(start - halo.before, stop + halo.after)
        return found

    def widen(self, block: Tensor) -> Tensor:
        """The block with what its outputs read around it, inside the field. Differentiable; one exchange a cut dim."""
        for halo in self.halos:
            block = halo.widen(block)
        return block

    def result(self, layout: Layout) -> Layout:
        """`layout` with the dims of the windows cut as their outputs are."""
        for dim, factor in self.factors.items():
            layout = layout.with_dim(dim, factor)
        return layout
