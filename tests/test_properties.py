"""Check properties over drawn layouts and shapes. Every rank draws the same examples, so all join each collective."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from shardfield import ShardingError, ShardTensor
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import any_rank, local_shard, world_mesh

SETTINGS = settings(
    derandomize=True,  # the same examples on every rank
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=list(HealthCheck),
)


@st.composite
def layouts(draw, mesh, shape):
    """Draw a layout of a shape on a mesh: any dims and shard sizes, Partial, several axes on one dim."""
    choices = [Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))]
    placements = [draw(st.sampled_from(choices)) for _ in range(mesh.ndim)]
    chunked = Layout.of(mesh, placements, shape)
    lengths = {}
    for dim, size in enumerate(shape):
        if chunked.axes_of(dim):
            parts = len(chunked.shard_sizes(dim))
            marks = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
            lengths[dim] = [b - a for a, b in zip([0, *marks], [*marks, size], strict=True)]
    return Layout.of(mesh, placements, shape, lengths)


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def tensor(shape, layout):
    full = torch.arange(math.prod(shape), dtype=torch.float64).view(shape) + 1
    return full, ShardTensor(local_shard(full, layout).requires_grad_(), layout)


def check_gradient(full, x, y, fn):
    """Check that y = fn(x) equals fn(full), and that x gets the gradient of full."""
    ref_in = full.clone().requires_grad_()
    ref = fn(ref_in)
    assert y.shape == ref.shape and y._local_tensor.shape == y._layout.local_shape
    torch.testing.assert_close(y.full_tensor(), ref)
    seed = torch.cos(torch.arange(ref.numel(), dtype=torch.float64)).view(ref.shape)
    ref.backward(seed)
    y.backward(seed)
    torch.testing.assert_close(x.grad.full_tensor(), ref_in.grad)


def redistributes(mesh_shape):
    mesh = world_mesh(mesh_shape)

    @SETTINGS
    @given(st.data())
    def run(data):
        shape = data.draw(shapes)
        source, target = data.draw(layouts(mesh, shape)), data.draw(layouts(mesh, shape))
        full, x = tensor(shape, source)
        y = x._redistribute_to(target)
        assert y._layout is target
        check_gradient(full, x, y, lambda t: t * 1)

    run()


def reshapes(mesh_shape):
    mesh = world_mesh(mesh_shape)

    @SETTINGS
    @given(st.data())
    def run(data):
        shape = data.draw(shapes)
        full, x = tensor(shape, data.draw(layouts(mesh, shape)))
        rest, target = math.prod(shape), []
        while rest > 1 and len(target) < 4:
            target.append(data.draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0])))
            rest //= target[-1]
        target.append(rest)
        check_gradient(
            full,
            x,
            (x * 2).reshape(target).sin().reshape(shape),
            lambda t: (t * 2).reshape(target).sin().reshape(shape),
        )

    run()


def slices(mesh_shape):
    mesh = world_mesh(mesh_shape)

    @SETTINGS
    @given(st.data())
    def run(data):
        shape = data.draw(shapes)
        full, x = tensor(shape, data.draw(layouts(mesh, shape)))
        index = []
        for size in shape:
            a, b = data.draw(st.integers(-size - 1, size + 1)), data.draw(st.integers(-size - 1, size + 1))
            choice = data.draw(st.integers(0, 3))
            index.append(
                data.draw(st.integers(-size, size - 1)) if choice == 0 else slice(a, b, data.draw(st.integers(1, 3)))
            )
            if choice == 3:
                index.append(None)
        key = tuple(index)
        check_gradient(full, x, x[key], lambda t: t[key] * 1)

    run()


def joins(mesh_shape):
    mesh = world_mesh(mesh_shape)

    @SETTINGS
    @given(st.data())
    def run(data):
        shape = data.draw(shapes)
        dim = data.draw(st.integers(0, len(shape) - 1))
        full, x = tensor(shape, data.draw(layouts(mesh, shape)))
        other, y = tensor(shape, data.draw(layouts(mesh, shape)))
        fn = data.draw(
            st.sampled_from(
                [
                    lambda a, b: torch.cat([a, b, a], dim),
                    lambda a, b: torch.stack([a, b], dim),
                    lambda a, b: torch.flip(a, [dim]) + b,
                    lambda a, b: torch.roll(a, 2, dim) * b,
                    lambda a, b: (a.cumsum(dim) - b).amax(dim),
                    lambda a, b: torch.softmax(a / 50, dim) * b,
                    lambda a, b: (a * b).sum(dim, keepdim=True) / a,
                ]
            )
        )
        check_gradient(full, x, fn(x, y), lambda t: fn(t, other))

    run()


def some_view(data, x):
    """Draw a view of a global tensor, and the function that makes it; torch's reshape may also copy."""
    kinds = ["permute", "reshape", "slice", "chunk", "unsqueeze", "select"] if x.ndim else ["unsqueeze"]
    kind = data.draw(st.sampled_from(kinds))
    if kind == "permute":
        order = data.draw(st.permutations(range(x.ndim)))
        return lambda t: t.permute(order)
    if kind == "reshape":
        rest, target = x.numel(), []
        while rest > 1 and len(target) < 3:
            target.append(data.draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0])))
            rest //= target[-1]
        return lambda t: t.reshape([*target, rest])
    dim = data.draw(st.integers(0, x.ndim - 1)) if x.ndim else 0
    if kind == "slice":
        size = x.shape[dim]
        a, b, step = (data.draw(st.integers(low, high)) for low, high in ((0, size), (0, size), (1, 2)))
        return lambda t: t[(slice(None),) * dim + (slice(a, b, step),)]
    if kind == "chunk":
        return lambda t: t.chunk(2, dim)[0]
    if kind == "select" and x.shape[dim]:
        at = data.draw(st.integers(0, x.shape[dim] - 1))
        return lambda t: t.select(dim, at)
    return lambda t: t.unsqueeze(dim)


def writes(mesh_shape):
    """Check that a write through a chain of views writes the same elements as on one device, or all ranks refuse it."""
    mesh = world_mesh(mesh_shape)

    @SETTINGS
    @given(st.data())
    def run(data):
        shape = data.draw(shapes)
        full = torch.arange(math.prod(shape), dtype=torch.float64).view(shape) + 1
        layout = data.draw(layouts(mesh, shape))
        x = ShardTensor(local_shard(full, layout), layout)
        part, shard = full, x
        for _ in range(data.draw(st.integers(1, 4))):
            view = some_view(data, part)
            part, shard = view(part), view(shard)
        refused = False
        try:
            shard.mul_(3)
        except ShardingError:
            refused = True
        assert any_rank(refused) == refused
        if not refused:
            part.mul_(3)
            torch.testing.assert_close(shard.full_tensor(), part)
            torch.testing.assert_close(x.full_tensor(), full)

    run()


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=lambda m: "x".join(map(str, m)))
@pytest.mark.parametrize("what", [redistributes, reshapes, slices, joins, writes])
def test_property(what, mesh):
    run_on_ranks(what, math.prod(mesh), mesh, timeout=120)
