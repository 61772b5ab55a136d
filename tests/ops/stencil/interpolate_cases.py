"""interpolate and upsample."""

import warnings

import torch
import torch.nn.functional as F

from tests.harness import DEVICE, T, case, double_backward, raises

FEW = {"layouts": 3}
FIELD = {"layouts": 12}
NO_MESSAGES = {"layouts": 3, "no_messages": True, "try_partial": False}


def spatial(*shape):
    """Build a field that is sharded along its spatial dims only."""
    return T(*shape, shard_dims=tuple(range(2, len(shape))))


def quietly(fn):
    """Return `fn` without torch's deprecation warnings."""

    def run(*args, **kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fn(*args, **kwargs)

    return run


def spoiled(shape, generator):
    """Draw a field with an infinity and a NaN."""
    field = torch.randn(shape, dtype=torch.float64, generator=generator)
    field[..., 2, 1], field[..., 5, 4] = float("inf"), float("nan")
    return field


def down_and_up(x, size):
    """Resample to half the size and to another one: the result has the proportions of the original sharding."""
    return F.interpolate(F.interpolate(x, scale_factor=0.5), size=size)


MODES = [
    ("nearest", {}),
    ("nearest-exact", {}),
    ("area", {}),
    ("bilinear", {"align_corners": False}),
    ("bilinear", {"align_corners": True}),
    ("bicubic", {"align_corners": False}),
    ("bicubic", {"align_corners": True}),
    ("bilinear", {"antialias": True}),
    ("bicubic", {"antialias": True}),
]

CASES = [
    *(case(down_and_up, spatial(1, 2, n), size, options=FIELD) for n, size in [(2, 4), (4, 8), (6, 7)]),
    # ---- every mode: down, up, to sizes without a common divisor with the field's
    *(
        case(F.interpolate, spatial(1, 2, 8, 7), size=size, mode=mode, **kwargs, options=FEW)
        for mode, kwargs in MODES
        for size in [(16, 14), (5, 11), (13, 2)]
    ),
    *(
        case(F.interpolate, spatial(1, 2, 9, 6), scale_factor=factor, mode=mode, **kwargs, options=FEW)
        for mode, kwargs in MODES
        for factor in [(0.5, 2), (1 / 3, 3), (1.7, 0.6)]
    ),
    # ---- a size that a factor does not change: torch ignores the factor in some modes. Antialiased, its backward does
    # not ignore it, so the gradient does not match the forward
    *(
        case(
            F.interpolate,
            spatial(1, 2, 9, 6),
            scale_factor=(1.1, 2.3),
            mode=mode,
            **kwargs,
            # halfway between two cells a device's nearest-exact reads one cell and its backward writes the other
            options=FEW | {"grad": "antialias" not in kwargs and (mode != "nearest-exact" or DEVICE == "cpu")},
        )
        for mode, kwargs in MODES
    ),
    # ---- any sharding
    case(F.interpolate, T(2, 3, 8, 7), scale_factor=2, mode="bilinear", options=FIELD),
    case(F.interpolate, T(2, 3, 8, 6), scale_factor=0.5, mode="bilinear", options=FIELD),
    case(F.interpolate, T(2, 4, 6, 5), scale_factor=3, options=FIELD),
    case(F.interpolate, T(2, 4, 6, 5), size=(9, 4), mode="bicubic", align_corners=True, options=FEW),
    case(F.interpolate, T(2, 4, 6, 5), size=(3, 8), mode="area", options=FEW),
    # ---- one and three dims
    *(
        case(F.interpolate, spatial(2, 1, 10), size=size, mode=mode, **kwargs, options=FEW)
        for mode, kwargs in [
            ("nearest", {}),
            ("nearest-exact", {}),
            ("area", {}),
            ("linear", {}),
            ("linear", {"align_corners": True}),
        ]
        for size in [20, 7]
    ),
    *(
        case(F.interpolate, spatial(1, 1, 5, 4, 6), scale_factor=factor, mode=mode, **kwargs, options=FEW)
        for mode, kwargs in [
            ("nearest", {}),
            ("nearest-exact", {}),
            ("area", {}),
            ("trilinear", {}),
            ("trilinear", {"align_corners": True}),
        ]
        for factor in [2, (0.6, 2, 1.3)]
    ),
    # ---- recomputed scale factors
    case(
        F.interpolate, spatial(1, 2, 7, 5), scale_factor=1.6, mode="bilinear", recompute_scale_factor=True, options=FEW
    ),
    case(
        F.interpolate, spatial(1, 2, 7, 5), scale_factor=1.6, mode="nearest", recompute_scale_factor=True, options=FEW
    ),
    case(
        F.interpolate, spatial(1, 2, 7, 5), scale_factor=1.6, mode="bicubic", recompute_scale_factor=False, options=FEW
    ),
    # ---- rounding of one device: results of more than 128 rows and columns come from another kernel, whose backward
    # in float64 rounds differently from its forward
    *(
        case(F.interpolate, spatial(1, 2, 4, 6), size=size, mode=mode, options=FEW | {"grad": False})
        for mode in ("nearest", "nearest-exact")
        for size in [(82, 55), (123, 7)]
    ),
    case(F.interpolate, spatial(1, 2, 3, 6), scale_factor=(2.3, 25.0), options=FEW | {"grad": False}),
    # ---- integer factors on matching shardings, and nearest in any case: no messages
    *(
        case(F.interpolate, T(2, 2, 8, 6), **kwargs, options=NO_MESSAGES)
        for kwargs in [
            {"scale_factor": 2},
            {"scale_factor": 3, "mode": "nearest-exact"},
            {"size": (5, 11)},
            {"size": (3, 1)},
            {"size": (8, 6), "mode": "bilinear"},
            {"size": (8, 6), "mode": "area"},
            {"size": (16, 24), "mode": "area"},
        ]
    ),
    # ---- other dtypes
    case(F.interpolate, T(2, 3, 6, 5, fill="ints", high=256, dtype=torch.uint8), size=(9, 4), options=NO_MESSAGES),
    case(
        F.interpolate,
        T(2, 3, 6, 5, fill="ints", high=256, dtype=torch.uint8),
        size=(9, 4),
        mode="bilinear",
        options=FEW,
    ),
    case(
        F.interpolate,
        T(2, 6, 6, 5, fill="ints", high=256, dtype=torch.uint8),
        size=(4, 3),
        mode="bicubic",
        antialias=True,
        options=FEW,
    ),
    case(
        F.interpolate,
        T(2, 3, 6, 5, dtype=torch.float32),
        size=(9, 4),
        mode="bicubic",
        options=FEW | {"tolerance": 1e-5},
    ),
    case(
        F.interpolate,
        T(2, 3, 6, 5, dtype=torch.bfloat16),
        size=(9, 4),
        mode="bilinear",
        options=FEW | {"tolerance": 2e-2},
    ),
    # ---- infinities and NaN as on one device
    *(
        case(F.interpolate, T(1, 2, 8, 6, fill=spoiled, grad=False), size=(5, 9), mode=mode, **kwargs, options=FEW)
        for mode, kwargs in MODES
    ),
    # ---- other spellings
    case(quietly(F.upsample), T(1, 2, 4, 5), scale_factor=2, mode="bilinear", options=FEW | {"name": "upsample"}),
    case(quietly(F.upsample_nearest), T(1, 2, 4, 5), scale_factor=2, options=FEW | {"name": "upsample_nearest"}),
    case(quietly(F.upsample_bilinear), T(1, 2, 4, 5), size=(7, 9), options=FEW | {"name": "upsample_bilinear"}),
    case(torch.nn.Upsample(scale_factor=(1.5, 2), mode="bicubic"), T(1, 2, 4, 5), options=FEW | {"name": "Upsample"}),
    case(torch._C._nn.upsample_nearest1d, T(2, 2, 7), [10], options=FEW),
    case(torch._C._nn.upsample_nearest2d, T(1, 2, 4, 5), None, [2.0, 1.6], options=FEW),
    case(torch._C._nn._upsample_nearest_exact2d, T(1, 2, 4, 5), [9, 3], scales_h=None, scales_w=None, options=FEW),
    case(torch._C._nn.upsample_linear1d, T(2, 2, 7), [10], True, options=FEW),
    case(torch._C._nn.upsample_bilinear2d, T(1, 2, 4, 5), [9, 3], False, 2.0, 0.7, options=FEW),
    case(torch._C._nn.upsample_bicubic2d, T(1, 2, 4, 5), [9, 3], align_corners=True, options=FEW),
    case(torch._C._nn._upsample_bilinear2d_aa, T(1, 2, 8, 5), [3, 9], False, options=FEW),
    case(torch._C._nn.upsample_trilinear3d, T(1, 1, 4, 3, 5), None, False, (2.0, 1.0, 0.5), options=FEW),
    case(
        torch._C._nn.upsample_trilinear3d,
        T(1, 1, 4, 3, 5),
        [2, 2],
        False,
        options=FEW | raises(RuntimeError, "It is expected output_size equals to 3"),
    ),
    # ---- channels last, for which torch uses other kernels
    *(
        case(
            lambda x, mode=mode: F.interpolate(
                x.contiguous(memory_format=torch.channels_last), size=(7, 123), mode=mode
            ),
            T(1, 4, 5, 3, shard_dims=(2,)),
            options=FEW | {"name": f"channels last {mode}", "try_partial": False},
        )
        for mode in ("nearest", "nearest-exact", "bilinear")
    ),
    # ---- empty fields, bad calls
    case(F.interpolate, T(0, 2, 4, 5), scale_factor=2, options=FEW),
    case(F.interpolate, T(1, 0, 4, 5), scale_factor=2, mode="area", options=FEW | {"grad": False}),
    case(
        F.interpolate,
        T(1, 0, 4, 5),
        scale_factor=2,
        options=FEW | raises(RuntimeError, "Non-empty 4D data tensor expected"),
    ),
    case(
        F.interpolate,
        T(1, 2, 0, 5),
        scale_factor=2,
        options=FEW | raises(RuntimeError, "Input and output sizes should be greater than"),
    ),
    case(F.interpolate, T(1, 2, 4, 5), size=(0, 3), mode="area", options=FEW | {"grad": False}),
    case(
        F.interpolate,
        T(1, 2, 4, 5),
        size=(0, 3),
        options=FEW | raises(RuntimeError, "Input and output sizes should be greater than"),
    ),
    case(
        F.interpolate, T(1, 2, 4, 5), options=FEW | raises(ValueError, "either size or scale_factor should be defined")
    ),
    case(
        F.interpolate,
        T(1, 2, 4, 5),
        size=3,
        mode="trilinear",
        options=FEW | raises(NotImplementedError, "trilinear mode needs 5D input"),
    ),
    case(
        F.interpolate,
        T(1, 2, 4, 5),
        size=3,
        mode="nearest",
        align_corners=True,
        options=FEW | raises(ValueError, "align_corners option can only be set"),
    ),
    case(
        F.interpolate,
        T(1, 2, 4, 5),
        size=(3, 4, 5),
        options=FEW | raises(ValueError, "must have the same number of spatial dimensions"),
    ),
    case(
        F.interpolate, T(1, 2, 4, fill="ints"), size=3, options=FEW | raises(NotImplementedError, "not implemented for")
    ),
    case(
        F.interpolate,
        T(4, 5),
        size=3,
        options=FEW | raises(NotImplementedError, "Only 3D, 4D and 5D input Tensors supported"),
    ),
    # ---- double backward
    *(
        case(
            double_backward(lambda x, mode=mode, size=size: F.interpolate(x, size=size, mode=mode)),
            T(2, 2, 6, 5),
            options=FEW | {"name": f"{mode} {size}, double backward"},
        )
        for mode in ("nearest", "bilinear", "bicubic", "area")
        for size in [(12, 10), (4, 7)]
    ),
]
