"""Potential flow past ellipsoids: limits in closed form, quadrature over the points, blocks that equal the whole."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import scatter_tensor
from shardfield.data import Ellipsoid, Ellipsoids, area_norm, force_coefficients
from shardfield.data.connectivity import is_closed, point_areas
from shardfield.data.ellipsoids import depolarization_factors
from shardfield.testing import run_on_ranks


def test_depolarization_factors():
    torch.testing.assert_close(depolarization_factors((2, 2, 2)), torch.full((3,), 1 / 3, dtype=torch.float64))
    found = depolarization_factors((3.0, 1.0, 1.0))  # a prolate spheroid, in closed form
    e = math.sqrt(1 - 1 / 9)
    along = (1 - e * e) / e**3 * (math.atanh(e) - e)
    torch.testing.assert_close(found, torch.tensor([along, (1 - along) / 2, (1 - along) / 2], dtype=torch.float64))
    assert abs(depolarization_factors((0.4, 0.7, 1.3)).sum() - 1) < 1e-14
    with pytest.raises(ValueError, match="three positive semi-axes"):
        depolarization_factors((1, 0, 1))


def test_pressure_on_a_sphere():
    """cp = 1 - 9/4 sin^2 of the angle to the stream."""
    turned, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    for body in (Ellipsoid((1, 1, 1)), Ellipsoid((0.3, 0.3, 0.3), turned)):
        normal = body.points(500)["normal"]
        expected = 1 - 9 / 4 * (1 - normal[:, 0].square())
        torch.testing.assert_close(body.pressure(normal), expected, rtol=0, atol=1e-13)


def test_a_thin_disc_and_a_needle():
    """A disc across the stream stops it at its center; a needle along the stream does not disturb it."""
    disc, needle = Ellipsoid((1e-4, 1, 1)), Ellipsoid((1, 1e-4, 1e-4))
    assert abs(disc.pressure(torch.tensor([1.0, 0, 0], dtype=torch.float64)) - 1) < 1e-12
    assert disc.speed[0] > 1e3  # around the edge
    assert abs(needle.pressure(torch.tensor([0.0, 1, 0], dtype=torch.float64))) < 1e-6


def test_points_are_spread_by_area():
    body = Ellipsoids(1, seed=3).body(0)
    found = body.points(4000)
    assert found["area"].max() / found["area"].min() < 1.05
    on_surface = ((found["position"] @ body.rotation) / body.axes).square().sum(1)
    torch.testing.assert_close(on_surface, torch.ones_like(on_surface), rtol=0, atol=1e-12)
    # the area of a spheroid in closed form
    spheroid, e = Ellipsoid((1.0, 1.0, 0.5)), math.sqrt(0.75)
    area = 2 * math.pi * (1 + (1 - e * e) / e * math.atanh(e))
    assert abs(spheroid.points(4000)["area"].sum() / area - 1) < 1e-4
    # half of the points have half of the area, on every side
    for side in torch.eye(3, dtype=torch.float64):
        assert abs((found["position"] @ side > 0).double().mean() - 0.5) < 0.01


def test_triangulation():
    body = Ellipsoid((1.0, 0.6, 0.4))
    points, faces = body.triangulation(1000)
    assert faces.shape == (1996, 3) and is_closed(faces)  # Euler's formula
    normals, areas = point_areas(points, faces)
    exact = body.points(1000)
    assert bool(((torch.from_numpy(normals) * exact["normal"]).sum(1) > 0.95).all()), "outward"
    assert abs(areas.sum() / exact["area"].sum() - 1) < 0.01


def test_no_drag():
    """d'Alembert: the force is zero to the quadrature error, which falls with the points."""
    worst = {}
    for points in (1000, 8000):
        bodies = Ellipsoids(6, points=points, dtype=torch.float64)
        samples = [bodies[i] for i in range(len(bodies))]
        forces = [force_coefficients(s["y"], s["x"][:, 3:], s["area"]) for s in samples]
        worst[points] = torch.stack(forces).abs().max().item()
    assert worst[1000] < 0.03 and worst[8000] < worst[1000] / 3, worst
    # not because everything is zero: the pressure of one side alone pushes
    one_side = samples[0]["y"] * (samples[0]["x"][:, 3:4] < 0)
    assert force_coefficients(one_side, samples[0]["x"][:, 3:], samples[0]["area"]).norm() > 0.1


def test_samples_and_blocks():
    bodies = Ellipsoids(5, points=101, seed=4)
    sample = bodies[2]
    assert {n: t.dtype for n, t in sample.items()} == dict.fromkeys(("x", "y", "area"), torch.float32)
    part = bodies.read(2, {"x": (slice(40, 77), slice(0, 6))})
    assert all(torch.equal(part[name], sample[name][40:77]) for name in sample)
    again = Ellipsoids(2, points=101, seed=4, start=2)
    assert all(torch.equal(again[0][name], sample[name]) for name in sample)
    assert not torch.equal(bodies[1]["x"], sample["x"])
    assert torch.equal(bodies[-3]["x"], sample["x"])
    with pytest.raises(IndexError, match="sample 5 of 5"):
        bodies[5]
    with pytest.raises(ValueError, match="points 0"):
        Ellipsoids(1, points=0)


def integrals_on_ranks():
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("points",))
    sample = Ellipsoids(1, points=40, dtype=torch.float64)[0]
    placed = {n: scatter_tensor(t, 0, mesh, (Shard(0),), requires_grad=True) for n, t in sample.items()}
    force = force_coefficients(placed["y"], placed["x"][:, 3:], placed["area"])
    norm = area_norm(placed["y"], placed["area"])
    torch.testing.assert_close(force.full_tensor(), force_coefficients(sample["y"], sample["x"][:, 3:], sample["area"]))
    torch.testing.assert_close(norm.full_tensor(), area_norm(sample["y"], sample["area"]))


def test_integrals_of_sharded_surfaces():
    run_on_ranks(integrals_on_ranks, 3)
