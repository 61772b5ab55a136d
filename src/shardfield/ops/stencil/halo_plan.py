"""Plan of a stencil op on a sharded tensor: the outputs that each rank owns, and the halo exchange they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from ... import runtime
from ...comm.halo import Halo
from ...layout import DimSharding, Layout, Origin, Span, rescale, shard_sizes_of, starts
from .pad import DimPadding
from .window import Window


def is_subspan(inner: Span, outer: Span) -> bool:
    """Return whether `inner` is inside `outer`; an empty range is inside every range."""
    return inner.start >= inner.stop or (outer.start <= inner.start and inner.stop <= outer.stop)


def owned_sizes(window: Any, shard_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return `window.owned(shard_sizes)`, cached: the layers of a model at one resolution share it."""
    return _owned_sizes(window, tuple(shard_sizes)) if isinstance(window, Window) else window.owned(shard_sizes)


@runtime.memo
def _owned_sizes(window: Window, shard_sizes: tuple[int, ...]) -> tuple[int, ...]:
    return window.owned(shard_sizes)


def resamples(window: Any) -> bool:
    """Return whether the outputs are another resolution of the inputs, rather than the same one without its edges."""
    return window.stride > 1 if isinstance(window, Window) else window.out != window.size


# Largest accepted size of a field's largest shard, relative to its size in the proportions of the original resolution.
MAX_IMBALANCE = 1.25


def sharding_of_outputs(window: Any, sharding: DimSharding, cells: Sequence[int]) -> DimSharding:
    """Return the sharding of the outputs. `cells` are the shard sizes of the inputs with their padding.

    An output belongs to the rank that holds the center of its window, unless this leaves a rank with twice its
    proportion. If boundaries were rounded in this way at every resolution, they would drift until one rank has
    everything. The layout of a field at another resolution therefore records the original sharding (`Origin`) and has
    its proportions. Back at the original resolution, the field has the original sharding again.

    >>> sharding_of_outputs(Window(7, 3, kernel=2, stride=2), DimSharding(7, (0,), (3, 2, 2)), (3, 2, 2)).shard_sizes
    (1, 1, 1)
    """
    if not sharding.axes:
        return DimSharding(window.out)
    centered = DimSharding(window.out, sharding.axes, owned_sizes(window, cells))
    recorded = sharding.field
    first = recorded or Origin("field", *sharding)
    scaled = DimSharding(window.out, sharding.axes, rescale(first.shard_sizes, window.out))
    largest, proportion = max(centered.shard_sizes), max(scaled.shard_sizes)
    if recorded is None:
        keeps_centers = largest < 2 * proportion
    else:
        keeps_centers = not resamples(window) and largest <= MAX_IMBALANCE * proportion
    if keeps_centers:
        return centered.with_origins([first] if recorded or resamples(window) else ())
    return scaled.with_origins([first] if window.out != first.size else ())


class HaloPlan:
    """Halo exchange of one rank for an op with a window along some dims.

    A dim that needs an exchange must be sharded over one mesh axis. All ranges are in global indices.

    held: dim -> the inputs in this rank's shard.
    owned: dim -> the outputs that this rank computes.
    ranges: dim -> the inputs that each coord reads, for dims along which some rank reads inputs of another rank.
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
        self.ranges: dict[int, Callable[[int], Span]] = {}
        for dim, window in self.windows.items():
            (sharding,) = layout.dims[dim]
            shard_sizes = shard_sizes_of(sharding)
            padding = self.dim_paddings.get(dim)
            cells = shard_sizes if padding is None else padding.padded_sizes(shard_sizes)
            self.out_shardings[dim] = sharding_of_outputs(window, sharding, cells)
            out_sizes = shard_sizes_of(self.out_shardings[dim])
            coord = layout.index(sharding.axes)
            shift = 0 if padding is None else padding.before
            held, owned = starts(shard_sizes), starts(out_sizes)
            self.held[dim] = Span(held[coord] + shift, held[coord] + shift + shard_sizes[coord])
            self.owned[dim] = Span(owned[coord], owned[coord] + out_sizes[coord])

            def range_of(c: int, window: Any = window, owned: Any = owned, out_sizes: Any = out_sizes) -> Span:
                return window.input_range(owned[c], owned[c] + out_sizes[c])

            if any(
                not is_subspan(range_of(c), Span(start + shift, start + shift + n))
                for c, (start, n) in enumerate(zip(held, shard_sizes, strict=True))
            ):
                self.ranges[dim] = range_of

    @cached_property
    def halos(self) -> list[Halo]:
        """One exchange for each dim along which some rank reads inputs of another rank."""
        halos, layout = [], self.layout
        for dim, range_of in self.ranges.items():
            (sharding,) = layout.dims[dim]
            padding = self.dim_paddings.get(dim)
            axes = layout.nontrivial_axes(sharding.axes)
            assert len(axes) <= 1, f"dim {dim} of {layout} needs a halo over several mesh axes"  # ranks would block
            group = layout.mesh.get_group(axes[0]) if axes else None
            boundary = () if padding is None else (padding.before, padding.source_runs)
            coord = layout.index(sharding.axes)
            halos.append(Halo.plan(dim, shard_sizes_of(sharding), range_of, coord, group, *boundary))
        # Local copies come last: otherwise the exchanges of other dims would also send them, as corners.
        return sorted(halos, key=lambda halo: halo.group is None)

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
