"""Nearest neighbours on CUDA by a Triton kernel that never forms the distance matrix.

Points are put in an order in which near ones stand together, and cut into tiles, each with the box around it. A program
holds a few queries, near ones again, and the keys of their best points so far. It looks at many boxes together, and
visits the tiles of those that are no farther than the worst of the best, nearest first: after a few tiles hardly any
are. A key is a squared distance's bits above a point's index, as one integer, so that the smallest keys are the nearest
points with ties in the order of their indices. In a tile the least key goes in for the worst of the best, as long as it
is smaller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..triton_kernels.jit import jit

tl: Any = None  # see jit.py

MAX_NEIGHBORS = 64  # neighbours; more are found pair by pair
FEATURES = 16
QUERIES, TILE, BOXES, WARPS = 1, 128, 128, 1
PROGRAMS = 4096  # enough to fill a device: few queries share out the points among more programs
MIN_PAIRS_TO_SORT = 1 << 27  # below, the order costs more than it saves
MORTON_BITS = 60  # bits of the cells that order the points, all features together; of one feature 20


def supports(points: Tensor, queries: Tensor, k: int) -> bool:
    """Whether the kernel can do it. Its offsets are 32 bits wide."""
    features = points.shape[1]
    fits = points.dtype is torch.float32 and k <= MAX_NEIGHBORS and features <= FEATURES and points.numel() < 1 << 31
    return points.is_cuda and fits and queries.numel() < 1 << 31 and jit(_knn_kernel) is not None


class PointTiles:
    """Points (n, features) in tiles, ready to be searched; with `ordered`, near ones together."""

    def __init__(self, points: Tensor, ordered: bool):
        (n, features), self.ordered = points.shape, ordered
        self.index = torch.arange(n, dtype=torch.int32, device=points.device)
        if ordered:
            self.bottom, self.half_bits = points.amin(0), min(max(MORTON_BITS // features // 2, 1), 10)
            bits = torch.arange(self.half_bits, device=points.device)
            steps = torch.arange(1 << self.half_bits, device=points.device)
            self.scale = (len(steps) ** 2 - 1) / (points.amax(0) - self.bottom).amax().clamp_min(1e-30)
            # each number with its bits so far apart that those of the other features have room between them
            self.spread_bits = (((steps[:, None] >> bits) & 1) << bits * features).sum(1)
            cells, order = self._morton_codes(points).sort()
            self.starts = cells[:: TILE * BOXES].contiguous()  # of chunks: as many tiles as are looked at together
            self.index, points = order.to(torch.int32), points[order]
        self.points, self.count = points.T.contiguous(), -(-n // TILE)
        spare = self.points[:, -1:].expand(features, self.count * TILE - n)
        tiled = torch.cat([self.points, spare], 1).view(features, self.count, TILE)
        self.low, self.high = tiled.amin(2), tiled.amax(2)

    def _morton_codes(self, points: Tensor) -> Tensor:
        """The cell of each point on a coarse grid, by its Morton code: near cells have near numbers."""
        features, size = points.shape[1], len(self.spread_bits)
        at = ((points - self.bottom) * self.scale).clamp(0, size * size - 1).to(torch.int32)
        upper, lower = self.spread_bits[at >> self.half_bits], self.spread_bits[at & (size - 1)]
        shift = torch.arange(features, device=points.device)
        return (((upper << self.half_bits * features) + lower) << shift).sum(1)

    def nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(squared distances, indices) of the k nearest points of each query, nearest first, equal ones by index."""
        (features, n), m = self.points.shape, len(queries)
        blocks, chunks = -(-m // QUERIES), -(-self.count // BOXES)
        if self.ordered:
            cells, order = self._morton_codes(queries).sort()
            first = cells[::QUERIES].contiguous()
            home = torch.searchsorted(self.starts, first, right=True, out_int32=True).sub(1).clamp_min(0)
        else:
            order, home = (
                torch.arange(m, device=queries.device),
                torch.zeros(blocks, dtype=torch.int32, device=queries.device),
            )
        parts = max(1, min(PROGRAMS // blocks, chunks, 64))
        slots = max(2, 1 << (k - 1).bit_length())
        keys = torch.empty(m, parts, slots, dtype=torch.int64, device=queries.device)
        with torch.cuda.device(queries.device):
            jit(_knn_kernel)[(blocks, parts)](
                self.points, self.index, self.low, self.high, queries.contiguous(), order, home, keys,
                n, m, self.count, -(-chunks // parts), parts,
                FEATURES=features, SLOTS=slots, QUERIES=QUERIES, TILE=TILE, BOXES=BOXES, num_warps=WARPS,
                enable_fp_fusion=False,  # a fused multiply-add rounds once where everything else rounds twice
            )  # fmt: skip
        best = keys.view(m, -1).sort(1)[0][:, :k]
        return (best >> 32).to(torch.int32).view(torch.float32), best & 0xFFFFFFFF


def _knn_kernel(
    points, index, low, high, queries, order, home, keys, n, m, tiles, length, parts,
    FEATURES: tl.constexpr, SLOTS: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, BOXES: tl.constexpr,
):  # fmt: skip
    """points (FEATURES, n), boxes low and high (FEATURES, tiles), queries (m, FEATURES) taken in `order` -> keys (m,
    parts, SLOTS): the best of each part of the points, which is `length` chunks of BOXES tiles."""
    block, part = tl.program_id(0), tl.program_id(1)
    place = block * QUERIES + tl.arange(0, QUERIES)
    there = place < m
    row = tl.load(order + place, mask=there, other=0)
    slot = tl.arange(0, SLOTS)
    # Every slot begins as a point infinitely far away, with an index of its own: no two keys are ever equal.
    empty = 0x7F80000000000000 + slot.to(tl.int64)
    best = tl.zeros([QUERIES, SLOTS], dtype=tl.int64) + empty[None, :]
    worst = tl.max(best, 1)
    far = (worst >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    begin = tl.load(home + block)
    for step in range(0, length):
        # the chunk that the queries are in comes first, if it is of this part
        box = (part * length + (begin + step) % length) * BOXES + tl.arange(0, BOXES)
        known = box < tiles
        away = tl.zeros([QUERIES, BOXES], dtype=tl.float32)
        for d in tl.static_range(FEATURES):
            q = tl.load(queries + row * FEATURES + d, mask=there, other=0.0)
            a = tl.load(low + d * tiles + box, mask=known, other=0.0)
            b = tl.load(high + d * tiles + box, mask=known, other=0.0)
            # rounded as distances are: never more than that of a point inside
            gap = tl.maximum(tl.maximum(a[None, :] - q[:, None], q[:, None] - b[None, :]), 0.0)
            away += gap * gap
        away = tl.where(known[None, :] & there[:, None], away, float("inf"))
        nearest = tl.min(tl.where(away <= far[:, None], away, float("inf")), 0)
        least_away = tl.min(nearest, 0)
        while least_away < float("inf"):
            tile = tl.min(tl.where(nearest == least_away, box, tiles), 0)
            column = tile * TILE + tl.arange(0, TILE)
            inside = column < n
            total = tl.zeros([QUERIES, TILE], dtype=tl.float32)
            for d in tl.static_range(FEATURES):
                q = tl.load(queries + row * FEATURES + d, mask=there, other=0.0)
                p = tl.load(points + d * n + column, mask=inside, other=0.0)
                apart = q[:, None] - p[None, :]
                total += apart * apart
            number = tl.load(index + column, mask=inside, other=0)
            key = (total.to(tl.int32, bitcast=True).to(tl.int64) << 32) | number.to(tl.int64)[None, :]
            key = tl.where(inside[None, :] & there[:, None], key, 0x7FFFFFFFFFFFFFFF)
            least = tl.min(key, 1)
            while tl.max((least < worst).to(tl.int32), 0) > 0:
                replaced = (best == worst[:, None]) & (least < worst)[:, None]
                best = tl.where(replaced, least[:, None], best)
                worst = tl.max(best, 1)
                key = tl.where(key == least[:, None], 0x7FFFFFFFFFFFFFFF, key)
                least = tl.min(key, 1)
            far = (worst >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            away = tl.where(box[None, :] == tile, float("inf"), away)
            nearest = tl.min(tl.where(away <= far[:, None], away, float("inf")), 0)
            least_away = tl.min(nearest, 0)
    out = (row.to(tl.int64)[:, None] * parts + part) * SLOTS + slot[None, :]
    tl.store(keys + out, best, mask=there[:, None])
