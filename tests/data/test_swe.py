"""The shallow water solver: steady states, conserved mass and the dataset of its trajectories."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardfield.data import ShallowWater
from shardfield.data.swe_solver import (
    GRAVITY,
    OMEGA,
    RADIUS,
    ShallowWaterSolver,
    area_weights,
    latitudes,
    random_flow,
)
from shardfield.testing import run_on_ranks

DAY = 86400.0


def solid_rotation(solver: ShallowWaterSolver) -> torch.Tensor:
    """Williamson's case 2: zonal flow in balance, a steady solution of the nonlinear equations."""
    u0, mean = 2 * math.pi * RADIUS / (12 * DAY), 2.94e4
    mu = torch.sin(torch.deg2rad(latitudes(solver.nlat)))
    height = (mean - (RADIUS * OMEGA * u0 + u0**2 / 2) * mu**2) / GRAVITY
    profile = torch.stack([height, 2 * u0 / RADIUS * mu, torch.zeros_like(mu)])
    return profile[:, :, None].expand(3, solver.nlat, solver.nlon).contiguous()


def test_steady_state_stays_steady():
    solver = ShallowWaterSolver(16, 32, damping_hours=math.inf)
    grid = solid_rotation(solver)
    start = solver.to_spectral(grid)
    torch.testing.assert_close(solver.to_grid(start), grid, rtol=1e-12, atol=1e-17)
    after = solver.to_grid(solver.advance(start, 5 * DAY))
    assert ((after[0] - grid[0]).abs().max() / grid[0].max()).item() < 1e-12
    assert ((after[1] - grid[1]).abs().max() / grid[1].max()).item() < 1e-10
    with pytest.raises(ValueError, match="no multiple of the time step"):
        solver.advance(start, 1000.0)


def test_mass_is_conserved_and_time_steps_converge():
    solver = ShallowWaterSolver(16, 32)
    flow = random_flow(solver, 3, 2)
    after = solver.advance(flow, DAY)
    weights = area_weights(16)[:, None]
    masses = [(solver.to_grid(state)[:, 0] * weights).mean((1, 2)) for state in (flow, after)]
    torch.testing.assert_close(*masses, rtol=1e-14, atol=0)
    assert (solver.to_grid(after)[:, 1] - solver.to_grid(flow)[:, 1]).std() > 1e-6  # it is not the steady state
    # fourth order: half the time step has a sixteenth of the error
    steps = [ShallowWaterSolver(16, 32, s, damping_hours=math.inf) for s in (1800.0, 900.0, 225.0)]
    coarse, fine, exact = (solver.to_grid(s.advance(flow, DAY / 4)) for s in steps)
    assert 12 < ((coarse - exact)[:, 0].norm() / (fine - exact)[:, 0].norm()).item() < 20


HOW = dict(nlat=8, nlon=16, hours=3, records=4, leads=2)


def prepared(cache) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    flows = ShallowWater(5, cache=cache, **HOW).prepare(mesh)
    return [flows[i]["y"] for i in (0, 14)]


def test_dataset(tmp_path):
    flows = ShallowWater(5, cache=tmp_path / "one", **HOW)
    assert len(flows) == 15
    # windows of one trajectory overlap, and other trajectories are other flows
    assert torch.equal(flows[0]["y"][0], flows[1]["x"]) and torch.equal(flows[0]["y"][1], flows[1]["y"][0])
    assert not torch.equal(flows[0]["x"], flows[3]["x"]) and not torch.equal(flows[0]["x"], flows[12]["x"])
    later = ShallowWater(1, cache=tmp_path / "one", start=4, **HOW)
    assert torch.equal(later[0]["x"], flows[12]["x"])
    assert len(ShallowWater(5, cache=tmp_path / "one", stride=2, **HOW)) == 10
    blocks = flows.read(3, {"x": (slice(0, 1), slice(2, 5), slice(0, 16)), "y": (slice(1, 2), *[slice(0, 2)] * 3)})
    assert torch.equal(blocks["x"], flows[3]["x"][:1, 2:5]) and torch.equal(blocks["y"], flows[3]["y"][1:, :2, :2, :2])
    for first, last in run_on_ranks(prepared, 2, tmp_path / "two"):
        assert torch.equal(first, flows[0]["y"]) and torch.equal(last, flows[14]["y"])


def test_refused(tmp_path):
    for how in ({"leads": 5, "records": 4}, {"nlat": 4}, {"nlon": 8, "nlat": 8}, {"stride": 0}, {"seed": -1}):
        with pytest.raises(ValueError, match="ShallowWater"):
            ShallowWater(1, cache=tmp_path, **how)
    with pytest.raises(IndexError, match="sample 3 of 3"):
        ShallowWater(1, cache=tmp_path, **HOW)[3]
