"""F.pad in every mode."""

import torch
import torch.nn.functional as F

from tests.harness import T, case, double_backward, raises

FEW = {"layouts": 6}
NO_MESSAGES = {"no_messages": True, "layouts": 8}

CASES = [
    case(F.pad, T(4, 5), (1, 2), options=NO_MESSAGES),
    case(F.pad, T(4, 5), (0, 0, 2, 1), options=NO_MESSAGES),
    case(F.pad, T(4, 5), (1, 0, 0, 3), value=1.5, options=FEW | {"no_messages": True, "try_partial": False}),
    case(F.pad, T(4, 5), (1, 0, 0, 3), value=1.5, options=FEW),
    case(F.pad, T(2, 5, 6), [-2, 1, 3, -4], options=NO_MESSAGES),
    case(F.pad, T(5), (-4, 1), options=NO_MESSAGES),
    case(F.pad, T(5), (-4, -2), options=FEW | raises(RuntimeError, "narrow(): length must be non-negative")),
    case(F.pad, T(0, 3), (0, 0, 1, 1), options=NO_MESSAGES),
    case(F.pad, T(3), (1, 1, 1, 1), options=FEW | raises(RuntimeError, "Padding length should be less than or equal")),
    case(torch.constant_pad_nd, T(3, 4), (1, 2), 2.0, options=FEW),
    case(F.pad, T(3, 4, fill="bool"), (1, 1), value=True, options=FEW),
    case(F.pad, T(2, 6), (2, 3), mode="reflect", options={"layouts": 16}),
    case(F.pad, T(2, 3, 5, 6), (2, 3, 1, 2), "reflect", options={"layouts": 16}),
    case(F.pad, T(1, 2, 4, 3, 5), (1, 1, 2, 0, 0, 1), "reflect", options=FEW),
    case(F.pad, T(2, 6), (6, 0), "reflect", options=FEW | raises(RuntimeError, "Padding size should be less than")),
    case(F.pad, T(2, 6), (-1, 2), "reflect", options=FEW),
    case(F.pad, T(2, 6), (2, 3), mode="replicate", options=NO_MESSAGES),
    case(F.pad, T(2, 3, 4, 5), (2, 1, 0, 3), "replicate", options=NO_MESSAGES),
    case(F.pad, T(2, 6), (-2, 9), "replicate", options=NO_MESSAGES),
    case(F.pad, T(2, 6), (2, 6), mode="circular", options={"layouts": 16}),
    case(F.pad, T(2, 2, 4, 5), (5, 1, 2, 3), "circular", options=FEW),
    case(
        F.pad, T(2, 6), (7, 0), "circular", options=FEW | raises(RuntimeError, "causes wrapping around more than once")
    ),
    case(F.pad, T(2, 6), (3, -1), "circular", options=FEW),
    case(F.pad, T(2, 6), (1, 1), "mirror", options=FEW | raises(NotImplementedError, "Unrecognised padding mode")),
    case(lambda x: F.pad(torch.sin(x.flatten(2)), (1, 1)), T(2, 2, 3, 2), options=FEW | {"name": "pad merged"}),
    case(
        lambda x: F.pad(torch.sin(x.flatten(1, 2)), (2, 1), "reflect"),
        T(2, 2, 3, 4),
        options=FEW | {"name": "pad next to a merged dim"},
    ),
]

CASES += [  # the functions that F.pad calls for each mode
    case(torch._C._nn.reflection_pad1d, T(2, 3, 6), (2, 1), options={"layouts": 3}),
    case(torch._C._nn.replication_pad2d, T(2, 3, 4, 5), (2, 1, 1, 3), options={"layouts": 3}),
    case(torch._C._nn.reflection_pad2d, T(2, 3, 4, 5), (2, 1, 1, 3), options={"layouts": 3}),
    case(torch._C._nn.reflection_pad3d, T(1, 2, 4, 3, 5), (2, 1, 1, 2, 0, 3), options={"layouts": 3}),
    case(torch._C._nn.replication_pad1d, T(2, 3, 6), (2, 7), options={"layouts": 3}),
    case(torch._C._nn.replication_pad3d, T(1, 2, 4, 3, 5), (2, 1, 1, 3, 0, 4), options={"layouts": 3}),
    case(
        double_backward(lambda x: F.pad(x, (2, 1), "reflect")),
        T(2, 5),
        options=FEW | {"name": "reflect, double backward"},
    ),
    case(double_backward(lambda x: F.pad(x, (1, -2, 0, 3))), T(4, 5), options=FEW | {"name": "pad, double backward"}),
]


def write_into_result(pad, mode):
    """Return the function that pads, writes into the result, and returns the input too, which must not change."""

    def call(x):
        x = torch.sin(x)
        y = F.pad(x, pad, mode)
        y.mul_(3.0)
        return x * 2, y

    return call


CASES += [  # torch returns new memory, also where nothing is padded
    case(write_into_result(pad, mode), T(2, 6), options={"layouts": 4, "name": f"write into pad {pad}, {mode}"})
    for mode in ("constant", "reflect", "replicate", "circular")
    for pad in ((0, 0), (-1, -1), (0, 1))
]
