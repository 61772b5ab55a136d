"""grid_sample and affine_grid."""

import math

import torch
import torch.nn.functional as F

from tests.harness import T, case, double_backward, raises

FEW = {"layouts": 4}
FIELD = {"layouts": 12}
NO_CUBIC_VOLUMES = raises(RuntimeError, "bicubic interpolation only supports 4D input")  # before torch 2.15


def anywhere(shape, generator):
    """Draw points inside and outside of the field."""
    return torch.rand(shape, dtype=torch.float64, generator=generator) * 3 - 1.5


def near(shape, generator):
    """Draw points near the identity grid."""
    *batch, height, width, _ = shape
    rows = torch.linspace(-1, 1, height, dtype=torch.float64).view(-1, 1).expand(height, width)
    columns = torch.linspace(-1, 1, width, dtype=torch.float64).expand(height, width)
    grid = torch.stack([columns, rows], -1).expand(shape)
    return grid + 0.1 * torch.randn(shape, dtype=torch.float64, generator=generator)


def ties(shape, generator):
    """Draw points on cell centers, on edges and halfway between."""
    return torch.randint(-10, 11, shape, generator=generator).double() / 8


def nowhere(shape, generator):
    """Draw points of which some are NaN or infinite."""
    grid = anywhere(shape, generator)
    grid[..., 0, :, 0], grid[..., 1, :, 1], grid[..., -1, 0, :] = math.nan, math.inf, -math.inf
    return grid


def spoiled(shape, generator):
    """Draw a field with an infinity and a NaN."""
    field = torch.randn(shape, dtype=torch.float64, generator=generator)
    field[..., 2, 1], field[..., 5, 4] = math.inf, math.nan
    return field


def rotated(x, angle):
    """Rotate a field about its center."""
    c, s = angle.cos(), angle.sin()
    theta = torch.stack([torch.stack([c, -s, 0 * c], -1), torch.stack([s, c, 0 * c], -1)], -2)
    return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)


PADDINGS = ("zeros", "border", "reflection")
CASES = [
    # ---- any sharding of field and grid
    case(F.grid_sample, T(2, 3, 6, 5), T(2, 4, 7, 2, fill=anywhere), align_corners=False, options=FIELD),
    case(F.grid_sample, T(2, 3, 8, 6), T(2, 8, 6, 2, fill=near), align_corners=True, options=FIELD),
    case(F.grid_sample, T(2, 2, 3, 4, 5), T(2, 3, 2, 4, 3, fill=anywhere), align_corners=False, options=FIELD),
    case(F.grid_sample, T(1, 1, 3, 2), T(1, 9, 8, 2, fill=anywhere), align_corners=False, options=FIELD),
    # ---- every mode
    *(
        case(
            F.grid_sample,
            T(1, 2, 6, 5, shard_dims=(2, 3)),
            T(1, 4, 5, 2, fill=anywhere, shard_dims=(1, 2)),
            mode=mode,
            padding_mode=padding,
            align_corners=corners,
            options=FEW,
        )
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in PADDINGS
        for corners in (False, True)
    ),
    *(
        case(
            F.grid_sample,
            T(1, 2, 4, 3, 5, shard_dims=(2, 3, 4)),
            T(1, 2, 4, 3, 3, fill=anywhere, shard_dims=(1, 2, 3)),
            mode=mode,
            padding_mode=padding,
            align_corners=corners,
            options=FEW,
        )
        for mode in ("bilinear", "nearest")
        for padding in PADDINGS
        for corners in (False, True)
    ),
    # ---- points on cells, on edges, halfway between; NaN and infinite points; a field with infinities
    *(
        case(
            F.grid_sample,
            T(1, 2, 8, 4, shard_dims=(2, 3)),
            T(1, 4, 5, 2, fill=fill, shard_dims=(1, 2)),
            mode=mode,
            padding_mode=padding,
            align_corners=corners,
            options=FEW | {"name": f"grid_sample {fill.__name__}", "grad": fill is ties},
        )
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in PADDINGS
        for corners, fill in ((False, ties), (True, ties), (False, nowhere))
    ),
    *(
        case(
            F.grid_sample,
            T(1, 1, 4, 3, 4, shard_dims=(2, 3, 4)),
            T(1, 2, 4, 3, 3, fill=fill, shard_dims=(1, 2, 3)),
            mode=mode,
            padding_mode=padding,
            align_corners=False,
            options=FEW | {"name": f"grid_sample {fill.__name__}", "grad": fill is ties},
        )
        for mode in ("bilinear", "nearest")
        for padding in PADDINGS
        for fill in (ties, nowhere)
    ),
    *(
        case(
            F.grid_sample,
            T(1, 2, 6, 5, fill=spoiled, grad=False, shard_dims=(2, 3)),
            T(1, 4, 5, 2, fill=anywhere, shard_dims=(1, 2), grad=False),
            mode=mode,
            padding_mode="zeros",
            align_corners=False,
            options=FEW | {"name": "grid_sample spoiled"},
        )
        for mode in ("bilinear", "nearest", "bicubic")
    ),
    # ---- one cell, no points, no samples, no channels
    case(
        F.grid_sample,
        T(1, 2, 1, 1),
        T(1, 3, 2, 2, fill=anywhere),
        padding_mode="reflection",
        align_corners=True,
        options=FEW,
    ),
    case(F.grid_sample, T(1, 2, 4, 3), T(1, 0, 2, 2, fill=anywhere), align_corners=False, options=FEW),
    case(F.grid_sample, T(0, 2, 4, 3), T(0, 3, 2, 2, fill=anywhere), align_corners=False, options=FEW),
    case(F.grid_sample, T(1, 0, 4, 3), T(1, 3, 2, 2, fill=anywhere), align_corners=False, options=FEW),
    # ---- only one operand requires a gradient
    case(
        F.grid_sample,
        T(1, 2, 6, 5, grad=False),
        T(1, 4, 5, 2, fill=anywhere),
        mode="nearest",
        align_corners=False,
        options=FEW,
    ),
    case(
        F.grid_sample,
        T(1, 2, 6, 5),
        T(1, 4, 5, 2, fill=anywhere, grad=False),
        mode="nearest",
        align_corners=False,
        options=FEW,
    ),
    case(F.grid_sample, T(1, 2, 6, 5, grad=False), T(1, 4, 5, 2, fill=anywhere), align_corners=False, options=FEW),
    # ---- other dtypes, other spellings
    case(
        lambda x, g: F.grid_sample(x.float(), g.float(), align_corners=False),
        T(1, 2, 6, 5),
        T(1, 4, 5, 2, fill=anywhere),
        options=FEW | {"name": "grid_sample float32", "tolerance": 1e-5},
    ),
    case(
        lambda x, g: F.grid_sample(x.bfloat16(), g.bfloat16(), align_corners=False),
        T(1, 2, 6, 5),
        T(1, 4, 5, 2, fill=ties),
        options=FEW | {"name": "grid_sample bfloat16", "tolerance": 5e-2, "grad": False},
    ),
    case(torch.grid_sampler, T(1, 2, 6, 5), T(1, 4, 5, 2, fill=anywhere), 0, 1, False, options=FEW),
    case(torch.grid_sampler_2d, T(1, 2, 6, 5), T(1, 4, 5, 2, fill=anywhere), 2, 0, True, options=FEW),
    case(torch.grid_sampler_3d, T(1, 2, 3, 4, 5), T(1, 2, 2, 5, 3, fill=anywhere), 0, 0, True, options=FEW),
    # ---- bad calls
    case(
        F.grid_sample,
        T(1, 2, 6, 5),
        T(2, 4, 5, 2, fill=anywhere),
        align_corners=False,
        options=FEW | raises(RuntimeError, "expected grid and input to have same batch size"),
    ),
    case(
        F.grid_sample,
        T(1, 2, 6, 5),
        T(1, 4, 5, 3, fill=anywhere),
        align_corners=False,
        options=FEW | raises(RuntimeError, "expected grid to have size"),
    ),
    case(
        F.grid_sample,
        T(1, 2, 0, 5),
        T(1, 4, 5, 2, fill=anywhere),
        align_corners=False,
        options=FEW | raises(RuntimeError, "expected input to have non-empty spatial dimensions"),
    ),
    case(
        F.grid_sample,
        T(1, 2, 6),
        T(1, 4, 5, 2, fill=anywhere),
        align_corners=False,
        options=FEW | raises(RuntimeError, "expected grid to have size"),
    ),
    case(
        F.grid_sample,
        T(1, 2, 6, 5),
        T(1, 4, 5, 2, fill=anywhere),
        mode="linear",
        align_corners=False,
        options=FEW | raises(ValueError, "expected mode to be"),
    ),
    case(
        F.grid_sample,
        T(1, 2, 3, 4, 5),
        T(1, 2, 2, 5, 3, fill=anywhere),
        mode="bicubic",
        align_corners=False,
        options=FEW | (NO_CUBIC_VOLUMES if torch.__version__ < "2.15" else {}),
    ),
    case(
        F.grid_sample,
        T(1, 2, 6, 5),
        T(1, 4, 5, 2, fill="ints"),
        align_corners=False,
        options=FEW | raises(RuntimeError, "expected scalar type Double but found Long"),
    ),
    # ---- affine grids
    case(F.affine_grid, T(3, 2, 3), [3, 1, 4, 5], align_corners=False, options=FEW),
    case(F.affine_grid, T(2, 3, 4), (2, 1, 4, 2, 5), align_corners=True, options=FEW),
    case(
        F.affine_grid,
        T(2, 2, 3),
        [2, 1, 0, 5],
        align_corners=False,
        options=FEW | raises(ValueError, "Expected non-zero, positive output size"),
    ),
    case(
        F.affine_grid,
        T(2, 3, 3),
        [2, 1, 4, 5],
        align_corners=False,
        options=FEW | raises(ValueError, "Expected a batch of 2D affine matrices"),
    ),
    case(rotated, T(2, 2, 6, 5), T(2), options=FIELD),
    # ---- double backward
    *(
        case(
            double_backward(lambda x, g: F.grid_sample(x, g, align_corners=False)),
            T(1, 2, 5, 4),
            T(1, 3, 4, 2, fill=anywhere),
            options=FEW | {"name": "grid_sample, double backward"},
        )
        for _ in range(torch.__version__ >= "2.13")  # torch 2.11 has no second derivative
    ),
]
