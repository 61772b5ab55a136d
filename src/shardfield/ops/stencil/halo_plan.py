"""Plan of a stencil op on a sharded tensor: the outputs that each rank owns, and the halo exchange they need."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...comm.halo import Halo
from ...layout import DimSharding, Layout, Span, shard_sizes_of
from .pad import DimPadding
from .window import Window, shard_spans


def is_subspan(inner: Span, outer: Span) -> bool:
    """Return whether `inner` is inside `outer`; an empty range is inside every range."""
    return inner.start >= inner.stop or (outer.start <= inner.start and inner.stop <= outer.stop)


class HaloPlan:
    """Halo exchange of one rank for an op with a window along some dims.

    A dim that needs an exchange must be sharded over one mesh axis. All ranges are in global indices.

    held: dim -> the inputs in this rank's shard.
    owned: dim -> the outputs that this rank computes.
    halos: one exchange for each dim along which some rank reads inputs of another rank.
    out_shardings: dim -> the sharding of the outputs.
    dim_paddings: dim -> boundary condition of the field. The window of such a dim reads the padded field, and `held`
        is in indices of the padded field.
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
            (sharding,) = layout.dims[dim]
            shard_sizes = shard_sizes_of(sharding)
            padding = self.dim_paddings.get(dim)
            out_sizes = window.owned(shard_sizes if padding is None else padding.padded_sizes(shard_sizes))
            coord = layout.index(sharding.axes)
            shift = 0 if padding is None else padding.before
            held = [Span(start + shift, stop + shift) for start, stop in shard_spans(shard_sizes)]
            self.held[dim], self.owned[dim] = held[coord], shard_spans(out_sizes)[coord]
            self.out_shardings[dim] = DimSharding(window.out, sharding.axes, out_sizes if sharding.axes else ())
            input_ranges = [window.input_range(*span) for span in shard_spans(out_sizes)]
            if any(not is_subspan(needed, local) for needed, local in zip(input_ranges, held, strict=True)):
                group = (
                    layout.mesh.get_group(layout.nontrivial_axes(sharding.axes)[0]) if layout.is_sharded(dim) else None
                )
                boundary = () if padding is None else (shift, padding.source_runs)
                self.halos.append(Halo.plan(dim, shard_sizes, input_ranges, coord, group, *boundary))
        # Local copies come last: otherwise the exchanges of other dims would also send them, as corners.
        self.halos.sort(key=lambda halo: halo.group is None)

    @property
    def held_with_halo(self) -> dict[int, Span]:
        """Dim -> the inputs that this rank holds after `with_halo`."""
        spans = dict(self.held)
        for halo in self.halos:
            start, stop = spans[halo.dim]
            spans[halo.dim] = Span(start - halo.before, stop + halo.after)
        return spans

    def with_halo(self, block: Tensor) -> Tensor:
        """Return the local block extended by its halo. Differentiable; one exchange per sharded dim."""
        for halo in self.halos:
            block = halo.with_halo(block)
        return block

    def result(self, layout: Layout) -> Layout:
        """Return `layout` with the window dims sharded like the outputs."""
        for dim, sharding in self.out_shardings.items():
            layout = layout.with_dim(dim, sharding)
        return layout
