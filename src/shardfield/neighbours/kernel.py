"""Nearest neighbours on CUDA by a Triton kernel that never forms the distance matrix.

A program holds a few queries and the keys of their best points so far, and walks over tiles of points. A key is a
squared distance's bits above a point's index, as one integer, so that the smallest keys are the nearest points with
ties in the order of their indices. A tile whose least distance is above the worst of the best is passed over: after the
first tiles most are, and cost their distances and one minimum. In the others the least key goes in for the worst of the
best, as long as it is smaller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..fused.jit import jit

tl: Any = None  # see jit.py

MOST = 64  # neighbours; more are found pair by pair
FEATURES = 16
QUERIES, TILE, WARPS = 2, 128, 1  # fastest of 120 settings on an H200: 3.9 ms for 12,345 queries among 234,567 points
PROGRAMS = 4096  # enough to fill a device: few queries share out the points among more programs


def takes(points: Tensor, queries: Tensor, k: int) -> bool:
    """Whether the kernel can do it. Its offsets are 32 bits wide."""
    features = points.shape[1]
    fits = points.dtype is torch.float32 and k <= MOST and features <= FEATURES and points.numel() < 1 << 31
    return points.is_cuda and fits and queries.numel() < 1 << 31 and jit(_search) is not None


def nearest(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(squared distances, indices) of the k nearest points of each query, nearest first, equal ones by index."""
    (n, features), m = points.shape, len(queries)
    blocks = -(-m // QUERIES)
    parts = max(1, min(PROGRAMS // blocks, n // (32 * TILE), 64))
    length = -(-n // parts)
    slots = max(2, 1 << (k - 1).bit_length())
    keys = torch.empty(m, parts, slots, dtype=torch.int64, device=points.device)
    with torch.cuda.device(points.device):
        jit(_search)[(blocks, parts)](
            points.T.contiguous(), queries.contiguous(), keys, n, m, length, parts,
            FEATURES=features, SLOTS=slots, QUERIES=QUERIES, TILE=TILE, num_warps=WARPS,
            enable_fp_fusion=False,  # a fused multiply-add rounds once where everything else rounds twice
        )  # fmt: skip
    best = keys.view(m, -1).sort(1)[0][:, :k]
    return (best >> 32).to(torch.int32).view(torch.float32), best & 0xFFFFFFFF


def _search(
    points, queries, keys, n, m, length, parts, FEATURES: tl.constexpr, SLOTS: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """points (FEATURES, n), queries (m, FEATURES) -> keys (m, parts, SLOTS): the best of each part of the points."""
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    part = tl.program_id(1)
    start = part * length
    stop = tl.minimum(start + length, n)
    slot = tl.arange(0, SLOTS)
    # Every slot begins as a point infinitely far away, with an index of its own: no two keys are ever equal.
    empty = 0x7F80000000000000 + slot.to(tl.int64)
    best = tl.zeros([QUERIES, SLOTS], dtype=tl.int64) + empty[None, :]
    worst = tl.max(best, 1)
    for at in range(start, stop, TILE):
        column = at + tl.arange(0, TILE)
        inside = column < stop
        total = tl.zeros([QUERIES, TILE], dtype=tl.float32)
        for d in tl.static_range(FEATURES):
            q = tl.load(queries + row * FEATURES + d, mask=row < m, other=0.0)
            p = tl.load(points + d * n + column, mask=inside, other=0.0)
            gap = q[:, None] - p[None, :]
            total += gap * gap
        total = tl.where(inside[None, :], total, float("inf"))
        far = (worst >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        if tl.max((tl.min(total, 1) <= far).to(tl.int32), 0) > 0:
            key = (total.to(tl.int32, bitcast=True).to(tl.int64) << 32) | column.to(tl.int64)[None, :]
            key = tl.where(inside[None, :], key, 0x7FFFFFFFFFFFFFFF)
            least = tl.min(key, 1)
            while tl.max((least < worst).to(tl.int32), 0) > 0:
                replaced = (best == worst[:, None]) & (least < worst)[:, None]
                best = tl.where(replaced, least[:, None], best)
                worst = tl.max(best, 1)
                key = tl.where(key == least[:, None], 0x7FFFFFFFFFFFFFFF, key)
                least = tl.min(key, 1)
    place = (row.to(tl.int64)[:, None] * parts + part) * SLOTS + slot[None, :]
    tl.store(keys + place, best, mask=(row < m)[:, None])
