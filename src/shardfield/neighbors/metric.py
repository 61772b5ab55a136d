"""Squared distances that are bitwise equal in every search method.

Searches on one device, by a tree, a kernel or over many ranks must choose the same neighbors, also among equally
distant points. There is therefore one definition: differences are squared and added feature by feature, with rounding
after each step. Rounding is monotonic, so the same steps on the sides of a bounding box give exact bounds of the
squared distances to the points inside, without a tolerance.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_NEIGHBOR = torch.iinfo(torch.int64).max  # the index of a missing neighbor: sorts after all others


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the distance computation: float32 for half precision, else `dtype`."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def max_coordinate(dtype: torch.dtype, features: int) -> float:
    """Return the largest absolute coordinate for which no squared distance overflows."""
    return (torch.finfo(dtype).max / (8 * features)) ** 0.5


def _sum_of_squares(gaps: list[Tensor]) -> Tensor:
    total = gaps[0].square()
    for gap in gaps[1:]:
        total += gap.square()
    return total


def squared_distance(left: Tensor, right: Tensor) -> Tensor:
    """Return the squared distances (...) of points (..., features), with broadcasting."""
    return _sum_of_squares([left[..., d] - right[..., d] for d in range(left.shape[-1])])


def bounding_box(points: Tensor) -> Tensor:
    """Return the lowest and highest coordinates (2, features); (inf, -inf) for no points, at distance inf to all."""
    if len(points):
        return torch.stack([points.amin(0), points.amax(0)])
    ends = points.new_tensor([torch.inf, -torch.inf])
    return ends[:, None].expand(2, points.shape[1])


def bounding_boxes(points: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return boxes (2 ** depth, 2, features) that cover the points, and the number of points in each.

    Each box is split at the median of its longest side, so that the boxes follow the shape of the cloud.
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
    """Return (points, boxes): lower bounds of the squared distances to points inside `boxes` (boxes, 2, features)."""
    low, high, x = boxes[:, 0], boxes[:, 1], points[:, None]
    return _sum_of_squares([_gap_to_interval(low[:, d], high[:, d], x[..., d]) for d in range(points.shape[1])])


def _gap_to_interval(low: Tensor, high: Tensor, x: Tensor) -> Tensor:
    return torch.maximum(low - x, x - high).clamp_min(0)


def max_distance_to_boxes(boxes: Tensor, points: Tensor) -> Tensor:
    """Return (points, boxes): upper bounds of the squared distances to points inside `boxes` (boxes, 2, features)."""
    low, high, x = boxes[:, 0], boxes[:, 1], points[:, None]
    return _sum_of_squares(
        [torch.maximum((x - low).abs()[..., d], (x - high).abs()[..., d]) for d in range(points.shape[1])]
    )


def select_nearest(squares: Tensor, index: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the first k candidates of each row, ordered by squared distance, then by index."""
    order = index.argsort(1)
    order = order.gather(1, squares.gather(1, order).argsort(dim=1, stable=True)[:, :k])
    return squares.gather(1, order), index.gather(1, order)
