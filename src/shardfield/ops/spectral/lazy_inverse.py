"""SparseSpectrum: a deferred spectrum of zeros and some blocks of modes, whose inverse is evaluated from the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...comm.consensus import Consensus
from ...layout import DimSharding, Layout, Origin
from ...tensor import Deferred, ShardTensor, wrap
from .mode_blocks import IndexRanges, as_slice, block_is_cheaper, overlaps, parse_block, roll_dims
from .truncation import resized_layout, truncated_ifft_unchecked


class SparseSpectrum(Deferred):
    """A spectrum that is zero outside some blocks, rolled by `shifts`; its field gets the layout `field_layout`.

    `dims` are the dims of modes; `real` marks that the last of them holds half a spectrum.
    """

    def __init__(self, layout: Layout, dtype, device, dims: Sequence[int], field_layout: Layout, real: bool):
        self.layout, self.dtype, self.device = layout, dtype, device
        self.dims, self.field_layout, self.real = tuple(dims), field_layout, real
        self.blocks: list[tuple[IndexRanges, ShardTensor]] = []
        self.shifts: dict[int, int] = {}
        self.grad_enabled = torch.is_grad_enabled()

    @property
    def requires_grad(self) -> bool:
        return self.grad_enabled and any(value.requires_grad for _, value in self.blocks)

    @property
    def is_replicated(self) -> bool:
        """Whether all blocks are Replicate, so that the field is computed without communication."""
        return all(value._layout.is_replicated for _, value in self.blocks)

    def __repr__(self) -> str:
        rolled = f", rolled by {self.shifts}" if any(self.shifts.values()) else ""
        kind = "half a spectrum" if self.real else "a spectrum"
        where = " and ".join(str([(r.start, r.stop, r.step) for r in runs]) for runs, _ in self.blocks)
        return f"{kind} of {tuple(self.layout.shape)} along {self.dims} with modes at {where or 'no index'}{rolled}"

    def roll(self, by: Mapping[int, int]) -> SparseSpectrum:
        """Return this spectrum rolled further."""
        other = SparseSpectrum(self.layout, self.dtype, self.device, self.dims, self.field_layout, self.real)
        other.blocks = list(self.blocks)
        other.shifts = {d: n for d in sorted({*self.shifts, *by}) if (n := self.shifts.get(d, 0) + by.get(d, 0))}
        return other

    def write_block(self, index: Any, value: Any) -> bool:
        """Add a block; return False if the index is not a block, or the block is too large or overlaps another."""
        runs = parse_block(self.layout.shape, index)
        if self.shifts or runs is None or value.__class__ is not ShardTensor or not value._dtype.is_complex:
            return False
        if tuple(map(len, runs)) != tuple(value.shape) or not block_is_cheaper(
            self.field_layout, self.dims, self.layout.shape, runs
        ):
            return False
        if any(len(r) != n for d, (r, n) in enumerate(zip(runs, self.layout.shape, strict=True)) if d not in self.dims):
            return False
        if any(overlaps(runs, other) for other, _ in self.blocks):
            return False
        self.blocks.append((runs, value.to(self.dtype).clone()))
        return True

    def materialize(self) -> ShardTensor:
        """Compute the dense spectrum. Communicates."""
        Consensus.start(self.layout.mesh, f"all of {self}").wait()
        with torch.set_grad_enabled(self.grad_enabled):
            zeros = torch.zeros(self.layout.local_shape, dtype=self.dtype, device=self.device)
            made = wrap(zeros, self.layout)
            for runs, value in self.blocks:
                made[tuple(map(as_slice, runs))] = value
            return roll_dims(made, self.shifts)._redistribute_to(self.layout)

    def inverse(self, dims: Sequence[int], sizes: Sequence[int | None], norm: str | None, real: bool) -> Any:
        """Return the field, of these sizes along `dims`; None if it does not follow from the blocks.

        If `dims` are some of the mode dims, the result is a `SparseSpectrum` with modes along the others.
        """
        left = tuple(d for d in self.dims if d not in dims)
        if set(dims) - set(self.dims) or (real and not (self.real and dims[-1] == self.dims[-1])):
            return None
        if (self.real and not real and self.dims[-1] in dims) or set(self.shifts) - set(self.dims) or not self.blocks:
            return None
        given = zip(dims, sizes, strict=True)
        goal = [out_size(self.layout.shape[d], n, real and d == dims[-1]) for d, n in given]
        if min(goal) < 1:
            return None
        like = resized_layout(self.field_layout, dims, goal)
        made: list[tuple[IndexRanges, Any]] = []
        for runs, value in self.blocks:
            modes = []
            for d, n in zip(dims, goal, strict=True):
                places = [(i + self.shifts.get(d, 0)) % self.layout.shape[d] for i in runs[d]]
                fit = [j for j, p in enumerate(places) if p < (n // 2 + 1 if real and d == dims[-1] else n)]
                if len(fit) < len(places):  # the array is cropped, as torch.fft does
                    value = value.index_select(d, torch.tensor(fit, dtype=torch.int64, device=self.device))
                modes.append(tuple(places[j] for j in fit))
            over = list(runs)
            for d, n in zip(dims, goal, strict=True):
                over[d] = range(n)
            made.append((over, truncated_ifft_unchecked(value, dims, modes, goal, norm, real, like)))
        total = _merge_blocks(made)
        if not left:
            return total[0][1] if len(total) == 1 else None
        return self._partial_inverse(left, like, total)

    def _partial_inverse(
        self, left: tuple[int, ...], like: Layout, made: list[tuple[IndexRanges, Any]]
    ) -> SparseSpectrum | None:
        """Return the spectrum along the dims `left`, after the inverse along the others; None if blocks overlap."""
        if any(overlaps(a, b) for i, (a, _) in enumerate(made) for b, _ in made[:i]):
            return None
        layout = made[0][1]._layout
        for d in left:
            layout = layout.with_dim(d, DimSharding(self.layout.shape[d]))
        other = SparseSpectrum(layout, self.dtype, self.device, left, like, self.real)
        other.blocks, other.shifts = made, {d: n for d, n in self.shifts.items() if d in left}
        return other


def out_size(modes: int, size: int | None, half: bool) -> int:
    """Return the size of the inverse of a dim of `modes`, for the argument `size` of torch.fft."""
    if size is not None:
        return size
    return 2 * (modes - 1) if half else modes


def field_of_modes(modes: Layout, shape: Sequence[int]) -> tuple[tuple[int, ...], bool, Layout] | None:
    """Return the mode dims of a block, whether the last holds half a spectrum, and the layout of the field.

    Each mode dim has one origin that fits a spectrum of `shape`; the field is sharded along it as the origin, and along
    other dims as the block. None for a block without origins, or with several that fit.
    """
    if modes.ndim != len(shape) or not modes.is_simple:
        return None
    found: dict[int, Origin] = {}
    for dim, size in enumerate(shape):
        of_modes = [o for o in modes.origins(dim) if o.kind in ("modes", "half modes")]
        fitting = [o for o in of_modes if size == (o.size if o.kind == "modes" else o.size // 2 + 1)]
        if len(fitting) > 1 or (of_modes and not fitting):
            return None
        if fitting:
            found[dim] = fitting[0]
    half = [dim for dim, origin in found.items() if origin.kind == "half modes"]
    axes = [axis for origin in found.values() for axis in origin.axes]
    if not found or len(half) > 1 or len(set(axes)) < len(axes):
        return None
    factors = {dim: DimSharding(o.size, o.axes, o.shard_sizes) for dim, o in found.items()}
    # an axis that shards the field along a mode dim may shard the block along another dim: the field's is kept
    busy = [d for d in range(modes.ndim) if d not in found and set(modes.axes_of(d)) & set(axes)]
    layout = modes.unshard([*busy, *found]).bare.with_partial(())
    field = layout.with_dims([(factors[d],) if d in factors else f for d, f in enumerate(layout.dims)])
    return (*[d for d in found if d not in half], *half), bool(half), field


def _merge_blocks(blocks: list[tuple[IndexRanges, Any]]) -> list[tuple[IndexRanges, Any]]:
    """Add blocks with equal index ranges."""
    found: list[tuple[IndexRanges, Any]] = []
    for runs, value in blocks:
        same = next((i for i, (other, _) in enumerate(found) if other == runs), None)
        if same is None:
            found.append((runs, value))
        else:
            found[same] = (runs, found[same][1] + value)
    return found
