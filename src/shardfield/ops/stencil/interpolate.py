"""Resampling of a field that is cut along any of its dims.

Each rank makes the outputs that lie in its piece and asks for the inputs they are made of (see `taps.py`). Where these
begin and end so that torch's own kernel, given them alone, does the same as on the whole field, it does the work: so
it is for whole factors, and for cuts that fit the ratio of the sizes. Elsewhere the taps are summed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import trace_state
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import rule
from ...layout import DimSharding, shard_sizes_of
from .._common.probe import HALF_DTYPES
from ..shape.flip_roll import shard_by_one_axis
from .halo_plan import HaloPlan, is_subspan
from .resample_weights import ANTIALIASED_TAPS, CHANNELS_LAST, TAPS, Taps, nearest
from .window import shard_spans


class ResampleArgs(NamedTuple):
    """What every local call shares. `factors` are the scale factors that torch's kernels are to work with."""

    mode: str
    align_corners: bool | None
    antialias: bool
    factors: tuple[float, ...] | None

    def run(self, input: Tensor, sizes: Sequence[int]) -> Tensor:
        how: Any = {"mode": self.mode, "align_corners": self.align_corners, "antialias": self.antialias}
        if self.factors is None:
            return F.interpolate(input, size=list(sizes), **how)
        return F.interpolate(input, scale_factor=list(self.factors), **how)

    def taps(
        self, shape: Sequence[int], out: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> dict[int, Taps]:
        """The taps of every spatial dim of a field of `shape`, by dim."""
        factors = self.factors or (None,) * len(out)
        dims = [(d, *sizes) for d, sizes in enumerate(zip(shape[2:], out, factors, strict=True), 2)]
        if self.mode in ("nearest", "nearest-exact"):
            result = (*shape[:2], *out)
            return {d: nearest(n, m, f, self.mode, result, dtype, device) for d, n, m, f in dims}
        table = (ANTIALIASED_TAPS if self.antialias else TAPS)[self.mode]
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        return {d: table(n, m, f, bool(self.align_corners), precise) for d, n, m, f in dims}


@rule("interpolate")
def interpolate(
    input: Operand,
    size=None,
    scale_factor=None,
    mode="nearest",
    align_corners=None,
    recompute_scale_factor=None,
    antialias=False,
    *,
    fn,
):
    """Halos along cut spatial dims; nothing travels for other cuts, nor for the nearest neighbour."""
    how = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
    out = fn(empty_probe(input), size, scale_factor, recompute_scale_factor=recompute_scale_factor, **how).shape[2:]
    factors = None
    if scale_factor is not None and not recompute_scale_factor and mode != "area":
        each = scale_factor if isinstance(scale_factor, (list, tuple)) else (scale_factor,) * len(out)
        factors = tuple(float(f) for f in each)
    return plan_resample(input, out, ResampleArgs(mode, align_corners, antialias, factors))


# what F.interpolate ends in: the mode, and whether antialiased
KERNELS = {
    **{f"upsample_nearest{n}d": ("nearest", False) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": ("nearest-exact", False) for n in (1, 2, 3)},
    "upsample_linear1d": ("linear", False),
    "upsample_bilinear2d": ("bilinear", False),
    "upsample_trilinear3d": ("trilinear", False),
    "upsample_bicubic2d": ("bicubic", False),
    "_upsample_bilinear2d_aa": ("bilinear", True),
    "_upsample_bicubic2d_aa": ("bicubic", True),
    "_upsample_lanczos2d_aa": ("lanczos", True),
}


@rule(*KERNELS)
def upsample(input: Operand, output_size, *rest, fn, **named):
    """The same under the names of the kernels; they take the factors as a list or one by one."""
    mode, antialias = KERNELS[fn.__name__]
    out = fn(empty_probe(input), output_size, *rest, **named).shape[2:]
    given = [*rest, *named.values()]
    corners = None if mode.startswith("nearest") else named.get("align_corners", next(iter(rest), None))
    numbers = [n for v in given if not isinstance(v, bool) for n in (v if isinstance(v, (list, tuple)) else [v])]
    if any(n is not None for n in numbers) and (len(numbers) != len(out) or None in numbers):
        return None  # a factor for some dims only
    factors = None if None in numbers or not numbers else tuple(map(float, numbers))
    return plan_resample(input, out, ResampleArgs(mode, corners, antialias, factors))


def empty_probe(input: Operand) -> Tensor:
    """A tensor by whose shape torch judges a call: with no samples in it, so that nothing is computed.

    Kernels of devices want some.
    """
    if input.device.type == "cpu":
        return torch.empty((0, *input.shape[1:]), dtype=input.dtype)
    return torch.empty((1, *input.shape[1:]), dtype=input.dtype, device="meta")


def plan_resample(input: Operand, out: Sequence[int], call: ResampleArgs) -> Plan | None:
    """Who makes which outputs, and of what."""
    on_cpu = input.device.type == "cpu"
    if call.factors and ("linear" in call.mode or call.antialias) and on_cpu:
        # torch copies a dim whose size stays; a trace forgets to
        sizes = zip(input.shape[2:], out, call.factors, strict=True)
        call = call._replace(factors=tuple(1.0 if n == m else f for n, m, f in sizes))
    one = torch.ones([1] * input.ndim, dtype=input.dtype, device=input.device)
    dtype = call._replace(factors=None).run(one, [1] * len(out)).dtype  # torch's verdict on that
    if dtype == torch.uint8 and not call.mode.startswith("nearest"):
        # torch rounds these in ways that depend on the number of channels
        if call.factors and any(int(n * f) != m for n, f, m in zip(input.shape[2:], call.factors, out, strict=True)):
            return None
        layout = input.layout.unshard(range(1, input.ndim))
        result = layout.with_dims([*layout.dims[:2], *((DimSharding(n),) for n in out)])

        def here(input: Tensor) -> Tensor:
            if trace_state.tracer is not None:
                raise NotImplementedError("bytes are not rounded in a program as torch's kernels do")
            return call.run(input, out)

        return Plan(local=here, operands={"input": layout}, layout=result)
    taps = call.taps(input.shape, out, dtype, input.device)
    layout = shard_by_one_axis(
        input.layout, [d for d in taps if not needs_no_halo(taps[d], shard_sizes_of(input.layout.dims[d][0]))]
    )
    windows: Any = taps  # they answer what windows do
    cover = HaloPlan(layout, windows)
    make = LocalResample(call, cover, taps, dtype, input.device).make
    return Plan(local=make, takes=["input"], operands={"input": layout}, layout=cover.result(layout))


def needs_no_halo(taps: Taps, lengths: Sequence[int]) -> bool:
    """Whether every piece makes its outputs of its own cells alone."""
    return all(
        is_subspan(taps.input_range(*made), held)
        for made, held in zip(shard_spans(taps.owned(lengths)), shard_spans(lengths), strict=True)
    )


class KernelCrop(NamedTuple):
    """One dim of a local call: `length` cells of the block from `start`; `number` of the results from `skip`."""

    start: int
    length: int
    out_size: int
    skip: int
    number: int


class LocalResample:
    """What one rank does."""

    def __init__(
        self, call: ResampleArgs, halo_plan: HaloPlan, taps: dict[int, Taps], dtype: torch.dtype, device: torch.device
    ):
        self.call, self.halo_plan, self.taps, self.dtype = call, halo_plan, taps, dtype
        shrinking = sorted(taps, key=lambda d: taps[d].out / taps[d].size)
        self.steps = [
            taps[d].weighted_sums(d, halo_plan.held_with_halo[d], halo_plan.owned[d], device) for d in shrinking
        ]
        boxes = [self._kernel_crop(d) for d in taps]
        self.crops = [b for b in boxes if b is not None]
        self.use_kernel = (
            len(self.crops) == len(boxes) and all(b.out_size for b in self.crops) and self._kernel_matches(device)
        )

    def _kernel_crop(self, dim: int) -> KernelCrop | None:
        """The part of a dim that torch can be given for the whole; None if there is none."""
        taps, (first, stop) = self.taps[dim], self.halo_plan.owned[dim]
        factor = None if self.call.factors is None else self.call.factors[dim - 2]
        if not self.halo_plan.layout.is_sharded(dim):
            fits = factor is None or int(taps.size * factor) == taps.out
            return KernelCrop(0, taps.size, taps.out, 0, taps.out) if fits else None
        if taps.ratio is None or first >= stop:
            return None
        p, q = taps.ratio
        low, high = taps.input_range(first, stop)
        start, end = low // p * p, -(-high // p) * p
        reached, made = self.halo_plan.held_with_halo[dim], (end - start) // p * q
        if start < reached.start or end > reached.stop:
            return None
        if factor is not None and int((end - start) * factor) != made:
            return None
        return KernelCrop(start - reached.start, end - start, made, first - start // p * q, stop - first)

    def _kernel_matches(self, device: torch.device) -> bool:
        """Whether torch chooses the same neighbours in the part as in the whole, which depends on the sizes."""
        if self.call.antialias:
            return self.crops[-1].out_size > 1  # torch 2.11-2.15 gets results of one column wrong, on the CPU
        if not self.call.mode.startswith("nearest"):
            return True
        shape = (*self.halo_plan.layout.shape[:2], *(b.length for b in self.crops))
        here = self.call.taps(shape, [b.out_size for b in self.crops], self.dtype, device)
        for (dim, taps), box in zip(self.taps.items(), self.crops, strict=True):
            begin = self.halo_plan.held_with_halo[dim].start + box.start
            first, stop = self.halo_plan.owned[dim]
            if not taps.cells[first:stop].equal(here[dim].cells[box.skip : box.skip + box.number] + begin):
                return False
        return all(taps.cells.shape[1] == 1 for taps in self.taps.values())

    def _decomposition_matches(self) -> bool:
        """Whether a trace, which takes torch's kernels apart, does as they do.

        It finds other neighbours where a ratio of sizes cannot be written exactly, and weighs infinite ones otherwise.
        """
        ratios = [b.out_size / b.length for b in self.crops]
        return self.call.mode == "nearest" and all(r in (1, 2, 4, 8, 16) for r in ratios)

    def make(self, input: Tensor) -> Tensor:
        """The rank's outputs."""
        nd = input.ndim - 2
        last = nd > 1 and not input.is_contiguous() and input.is_contiguous(memory_format=CHANNELS_LAST[nd])
        block = self.halo_plan.with_halo(input.to(self.dtype))
        if self.use_kernel and block.numel() and (trace_state.tracer is None or self._decomposition_matches()):
            return self._run_kernel(block)
        half = self.dtype in HALF_DTYPES and not self.call.mode.startswith("nearest")
        made = block.float() if half else block
        for step in self.steps:
            made = step[-1 if last else 0](made)
        made = made.to(self.dtype)
        return made.contiguous(memory_format=CHANNELS_LAST[nd]) if last else made

    def _run_kernel(self, block: Tensor) -> Tensor:
        for dim, box in enumerate(self.crops, 2):
            if box.length != block.shape[dim]:
                block = block.narrow(dim, box.start, box.length)
        made = self.call.run(block, [b.out_size for b in self.crops])
        for dim, box in enumerate(self.crops, 2):
            if box.number != box.out_size:
                made = made.narrow(dim, box.skip, box.number)
        return made
