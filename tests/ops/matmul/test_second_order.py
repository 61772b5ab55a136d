"""Second derivatives through products, as PDE losses take with respect to coordinates."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

from shardfield import ShardTensor
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import T, draw_layout, local_shard, world_mesh

PRODUCTS = [
    (F.linear, (T(5, 6), T(4, 6), T(4))),
    (torch.matmul, (T(5, 6), T(6, 4))),
    (torch.matmul, (T(2, 5, 3), T(2, 3, 4))),
    (lambda a, b: torch.einsum("bic,bjc->bij", a, b), (T(2, 5, 3), T(2, 4, 3))),
    (lambda a, b, c: torch.einsum("bi,ij,bj->b", a, b, c), (T(5, 3), T(3, 4), T(5, 4))),
    (lambda a: torch.einsum("iij->ij", a), (T(4, 4, 3),)),
    (torch.addmm, (T(5, 4), T(5, 6), T(6, 4))),
    (torch.kron, (T(3, 2), T(2, 4))),
    (torch.linalg.inv, (T(4, 2, 2),)),
]


def full(value):
    return value.full_tensor() if isinstance(value, ShardTensor) else value


def second_order(fn, inputs, generator):
    """Return the gradients of a function of the gradients, which involves every second derivative."""
    out = fn(*inputs)
    seed = torch.randn(out.shape, dtype=out.dtype, generator=generator)
    first = torch.autograd.grad(torch.sin(out), inputs, seed, create_graph=True)
    loss = sum((g * g * torch.randn(g.shape, dtype=g.dtype, generator=generator)).sum() for g in first)
    return [*first, *torch.autograd.grad(loss, inputs)]


def compare_products(mesh_shape, row, draws):
    mesh = world_mesh(mesh_shape)
    fn, tensors = PRODUCTS[row]
    values = [t.make(torch.Generator().manual_seed(i)) for i, t in enumerate(tensors)]
    wanted = second_order(fn, [v.clone().requires_grad_() for v in values], torch.Generator().manual_seed(7))
    for number in range(draws):
        rng = random.Random(f"{row} {number}")
        layouts = [draw_layout(mesh, t, rng, try_partial=True) for t in tensors]
        given = [ShardTensor(local_shard(v, x).requires_grad_(), x) for v, x in zip(values, layouts, strict=True)]
        found = second_order(fn, given, torch.Generator().manual_seed(7))
        for i, (got, ref) in enumerate(zip(found, wanted, strict=True)):
            torch.testing.assert_close(
                full(got), ref, rtol=1e-9, atol=1e-9, msg=lambda m, i=i, x=layouts: f"{i} {x} {m}"
            )


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("row", range(len(PRODUCTS)))
def test_second_derivatives(row, mesh):
    run_on_ranks(compare_products, math.prod(mesh), mesh, row, 8)


COORDINATES = [
    ((2,), [Shard(0)], {0: [5, 2]}),
    ((2,), [Shard(1)], {1: [1, 1]}),
    ((2,), [Partial()], {}),
    ((3,), [Shard(0)], {0: [0, 6, 1]}),
    ((2, 2), [Shard(0), Shard(1)], {0: [3, 4], 1: [2, 0]}),
    ((2, 2), [Shard(0), Replicate()], {0: [6, 1]}),
    ((2, 2), [Shard(0), Shard(0)], {0: [1, 2, 0, 4]}),
]


def residual(net, xy):
    """Return the loss of u_xx + u_yy + u = x on a point cloud, plus one on its gradient."""
    u = net(xy)
    (du,) = torch.autograd.grad(u.sum(), xy, create_graph=True)
    second = [torch.autograd.grad(du[:, d].sum(), xy, create_graph=True)[0][:, d] for d in range(2)]
    return ((second[0] + second[1] + u[:, 0] - xy[:, 0]) ** 2).mean() + (du**2).mean()


def pde(mesh_shape, placements, lengths):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh())
    net = torch.nn.Sequential(net, torch.nn.Linear(8, 1)).double()
    points = torch.randn(7, 2, dtype=torch.float64)
    plain = points.clone().requires_grad_()
    loss = residual(net, plain)
    wanted = [loss.detach(), *torch.autograd.grad(loss, [plain, *net.parameters()])]
    layout = Layout.of(world_mesh(mesh_shape), placements, points.shape, lengths)
    xy = ShardTensor(local_shard(points, layout).requires_grad_(), layout)
    loss = residual(net, xy)
    loss.backward()
    found = [loss, xy.grad, *(p.grad for p in net.parameters())]
    for got, ref in zip(found, wanted, strict=True):
        torch.testing.assert_close(full(got).detach(), ref, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("mesh", "placements", "lengths"), COORDINATES, ids=str)
def test_pde_loss(mesh, placements, lengths):
    run_on_ranks(pde, math.prod(mesh), mesh, placements, lengths)


def in_one_thread():
    """Check that a backward with create_graph runs in the calling thread, whose tape it extends."""
    layout = Layout.of(world_mesh((1,)), (Shard(0),), (4,), None)
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch._C._is_multithreading_enabled())
            return grad

    for make in (lambda: torch.ones(4), lambda: ShardTensor(torch.ones(4), layout)):
        x = make().requires_grad_()
        y = Look.apply(x * 1).square().sum()
        for call in (
            lambda **how: torch.autograd.grad(y, x, retain_graph=True, **how),  # noqa: B023
            lambda **how: torch.autograd.backward(y, inputs=[x], retain_graph=True, **how),  # noqa: B023
        ):
            call(create_graph=True)
            call()
        assert torch._C._is_multithreading_enabled()
    assert seen == [False, True] * 4


def test_backward_with_create_graph_runs_in_the_calling_thread():
    run_on_ranks(in_one_thread, 1)
