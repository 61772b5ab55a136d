"""Products: linear, matmul and related ops, einsum, distances, and linear algebra on batches of matrices."""

import torch
import torch.nn.functional as F

from tests.harness import T, case, double_backward, raises

C = torch.complex128
FEW = {"layouts": 5}


def ties(shape, generator):
    return torch.randint(3, shape, generator=generator).double()


def plain(*shape):
    """Build a parameter, which stays a plain tensor."""
    return T(*shape, shard_dims=())


def no_messages(**more):
    """Return options that forbid messages in forward."""
    return {"no_messages": True, **more}


def into(fn):
    """Return an in-place method applied to a copy, so that gradients reach the original."""

    def call(first, *args, **kwargs):
        return fn(first.clone(), *args, **kwargs)

    call.__name__ = fn.__name__
    return call


LINEAR = [
    case(F.linear, T(3, 5, 6), plain(5, 6), plain(5), options=no_messages(layouts=20, try_partial=False)),
    case(F.linear, T(3, 5, 6), plain(5, 6), plain(5), options={"layouts": 20, "name": "linear of pending sums"}),
    case(F.linear, T(3, 5, 6), plain(7, 6), plain(7)),  # a pending sum is reduced before it grows
    case(F.linear, T(5, 6), T(7, 6), T(7), options={"layouts": 20}),
    case(F.linear, T(5, 6), T(7, 6)),
    case(F.linear, T(6), T(7, 6), T(7)),
    case(F.linear, T(4, 6), T(6)),
    case(F.linear, T(4, 6), T(6), T(), options=raises(RuntimeError, "must be a matrix")),
    case(F.linear, T(2, 3, 4, 5), T(1, 5), bias=T(1)),
    case(F.linear, T(3, 5), T(7, 6), options=raises(RuntimeError, "shapes cannot be multiplied")),
    case(torch.nn.functional.linear, T(5, 6, dtype=C), T(3, 6, dtype=C), T(3, dtype=C)),
    case(F.bilinear, T(4, 3), T(4, 5), T(2, 3, 5), T(2)),
    case(F.bilinear, T(2, 4, 3), T(2, 4, 5), T(2, 3, 5)),
    case(
        F.bilinear,
        T(4, 3, dtype=torch.float32),
        T(4, 5),
        T(2, 3, 5),
        options=raises(RuntimeError, "All tensors must have the same dtype"),
    ),
    case(
        lambda x, w, b: F.linear(x.reshape(2, 20, 3), w, b).reshape(2, 4, 5, 6),
        T(2, 4, 5, 3, shard_dims=(0, 1, 2)),
        plain(6, 3),
        plain(6),
        options=no_messages(name="linear on merged dims", try_partial=False),
    ),
    case(
        lambda x, w: torch.relu(F.linear(x.flatten(1, 2), w)) @ w,
        T(2, 4, 5, 3),
        plain(6, 3),
        options={"name": "two products on merged dims"},
    ),
    case(
        lambda x, y: torch.einsum("bnc,bnd->bcd", x.reshape(2, 20, 3), y.reshape(2, 20, 2)),
        T(2, 4, 5, 3),
        T(2, 4, 5, 2),
        options={"name": "merged dims summed over"},
    ),
]

MATMUL = [
    case(torch.matmul, T(5, 6), T(6, 4), options={"layouts": 30}),
    case(torch.matmul, T(5, 6), T(6)),
    case(torch.matmul, T(6), T(6, 4)),
    case(torch.matmul, T(6), T(6)),
    case(torch.matmul, T(3, 5, 6), T(3, 6, 4)),
    case(torch.matmul, T(2, 1, 5, 6), T(3, 6, 4)),
    case(torch.matmul, T(1, 5, 6), T(4, 6, 3)),
    case(torch.matmul, T(3, 2, 5, 6), T(6)),
    case(torch.matmul, T(6), T(2, 3, 6, 4)),
    case(torch.matmul, T(3, 5, 0), T(3, 0, 4), options=FEW),
    case(torch.matmul, T(5, 6), T(5, 6), options=FEW | raises(RuntimeError, "shapes cannot be multiplied")),
    case(torch.Tensor.__matmul__, T(5, 6), T(6, 4)),
    case(torch.Tensor.__rmatmul__, T(6, 4), T(5, 6)),
    case(torch.linalg.matmul, T(2, 5, 6), T(6, 4), options=FEW),
    case(torch.mm, T(5, 6), T(6, 4)),
    case(torch.mm, T(5, 6, fill="ints"), T(6, 4, fill="ints")),
    case(torch.mm, T(5, 6, dtype=C), T(6, 4, dtype=C)),
    case(torch.mm, T(5, 6), mat2=T(6, 4), options=FEW),
    case(torch.mm, T(5, 6), T(5, 4), options=FEW | raises(RuntimeError, "shapes cannot be multiplied")),
    case(torch.bmm, T(3, 5, 6), T(3, 6, 4)),
    case(torch.mv, T(5, 6), T(6)),
    case(torch.dot, T(7), T(7)),
    case(torch.dot, T(7), T(6), options=FEW | raises(RuntimeError, "inconsistent tensor size")),
    case(torch.vdot, T(7, dtype=C), T(7, dtype=C)),
    case(torch.outer, T(5), T(6)),
    case(torch.ger, T(5), T(6), options=FEW),
    case(torch.inner, T(3, 4, 6), T(5, 6)),
    case(torch.inner, T(3, 6), T(), options=FEW),
    case(torch.inner, T(6), T(6), options=FEW),
    case(torch.linalg.vecdot, T(4, 6, dtype=C), T(4, 6, dtype=C)),
    case(torch.linalg.vecdot, T(4, 1, 6), T(5, 6)),
    case(torch.linalg.vecdot, T(4, 5, 6), T(4, 5, 6), dim=1),
    case(torch.linalg.multi_dot, [T(5, 6), T(6, 3), T(3, 4)]),
    case(torch.linalg.multi_dot, [T(6), T(6, 3), T(3, 4), T(4)]),
    case(torch.linalg.multi_dot, [T(6), T(6, 3)], options=FEW),
    case(torch.kron, T(3, 4), T(2, 5)),
    case(torch.kron, T(4), T(3, 2), options=FEW),
    case(torch.trace, T(6, 6), options=no_messages()),
    # torch 2.11 has a wrong gradient for matrices that are not square
    case(torch.trace, T(5, 6), options=no_messages(grad=torch.__version__ >= "2.13")),
    case(torch.trace, T(7, 4), options=no_messages(grad=torch.__version__ >= "2.13")),
    case(torch.trace, T(7, 4, fill="ints"), options=no_messages(layouts=5)),
    case(torch.cross, T(4, 3, 3), T(4, 3, 3), dim=1),
    case(torch.cross, T(5, 3), T(5, 3), dim=1),
    case(torch.cross, T(5, 3), T(1, 3)),
    case(torch.cross, T(1, 4, 3), T(3, 4, 3)),
    case(torch.linalg.cross, T(5, 3), T(1, 3)),
    case(torch.linalg.cross, T(3, 4), T(3, 4), dim=0),
    case(torch.linalg.cross, T(3), T(3), options=FEW),
]

ADDED = [
    case(torch.addmm, T(5, 4), T(5, 6), T(6, 4), options={"layouts": 20}),
    case(torch.addmm, T(4), T(5, 6), T(6, 4), beta=0.5, alpha=2.0),
    case(torch.addmm, T(5, 4), T(5, 6), T(6, 4), beta=0, options=FEW),
    case(torch.addmm, T(5, 4, fill="ints"), T(5, 6, fill="ints"), T(6, 4, fill="ints"), alpha=3, options=FEW),
    case(torch.addmv, T(5), T(5, 6), T(6)),
    case(torch.addmv, T(), T(5, 6), T(6), beta=3, options=FEW),
    case(torch.addr, T(5, 4), T(5), T(4), alpha=0.5),
    case(torch.baddbmm, T(3, 5, 4), T(3, 5, 6), T(3, 6, 4)),
    case(torch.baddbmm, T(1, 4), T(3, 5, 6), T(3, 6, 4), alpha=2, options=FEW),
    case(torch.addbmm, T(5, 4), T(3, 5, 6), T(3, 6, 4), beta=2),
    case(into(torch.Tensor.addmm_), T(5, 4), T(5, 6), T(6, 4), alpha=2),
    case(into(torch.Tensor.addmv_), T(5), T(5, 6), T(6), options=FEW),
    case(into(torch.Tensor.addr_), T(5, 4), T(5), T(4), options=FEW),
    case(into(torch.Tensor.baddbmm_), T(3, 5, 4), T(3, 5, 6), T(3, 6, 4), options=FEW),
    case(into(torch.Tensor.addbmm_), T(5, 4), T(3, 5, 6), T(3, 6, 4), options=FEW),
]

EINSUM = [
    # under autocast torch multiplies a contracted dim of one element in fp32: ranks would send different dtypes
    case(torch.einsum, "ij,jk->ik", T(5, 6, shard_dims=(1,)), T(6, 4), options={"name": "low precision einsum"}),
    case(torch.einsum, "ij,jk->ik", T(5, 6), T(6, 4), options={"layouts": 20}),
    case(torch.einsum, "ij,jk", T(5, 6), T(6, 4), options=FEW),
    case(torch.einsum, "ba,Bb", T(5, 6), T(4, 5), options=FEW),
    case(torch.einsum, "becd,abcd->aecd", T(3, 2, 4, 5), T(2, 3, 4, 5)),
    case(torch.einsum, "...ij,...jk->...ik", T(2, 3, 5, 6), T(3, 6, 4)),
    case(torch.einsum, "...ij,...jk", T(2, 5, 6), T(1, 6, 4), options=FEW),
    case(torch.einsum, "i...,i...->...", T(5, 3, 4), T(5, 4), options=FEW),
    case(torch.einsum, "...i->i", T(2, 3, 5), options=FEW),
    case(torch.einsum, "ii->i", T(6, 6)),
    case(torch.einsum, "ii", T(6, 6)),
    case(torch.einsum, "iij,jki->kj", T(4, 4, 3), T(3, 2, 4)),
    case(torch.einsum, "iji,i->ij", T(4, 3, 4), T(4), options=FEW),
    case(torch.einsum, "ij->ji", T(5, 6), options=FEW),
    case(torch.einsum, "ij->", T(5, 6), options=FEW),
    case(torch.einsum, "i,j->ij", T(5), T(6), options=FEW),
    case(torch.einsum, "i,i->", T(7), T(7), options=FEW),
    case(torch.einsum, "ij,ij->ij", T(5, 6), T(5, 1), options=FEW),
    case(torch.einsum, "bi,bj,ijo->bo", T(4, 3), T(4, 5), T(3, 5, 2)),
    case(
        torch.einsum,
        "abcd,ae,bf,cg,dh->efgh",
        T(2, 3, 2, 3),
        T(2, 4),
        T(3, 4),
        T(2, 5),
        T(3, 2),
        options={"layouts": 6},
    ),
    case(torch.einsum, "ij,jk->ik", T(5, 6, dtype=C), T(6, 4, dtype=C), options=FEW),
    case(torch.einsum, "ij,jk->ik", [T(5, 6), T(6, 4)], options=FEW),
    case(torch.einsum, T(5, 6), [0, 1], T(6, 4), [1, 2], [2, 0], options=FEW),
    case(
        torch.einsum,
        "ij,jk->ik",
        T(5, 6),
        T(5, 4),
        options=FEW | raises(RuntimeError, "does not broadcast with previously seen size"),
    ),
    case(torch.einsum, " i j , j k -> i k ", T(5, 6), T(6, 4), options=FEW),
    case(torch.tensordot, T(3, 4, 5), T(4, 5, 2), options=FEW),
    case(torch.tensordot, T(3, 4, 5), T(5, 6, 3), dims=([0, -1], [2, 0])),
    case(torch.tensordot, T(3, 4), T(5, 2), dims=0, options=FEW),
    case(torch.tensordot, T(3, 4, 1), T(4, 5, 2), dims=([1, 2], [0, 1]), options=FEW),
    case(
        torch.tensordot,
        T(3, 4),
        T(5, 2),
        dims=1,
        options=FEW | raises(RuntimeError, "contracted dimensions need to match"),
    ),
]

DISTANCES = [
    case(torch.cdist, T(5, 3), T(6, 3), options={"layouts": 20}),
    case(torch.cdist, T(2, 5, 3), T(6, 3)),
    case(torch.cdist, T(2, 1, 5, 3), T(4, 6, 3), p=1.0, options=FEW),
    case(torch.cdist, T(2, 16), T(3, 16), p=3.0),
    case(torch.cdist, T(2, 16), T(3, 16), options={"layouts": 12}),
    case(torch.cdist, T(2, 16), T(3, 16), p=1.0, options=FEW),
    case(torch.cdist, T(2, 16), T(3, 16), p=float("inf"), options=FEW),
    case(torch.cdist, T(2, 16, fill=ties), T(3, 16, fill=ties), p=float("inf"), options={"name": "cdist with ties"}),
    case(torch.cdist, T(2, 16), T(3, 16), p=0.0, options=FEW),
    case(torch.cdist, T(2, 16), T(3, 16), p=0.5, options=FEW),
    case(torch.cdist, T(5, 3), T(6, 3), compute_mode="use_mm_for_euclid_dist", options=FEW | {"tolerance": 1e-7}),
    case(torch.cdist, T(30, 2), T(4, 2), options=FEW | {"tolerance": 1e-7}),
    case(lambda x: torch.cdist(x, x), T(4, 9), options=FEW | {"name": "cdist of points to themselves"}),
    case(lambda x: torch.cdist(x[:2], x), T(4, 40), options={"name": "cdist of sharded features, some distances zero"}),
    case(torch.cdist, T(5, 3), T(6, 4), options=FEW | raises(RuntimeError, "must have the same number of columns")),
    case(F.pdist, T(9, 3), options={"layouts": 20}),
    case(F.pdist, T(30, 2), p=1.0, options=FEW),
    case(F.pdist, T(6, 4, fill=ties), p=float("inf"), options=FEW | {"name": "pdist with ties"}),
    case(F.pdist, T(5, 2), p=0.0, options=FEW),
    case(F.pdist, T(5, 2), p=0.5, options=FEW),
    case(lambda x: F.pdist(x[:1].expand(4, 3)), T(5, 3), options=FEW | {"name": "pdist of equal points"}),
    case(F.pdist, T(2, 3), options=FEW),
    case(F.pdist, T(1, 3), options=FEW),
    case(F.pdist, T(5, 2), p=-1.0, options=FEW | raises(RuntimeError, "non-negative p values")),
    case(F.pdist, T(2, 5, 2), options=FEW | raises(RuntimeError, "2D tensors")),
    case(F.pairwise_distance, T(5, 6), T(5, 6)),
    case(F.pairwise_distance, T(5, 6), T(6), p=1.0, keepdim=True, options=FEW),
    case(F.cosine_similarity, T(5, 6), T(5, 6)),
    case(F.cosine_similarity, T(3, 5, 6), T(6), dim=-1, options=FEW),
    case(F.cosine_similarity, T(5, 6), T(5, 6), dim=0, eps=10.0, options=FEW),
]


def apart(shape, generator):
    """Draw well-conditioned matrices with well-separated eigenvalues and singular values."""
    rows, columns = shape[-2:]
    eye = torch.eye(rows, columns, dtype=torch.float64) * torch.arange(1.0, columns + 1) * 3
    return torch.randn(shape, dtype=torch.float64, generator=generator) * 0.3 + eye


def definite(shape, generator):
    """Draw symmetric positive definite matrices with well-separated eigenvalues."""
    half = apart(shape, generator)
    return half @ half.mT


def triangular(shape, generator):
    return apart(shape, generator).tril()


def on(fn, make, *shape, options=FEW, **kwargs):
    """Build a row for a function of one batch of matrices."""
    return case(fn, T(*shape, fill=make), options=options, **kwargs)


def unsigned(fn):
    """Return `fn` with the absolute values of its factors, which are unique up to signs."""

    def call(x, *args, **kwargs):
        return [abs(part) for part in fn(x, *args, **kwargs)]

    call.__name__ = fn.__name__
    return call


LA = torch.linalg
ALONE = FEW | {"may_gather": True}  # one sharded matrix and no batch to divide
NO_GRAD = FEW | {"grad": False}  # torch has no gradient, or overwrites its saved tensors
BATCHES = [
    *(on(fn, apart, 5, 3, 3) for fn in (torch.det, LA.det, torch.slogdet, LA.slogdet, torch.inverse, LA.inv)),
    *(on(fn, definite, 5, 3, 3) for fn in (torch.logdet, LA.cholesky, LA.eigvalsh, LA.cholesky_ex)),
    on(LA.inv, apart, 2, 3, 4, 4, options={"layouts": 10}),
    on(LA.inv, apart, 4, 4, options=ALONE),
    on(LA.inv_ex, apart, 5, 3, 3),
    on(LA.svdvals, apart, 5, 4, 3),
    on(LA.pinv, apart, 5, 4, 3),
    on(torch.pinverse, apart, 5, 4, 3),
    on(LA.matrix_exp, apart, 5, 3, 3),
    on(torch.matrix_exp, apart, 5, 3, 3),
    on(LA.matrix_rank, apart, 5, 4, 3),
    on(LA.cond, apart, 5, 3, 3),
    on(LA.cond, apart, 5, 3, 3, p=1, options=NO_GRAD),
    on(LA.lu, apart, 5, 3, 3),
    on(LA.lu_factor, apart, 5, 3, 3),
    on(LA.lu_factor_ex, apart, 5, 3, 3),
    on(LA.ldl_factor, definite, 5, 3, 3, options=NO_GRAD),
    on(LA.qr, apart, 5, 4, 3),
    on(LA.qr, apart, 5, 3, 3, mode="complete"),
    on(torch.geqrf, apart, 5, 4, 3, options=NO_GRAD),
    on(torch.cholesky_inverse, triangular, 5, 3, 3),
    on(LA.eigvals, definite, 5, 3, 3),
    on(unsigned(LA.eigh), definite, 5, 3, 3),
    on(unsigned(LA.svd), apart, 5, 3, 3),
    on(unsigned(LA.svd), apart, 5, 4, 3, full_matrices=False),
    on(unsigned(torch.svd), apart, 5, 4, 3),
    case(LA.matrix_power, T(5, 3, 3, fill=apart), 3, options=FEW),
    case(torch.matrix_power, T(5, 3, 3, fill=apart), -2, options=FEW),
    case(LA.matrix_power, T(5, 5), 5, options=FEW),
    case(torch.matrix_power, T(5, 5), 1, options=FEW),
    case(LA.solve, T(5, 3, 3, fill=apart), T(5, 3, 4), options={"layouts": 10}),
    case(LA.solve, T(5, 3, 3, fill=apart), T(5, 3), options=FEW),
    case(LA.solve, T(3, 3, fill=apart), T(5, 3, 2), options=ALONE),
    case(LA.solve, T(3, 3, fill=apart, shard_dims=()), T(5, 3, 2), options=FEW),
    case(LA.solve, T(3, 3, fill=apart), T(3, 6), options=ALONE),
    case(
        LA.solve,
        T(3, 3, fill=apart, shard_dims=()),
        T(3, 6, shard_dims=(1,)),
        options=FEW | {"name": "solve, sharded columns"},
    ),
    case(LA.solve, T(3, 3, fill=apart), T(3), options=ALONE),
    case(LA.solve, T(5, 3, 3, fill=apart), T(5, 4, 3), left=False, options=FEW),
    case(LA.solve, B=T(5, 3, 3), A=T(5, 3, 3, fill=apart), options=FEW),
    case(LA.solve_ex, T(5, 3, 3, fill=apart), T(5, 3, 4), options=FEW),
    case(LA.solve_triangular, T(5, 3, 3, fill=triangular), T(5, 3, 4), upper=False, options=FEW),
    case(LA.lstsq, T(5, 4, 3, fill=apart), T(5, 4, 2), options=FEW),
    case(torch.cholesky_solve, T(5, 3, 4), T(5, 3, 3, fill=triangular), options=FEW),
    case(
        lambda a, b: LA.lu_solve(*LA.lu_factor(a), b),
        T(5, 3, 3, fill=apart),
        T(5, 3, 4),
        options=FEW | {"name": "lu_solve"},
    ),
    case(
        lambda a, b: LA.ldl_solve(*LA.ldl_factor(a), b),
        T(5, 3, 3, fill=definite),
        T(5, 3, 4),
        options=FEW | {"name": "ldl_solve", "grad": False},
    ),
    case(lambda a: torch.lu_unpack(*LA.lu_factor(a)), T(5, 3, 3, fill=apart), options=FEW | {"name": "lu_unpack"}),
    case(
        lambda a: LA.householder_product(*torch.geqrf(a)),
        T(5, 4, 3, fill=apart),
        options=FEW | {"name": "householder_product", "grad": False},
    ),
    case(LA.vander, T(2, 5), N=4, options=FEW),
    case(torch.vander, T(5), options=NO_GRAD),
    on(LA.det, apart, 5, 3, 4, options=FEW | raises(RuntimeError, "must be batches of square matrices")),
    *(
        on(double_backward(fn), apart, 5, 3, 3, options=FEW | {"name": f"{fn.__name__}, double backward"})
        for fn in (LA.det, LA.inv)
    ),
    case(
        double_backward(LA.solve), T(5, 3, 3, fill=apart), T(5, 3, 4), options=FEW | {"name": "solve, double backward"}
    ),
]

CASES = [*LINEAR, *MATMUL, *ADDED, *EINSUM, *DISTANCES, *BATCHES]

CASES += [case(torch.chain_matmul, T(3, 4), T(4, 5), T(5, 2), options={"layouts": 4})]


def round_trip(x, forward, inverse):
    """Contract a dim with a constant matrix, and contract the result with another one to the same or another size."""
    modes = torch.einsum("...mk,mlk->...lm", x, forward)
    modes = torch.complex(modes.contiguous(), 2 * modes).transpose(-1, -2)
    return torch.einsum("...ml,mkl->...km", modes.real.contiguous(), inverse), modes.imag


TABLE = {"grad": False, "shard_dims": ()}
CONSTANT = torch.arange(72, dtype=torch.float64).sin().view(4, 3, 6)

CASES += [
    case(round_trip, T(2, 3, 4, 6), T(4, 3, 6, **TABLE), T(4, k, 3, **TABLE), options={"layouts": 12})
    for k in (6, 5, 2)
] + [
    case(
        double_backward(lambda x: round_trip(x, CONSTANT, CONSTANT.transpose(1, 2))[0]),
        T(2, 4, 6),
        options={"layouts": 12, "name": "round trip, double backward"},
    ),
    case(
        lambda x, w, there, back: torch.einsum(
            "bolm,mkl->bokm", torch.einsum("bilm,oil->bolm", torch.einsum("bimk,mlk->bilm", x, there), w), back
        ),
        T(2, 3, 4, 6),
        T(3, 3, 3, shard_dims=()),
        T(4, 3, 6, **TABLE),
        T(4, 6, 3, **TABLE),
        options={"layouts": 12, "name": "round trip with weights"},
    ),
]
