"""Local work of a rank between its messages, against the one call that a single device would make.

Attention in blocks: one block of keys and values at a time, as in a ring, with the partial results accumulated, against
one call with all keys; for all queries and for those of one rank. Halo: packing and unpacking. Modes: the partial
Fourier sum of a rank's rows and back, against torch.fft on a field of that size. On a device: the number of kernels of
each, and an uncompiled step as a CUDA graph.
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

from ..comm.halo import Halo
from ..layout import Span
from ..ops.attention import ring
from ..ops.attention.block_kernels import select_kernel
from ..ops.spectral import partial_dft
from ..ops.stencil.pad import padding_runs
from ..tensor import ShardTensor
from ..triton_kernels import fold as fused_fold
from . import models
from .compile import capture_graph
from .measure import Times, busy_seconds, interleave
from .ranks import domain_mesh, measure_on_ranks, train_step
from .table import Table

ONE_CALL = "one call"
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
    size: int = 64  # of the field for the CUDA graph
    rounds: int = 9

    quick: ClassVar[dict[str, Any]] = {"sequence": 256, "rounds": 3}
    cuda: ClassVar[dict[str, Any]] = {
        "sequence": 65536, "heads": 8, "features": 128, "channels": 64, "grid": (720, 1440), "modes": (64, 33),
        "size": 256, "rounds": 15,
    }  # fmt: skip


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, blocks: int, fold: Callable) -> Tensor:
    """Compute attention block by block, as a rank of a ring does."""
    scale = 1 / math.sqrt(q.shape[-1])
    out = q.new_zeros(q.shape, dtype=torch.float32)
    lse = q.new_full(q.shape[:-1], -math.inf, dtype=torch.float32)
    for kb, vb in zip(k.chunk(blocks, 2), v.chunk(blocks, 2), strict=True):
        kernel = select_kernel(q, vb, None, dropout=None, bias_grad=False)
        fold(out, lse, *kernel.forward(q, kb, vb, None, False, scale))
    return out.to(q.dtype)


def fold_unfused(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Run `ring.accumulate_block` without the fused Triton kernel."""
    supports = fused_fold.supports
    fused_fold.supports = lambda *args: False
    try:
        ring.accumulate_block(out, lse, part, part_lse)
    finally:
        fused_fold.supports = supports


def time_attention(device: str, rows: int, s: Settings) -> Times:
    """Time the attention of `rows` queries to all keys, on one rank."""
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
        ONE_CALL: once,
        BLOCKS: partial(blockwise_attention, q, k, v, s.blocks, ring.accumulate_block),
        UNFUSED: partial(blockwise_attention, q, k, v, s.blocks, fold_unfused),
    }
    expected = calls[ONE_CALL]().float()
    for call in calls.values():
        error = (call().float() - expected).norm() / expected.norm()
        assert error < 0.01, f"attention in blocks differs from one call by a relative error of {error:.2g}"
    return interleave(calls, s.rounds, partial(busy_seconds, device=device))


def make_halo(device: str, s: Settings) -> tuple[Tensor, Halo]:
    """Return a local field and a periodic halo of one row on each side, which needs no message on one rank."""
    rows = s.grid[0] // s.blocks
    field = torch.randn(1, s.channels, rows, s.grid[1], device=device)
    halo = Halo.plan(
        2,
        [rows],
        lambda coord: Span(0, rows + 2),
        0,
        None,
        1,
        lambda a, b: padding_runs("circular", rows, 1, 1, a, b) if a < b else [],
    )
    return field, halo


def time_packing(device: str, s: Settings) -> Times:
    """Time packing the rows for both neighbors and unpacking theirs, on one rank."""
    field, halo = make_halo(device, s)
    rows = halo.start(field, []).wait()
    assert torch.equal(rows, torch.cat([field[:, :, -1:], field[:, :, :1]], 2))
    candidates = {
        "packed and unpacked": lambda: halo.start(field, []).wait(),
        "torch.cat of both rows": lambda: torch.cat([field[:, :, -1:], field[:, :, :1]], 2),
    }
    return interleave(candidates, s.rounds, partial(busy_seconds, device=device, repeats=20))


def time_spectral(device: str, s: Settings) -> Times:
    """Time a spectral layer on the rows of one rank, without the all_reduce in its middle."""
    torch.manual_seed(0)
    height, width = s.grid
    rows, (m, n) = height // s.blocks, s.modes
    field = torch.randn(1, s.channels, rows, width, device=device)
    weight = torch.randn(s.channels, s.channels, m, n, dtype=torch.cfloat, device=device)
    dim_modes = [
        partial_dft.DimModes(2, height, tuple(range(-(m // 2), m - m // 2)), (0, rows)),
        partial_dft.DimModes(3, width, tuple(range(n))),
    ]

    def partial_layer() -> Tensor:
        modes = torch.einsum("bixy,ioxy->boxy", partial_dft.forward_dft(field, dim_modes, "forward"), weight)
        return partial_dft.inverse_dft(modes, dim_modes, "forward", real=True)

    def fft_layer() -> Tensor:
        kept = min(m, rows)
        spectrum = torch.fft.rfft2(field, norm="forward")
        modes = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :kept, :n], weight[:, :, :kept])
        out = torch.zeros_like(spectrum)
        out[:, :, :kept, :n] = modes
        return torch.fft.irfft2(out, s=field.shape[2:], norm="forward")

    return interleave(
        {"torch.fft": fft_layer, "shardfield": partial_layer},
        s.rounds,
        partial(busy_seconds, device=device, repeats=5),
    )


def count_nodes(call: Callable[[], Any]) -> int:
    """Return the number of kernels, copies and fills that a call launches: the nodes of its CUDA graph."""
    graph, count = torch.cuda.CUDAGraph(keep_graph=True), ctypes.c_size_t()
    capture_graph(call, graph)
    failed = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
        ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)
    )
    assert not failed, f"cuGraphGetNodes: error {failed}"
    return count.value


def count_kernels(device: str, s: Settings) -> dict[str, int]:
    """Return the number of kernels of each operation, on one rank."""
    field, halo = make_halo(device, s)
    two = count_nodes(lambda: (field * 2).relu())
    assert two == 2, f"a product and a relu should be 2 nodes of a CUDA graph, not {two}"
    out, lse = torch.zeros(1, s.heads, 64, s.features, device=device), torch.zeros(1, s.heads, 64, device=device)
    partial_out = out.bfloat16()
    return {
        "fold a block of attention": count_nodes(lambda: ring.accumulate_block(out, lse, partial_out, lse.clone())) - 1,
        "pack a halo": count_nodes(lambda: halo.start(field, [])),
        "unpack a halo": count_nodes(lambda: halo.start(field, []).wait()) - count_nodes(lambda: halo.start(field, [])),
    }


def time_graphs(device: str, size: int, rounds: int) -> Times:
    """Time an uncompiled step as a CUDA graph, on plain tensors and on ShardTensors, on one rank."""
    model = models.unet(32).to(device)
    field = torch.randn(1, 3, size, size, device=device)
    ours = copy.deepcopy(model)
    sharded = ShardTensor.from_local(field, domain_mesh(device), [Shard(2)])
    train_step(ours, sharded)
    expected = [p.grad.clone() for p in ours.parameters() if p.grad is not None]
    steps = {"plain torch": partial(train_step, model, field), "shardfield": partial(train_step, ours, sharded)}
    replays = {name: capture_graph(call) for name, call in steps.items()}
    replays["shardfield"]()
    for p, grad in zip(ours.parameters(), expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, grad, rtol=1e-2, atol=1e-3 * float(grad.abs().max()))
    candidates = replays | {"shardfield, not captured": steps["shardfield"]}
    return interleave(candidates, rounds, partial(busy_seconds, device=device))


def run(settings: Settings, device: str, table: Table) -> None:
    s = settings
    bars = {BLOCKS: 1.1} if device != "cpu" else {}
    for rows in (s.sequence, s.sequence // s.blocks):
        (times,) = measure_on_ranks(time_attention, 1, device, rows, s)
        case = f"attention of {rows:,} queries to {s.sequence:,} keys in {s.blocks} blocks"
        table.add_times(case, times, ONE_CALL, bars=bars)
    (times,) = measure_on_ranks(time_packing, 1, device, s)
    table.add_times(
        f"a halo of 1 row of {s.channels} x {s.grid[0] // s.blocks} x {s.grid[1]}",
        times,
        "torch.cat of both rows",
        "us",
    )
    (times,) = measure_on_ranks(time_spectral, 1, device, s)
    case = f"{' x '.join(map(str, s.modes))} modes of {s.channels} x {s.grid[0] // s.blocks} x {s.grid[1]} and back"
    table.add_times(case, times, "torch.fft", bars={"shardfield": 1.0} if device != "cpu" else {})
    if device == "cpu":
        return
    (counts,) = measure_on_ranks(count_kernels, 1, device, s)
    for case, count in counts.items():
        table.add_counts(case, {"shardfield": count, "one kernel": 1}, "kernels", "one kernel", {"shardfield": 1.0})
    (times,) = measure_on_ranks(time_graphs, 1, device, s.size, s.rounds)
    table.add_times(f"UNet {s.size} x {s.size} step as a CUDA graph", times, "plain torch", bars={"shardfield": 1.05})
