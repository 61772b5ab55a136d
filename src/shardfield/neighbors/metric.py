"""Squared distances that come out the same, to the last bit, however the search is done.

A search on one device, in blocks, by a tree or over many ranks must choose the same neighbours, also where two points
are equally far. So there is one definition: differences are squared and added feature by feature, each step rounded.
Rounding never turns the order of two numbers around, so the same steps on the sides of a box give bounds on the
squared distances to the points inside that hold exactly, without a margin.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_NEIGHBOR = torch.iinfo(torch.int64).max  # the index of a neighbour that is not there: behind all others


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which distances are computed: half precision is widened."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def max_coordinate(dtype: torch.dtype, features: int) -> float:
    """The largest size of a coordinate for which no squared distance overflows."""
    return (torch.finfo(dtype).max / (8 * features)) ** 0.5


def _sum_of_squares(gaps: list[Tensor]) -> Tensor:
    total = gaps[0].square()
    for gap in gaps[1:]:
        total += gap.square()
    return total


def squared_distance(left: Tensor, right: Tensor) -> Tensor:
    """The squared distances of points (..., features) that broadcast: (...)."""
    return _sum_of_squares([left[..., d] - right[..., d] for d in range(left.shape[-1])])


def bounding_box(points: Tensor) -> Tensor:
    """The lowest and the highest coordinates (2, features); of no points: an inside-out box that is far from all."""
    if len(points):
        return torch.stack([points.amin(0), points.amax(0)])
    ends = points.new_tensor([torch.inf, -torch.inf])
    return ends[:, None].expand(2, points.shape[1])


def bounding_boxes(points: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Boxes (2 ** depth, 2, features) that hold the points between them, and how many each holds.

    A box is halved at the median of its longest side: the boxes of a block follow its shape, which one alone does not.
    """
    parts = [points]
    for _ in range(depth):
        parts = [half for part in parts for half in _split_at_median(part)]
    return torch.stack([bounding_box(p) for p in parts]), torch.tensor([len(p) for p in parts], device=points.device)


def _split_at_median(points: Tensor) -> tuple[Tensor, Tensor]:
    if len(points) < 2:
        return points, points[:0]
    side = points[:, int((points.amax(0) - points.amin(0)).argmax())]
    low = side <= side.median()
    return points[low], points[~low]


def min_distance_to_boxes(boxes: Tensor, points: Tensor) -> Tensor:
    """(points, boxes): no point in the box is closer than this, squared. `boxes`: (boxes, 2, features)."""
    low, high, x = boxes[:, 0], boxes[:, 1], points[:, None]
    return _sum_of_squares([_gap_to_interval(low[:, d], high[:, d], x[..., d]) for d in range(points.shape[1])])


def _gap_to_interval(low: Tensor, high: Tensor, x: Tensor) -> Tensor:
    return torch.maximum(low - x, x - high).clamp_min(0)


def max_distance_to_boxes(boxes: Tensor, points: Tensor) -> Tensor:
    """(points, boxes): no point in the box is farther than this, squared."""
    low, high, x = boxes[:, 0], boxes[:, 1], points[:, None]
    return _sum_of_squares(
        [torch.maximum((x - low).abs()[..., d], (x - high).abs()[..., d]) for d in range(points.shape[1])]
    )


def select_nearest(squares: Tensor, index: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k first of each row of candidates: by squared distance, then by index."""
    order = index.argsort(1)
    order = order.gather(1, squares.gather(1, order).argsort(dim=1, stable=True)[:, :k])
    return squares.gather(1, order), index.gather(1, order)
