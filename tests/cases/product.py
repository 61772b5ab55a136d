"""Products: linear, matmul and their kin, einsum, distances, and linear algebra on batches of matrices."""

import torch
import torch.nn.functional as F

from harness import T, case

C = torch.complex128
FEW = {"layouts": 5}


def plain(*shape):
    """A parameter: whole and plain."""
    return T(*shape, cut=())


def free(**how):
    """Nothing is sent in forward, whatever is cut."""
    return {"free": True, **how}


def into(fn):
    """An in-place form on a copy, so that gradients reach what it was copied from."""

    def call(first, *args, **kwargs):
        return fn(first.clone(), *args, **kwargs)

    call.__name__ = fn.__name__
    return call


LINEAR = [
    case(F.linear, T(3, 5, 6), plain(7, 6), plain(7), how=free(layouts=20)),
    case(F.linear, T(5, 6), T(7, 6), T(7), how={"layouts": 20}),
    case(F.linear, T(5, 6), T(7, 6)),
    case(F.linear, T(6), T(7, 6), T(7)),
    case(F.linear, T(4, 6), T(6)),
    case(F.linear, T(4, 6), T(6), T()),
    case(F.linear, T(2, 3, 4, 5), T(1, 5), bias=T(1)),
    case(F.linear, T(3, 5), T(7, 6)),
    case(torch.nn.functional.linear, T(5, 6, dtype=C), T(3, 6, dtype=C), T(3, dtype=C)),
    case(F.bilinear, T(4, 3), T(4, 5), T(2, 3, 5), T(2)),
    case(F.bilinear, T(2, 4, 3), T(2, 4, 5), T(2, 3, 5)),
    case(
        lambda x, w, b: F.linear(x.reshape(2, 20, 3), w, b).reshape(2, 4, 5, 6),
        T(2, 4, 5, 3, cut=(0, 1, 2)),
        plain(6, 3),
        plain(6),
        how=free(name="linear on merged dims", partial=False),
    ),
    case(
        lambda x, w: torch.relu(F.linear(x.flatten(1, 2), w)) @ w,
        T(2, 4, 5, 3),
        plain(6, 3),
        how={"name": "two products on merged dims"},
    ),
    case(
        lambda x, y: torch.einsum("bnc,bnd->bcd", x.reshape(2, 20, 3), y.reshape(2, 20, 2)),
        T(2, 4, 5, 3),
        T(2, 4, 5, 2),
        how={"name": "merged dims summed over"},
    ),
]

MATMUL = [
    case(torch.matmul, T(5, 6), T(6, 4), how={"layouts": 30}),
    case(torch.matmul, T(5, 6), T(6)),
    case(torch.matmul, T(6), T(6, 4)),
    case(torch.matmul, T(6), T(6)),
    case(torch.matmul, T(3, 5, 6), T(3, 6, 4)),
    case(torch.matmul, T(2, 1, 5, 6), T(3, 6, 4)),
    case(torch.matmul, T(1, 5, 6), T(4, 6, 3)),
    case(torch.matmul, T(3, 2, 5, 6), T(6)),
    case(torch.matmul, T(6), T(2, 3, 6, 4)),
    case(torch.matmul, T(3, 5, 0), T(3, 0, 4), how=FEW),
    case(torch.matmul, T(5, 6), T(5, 6), how=FEW),
    case(torch.Tensor.__matmul__, T(5, 6), T(6, 4)),
    case(torch.Tensor.__rmatmul__, T(6, 4), T(5, 6)),
    case(torch.linalg.matmul, T(2, 5, 6), T(6, 4), how=FEW),
    case(torch.mm, T(5, 6), T(6, 4)),
    case(torch.mm, T(5, 6, fill="ints"), T(6, 4, fill="ints")),
    case(torch.mm, T(5, 6, dtype=C), T(6, 4, dtype=C)),
    case(torch.mm, T(5, 6), mat2=T(6, 4), how=FEW),
    case(torch.mm, T(5, 6), T(5, 4), how=FEW),
    case(torch.bmm, T(3, 5, 6), T(3, 6, 4)),
    case(torch.mv, T(5, 6), T(6)),
    case(torch.dot, T(7), T(7)),
    case(torch.dot, T(7), T(6), how=FEW),
    case(torch.vdot, T(7, dtype=C), T(7, dtype=C)),
    case(torch.outer, T(5), T(6)),
    case(torch.ger, T(5), T(6), how=FEW),
    case(torch.inner, T(3, 4, 6), T(5, 6)),
    case(torch.inner, T(3, 6), T(), how=FEW),
    case(torch.inner, T(6), T(6), how=FEW),
    case(torch.linalg.vecdot, T(4, 6, dtype=C), T(4, 6, dtype=C)),
    case(torch.linalg.vecdot, T(4, 1, 6), T(5, 6)),
    case(torch.linalg.vecdot, T(4, 5, 6), T(4, 5, 6), dim=1),
    case(torch.linalg.multi_dot, [T(5, 6), T(6, 3), T(3, 4)]),
    case(torch.linalg.multi_dot, [T(6), T(6, 3), T(3, 4), T(4)]),
    case(torch.linalg.multi_dot, [T(6), T(6, 3)], how=FEW),
    case(torch.kron, T(3, 4), T(2, 5)),
    case(torch.kron, T(4), T(3, 2), how=FEW),
    case(torch.trace, T(5, 6), how=free()),
    case(torch.trace, T(7, 4), how=free()),
    case(torch.trace, T(7, 4, fill="ints"), how=free(layouts=5)),
    case(torch.cross, T(4, 3, 3), T(4, 3, 3), dim=1),
    case(torch.cross, T(5, 3), T(5, 3), dim=1),
    case(torch.linalg.cross, T(5, 3), T(3)),
    case(torch.linalg.cross, T(3, 4), T(3, 4), dim=0),
    case(torch.linalg.cross, T(3), T(3), how=FEW),
]

ADDED = [
    case(torch.addmm, T(5, 4), T(5, 6), T(6, 4), how={"layouts": 20}),
    case(torch.addmm, T(4), T(5, 6), T(6, 4), beta=0.5, alpha=2.0),
    case(torch.addmm, T(5, 4), T(5, 6), T(6, 4), beta=0, how=FEW),
    case(torch.addmm, T(5, 4, fill="ints"), T(5, 6, fill="ints"), T(6, 4, fill="ints"), alpha=3, how=FEW),
    case(torch.addmv, T(5), T(5, 6), T(6)),
    case(torch.addmv, T(), T(5, 6), T(6), beta=3, how=FEW),
    case(torch.addr, T(5, 4), T(5), T(4), alpha=0.5),
    case(torch.baddbmm, T(3, 5, 4), T(3, 5, 6), T(3, 6, 4)),
    case(torch.baddbmm, T(1, 4), T(3, 5, 6), T(3, 6, 4), alpha=2, how=FEW),
    case(torch.addbmm, T(5, 4), T(3, 5, 6), T(3, 6, 4), beta=2),
    case(into(torch.Tensor.addmm_), T(5, 4), T(5, 6), T(6, 4), alpha=2),
    case(into(torch.Tensor.addmv_), T(5), T(5, 6), T(6), how=FEW),
    case(into(torch.Tensor.addr_), T(5, 4), T(5), T(4), how=FEW),
    case(into(torch.Tensor.baddbmm_), T(3, 5, 4), T(3, 5, 6), T(3, 6, 4), how=FEW),
    case(into(torch.Tensor.addbmm_), T(5, 4), T(3, 5, 6), T(3, 6, 4), how=FEW),
]

EINSUM = [
    case(torch.einsum, "ij,jk->ik", T(5, 6), T(6, 4), how={"layouts": 20}),
    case(torch.einsum, "ij,jk", T(5, 6), T(6, 4), how=FEW),
    case(torch.einsum, "ba,Bb", T(5, 6), T(4, 5), how=FEW),
    case(torch.einsum, "becd,abcd->aecd", T(3, 2, 4, 5), T(2, 3, 4, 5)),
    case(torch.einsum, "...ij,...jk->...ik", T(2, 3, 5, 6), T(3, 6, 4)),
    case(torch.einsum, "...ij,...jk", T(2, 5, 6), T(1, 6, 4), how=FEW),
    case(torch.einsum, "i...,i...->...", T(5, 3, 4), T(5, 4), how=FEW),
    case(torch.einsum, "...i->i", T(2, 3, 5), how=FEW),
    case(torch.einsum, "ii->i", T(6, 6)),
    case(torch.einsum, "ii", T(6, 6)),
    case(torch.einsum, "iij,jki->kj", T(4, 4, 3), T(3, 2, 4)),
    case(torch.einsum, "iji,i->ij", T(4, 3, 4), T(4), how=FEW),
    case(torch.einsum, "ij->ji", T(5, 6), how=FEW),
    case(torch.einsum, "ij->", T(5, 6), how=FEW),
    case(torch.einsum, "i,j->ij", T(5), T(6), how=FEW),
    case(torch.einsum, "i,i->", T(7), T(7), how=FEW),
    case(torch.einsum, "ij,ij->ij", T(5, 6), T(5, 1), how=FEW),
    case(torch.einsum, "bi,bj,ijo->bo", T(4, 3), T(4, 5), T(3, 5, 2)),
    case(torch.einsum, "abcd,ae,bf,cg,dh->efgh", T(2, 3, 2, 3), T(2, 4), T(3, 4), T(2, 5), T(3, 2), how={"layouts": 6}),
    case(torch.einsum, "ij,jk->ik", T(5, 6, dtype=C), T(6, 4, dtype=C), how=FEW),
    case(torch.einsum, "ij,jk->ik", [T(5, 6), T(6, 4)], how=FEW),
    case(torch.einsum, T(5, 6), [0, 1], T(6, 4), [1, 2], [2, 0], how=FEW),
    case(torch.einsum, "ij,jk->ik", T(5, 6), T(5, 4), how=FEW),
    case(torch.einsum, " i j , j k -> i k ", T(5, 6), T(6, 4), how=FEW),
    case(torch.tensordot, T(3, 4, 5), T(4, 5, 2), how=FEW),
    case(torch.tensordot, T(3, 4, 5), T(5, 6, 3), dims=([0, -1], [2, 0])),
    case(torch.tensordot, T(3, 4), T(5, 2), dims=0, how=FEW),
    case(torch.tensordot, T(3, 4, 1), T(4, 5, 2), dims=([1, 2], [0, 1]), how=FEW),
    case(torch.tensordot, T(3, 4), T(5, 2), dims=1, how=FEW),
]

CASES = [*LINEAR, *MATMUL, *ADDED, *EINSUM]
