"""torch.gradient: differences that are one-sided at the field's edges."""

import torch

from tests.harness import T, case, double_backward, raises

FEW = {"layouts": 4}
SOME = {"layouts": 10}


def at(*points):
    """Build coordinates of a dim, a plain tensor that gets a gradient."""
    return T(len(points), fill=lambda shape, generator: torch.tensor(points, dtype=torch.float64), shard_dims=())


def by_coordinates(x, *points):
    return torch.gradient(x, spacing=points)


CASES = [
    case(torch.gradient, T(7, 6), options=SOME),
    case(torch.gradient, T(7, 6), edge_order=2, options=SOME),
    case(torch.gradient, T(3, 9), dim=1, edge_order=2, options=SOME),
    case(torch.gradient, T(2, 5, 3), dim=(-1, 0), spacing=[0.5, 2.0], options=FEW),
    case(torch.gradient, T(5, 4), spacing=3, options=FEW),
    case(by_coordinates, T(5, 4), at(0.0, 0.5, 2.0, 2.5, 4.0), at(1.0, 2.0, 4.0, 7.0), options=SOME),
    case(by_coordinates, T(6), T(6, fill=lambda s, g: torch.arange(6.0, dtype=torch.float64) ** 1.5), options=FEW),
    case(torch.gradient, T(6, 4, dtype=torch.complex128), dim=0, options=FEW),
    case(torch.gradient, T(6, 4, fill="ints"), options=FEW),
    case(lambda x: torch.gradient(x)[0] ** 2, T(2, 3), options=FEW | {"name": "few cells"}),
    case(double_backward(lambda x: torch.gradient(x, edge_order=2)[1] ** 2), T(4, 5), options=FEW | {"name": "twice"}),
    case(torch.gradient, T(4, 1), options=FEW | raises(RuntimeError, "at least edge_order+1")),
    case(torch.gradient, T(4, 4), edge_order=3, options=FEW | raises(RuntimeError, "edge_order=1 and edge_order=2")),
    case(torch.gradient, T(4, 4), dim=2, options=FEW | raises(IndexError, "Dimension out of range")),
    case(torch.gradient, T(4, 4), spacing=[1.0], options=FEW | raises(RuntimeError, "expected spacing")),
]
