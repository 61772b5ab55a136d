"""Windows over the dims of a tensor in pieces: who makes which outputs, and what of other ranks' pieces that takes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...comm.halo import Halo
from ...layout import DimSharding, Layout, Span, shard_sizes_of
from .pad import DimPadding
from .window import Window, shard_spans


def is_subspan(inner: Span, outer: Span) -> bool:
    """Whether a range lies in another; an empty one always does."""
    return inner.start >= inner.stop or (outer.start <= inner.start and inner.stop <= outer.stop)


class HaloPlan:
    """This rank's part of an op that looks through a window along some dims, each cut by one axis if anything travels.

    held, owned: the inputs it has and the outputs it makes, by dim, in global indices. halos: for each cut dim, the
    exchange of what those outputs read elsewhere. factors: how the outputs are cut. edges: dims along which the field
    goes on beyond its ends; their windows look at the longer field, in whose indices `held` is.
    """

    def __init__(
        self, layout: Layout, windows: Mapping[int, Window], dim_paddings: Mapping[int, DimPadding] | None = None
    ):
        self.layout, self.windows, self.dim_paddings = layout, dict(windows), dim_paddings or {}
        self.held: dict[int, Span] = {}
        self.owned: dict[int, Span] = {}
        self.out_shardings: dict[int, DimSharding] = {}
        self.halos: list[Halo] = []
        for dim, window in self.windows.items():
            (factor,) = layout.dims[dim]
            lengths = shard_sizes_of(factor)
            edge = self.dim_paddings.get(dim)
            made = window.owned(lengths if edge is None else edge.padded_sizes(lengths))
            at = layout.index(factor.axes)
            shift = 0 if edge is None else edge.before
            held = [Span(start + shift, stop + shift) for start, stop in shard_spans(lengths)]
            self.held[dim], self.owned[dim] = held[at], shard_spans(made)[at]
            self.out_shardings[dim] = DimSharding(window.out, factor.axes, made if factor.axes else ())
            wanted = [window.input_range(*span) for span in shard_spans(made)]
            if any(not is_subspan(want, has) for want, has in zip(wanted, held, strict=True)):
                group = (
                    layout.mesh.get_group(layout.nontrivial_axes(factor.axes)[0]) if layout.is_sharded(dim) else None
                )
                more = () if edge is None else (shift, edge.source_runs)
                self.halos.append(Halo.plan(dim, lengths, wanted, at, group, *more))
        # what is copied here comes last: it does not travel as part of the corners
        self.halos.sort(key=lambda halo: halo.group is None)

    @property
    def held_with_halo(self) -> dict[int, Span]:
        """The inputs, by dim, that this rank has after `widen`: its own and those around them."""
        found = dict(self.held)
        for halo in self.halos:
            start, stop = found[halo.dim]
            found[halo.dim] = Span(start - halo.before, stop + halo.after)
        return found

    def with_halo(self, block: Tensor) -> Tensor:
        """The block with what its outputs read around it, inside the field. Differentiable; one exchange a cut dim."""
        for halo in self.halos:
            block = halo.with_halo(block)
        return block

    def result(self, layout: Layout) -> Layout:
        """`layout` with the dims of the windows cut as their outputs are."""
        for dim, factor in self.out_shardings.items():
            layout = layout.with_dim(dim, factor)
        return layout
