"""Rules of `F.interpolate` and the upsample ops on an input sharded along any dim.

Each rank computes the outputs centered in its shard and receives the halo they read (`resample_weights.py`). If torch's
kernel gives the same values on this block as on the global field, the rank calls it: this holds for unsharded dims,
and where the shard boundaries fit the ratio of input to output size. Otherwise the rank computes weighted sums of its
cells (`weighted_sum.py`). The adjoint sends the gradients of the halo back to its owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import runtime
from ...dispatch.plan import Operand, Plan
from ...dispatch.registry import rule
from ...layout import DimSharding, shard_sizes_of
from ...redistribute import redistribute
from .._common.autocast import HALF_DTYPES
from .._common.probe import probe, stand_in
from ..shape.flip_roll import shard_by_one_axis
from .halo_plan import HaloPlan, is_subspan, sharding_of_outputs
from .resample_weights import ANTIALIASED_TAPS, CHANNELS_LAST, TAPS, Taps, nearest
from .window import shard_spans


class ResampleArgs(NamedTuple):
    """Arguments shared by all local calls. `factors` are the scale factors passed to torch's kernels, if any."""

    mode: str
    align_corners: bool | None
    antialias: bool
    factors: tuple[float, ...] | None

    def run(self, input: Tensor, sizes: Sequence[int]) -> Tensor:
        options: Any = {"mode": self.mode, "align_corners": self.align_corners, "antialias": self.antialias}
        if self.factors is None:
            return F.interpolate(input, size=list(sizes), **options)
        return F.interpolate(input, scale_factor=list(self.factors), **options)

    def taps(
        self, shape: Sequence[int], out: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> dict[int, Taps]:
        """Return dim -> taps for every spatial dim of a field of `shape`."""
        factors = self.factors or (None,) * len(out)
        dims = [(d, *sizes) for d, sizes in enumerate(zip(shape[2:], out, factors, strict=True), 2)]
        if self.mode in ("nearest", "nearest-exact"):
            result = (*shape[:2], *out)
            return {d: nearest(n, m, f, self.mode, result, dtype, device) for d, n, m, f in dims}
        table = (ANTIALIASED_TAPS if self.antialias else TAPS)[self.mode]
        weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        return {d: table(n, m, f, bool(self.align_corners), weight_dtype) for d, n, m, f in dims}


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
    """Exchange halos along sharded spatial dims; no communication for other dims."""
    options = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
    options["recompute_scale_factor"] = recompute_scale_factor
    out = probe(fn, without_samples(input), size, scale_factor, **options).shape[2:]
    factors = None
    if scale_factor is not None and not recompute_scale_factor and mode != "area":
        per_dim = scale_factor if isinstance(scale_factor, (list, tuple)) else (scale_factor,) * len(out)
        factors = tuple(float(f) for f in per_dim)
    return plan_resample(input, out, ResampleArgs(mode, align_corners, antialias, factors))


# the ops that F.interpolate calls -> (mode, antialias)
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
    """Plan an op of `KERNELS`. It takes the scale factors as one list or as one argument per dim."""
    mode, antialias = KERNELS[fn.__name__]
    out = probe(fn, without_samples(input), output_size, *rest, **named).shape[2:]
    arguments = [*rest, *named.values()]
    corners = None if mode.startswith("nearest") else named.get("align_corners", next(iter(rest), None))
    scales = [n for v in arguments if not isinstance(v, bool) for n in (v if isinstance(v, (list, tuple)) else [v])]
    if any(n is not None for n in scales) and (len(scales) != len(out) or None in scales):
        return None  # scale factors for some dims only
    factors = None if None in scales or not scales else tuple(map(float, scales))
    return plan_resample(input, out, ResampleArgs(mode, corners, antialias, factors))


def without_samples(input: Operand) -> Tensor:
    """Return a stand-in with batch size 0: the kernel checks the call and computes nothing.

    It is on the CPU. Kernels of other devices refuse batch size 0, and shape functions check less than kernels do.
    """
    return stand_in(input, (0, *input.shape[1:]), "cpu")


def plan_resample(input: Operand, out: Sequence[int], call: ResampleArgs) -> Plan | None:
    """Plan the halo exchange and the local resampling."""
    on_cpu = input.device.type == "cpu"
    if call.factors and ("linear" in call.mode or call.antialias) and on_cpu:
        # torch's kernel copies a dim of unchanged size whatever the factor; its decomposition in a trace does not.
        sizes = zip(input.shape[2:], out, call.factors, strict=True)
        call = call._replace(factors=tuple(1.0 if n == m else f for n, m, f in sizes))
    one_cell = stand_in(input, [1] * input.ndim)
    dtype = probe(call._replace(factors=None).run, one_cell, [1] * len(out)).dtype
    if dtype == torch.uint8 and not call.mode.startswith("nearest"):
        return plan_bytes(input, out, call)
    taps = call.taps(input.shape, out, dtype, input.device)
    layout = shard_by_one_axis(
        input.layout,
        [d for d in taps if not needs_no_halo(taps[d], input.layout.dims[d][0])],
        field=range(2, input.ndim),
    )
    windows: Any = taps  # Taps has the methods of Window that HaloPlan uses
    halo_plan = HaloPlan(layout, windows)
    resample = LocalResample(call, halo_plan, taps, dtype, input.device).resample
    return Plan(local=resample, takes=["input"], operands={"input": layout}, layout=halo_plan.result(layout))


def plan_bytes(input: Operand, out: Sequence[int], call: ResampleArgs) -> Plan | None:
    """Plan the weighted sums of bytes: every rank computes all channels and cells and keeps its own.

    torch's rounding depends on the number of channels and on the weights of all cells.
    """
    if call.factors and any(int(n * f) != m for n, f, m in zip(input.shape[2:], call.factors, out, strict=True)):
        return None
    layout = input.layout.unshard(range(1, input.ndim))
    whole = layout.with_dims([*layout.dims[:2], *((DimSharding(n),) for n in out)])
    windows: Any = call.taps(input.shape, out, torch.uint8, input.device)
    result = HaloPlan(input.layout, windows).result(input.layout)

    def unsharded(input: Tensor) -> Tensor:
        if runtime.active.tracer is not None:
            raise NotImplementedError("interpolate of uint8 cannot be traced: a trace rounds unlike torch's kernels")
        full = call.run(input, out)
        order = torch.contiguous_format if full.is_contiguous() else torch.channels_last
        return redistribute(full, whole, result).contiguous(memory_format=order)

    return Plan(local=unsharded, operands={"input": layout}, layout=result)


def needs_no_halo(taps: Any, sharding: DimSharding) -> bool:
    """Return whether every shard contains all the inputs that its outputs read."""
    held = shard_sizes_of(sharding)
    outputs = shard_sizes_of(sharding_of_outputs(taps, sharding, held))
    return all(
        is_subspan(taps.input_range(*owned), span)
        for owned, span in zip(shard_spans(outputs), shard_spans(held), strict=True)
    )


class KernelCrop(NamedTuple):
    """One dim of a kernel call: it reads `length` cells from `start` and gives `out_size` results.

    Of these results, the `number` results from `skip` are the rank's outputs.
    """

    start: int
    length: int
    out_size: int
    skip: int
    number: int


class LocalResample:
    """Resampling of one rank, by torch's kernel if `use_kernel`, else by weighted sums dim by dim."""

    def __init__(
        self, call: ResampleArgs, halo_plan: HaloPlan, taps: dict[int, Taps], dtype: torch.dtype, device: torch.device
    ):
        self.call, self.halo_plan, self.taps, self.dtype = call, halo_plan, taps, dtype
        order = sorted(taps, key=lambda d: taps[d].out / taps[d].size)  # dims that shrink first: less work for the rest
        self.steps = [taps[d].weighted_sums(d, halo_plan.held_with_halo[d], halo_plan.owned[d], device) for d in order]
        crops = [self._kernel_crop(d) for d in taps]
        self.crops = [b for b in crops if b is not None]
        self.use_kernel = (
            len(self.crops) == len(crops) and all(b.out_size for b in self.crops) and self._kernel_matches(device)
        )

    def _kernel_crop(self, dim: int) -> KernelCrop | None:
        """Return the part of a dim on which torch's kernel computes this rank's outputs; None if there is none."""
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
        available, out_size = self.halo_plan.held_with_halo[dim], (end - start) // p * q
        if start < available.start or end > available.stop:
            return None
        if factor is not None and int((end - start) * factor) != out_size:
            return None
        return KernelCrop(start - available.start, end - start, out_size, first - start // p * q, stop - first)

    def _kernel_matches(self, device: torch.device) -> bool:
        """Return whether torch's kernel chooses the same input cells in the crop as in the global field.

        Its rounding in the nearest modes depends on the sizes.
        """
        if self.call.antialias:
            return self.crops[-1].out_size > 1  # torch 2.11-2.15 computes outputs of one column wrongly on the CPU
        if not self.call.mode.startswith("nearest"):
            return True
        shape = (*self.halo_plan.layout.shape[:2], *(b.length for b in self.crops))
        crop_taps = self.call.taps(shape, [b.out_size for b in self.crops], self.dtype, device)
        for (dim, taps), crop in zip(self.taps.items(), self.crops, strict=True):
            crop_start = self.halo_plan.held_with_halo[dim].start + crop.start
            first, stop = self.halo_plan.owned[dim]
            if not taps.cells[first:stop].equal(crop_taps[dim].cells[crop.skip : crop.skip + crop.number] + crop_start):
                return False
        return all(taps.cells.shape[1] == 1 for taps in self.taps.values())

    def _decomposition_matches(self) -> bool:
        """Return whether torch's decomposition, which a trace uses, gives the same values as the kernel.

        It chooses other cells where the ratio of sizes is not exact in floating point, and treats infinite values
        differently.
        """
        ratios = [b.out_size / b.length for b in self.crops]
        return self.call.mode == "nearest" and all(r in (1, 2, 4, 8, 16) for r in ratios)

    def resample(self, input: Tensor) -> Tensor:
        """Return the rank's outputs."""
        nd = input.ndim - 2
        channels_last = nd > 1 and not input.is_contiguous() and input.is_contiguous(memory_format=CHANNELS_LAST[nd])
        block = self.halo_plan.with_halo(input.to(self.dtype))
        if self.use_kernel and block.numel() and (runtime.active.tracer is None or self._decomposition_matches()):
            return self._run_kernel(block)
        half = self.dtype in HALF_DTYPES and not self.call.mode.startswith("nearest")
        out = block.float() if half else block
        for step in self.steps:
            out = step[-1 if channels_last else 0](out)
        out = out.to(self.dtype)
        return out.contiguous(memory_format=CHANNELS_LAST[nd]) if channels_last else out

    def _run_kernel(self, block: Tensor) -> Tensor:
        for dim, crop in enumerate(self.crops, 2):
            if crop.length != block.shape[dim]:
                block = block.narrow(dim, crop.start, crop.length)
        out = self.call.run(block, [b.out_size for b in self.crops])
        for dim, crop in enumerate(self.crops, 2):
            if crop.number != crop.out_size:
                out = out.narrow(dim, crop.skip, crop.number)
        return out
