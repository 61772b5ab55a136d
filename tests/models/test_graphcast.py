"""An encoder, processor and decoder as GraphCast's: grid and icosahedral multi-mesh have shardings of their own."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, explain
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import local_shard
from tests.models.graphcast import GraphCast, build_tensors, icosahedral_levels


def shardings(tensors):
    """Return the shard sizes of each tensor on three ranks: of the grid, of the mesh, edges with their targets."""
    sizes = {"grid": (90, 0, 72), "mesh": (30, 77, 55)}
    for name, points in (("to_mesh", "mesh"), ("on_mesh", "mesh"), ("to_grid", "grid")):
        ends = torch.tensor(sizes[points]).cumsum(0)
        below = torch.searchsorted(tensors[name][1].contiguous(), ends)
        sizes[name] = tuple(below.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist())
    return sizes | {"state": sizes["grid"]}


def compare():
    device_mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("points",))
    full = build_tensors(2, 9, 18, features=4)
    torch.manual_seed(0)
    model = GraphCast(4, width=6).double()
    alone = full | {"state": full["state"].clone().requires_grad_()}
    expected = model(**alone)
    expected.square().mean().backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    placed = {}
    for name, sizes in shardings(full).items():
        dim = 1 if full[name].dtype == torch.int64 else 0
        layout = Layout.of(device_mesh, [Shard(dim)], full[name].shape, {0: sizes})
        placed[name] = ShardTensor.from_local(local_shard(full[name], layout).clone(), device_mesh, [Shard(dim)])
    placed["state"].requires_grad_()
    with explain() as report:
        found = model(**placed)
        found.square().mean().backward()
    torch.testing.assert_close(found.full_tensor(), expected.detach())
    torch.testing.assert_close(placed["state"].grad.full_tensor(), alone["state"].grad)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, want[name], msg=lambda m, n=name: f"{n}: {m}")
    return [row.op for row in report.gathers], found._layout.shard_sizes(0)


def test_grid_and_mesh_sharded_differently():
    assert [len(level[0]) for level in icosahedral_levels(2)[1]] == [60, 240, 960]
    for gathers, sizes in run_on_ranks(compare, 3, timeout=120):
        assert not gathers and tuple(sizes) == (90, 0, 72)
