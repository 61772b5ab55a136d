"""The rule of PhysicsNeMo's radius search, on an operator of torch calls with its signature."""

import torch
from torch import Tensor

from shardfield import runtime
from shardfield.dispatch.executor import make_handler
from shardfield.ops.indexing.point_search import radius_search
from tests.harness import T, case, raises


def found_in_order(points, queries, radius, limit):
    """Return, for each query, the first `limit` points within the radius by index, and their number."""
    near = torch.cdist(queries, points) <= radius
    at = torch.where(near, torch.arange(points.shape[-2], device=points.device), points.shape[-2]).sort(-1).values
    at = torch.nn.functional.pad(at, (0, limit), value=points.shape[-2])[..., :limit]
    return at, near.sum(-1).clamp(max=limit)


@torch.library.custom_op("shardfield_tests::radius_search", mutates_args=())
def stand_in(
    points: Tensor,
    queries: Tensor,
    radius: float,
    max_points: int | None = None,
    return_dists: bool = False,
    return_points: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if radius < 0:
        raise RuntimeError("the radius must not be negative")
    assert points.is_contiguous() and queries.is_contiguous() and queries.numel() and max_points is not None
    at, number = found_in_order(points, queries, radius, max_points)
    padded = torch.cat([points, torch.zeros_like(points[..., :1, :])], -2)
    rows = at.flatten(-2).unsqueeze(-1).expand(*at.shape[:-2], -1, 3)
    of_points = padded.gather(-2, rows).unflatten(-2, at.shape[-2:])
    distances = (of_points - queries.unsqueeze(-2)).norm(dim=-1) * (at < points.shape[-2])
    at = torch.where(at < points.shape[-2], at, 0).int()
    empty = points.new_empty(0, max_points, 3)
    distances = distances if return_dists else points.new_empty(0)
    return at, of_points if return_points else empty, distances, number.int()


@stand_in.register_fake
def _(points, queries, radius, max_points=None, return_dists=False, return_points=False):
    shape = (*queries.shape[:-1], max_points)
    return (
        queries.new_empty(shape, dtype=torch.int32),
        points.new_empty((*shape, 3) if return_points else (0, max_points, 3)),
        points.new_empty(shape if return_dists else (0,)),
        queries.new_empty(shape[:-1], dtype=torch.int32),
    )


def save(ctx, inputs, output):
    ctx.shape, ctx.wanted = inputs[0].shape, inputs[5]
    ctx.save_for_backward(output[0], output[3])


def scatter(ctx, _, grad, *others):
    if not ctx.wanted:
        return (None,) * 6
    at, number = ctx.saved_tensors
    kept = torch.arange(at.shape[-1], device=at.device) < number.unsqueeze(-1)
    rows = at.long().flatten(-2).unsqueeze(-1).expand(*at.shape[:-2], -1, 3)
    zeros = grad.new_zeros(ctx.shape)
    return zeros.scatter_add(-2, rows, (grad * kept.unsqueeze(-1)).flatten(-3, -2)), *(None,) * 5


stand_in.register_autograd(scatter, setup_context=save)


runtime.active.registry.register_named(
    "shardfield_tests.radius_search.default", make_handler(radius_search, partial=False, merged=False)
)


def search(points, queries, radius, limit, distances=False, neighbors=False):
    return torch.ops.shardfield_tests.radius_search(points, queries, radius, limit, distances, neighbors)


def searched_points(points, queries, radius, limit):
    """Return the neighbors alone, in a function that has their gradient."""
    return search(points, queries, radius, limit, False, True)[1].sin()


def queries(*shape):
    return T(*shape, grad=False)


CASES = [
    case(search, T(9, 3, grad=False), queries(7, 3), 1.3, 4, True, True, options={"layouts": 12}),
    case(search, T(2, 9, 3, grad=False), queries(2, 7, 3), 1.3, 3, options={"layouts": 8}),
    case(search, T(9, 3, grad=False), queries(1, 3), 1.3, 2, True, options={"layouts": 4}),
    # ranks without queries raise the operator's errors too
    case(
        search, T(9, 3), queries(1, 3), -1.0, 2, options={"layouts": 4} | raises(RuntimeError, "must not be negative")
    ),
    case(searched_points, T(9, 3), queries(7, 3), 1.5, 4, options={"layouts": 10}),
    case(searched_points, T(2, 6, 3), queries(2, 5, 3), 1.5, 4, options={"layouts": 8}),
]
