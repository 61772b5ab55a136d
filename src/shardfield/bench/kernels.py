"""What one rank does between messages, beside the one call that a single device would make.

Attention in blocks: queries meet keys and values a block at a time, as they come by in a ring, and the shares are
folded, against one call with all of them; of all queries and of one rank's. Merging the moments of several ranks for a
norm. Packing and unpacking a halo. The modes of a field cut into rows (a part of the Fourier sum) and back, against
torch.fft on a field of that size. On a device: how many kernels these take, and an uncompiled step as a CUDA graph.
"""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..comm.fetch import Halo
from ..fused import fold as fused_fold
from ..fused import merge as fused_merge
from ..layout import Span
from ..ops import dft, ring_attention
from ..ops.kernels import kernel_for
from ..ops.pad import copies
from ..tensor import ShardTensor
from . import models
from .compile import captured
from .measure import Times, busy, turns
from .ranks import domain, measured, step
from .table import Table

ONE = "one call"
BLOCKS, UNFUSED = "in blocks", "in blocks, folded in torch's calls"


@dataclass(frozen=True)
class Settings:
    sequence: int = 2048
    heads: int = 4
    features: int = 32
    blocks: int = 8
    channels: int = 8
    grid: tuple[int, ...] = (96, 192)
    modes: tuple[int, ...] = (16, 9)
    size: int = 64  # of the field that is captured
    rounds: int = 9

    quick: ClassVar[dict[str, Any]] = {"sequence": 256, "rounds": 3}
    cuda: ClassVar[dict[str, Any]] = {
        "sequence": 65536, "heads": 8, "features": 128, "channels": 64, "grid": (720, 1440), "modes": (64, 33),
        "size": 256, "rounds": 15,
    }  # fmt: skip


def in_blocks(q: Tensor, k: Tensor, v: Tensor, blocks: int, fold: Callable) -> Tensor:
    """Attention as a rank of a ring does it."""
    scale = 1 / math.sqrt(q.shape[-1])
    out = q.new_zeros(q.shape, dtype=torch.float32)
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=torch.float32)
    for kb, vb in zip(k.chunk(blocks, 2), v.chunk(blocks, 2), strict=True):
        kernel = kernel_for(q, vb, None, dropout=None, bias_grad=False)
        fold(out, lse, *kernel.forward(q, kb, vb, None, False, scale))
    return out.to(q.dtype)


def fold_unfused(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """What `ring_attention.fold` does without a kernel of ours."""
    takes = fused_fold.takes
    fused_fold.takes = lambda *given: False
    try:
        ring_attention.fold(out, lse, part, part_lse)
    finally:
        fused_fold.takes = takes


def attention(device: str, rows: int, s: Settings) -> Times:
    """On one rank: seconds of the attention of some queries to all keys."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    q, k, v = (
        torch.randn(1, s.heads, n, s.features, device=device, dtype=dtype) for n in (rows, s.sequence, s.sequence)
    )
    kinds = [SDPBackend.FLASH_ATTENTION] if device != "cpu" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def once() -> Tensor:
        with sdpa_kernel(kinds):
            return F.scaled_dot_product_attention(q, k, v)

    calls: dict[str, Callable[[], Tensor]] = {
        ONE: once,
        BLOCKS: partial(in_blocks, q, k, v, s.blocks, ring_attention.fold),
        UNFUSED: partial(in_blocks, q, k, v, s.blocks, fold_unfused),
    }
    wanted = calls[ONE]().float()
    for call in calls.values():
        apart = (call().float() - wanted).norm() / wanted.norm()
        assert apart < 0.01, f"attention in blocks is {apart:.2g} from the one call"
    return turns(calls, s.rounds, partial(busy, device=device))


def merging(device: str, s: Settings) -> Times:
    """On one rank: seconds of merging the moments of as many ranks as there are blocks."""
    torch.manual_seed(0)
    parts = torch.rand(s.blocks, 2, 1, 4 * s.channels, 1, 1, dtype=torch.float64, device=device)
    weights = torch.arange(1.0, s.blocks + 1, dtype=torch.float64, device=device).view(-1, 1, 1, 1, 1)

    calls = partial(fused_merge.by_calls, parts, weights)
    candidates: dict[str, Callable[[], Any]] = {"torch's calls": calls}
    if fused_merge.takes(parts, weights):
        candidates["one kernel"] = partial(fused_merge.merge, parts, weights)
        for a, b in zip(calls(), fused_merge.merge(parts, weights), strict=True):
            torch.testing.assert_close(a, b)
    return turns(candidates, s.rounds, partial(busy, device=device, repeats=20))


def around(device: str, s: Settings) -> tuple[Tensor, Halo]:
    """A rank's field and a halo of one row on either side of it, which is the field's own other end: no message."""
    rows = s.grid[0] // s.blocks
    field = torch.randn(1, s.channels, rows, s.grid[1], device=device)
    halo = Halo.around(
        2, [rows], [Span(0, rows + 2)], 0, None, 1, lambda a, b: copies("circular", rows, 1, 1, a, b) if a < b else []
    )
    return field, halo


def packing(device: str, s: Settings) -> Times:
    """On one rank: seconds of packing the rows for both neighbours and unpacking theirs."""
    field, halo = around(device, s)
    strip = halo.start(field, []).wait()
    assert torch.equal(strip, torch.cat([field[:, :, -1:], field[:, :, :1]], 2))
    candidates = {
        "packed and unpacked": lambda: halo.start(field, []).wait(),
        "torch.cat of both rows": lambda: torch.cat([field[:, :, -1:], field[:, :, :1]], 2),
    }
    return turns(candidates, s.rounds, partial(busy, device=device, repeats=20))


def spectral(device: str, s: Settings) -> Times:
    """On one rank: seconds of a spectral layer on its rows of a field, but for the sum over ranks in the middle."""
    torch.manual_seed(0)
    height, width = s.grid
    rows, (m, n) = height // s.blocks, s.modes
    field = torch.randn(1, s.channels, rows, width, device=device)
    weight = torch.randn(s.channels, s.channels, m, n, dtype=torch.cfloat, device=device)
    along = [
        dft.Along(2, height, tuple(range(-(m // 2), m - m // 2)), (0, rows)),
        dft.Along(3, width, tuple(range(n))),
    ]

    def partly() -> Tensor:
        modes = torch.einsum("bixy,ioxy->boxy", dft.analyse(field, along, "forward"), weight)
        return dft.evaluate(modes, along, "forward", real=True)

    def wholly() -> Tensor:
        kept = min(m, rows)
        spectrum = torch.fft.rfft2(field, norm="forward")
        modes = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :kept, :n], weight[:, :, :kept])
        out = torch.zeros_like(spectrum)
        out[:, :, :kept, :n] = modes
        return torch.fft.irfft2(out, s=field.shape[2:], norm="forward")

    return turns({"torch.fft": wholly, "shardfield": partly}, s.rounds, partial(busy, device=device, repeats=5))


def launched(call: Callable[[], Any]) -> int:
    """How many kernels, copies and fills a call starts on the device: the nodes of it as a CUDA graph."""
    graph, count = torch.cuda.CUDAGraph(keep_graph=True), ctypes.c_size_t()
    captured(call, graph)
    failed = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
        ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)
    )
    assert not failed, f"cuGraphGetNodes: error {failed}"
    return count.value


def kernels(device: str, s: Settings) -> dict[str, int]:
    """On one rank: how many kernels each takes."""
    field, halo = around(device, s)
    two = launched(lambda: (field * 2).relu())
    assert two == 2, f"a product and a relu are {two} nodes of a graph"
    parts = torch.rand(s.blocks, 2, 1, s.channels, 1, 1, dtype=torch.float64, device=device)
    weights = torch.ones(s.blocks, 1, 1, 1, 1, dtype=torch.float64, device=device)
    out, lse = torch.zeros(1, s.heads, 64, s.features, device=device), torch.zeros(1, s.heads, 64, device=device)
    share = out.bfloat16()
    return {
        "fold a block of attention": launched(lambda: ring_attention.fold(out, lse, share, lse.clone())) - 1,
        "merge moments": launched(lambda: fused_merge.merge(parts, weights)),
        "pack a halo": launched(lambda: halo.start(field, [])),
        "unpack a halo": launched(lambda: halo.start(field, []).wait()) - launched(lambda: halo.start(field, [])),
    }


def graphs(device: str, size: int, rounds: int) -> Times:
    """On one rank: seconds of an uncompiled step replayed as a CUDA graph, of plain tensors and of ShardTensors."""
    model = models.unet(32).to(device)
    field = torch.randn(1, 3, size, size, device=device)
    ours = copy.deepcopy(model)
    sharded = ShardTensor.from_local(field, domain(device), [Shard(2)])
    step(ours, sharded)
    wanted = [p.grad.clone() for p in ours.parameters() if p.grad is not None]
    steps = {"plain torch": partial(step, model, field), "shardfield": partial(step, ours, sharded)}
    replays = {name: captured(call) for name, call in steps.items()}
    replays["shardfield"]()
    for p, grad in zip(ours.parameters(), wanted, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, grad, rtol=1e-2, atol=1e-3 * float(grad.abs().max()))
    candidates = replays | {"shardfield, not captured": steps["shardfield"]}
    return turns(candidates, rounds, partial(busy, device=device))


def run(settings: Settings, device: str, table: Table) -> None:
    s = settings
    bars = {BLOCKS: 1.1} if device != "cpu" else {}
    for rows in (s.sequence, s.sequence // s.blocks):
        (times,) = measured(attention, 1, device, rows, s)
        case = f"attention of {rows:,} queries to {s.sequence:,} keys in {s.blocks} blocks"
        table.times(case, times, ONE, bars=bars)
    (times,) = measured(merging, 1, device, s)
    table.times(f"moments of {s.blocks} ranks, {4 * s.channels} channels", times, "torch's calls", "us")
    (times,) = measured(packing, 1, device, s)
    table.times(
        f"a halo of 1 row of {s.channels} x {s.grid[0] // s.blocks} x {s.grid[1]}",
        times,
        "torch.cat of both rows",
        "us",
    )
    (times,) = measured(spectral, 1, device, s)
    case = f"{' x '.join(map(str, s.modes))} modes of {s.channels} x {s.grid[0] // s.blocks} x {s.grid[1]} and back"
    table.times(case, times, "torch.fft", bars={"shardfield": 1.0} if device != "cpu" else {})
    if device == "cpu":
        return
    (counts,) = measured(kernels, 1, device, s)
    for what, count in counts.items():
        table.counts(what, {"shardfield": count, "one kernel": 1}, "kernels", "one kernel", {"shardfield": 1.0})
    (times,) = measured(graphs, 1, device, s.size, s.rounds)
    table.times(f"UNet {s.size} x {s.size} step as a CUDA graph", times, "plain torch", bars={"shardfield": 1.05})
