"""Borders."""

import torch
import torch.nn.functional as F

from tests.harness import T, case, double_backward

FEW = {"layouts": 6}
FREE = {"free": True, "layouts": 8}

CASES = [
    case(F.pad, T(4, 5), (1, 2), how=FREE),
    case(F.pad, T(4, 5), (0, 0, 2, 1), how=FREE),
    case(F.pad, T(4, 5), (1, 0, 0, 3), value=1.5, how=FEW | {"free": True, "partial": False}),
    case(F.pad, T(4, 5), (1, 0, 0, 3), value=1.5, how=FEW),
    case(F.pad, T(2, 5, 6), [-2, 1, 3, -4], how=FREE),
    case(F.pad, T(5), (-4, 1), how=FREE),
    case(F.pad, T(5), (-4, -2), how=FEW),
    case(F.pad, T(0, 3), (0, 0, 1, 1), how=FREE),
    case(F.pad, T(3), (1, 1, 1, 1), how=FEW),
    case(torch.constant_pad_nd, T(3, 4), (1, 2), 2.0, how=FEW),
    case(F.pad, T(3, 4, fill="bool"), (1, 1), value=True, how=FEW),
    case(F.pad, T(2, 6), (2, 3), mode="reflect", how={"layouts": 16}),
    case(F.pad, T(2, 3, 5, 6), (2, 3, 1, 2), "reflect", how={"layouts": 16}),
    case(F.pad, T(1, 2, 4, 3, 5), (1, 1, 2, 0, 0, 1), "reflect", how=FEW),
    case(F.pad, T(2, 6), (6, 0), "reflect", how=FEW),
    case(F.pad, T(2, 6), (-1, 2), "reflect", how=FEW),
    case(F.pad, T(2, 6), (2, 3), mode="replicate", how=FREE),
    case(F.pad, T(2, 3, 4, 5), (2, 1, 0, 3), "replicate", how=FREE),
    case(F.pad, T(2, 6), (-2, 9), "replicate", how=FREE),
    case(F.pad, T(2, 6), (2, 6), mode="circular", how={"layouts": 16}),
    case(F.pad, T(2, 2, 4, 5), (5, 1, 2, 3), "circular", how=FEW),
    case(F.pad, T(2, 6), (7, 0), "circular", how=FEW),
    case(F.pad, T(2, 6), (3, -1), "circular", how=FEW),
    case(F.pad, T(2, 6), (1, 1), "mirror", how=FEW),
    case(lambda x: F.pad(torch.sin(x.flatten(2)), (1, 1)), T(2, 2, 3, 2), how=FEW | {"name": "pad merged"}),
    case(
        lambda x: F.pad(torch.sin(x.flatten(1, 2)), (2, 1), "reflect"),
        T(2, 2, 3, 4),
        how=FEW | {"name": "pad beside merged"},
    ),
]

CASES += [  # what F.pad calls for each mode
    case(torch._C._nn.reflection_pad1d, T(2, 3, 6), (2, 1), how={"layouts": 3}),
    case(torch._C._nn.replication_pad2d, T(2, 3, 4, 5), (2, 1, 1, 3), how={"layouts": 3}),
    case(torch._C._nn.reflection_pad2d, T(2, 3, 4, 5), (2, 1, 1, 3), how={"layouts": 3}),
    case(double_backward(lambda x: F.pad(x, (2, 1), "reflect")), T(2, 5), how=FEW | {"name": "reflect, twice"}),
    case(double_backward(lambda x: F.pad(x, (1, -2, 0, 3))), T(4, 5), how=FEW | {"name": "pad, twice"}),
]
