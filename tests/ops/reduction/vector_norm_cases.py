"""Norms and distances."""

import math

import torch
import torch.nn.functional as F

from tests.harness import T, case, raises

FEW = {"layouts": 5}


def ties(shape, generator):
    return torch.randint(3, shape, generator=generator).double() - 1


def renorm_(x, *args):
    return x.clone().renorm_(*args)


vector_norm, matrix_norm, norm = torch.linalg.vector_norm, torch.linalg.matrix_norm, torch.linalg.norm

CASES = [
    case(vector_norm, T(5, 6)),
    case(vector_norm, T(5, 6), 2, 0),
    case(vector_norm, T(5, 6, fill=ties), 2, 1, options=FEW),
    case(vector_norm, T(5, 6), 3, (0, 1), True),
    case(vector_norm, T(5, 6), 1, 0),
    case(vector_norm, T(5, 6, fill=ties), 0, 0),
    case(vector_norm, T(5, 6, fill=ties), 0, options=FEW),
    case(vector_norm, T(5, 6, fill=ties), math.inf, 0),
    case(vector_norm, T(5, 6, fill=ties), -math.inf),
    case(vector_norm, T(5, 6), 0.5, 0),
    case(vector_norm, T(5, 6), 1.5, 1, options=FEW),
    case(vector_norm, T(5, 6), -2, 0),
    # a zero norm has gradient 0, also for negative orders, where one zero element suffices
    *(case(vector_norm, T(4, 5, fill=ties), ord, 1, options=FEW) for ord in (-2, -0.5, 0.5, 1.5, 3)),
    case(norm, T(5, fill=lambda shape, _: torch.zeros(shape).double()), -1, options=FEW),
    case(vector_norm, T(5, 6, dtype=torch.complex128), 2, 0, options=FEW),
    case(vector_norm, T(5, 6, dtype=torch.complex128), math.inf, 0, options=FEW),
    case(vector_norm, T(5, 6, dtype=torch.float32), 2, 0, dtype=torch.float64, options=FEW | {"tolerance": 1e-6}),
    case(vector_norm, T(5, 6, dtype=torch.float16), 2, 0, options=FEW | {"tolerance": 2e-3}),
    case(vector_norm, T(3, 0), 2, 1, options=FEW),
    case(vector_norm, T(3, 0), math.inf, 1, options=FEW | raises(RuntimeError, "cannot compute the inf norm")),
    case(
        vector_norm,
        T(3, 4, fill="ints"),
        options=FEW
        | raises(RuntimeError, "Expected a floating point or complex tensor", since_2_15=NotImplementedError),
    ),
    case(vector_norm, T(), options=FEW),
    case(matrix_norm, T(5, 6)),
    case(matrix_norm, T(2, 5, 6), "fro", (0, 2), True, options=FEW),
    case(matrix_norm, T(2, 5, 6), 1),
    case(matrix_norm, T(2, 5, 6), -1, (1, 0), options=FEW),
    case(matrix_norm, T(4, 5, 6), math.inf, (-2, -1), True),
    case(matrix_norm, T(5, 6), -math.inf, options=FEW),
    case(matrix_norm, T(5, 0), 1, options=FEW),
    case(matrix_norm, T(5, 0), math.inf, options=FEW),
    case(matrix_norm, T(5, 0), -1, options=FEW | raises(IndexError, "to have non-zero size")),
    case(matrix_norm, T(5, 2, 3, shard_dims=(0,)), "nuc", options=FEW | {"try_partial": False}),
    case(matrix_norm, T(5, 2, 3, shard_dims=(0,)), 2, options=FEW | {"try_partial": False}),
    case(matrix_norm, T(4, 3), "nuc", options=FEW | {"may_gather": True}),  # an SVD of one sharded matrix
    case(norm, T(5, 6)),
    case(norm, T(5, 6, 2), options=FEW),
    case(norm, T(5, 6), 1),
    case(norm, T(7), 1, options=FEW),
    case(norm, T(5, 6), "fro", options=FEW),
    case(norm, T(5, 6), math.inf, 1, options=FEW),
    case(norm, T(5, 6, 2), 1, options=FEW | raises(RuntimeError, "If dim is not specified but ord is")),
    case(torch.norm, T(5, 6)),
    case(torch.norm, T(5, 6), "fro", options=FEW),
    case(torch.norm, T(5, 6), 3, 1),
    case(torch.norm, T(5, 6), math.inf, (0,), True, options=FEW),
    case(torch.Tensor.norm, T(5, 6), dim=0, keepdim=True, options=FEW),
    case(torch.frobenius_norm, T(5, 6), (0, 1), options=FEW),
    case(torch.dist, T(5, 6), T(5, 6)),
    case(torch.dist, T(5, 6), T(6), 3, options=FEW),
    case(F.normalize, T(5, 6)),
    case(F.normalize, T(5, 6, 2), p=1, dim=0, options=FEW),
    case(F.normalize, T(5, 6, fill=ties), dim=-1, options=FEW),
    # a bound near the typical norm: some slices are scaled, others are not
    case(torch.renorm, T(5, 6), 2, 0, 2.3),
    case(torch.renorm, T(5, 6), 2, -1, 2.0),
    case(torch.renorm, T(4, 5, 3), 3, 1, 1.7),
    case(torch.renorm, T(5, 6), 1, 1, 4.0),
    case(torch.renorm, T(5, 6), 0.5, 0, 20.0, options=FEW),
    case(torch.renorm, T(5, 6, fill=ties), math.inf, 0, 0.5, options=FEW),
    case(torch.renorm, T(5, 6, fill=ties), 2, 1, 0, options=FEW),
    case(torch.renorm, T(5, 6, dtype=torch.complex128), 2, 0, 3.3, options=FEW),
    case(torch.renorm, T(5, 6, dtype=torch.float16), 2, 0, 2.3, options=FEW | {"tolerance": 2e-3}),
    case(torch.renorm, T(3, 0), 2, 0, 1.0, options=FEW),
    case(torch.renorm, T(5, 6), 2, 0, torch.tensor(2.3), options=FEW),
    case(torch.Tensor.renorm, T(5, 6), p=2, dim=0, maxnorm=2.3, options=FEW),
    case(renorm_, T(5, 6), 2, 0, 2.3, options=FEW),
    case(torch.renorm, T(5, 6), 0, 0, 1.0, options=FEW | raises(RuntimeError, "non-positive-norm not supported")),
    case(torch.renorm, T(5, 6), 2, 0, -1.0, options=FEW | raises(RuntimeError, "expected maxnorm to be >= 0")),
    case(torch.renorm, T(5, 6), 2, 2, 1.0, options=FEW | raises(IndexError, "Dimension out of range")),
    case(torch.renorm, T(5), 2, 0, 1.0, options=FEW | raises(RuntimeError, "needs at least 2 dimensions")),
]

CASES += [
    case(torch.nuclear_norm, T(4, 3), options={"layouts": 3, "may_gather": True})
]  # singular values of one sharded matrix
