"""Nearest neighbors on CUDA by a Triton kernel that never forms the distance matrix.

Points are sorted by Morton code, so that near points are adjacent, and split into tiles, and tiles into chunks, with a
bounding box each. A program holds a few adjacent queries and the keys of their k best points so far. It computes the
distances to the boxes of many chunks at once and visits the chunks whose box is within the distance of the k-th best
point, nearest first, and within a chunk the tiles in the same way; after a few tiles hardly any are left. A key is one
integer, the bits of the squared distance above the index of the point: the smallest keys are the nearest points, with
ties by index. Within a tile the smallest key replaces the worst of the best keys as long as it is smaller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..triton_kernels.jit import jit

tl: Any = None  # see jit.py

MAX_NEIGHBORS = 64  # the largest k; brute force is used for a larger k
FEATURES = 16
QUERIES, TILE, BOXES, CHUNKS, WARPS = 1, 64, 128, 128, 1  # a chunk has BOXES tiles, a round CHUNKS chunks
PROGRAMS = 4096  # enough to fill a device: with few queries, several programs split the points of one query
MIN_PAIRS_TO_SORT = 1 << 27  # with fewer pairs, sorting costs more than it saves
MORTON_BITS = 60  # bits of a Morton code over all features; at most 20 of one feature


def supports(points: Tensor, queries: Tensor, k: int) -> bool:
    """Return whether the kernel supports these operands. Its offsets are 32 bits wide."""
    features = points.shape[1]
    fits = points.dtype is torch.float32 and k <= MAX_NEIGHBORS and features <= FEATURES and points.numel() < 1 << 31
    return points.is_cuda and fits and queries.numel() < 1 << 31 and jit(_knn_kernel) is not None


class PointTiles:
    """Points (n, features) split into tiles with bounding boxes; with `ordered`, sorted by Morton code first."""

    def __init__(self, points: Tensor, ordered: bool):
        (n, features), self.ordered = points.shape, ordered
        self.index = torch.arange(n, dtype=torch.int32, device=points.device)
        if ordered:
            self.low_corner, self.half_bits = points.amin(0), min(max(MORTON_BITS // features // 2, 1), 10)
            bits = torch.arange(self.half_bits, device=points.device)
            steps = torch.arange(1 << self.half_bits, device=points.device)
            self.scale = (len(steps) ** 2 - 1) / (points.amax(0) - self.low_corner).amax().clamp_min(1e-30)
            # table: each number with its bits spread by the number of features, to interleave them with the others
            self.spread_bits = (((steps[:, None] >> bits) & 1) << bits * features).sum(1)
            codes, order = self._morton_codes(points).sort()
            self.starts = codes[:: TILE * BOXES].contiguous()  # code of the first point of each chunk
            self.index, points = order.to(torch.int32), points[order]
        self.points, self.count = points.T.contiguous(), -(-n // TILE)
        self.low, self.high = (_by_groups(self.points, TILE, largest) for largest in (False, True))
        self.chunk_low, self.chunk_high = _by_groups(self.low, BOXES, False), _by_groups(self.high, BOXES, True)

    def _morton_codes(self, points: Tensor) -> Tensor:
        """Return the Morton code of each point's cell on a coarse grid: near cells mostly have near codes."""
        features, size = points.shape[1], len(self.spread_bits)
        cell = ((points - self.low_corner) * self.scale).clamp(0, size * size - 1).to(torch.int32)
        upper, lower = self.spread_bits[cell >> self.half_bits], self.spread_bits[cell & (size - 1)]
        shift = torch.arange(features, device=points.device)
        return (((upper << self.half_bits * features) + lower) << shift).sum(1)

    def nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return (squared distances, indices) of the k nearest points of each query: nearest first, ties by index."""
        (features, n), m = self.points.shape, len(queries)
        blocks, chunks = -(-m // QUERIES), -(-self.count // BOXES)
        if self.ordered:
            codes, order = self._morton_codes(queries).sort()
            block_codes = codes[::QUERIES].contiguous()
            first_chunk = torch.searchsorted(self.starts, block_codes, right=True, out_int32=True).sub(1).clamp_min(0)
        else:
            order, first_chunk = (
                torch.arange(m, device=queries.device),
                torch.zeros(blocks, dtype=torch.int32, device=queries.device),
            )
        splits = max(1, min(PROGRAMS // blocks, chunks, 64))
        length = -(-chunks // splits)
        slots = max(2, 1 << (k - 1).bit_length())
        keys = torch.empty(m, splits, slots, dtype=torch.int64, device=queries.device)
        with torch.cuda.device(queries.device):
            jit(_knn_kernel)[(blocks, splits)](
                self.points, self.index, self.low, self.high, self.chunk_low, self.chunk_high, queries.contiguous(),
                order, first_chunk, keys, n, m, self.count, chunks, length, -(-length // CHUNKS), splits,
                FEATURES=features, SLOTS=slots, QUERIES=QUERIES, TILE=TILE, BOXES=BOXES, CHUNKS=CHUNKS, num_warps=WARPS,
                enable_fp_fusion=False,  # a fused multiply-add rounds once, where metric.py rounds twice
            )  # fmt: skip
        best = keys.view(m, -1).sort(1)[0][:, :k]
        return (best >> 32).to(torch.int32).view(torch.float32), best & 0xFFFFFFFF


def _by_groups(values: Tensor, size: int, largest: bool) -> Tensor:
    """Return the least (or largest) of every `size` columns of (features, columns)."""
    features, n = values.shape
    groups = -(-n // size)
    padding = values[:, -1:].expand(features, groups * size - n)
    grouped = torch.cat([values, padding], 1).view(features, groups, size)
    return grouped.amax(2) if largest else grouped.amin(2)


def _knn_kernel(
    points, index, low, high, chunk_low, chunk_high, queries, order, first_chunk, keys, n, m, tiles, chunks, length,
    rounds, splits, FEATURES: tl.constexpr, SLOTS: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
    BOXES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write keys (m, splits, SLOTS): the best keys of each query in each split of the points.

    points (FEATURES, n); low and high corners of the boxes of tiles (FEATURES, tiles) and chunks (FEATURES, chunks);
    queries (m, FEATURES), processed in `order`. A split is `length` chunks, visited in rounds of CHUNKS.
    """
    block, split = tl.program_id(0), tl.program_id(1)
    position = block * QUERIES + tl.arange(0, QUERIES)
    valid = position < m
    row = tl.load(order + position, mask=valid, other=0)
    slot = tl.arange(0, SLOTS)
    # Every slot starts as an infinitely distant point with its own index, so that no two keys are equal.
    empty = 0x7F80000000000000 + slot.to(tl.int64)
    best = tl.zeros([QUERIES, SLOTS], dtype=tl.int64) + empty[None, :]
    worst = tl.max(best, 1)
    far = (worst >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    # Start with the round that contains the queries, if it is in this split.
    begin = tl.load(first_chunk + block) % length // CHUNKS
    for step in range(0, rounds):
        offset = (begin + step) % rounds * CHUNKS + tl.arange(0, CHUNKS)
        chunk = split * length + offset
        chunk_valid = (offset < length) & (chunk < chunks)
        chunk_distance = tl.zeros([QUERIES, CHUNKS], dtype=tl.float32)
        for d in tl.static_range(FEATURES):
            q = tl.load(queries + row * FEATURES + d, mask=valid, other=0.0)
            corner = tl.load(chunk_low + d * chunks + chunk, mask=chunk_valid, other=0.0)
            opposite = tl.load(chunk_high + d * chunks + chunk, mask=chunk_valid, other=0.0)
            # Rounded like the distances, so the result never exceeds the distance to a point in the box.
            outside = tl.maximum(tl.maximum(corner[None, :] - q[:, None], q[:, None] - opposite[None, :]), 0.0)
            chunk_distance += outside * outside
        chunk_distance = tl.where(chunk_valid[None, :] & valid[:, None], chunk_distance, float("inf"))
        near_chunks = tl.min(tl.where(chunk_distance <= far[:, None], chunk_distance, float("inf")), 0)
        nearest_chunk = tl.min(near_chunks, 0)
        while nearest_chunk < float("inf"):
            visited = tl.min(tl.where(near_chunks == nearest_chunk, chunk, chunks), 0)
            box = visited * BOXES + tl.arange(0, BOXES)
            box_valid = box < tiles
            box_distance = tl.zeros([QUERIES, BOXES], dtype=tl.float32)
            for d in tl.static_range(FEATURES):
                q = tl.load(queries + row * FEATURES + d, mask=valid, other=0.0)
                a = tl.load(low + d * tiles + box, mask=box_valid, other=0.0)
                b = tl.load(high + d * tiles + box, mask=box_valid, other=0.0)
                gap = tl.maximum(tl.maximum(a[None, :] - q[:, None], q[:, None] - b[None, :]), 0.0)
                box_distance += gap * gap
            box_distance = tl.where(box_valid[None, :] & valid[:, None], box_distance, float("inf"))
            nearest = tl.min(tl.where(box_distance <= far[:, None], box_distance, float("inf")), 0)
            nearest_distance = tl.min(nearest, 0)
            while nearest_distance < float("inf"):
                tile = tl.min(tl.where(nearest == nearest_distance, box, tiles), 0)
                column = tile * TILE + tl.arange(0, TILE)
                in_range = column < n
                total = tl.zeros([QUERIES, TILE], dtype=tl.float32)
                for d in tl.static_range(FEATURES):
                    q = tl.load(queries + row * FEATURES + d, mask=valid, other=0.0)
                    p = tl.load(points + d * n + column, mask=in_range, other=0.0)
                    difference = q[:, None] - p[None, :]
                    total += difference * difference
                point = tl.load(index + column, mask=in_range, other=0)
                key = (total.to(tl.int32, bitcast=True).to(tl.int64) << 32) | point.to(tl.int64)[None, :]
                key = tl.where(in_range[None, :] & valid[:, None], key, 0x7FFFFFFFFFFFFFFF)
                least = tl.min(key, 1)
                while tl.max((least < worst).to(tl.int32), 0) > 0:
                    replaced = (best == worst[:, None]) & (least < worst)[:, None]
                    best = tl.where(replaced, least[:, None], best)
                    worst = tl.max(best, 1)
                    key = tl.where(key == least[:, None], 0x7FFFFFFFFFFFFFFF, key)
                    least = tl.min(key, 1)
                far = (worst >> 32).to(tl.int32).to(tl.float32, bitcast=True)
                box_distance = tl.where(box[None, :] == tile, float("inf"), box_distance)
                nearest = tl.min(tl.where(box_distance <= far[:, None], box_distance, float("inf")), 0)
                nearest_distance = tl.min(nearest, 0)
            chunk_distance = tl.where(chunk[None, :] == visited, float("inf"), chunk_distance)
            near_chunks = tl.min(tl.where(chunk_distance <= far[:, None], chunk_distance, float("inf")), 0)
            nearest_chunk = tl.min(near_chunks, 0)
    out = (row.to(tl.int64)[:, None] * splits + split) * SLOTS + slot[None, :]
    tl.store(keys + out, best, mask=valid[:, None])
