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

from .. import tracing
from ..dispatch import rule
from ..layout import Factor, pieces
from ..plan import Operand, Plan
from .across import HALF
from .cover import Cover, inside
from .rearrange import one_axis
from .taps import ANTIALIASED, CHANNELS_LAST, PLAIN, Taps, nearest
from .window import spans


class Call(NamedTuple):
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
        table = (ANTIALIASED if self.antialias else PLAIN)[self.mode]
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
    out = fn(nothing(input), size, scale_factor, recompute_scale_factor=recompute_scale_factor, **how).shape[2:]
    factors = None
    if scale_factor is not None and not recompute_scale_factor and mode != "area":
        each = scale_factor if isinstance(scale_factor, (list, tuple)) else (scale_factor,) * len(out)
        factors = tuple(float(f) for f in each)
    return resampled(input, out, Call(mode, align_corners, antialias, factors))


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
    out = fn(nothing(input), output_size, *rest, **named).shape[2:]
    given = [*rest, *named.values()]
    corners = None if mode.startswith("nearest") else named.get("align_corners", next(iter(rest), None))
    numbers = [n for v in given if not isinstance(v, bool) for n in (v if isinstance(v, (list, tuple)) else [v])]
    if any(n is not None for n in numbers) and (len(numbers) != len(out) or None in numbers):
        return None  # a factor for some dims only
    factors = None if None in numbers or not numbers else tuple(map(float, numbers))
    return resampled(input, out, Call(mode, corners, antialias, factors))


def nothing(input: Operand) -> Tensor:
    """A tensor by whose shape torch judges a call: with no samples in it, so that nothing is computed.

    Kernels of devices want some.
    """
    if input.device.type == "cpu":
        return torch.empty((0, *input.shape[1:]), dtype=input.dtype)
    return torch.empty((1, *input.shape[1:]), dtype=input.dtype, device="meta")


def resampled(input: Operand, out: Sequence[int], call: Call) -> Plan | None:
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
        layout = input.layout.uncut(range(1, input.ndim))
        result = layout.with_dims([*layout.dims[:2], *((Factor(n),) for n in out)])

        def here(input: Tensor) -> Tensor:
            if tracing.writer is not None:
                raise NotImplementedError("bytes are not rounded in a program as torch's kernels do")
            return call.run(input, out)

        return Plan(local=here, operands={"input": layout}, layout=result)
    taps = call.taps(input.shape, out, dtype, input.device)
    layout = one_axis(input.layout, [d for d in taps if not apart(taps[d], pieces(input.layout.dims[d][0]))])
    windows: Any = taps  # they answer what windows do
    cover = Cover(layout, windows)
    make = Part(call, cover, taps, dtype, input.device).make
    return Plan(local=make, takes=["input"], operands={"input": layout}, layout=cover.result(layout))


def apart(taps: Taps, lengths: Sequence[int]) -> bool:
    """Whether every piece makes its outputs of its own cells alone."""
    return all(
        inside(taps.reads(*made), held) for made, held in zip(spans(taps.owned(lengths)), spans(lengths), strict=True)
    )


class Box(NamedTuple):
    """One dim of a local call: `length` cells of the block from `start`; `number` of the results from `skip`."""

    start: int
    length: int
    made: int
    skip: int
    number: int


class Part:
    """What one rank does."""

    def __init__(self, call: Call, cover: Cover, taps: dict[int, Taps], dtype: torch.dtype, device: torch.device):
        self.call, self.cover, self.taps, self.dtype = call, cover, taps, dtype
        shrinking = sorted(taps, key=lambda d: taps[d].out / taps[d].size)
        self.steps = [taps[d].sums(d, cover.reached[d], cover.owned[d], device) for d in shrinking]
        boxes = [self._box(d) for d in taps]
        self.boxes = [b for b in boxes if b is not None]
        self.direct = len(self.boxes) == len(boxes) and all(b.made for b in self.boxes) and self._same(device)

    def _box(self, dim: int) -> Box | None:
        """The part of a dim that torch can be given for the whole; None if there is none."""
        taps, (first, stop) = self.taps[dim], self.cover.owned[dim]
        factor = None if self.call.factors is None else self.call.factors[dim - 2]
        if not self.cover.layout.is_cut(dim):
            fits = factor is None or int(taps.size * factor) == taps.out
            return Box(0, taps.size, taps.out, 0, taps.out) if fits else None
        if taps.ratio is None or first >= stop:
            return None
        p, q = taps.ratio
        low, high = taps.reads(first, stop)
        start, end = low // p * p, -(-high // p) * p
        reached, made = self.cover.reached[dim], (end - start) // p * q
        if start < reached.start or end > reached.stop:
            return None
        if factor is not None and int((end - start) * factor) != made:
            return None
        return Box(start - reached.start, end - start, made, first - start // p * q, stop - first)

    def _same(self, device: torch.device) -> bool:
        """Whether torch chooses the same neighbours in the part as in the whole, which depends on the sizes."""
        if self.call.antialias:
            return self.boxes[-1].made > 1  # torch 2.11-2.15 gets results of one column wrong, on the CPU
        if not self.call.mode.startswith("nearest"):
            return True
        shape = (*self.cover.layout.shape[:2], *(b.length for b in self.boxes))
        here = self.call.taps(shape, [b.made for b in self.boxes], self.dtype, device)
        for (dim, taps), box in zip(self.taps.items(), self.boxes, strict=True):
            begin = self.cover.reached[dim].start + box.start
            first, stop = self.cover.owned[dim]
            if not taps.cells[first:stop].equal(here[dim].cells[box.skip : box.skip + box.number] + begin):
                return False
        return all(taps.cells.shape[1] == 1 for taps in self.taps.values())

    def _traced_alike(self) -> bool:
        """Whether a trace, which takes torch's kernels apart, does as they do.

        It finds other neighbours where a ratio of sizes cannot be written exactly, and weighs infinite ones otherwise.
        """
        ratios = [b.made / b.length for b in self.boxes]
        return self.call.mode == "nearest" and all(r in (1, 2, 4, 8, 16) for r in ratios)

    def make(self, input: Tensor) -> Tensor:
        """The rank's outputs."""
        nd = input.ndim - 2
        last = nd > 1 and not input.is_contiguous() and input.is_contiguous(memory_format=CHANNELS_LAST[nd])
        block = self.cover.widen(input.to(self.dtype))
        if self.direct and block.numel() and (tracing.writer is None or self._traced_alike()):
            return self._directly(block)
        half = self.dtype in HALF and not self.call.mode.startswith("nearest")
        made = block.float() if half else block
        for step in self.steps:
            made = step[-1 if last else 0](made)
        made = made.to(self.dtype)
        return made.contiguous(memory_format=CHANNELS_LAST[nd]) if last else made

    def _directly(self, block: Tensor) -> Tensor:
        for dim, box in enumerate(self.boxes, 2):
            if box.length != block.shape[dim]:
                block = block.narrow(dim, box.start, box.length)
        made = self.call.run(block, [b.made for b in self.boxes])
        for dim, box in enumerate(self.boxes, 2):
            if box.number != box.made:
                made = made.narrow(dim, box.skip, box.number)
        return made
