"""LazySpectrum: the deferred transform of a field along sharded dims.

A block of modes that is read from it is a truncated transform. On one device the block would be a view of the spectrum.
So values written into a block are copied into the spectrum when it is materialized; after that, a write into either
rebinds the block to a view of the spectrum. While its spectrum is deferred, a field is copied before it is written and
before its local tensor is exported. Ranks compare their calls whenever they are about to communicate.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ..._compat.storage import storage_id, storage_of
from ...comm.consensus import Consensus
from ...comm.grad_deferral import has_deferred
from ...dispatch.plan import process_groups
from ...errors import ShardingError
from ...layout import Layout
from ...tensor import Deferred, ShardTensor, has_later_hooks, wrap
from .mode_blocks import (
    IndexRanges,
    as_slice,
    block_is_cheaper,
    format_index,
    overlaps,
    parse_block,
    roll_dims,
    with_mode_origins,
)
from .mode_placement import choose_placement
from .partial_dft import opposite_norm
from .truncation import truncated_fft_unchecked


class LazySpectrum(Deferred):
    """The spectrum of a field along `dims`, rolled by `shifts`.

    `compute(field)` computes it eagerly; `is_inverse` marks an inverse transform.
    """

    def __init__(
        self, source: ShardTensor, dims, norm, real: bool, is_inverse: bool, layout: Layout, compute: Callable
    ):
        local = source._local_tensor
        exposed = runtime.active.exposed_storages
        if local.is_inference() and storage_of(local) in exposed:  # it has no version counter to detect writes
            local = local.clone()
        self.source: ShardTensor | None = wrap(local, source._layout)
        self.dims, self.norm, self.real, self.is_inverse = tuple(dims), norm, real, is_inverse
        self.layout, self.compute = layout, compute
        self.shifts: dict[int, int] = {}
        self.blocks: list[SpectrumBlock] = []  # until it is materialized
        self.block_refs: list[weakref.ref[SpectrumBlock]] = []  # after that
        self.local: Tensor | None = None  # the materialized spectrum
        self.version = None if local.is_inference() else local._version
        self.grad_enabled = torch.is_grad_enabled()
        runtime.active.write_observers.add(self)

    @property
    def requires_grad(self) -> bool:
        return self.grad_enabled and self.field.requires_grad

    @property
    def field(self) -> ShardTensor:
        """The source, until the spectrum is materialized."""
        assert self.source is not None
        return self.source

    def __repr__(self) -> str:
        kind = "inverse " if self.is_inverse else "half " if self.real else ""
        rolled = f", rolled by {self.shifts}" if any(self.shifts.values()) else ""
        return f"the {kind}spectrum of {self.field._layout} along {self.dims}, norm {self.norm}{rolled}"

    def roll(self, by: Mapping[int, int]) -> LazySpectrum | None:
        """Return this spectrum rolled further; None if blocks of it were read, which are views of this one."""
        if self.blocks:
            return None
        other = LazySpectrum(self.field, self.dims, self.norm, self.real, self.is_inverse, self.layout, self.compute)
        other.shifts = {d: n for d in sorted({*self.shifts, *by}) if (n := self.shifts.get(d, 0) + by.get(d, 0))}
        other.grad_enabled, other.version = self.grad_enabled and torch.is_grad_enabled(), self.version
        return other

    def materialize(self) -> ShardTensor:
        """Compute the spectrum, with the values that were written into its blocks. Communicates."""
        wrote = any(b.maybe_written for b in self.blocks)  # may differ between ranks
        anyone = Consensus.start(self.layout.mesh, f"all of {self}", problem=self._write_conflict(), flag=wrote).wait()
        with torch.set_grad_enabled(self.grad_enabled):
            made = roll_dims(self.compute(self.field), self.shifts)._redistribute_to(self.layout)
        if anyone:
            for block in self.blocks:
                made[tuple(map(as_slice, block.runs))] = wrap(block.local, block.layout)
        self.local, self.source = made._local_tensor, None
        # From here on blocks keep the spectrum alive, and not the reverse: a cycle would need garbage collection.
        for block in self.blocks:
            block.spectrum = self
        self.block_refs, self.blocks = [weakref.ref(b) for b in self.blocks], []
        return made

    def read_block(self, index: Any) -> ShardTensor | None:
        """Return the modes at an index, replicated or sharded; None if it is not a block, or the block is too large.

        None too in a checkpoint that the spectrum was made before: it would recompute with the full spectrum, if that
        has been read by then.
        """
        if has_later_hooks(self):
            return None
        words = f"{self}{format_index(index)}{'' if self._records_grad() else ', no grad'}"
        with Consensus.start(self.layout.mesh, words, problem=self._write_conflict()) as check:
            return self._read_block(index, check)

    def _read_block(self, index: Any, check: Consensus) -> ShardTensor | None:
        shape = self.layout.shape
        runs = parse_block(shape, index)
        field = self.field
        if (
            runs is None
            or set(self.shifts) - set(self.dims)
            or not block_is_cheaper(field._layout, self.dims, shape, runs)
        ):
            return None
        grad = self._records_grad()
        block = next((b for b in self.blocks if b.runs == runs and b.grad_enabled == grad), None)
        if block is None:
            if any(overlaps(b.runs, runs) for b in self.blocks):
                return None
            sign = -1 if self.is_inverse else 1
            modes = [tuple(sign * (i - self.shifts.get(d, 0)) % shape[d] for i in runs[d]) for d in self.dims]
            with torch.set_grad_enabled(grad):
                found = truncated_fft_unchecked(
                    field, self.dims, modes, opposite_norm(self.norm) if self.is_inverse else self.norm
                )
                check.wait()  # the comparison was in flight during the local transform
                found = found._redistribute_to(self._block_layout(found, grad))
                if any(d not in self.dims and len(r) < shape[d] for d, r in enumerate(runs)):
                    found = found[tuple(slice(None) if d in self.dims else as_slice(r) for d, r in enumerate(runs))]
                if found._local_tensor._is_view():  # the block must have a storage of its own
                    found = found.clone()
            block = SpectrumBlock(runs, found._local_tensor, self._with_origins(found._layout), grad)
            self.blocks.append(block)
        return block.as_view()

    def _block_layout(self, modes: ShardTensor, grad: bool) -> Layout:
        """Return the placement of a block that is a partial sum.

        The block will most likely be multiplied by a weight. Replicated modes then cost an all_reduce of the weight's
        gradient, unless gradients are averaged over these ranks later.
        """
        layout = modes._layout
        deferring = runtime.active.deferring_groups
        reduces = grad and not (deferring and has_deferred(process_groups(layout, layout.partial_axes)))
        return choose_placement(
            layout, self.dims, modes._dtype.itemsize, grad_bytes=math.inf if reduces else 0.0, grad=grad
        )

    def _records_grad(self) -> bool:
        return self.grad_enabled and torch.is_grad_enabled()

    def _with_origins(self, modes: Layout) -> Layout:
        """Return the layout of a block of modes whose mode dims carry the sharding of the field's dims as `Origin`.

        A spectrum that is assembled from products of the block is then inverted into that sharding
        (`lazy_spectrum.defer_block_write`).
        """
        return modes if self.is_inverse else with_mode_origins(modes, self.field._layout, self.dims, self.real)

    def _write_conflict(self) -> str | None:
        """Return the error text if the field was written after the transform, bypassing `before_write`; else None."""
        if self.version is None or self.field._version == self.version:
            return None
        return (
            "the local tensor of the field was written after its transform was called and before the spectrum was "
            "used; write into the field itself, or transform a clone() of it"
        )

    # ------------------------------------------------------------------ writes

    def before_write(self, target: Tensor) -> None:
        """Take a snapshot of the field, or rebind the blocks to views, before a write through `target`."""
        self.before_export(target)
        at = storage_address(target)
        if self.local is not None and (
            at == storage_address(self.local) or any(at == storage_address(b.local) for b in self._live_blocks())
        ):
            self._rebind_views()

    def before_export(self, target: Tensor) -> None:
        """Take a snapshot of the field, or mark blocks as possibly written, when `target` is exported."""
        if self.source is None:
            return
        at = storage_address(target)
        if at == storage_address(self.source._local_tensor) and self._write_conflict() is None:
            with torch.set_grad_enabled(self.grad_enabled):
                self.source = wrap(self.source._local_tensor.clone(), self.source._layout)
            if self.version is not None:
                self.version = self.source._version
        for block in self.blocks:
            block.maybe_written |= at == storage_address(block.local)

    def _live_blocks(self) -> list[SpectrumBlock]:
        return [b for b in (r() for r in self.block_refs) if b is not None]

    def _rebind_views(self) -> None:
        """Rebind the tensors of all blocks to views of the materialized spectrum; mark views of them as stale."""
        assert self.local is not None
        spectrum = wrap(self.local, self.layout)
        left, self.block_refs = self._live_blocks(), []
        while left:
            block = left.pop()
            for tensor in [t for t in (r() for r in block.views) if t is not None]:
                view = spectrum[tuple(map(as_slice, block.runs))]
                tensor._local_tensor, tensor._layout = view._local_tensor, view._layout
                tensor._copied_view, tensor._narrowed = view._copied_view, view._narrowed
            for tensor in [t for t in (r() for r in block.views_of_views) if t is not None]:
                tensor.__dict__.pop("_local_tensor", None)
                tensor._deferred = _StaleView(tensor._layout)


class _StaleView(Deferred):
    """A view of a block of a spectrum that was written since: reading it raises.

    On one device it would see the write. Raising when it is read, and not when the spectrum is written, gives the same
    error on all ranks: they read the same tensors, but one of them may keep a view alive that others have dropped.
    """

    requires_grad = False  # type: ignore[assignment]

    def __init__(self, layout: Layout):
        self.layout = layout

    def materialize(self) -> ShardTensor:
        raise ShardingError(
            "this tensor is a view of a block of modes whose spectrum was written since; on one device it would see "
            "the write. Take it from the spectrum with one index, or clone() it before the spectrum is written"
        )


class SpectrumBlock:
    """A block of modes that was read from a spectrum, and the tensors that are views of it.

    It is the `_copied_view` of these tensors and of their views: `write_is_lost` decides if writes are refused.
    """

    def __init__(self, runs: IndexRanges, local: Tensor, layout: Layout, grad: bool):
        self.runs, self.grad_enabled = runs, grad
        self.spectrum: LazySpectrum | None = None  # set when the spectrum is materialized
        self.local, self.layout = local, layout
        self.views: list[weakref.ref[ShardTensor]] = []
        self.views_of_views: list[weakref.ref[ShardTensor]] = []
        self.maybe_written = False

    def as_view(self) -> ShardTensor:
        """Return a new ShardTensor of the block."""
        made = wrap(self.local, self.layout)
        made._copied_view = self  # type: ignore[assignment]
        self.views.append(weakref.ref(made))
        return made

    def add_view(self, tensor: ShardTensor) -> None:
        """Keep track of a view of one of `views` (see `write_tracking.set_copied_view`)."""
        self.views_of_views = [r for r in self.views_of_views if r() is not None]
        self.views_of_views.append(weakref.ref(tensor))

    def write_is_lost(self) -> bool:
        return self.spectrum is not None


def storage_address(tensor: Tensor) -> int:
    """Return an id of the storage: tensors that share a storage have the same id."""
    return storage_id(tensor)
