"""`halo_padding`: a rank's padded shard is a slice of the padded global field; the adjoint adds halos back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardfield import ShardingError, runtime
from shardfield.comm import collectives
from shardfield.layout import starts
from shardfield.shard_utils import HaloConfig, halo_padding, unhalo_padding
from shardfield.testing import run_on_ranks
from tests.harness import world_mesh


def continued(full: torch.Tensor, dim: int, edge: int, boundary: str | None) -> torch.Tensor:
    """Return the global field padded by `edge` cells at both ends of a dim."""
    if boundary == "pole":
        half = full.shape[3] // 2
        first = full.narrow(dim, 0, edge).flip(dim).roll(half, 3)
        last = full.narrow(dim, full.shape[dim] - edge, edge).flip(dim).roll(half, 3)
        return torch.cat([first, full, last], dim)
    pad = (edge, edge, 0, 0) if dim == 3 else (0, 0, edge, edge)
    return F.pad(full, pad, {None: "constant", "zero": "constant"}.get(boundary, boundary))


def on_rank(mesh_shape, rows, columns, halo, edge, boundaries) -> list[str]:
    mesh = world_mesh(mesh_shape)
    full = torch.randn(2, 3, sum(rows), sum(columns), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    pole = {"pole_dim": 3, "pole_mesh_dim": 1} if boundaries[0] == "pole" else {}
    configs = [
        HaloConfig(0, 2, halo, edge, boundary=boundaries[0], **pole),
        HaloConfig(1, 3, halo, edge, boundary=boundaries[1], lengths=tuple(columns)),
    ]
    h, w = mesh.get_coordinate()
    top, left = starts(rows)[h], starts(columns)[w]
    full_value = full.clone().requires_grad_()
    block = full[:, :, top : top + rows[h], left : left + columns[w]].clone().requires_grad_()
    wide = halo_padding(block, mesh, configs)
    reference, at = full_value, []
    for config, dim, lengths, coord in ((configs[0], 2, rows, h), (configs[1], 3, columns, w)):
        reference = continued(reference, dim, config.edge, config.boundary)
        low, high = config.ranges(lengths)[coord]
        at.append(slice(low + config.edge, high + config.edge))
    complaints = []
    expected = reference[:, :, at[0], at[1]]
    if wide.shape != expected.shape or not torch.equal(wide, expected):
        complaints.append(f"rank at {(h, w)}: {tuple(wide.shape)} should be {tuple(expected.shape)}")
    stated = [HaloConfig(0, 2, halo, edge, boundary=boundaries[0], lengths=tuple(rows), **pole), configs[1]]
    if not torch.equal(unhalo_padding(wide, mesh, stated), block):
        complaints.append("unhalo_padding does not give the block back")
    # <A x, y> summed over ranks has the gradient A* y
    torch.manual_seed(h * 7 + w)
    weight = torch.randn_like(wide)
    (wide * weight).sum().backward()
    (expected * weight).sum().backward()
    total = full_value.grad
    for axis in (0, 1):
        total = collectives.all_reduce(total, mesh.get_group(axis))
    mine = total[:, :, top : top + rows[h], left : left + columns[w]]
    if not torch.allclose(block.grad, mine, rtol=1e-12, atol=1e-12):
        complaints.append(f"rank at {(h, w)}: gradient off by {(block.grad - mine).abs().max()}")
    return complaints


@pytest.mark.parametrize("boundaries", [(None, None), ("pole", "circular"), ("reflect", "zero"), ("replicate",) * 2])
@pytest.mark.parametrize(
    ("mesh", "rows", "columns"),
    [
        ((1, 1), [6], [8]),
        ((2, 2), [3, 5], [6, 4]),
        ((4, 1), [3, 1, 0, 4], [8]),
        ((1, 4), [5], [1, 2, 1, 4]),
    ],
)
@pytest.mark.parametrize(("halo", "edge"), [(1, 0), (2, 2), (3, 1), (0, 1)])
def test_shards_are_slices_of_the_padded_field(mesh, rows, columns, halo, edge, boundaries):
    world = mesh[0] * mesh[1]
    assert run_on_ranks(on_rank, world, mesh, rows, columns, halo, edge, boundaries) == [[]] * world


def sent() -> tuple[int, int]:
    mesh, count = world_mesh((4,)), [0, 0]
    block = torch.zeros(1, 2, 5, 6)
    runtime.active.meter = lambda kind, messages, nbytes: count.__setitem__(
        slice(None), [count[0] + messages, count[1] + nbytes]
    )
    halo_padding(block, mesh, HaloConfig(0, 2, 2, boundary="circular", lengths=(5,) * 4))
    runtime.active.meter = None
    return tuple(count)


def test_one_message_per_neighbor():
    assert run_on_ranks(sent, 4) == [(2, 2 * 2 * 2 * 6 * 4)] * 4


@pytest.mark.parametrize(
    "config", [{"halo_size": -1}, {"boundary": "moebius"}, {"boundary": "pole"}, {"communication_method": "pigeon"}]
)
def test_bad_configs_are_refused(config):
    with pytest.raises(ShardingError):
        HaloConfig(**({"mesh_dim": 0, "tensor_dim": 2, "halo_size": 1} | config))


def too_wide() -> str:
    block = torch.zeros(1, 1, 2, 4)
    try:
        halo_padding(block, world_mesh((2,)), HaloConfig(0, 2, 5, boundary="reflect"))
    except ShardingError as error:
        return str(error)
    return ""


def test_halo_wider_than_the_field():
    assert all("a field of 4 rows cannot have 5 cells" in said for said in run_on_ranks(too_wide, 2))
