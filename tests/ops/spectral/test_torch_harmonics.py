"""torch-harmonics, unmodified, on fields sharded along latitudes, longitudes or both."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Shard

from shardfield import explain, strict
from shardfield.testing import run_on_ranks
from tests.harness import no_gathers, world_mesh
from tests.harness.run import scatter_small_partials
from tests.ops.stencil.test_conv import field

LATITUDES, LONGITUDES, TILES = [Shard(-2)], [Shard(-1)], [Shard(-2), Shard(-1)]
SHARDINGS = [
    ((4,), LATITUDES, None),
    ((4,), LATITUDES, [5, 0, 1, 6]),
    ((4,), LONGITUDES, [3, 9, 5, 7]),
    ((2, 2), TILES, None),
]


def harmonics():
    """Import the package, which imports deprecated parts of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch_harmonics
        import torch_harmonics.distributed
        import torch_harmonics.examples.models
    return torch_harmonics


def on_sphere(mesh, placements, lengths, shape, dtype=torch.float64):
    """Return a global field and its ShardTensor; `placements` count from the last dim."""
    placed = [Shard(p.dim % len(shape)) for p in placements]
    return field(mesh, placed, shape, lengths and {placed[0].dim: lengths}, dtype)


def off(pairs) -> float:
    """Return the largest difference, relative to the largest value of each pair."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


# ---------------------------------------------------------------------- transforms


def transformed(vector: bool, mesh, placements, lengths) -> tuple[float, float]:
    """Return the differences of coefficients, of the inverse and of its gradient from one device."""
    th = harmonics()
    analysis, synthesis = (th.RealVectorSHT, th.InverseRealVectorSHT) if vector else (th.RealSHT, th.InverseRealSHT)
    how = {"lmax": 7, "mmax": 6, "grid": "legendre-gauss"}
    there, back = analysis(12, 24, **how).double(), synthesis(12, 24, **how).double()
    full, x = on_sphere(mesh, placements, lengths, (3, 2, 12, 24))
    with no_gathers():
        modes = there(x.requires_grad_())
        made = back(modes)
        (made.square().sum() + modes.abs().square().sum()).backward()
    expected = there(full.requires_grad_())
    full_value = back(expected)
    (full_value.square().sum() + expected.abs().square().sum()).backward()
    return off([(modes.full_tensor(), expected), (made.full_tensor(), full_value), (x.grad.full_tensor(), full.grad)])


@pytest.mark.parametrize(("mesh", "placements", "lengths"), SHARDINGS)
@pytest.mark.parametrize("vector", [False, True])
def test_transforms(vector, mesh, placements, lengths):
    assert max(run_on_ranks(transformed, 4, vector, mesh, placements, lengths)) < 1e-12


def sent(size) -> tuple[int, list[int], list]:
    """Return the bytes of a transform and its inverse, forward and backward, and the placements of the results."""
    th = harmonics()
    there, back = th.RealSHT(*size, lmax=6, mmax=6).double(), th.InverseRealSHT(*size, lmax=6, mmax=6).double()
    _, x = on_sphere((4,), LATITUDES, None, (1, 2, *size))
    with explain() as report, strict():
        modes = there(x.requires_grad_())
        made = back(modes)
        made.backward(torch.ones(made.shape, dtype=torch.float64))
    rows = report.rows
    return (
        sum(r.bytes for r in rows),
        sum(r.back_bytes for r in rows),
        [modes.placements, made.placements, tuple(made.to_local().shape)],
    )


def test_sums_over_latitudes_send_modes():
    """An all_reduce of the coefficients, real and imaginary parts, forward and backward, for any grid."""
    modes = 2 * 6 * 6 * 16
    for size in ((12, 24), (48, 96)):
        for forward, backward, where in run_on_ranks(sent, 4, size):
            assert 0 < forward <= 2 * modes and 0 < backward <= 2 * modes
            assert where == [(Partial(),), (Shard(2),), (1, 2, size[0] // 4, size[1])]


def many_coefficients() -> list[str]:
    """Return the layouts of many coefficients, of more channels than orders, and of their inverses on two grids."""
    th = harmonics()
    there, back = th.RealSHT(12, 24, lmax=8, mmax=8).double(), th.InverseRealSHT(12, 24, lmax=8, mmax=8).double()
    coarse = th.InverseRealSHT(9, 18, lmax=8, mmax=8, grid="legendre-gauss").double()
    again = th.RealSHT(9, 18, lmax=8, mmax=8, grid="legendre-gauss").double()
    full, x = on_sphere((4,), LATITUDES, [4, 3, 3, 2], (1, 32, 12, 24))
    with scatter_small_partials(), strict():
        modes = there(x.requires_grad_())
        inner = coarse(modes)
        made = back(again(inner))
        made.square().sum().backward()
    expected = back(again(coarse(there(full.requires_grad_()))))
    expected.square().sum().backward()
    assert off([(made.full_tensor(), expected), (x.grad.full_tensor(), full.grad)]) < 1e-12
    return [str(t._layout) for t in (modes, inner, made)]


def test_many_coefficients_are_sharded_by_order():
    """The sharding moves to the orders and back to the latitudes, with the shard sizes it had."""
    for layouts in run_on_ranks(many_coefficients, 4):
        assert layouts == [
            "(1, 32, 8, 8) Shard(3) as 2+2+2+2 over 'h'",
            "(1, 32, 9, 18) Shard(2) as 3+2+3+1 over 'h'",
            "(1, 32, 12, 24) Shard(2) as 4+3+3+2 over 'h'",
        ]


# ---------------------------------------------------------------------- torch-harmonics' own distributed modules


def against_distributed_modules(vector: bool) -> float:
    """Return the difference of this rank's shards from those of the package's own distributed modules."""
    th = harmonics()
    own = th.distributed
    mesh = world_mesh((2, 2))
    if not own.is_initialized():  # never finalized: `finalize` would destroy the groups of our mesh
        own.init(mesh.get_group(0), mesh.get_group(1))
    kind = "Vector" if vector else ""
    how = (12, 24, 6, 6)
    theirs = [getattr(own, f"Distributed{name}{kind}SHT")(*how).double() for name in ("Real", "InverseReal")]
    ours = [getattr(th, f"{name}{kind}SHT")(*how).double() for name in ("Real", "InverseReal")]
    _, x = on_sphere((2, 2), TILES, None, (3, 2, 12, 24))
    block = x.to_local().clone().requires_grad_()
    modes = ours[0](x.requires_grad_())
    made = ours[1](modes)
    other_modes = theirs[0](block)
    other = theirs[1](other_modes)
    made.square().sum().backward()
    other.square().sum().backward()
    p, a = mesh.get_coordinate()
    rows, columns = theirs[0].l_shapes, theirs[0].m_shapes
    full_value = modes.full_tensor().split(rows, -2)[p].split(columns, -1)[a]
    here = made.redistribute(placements=x.placements).to_local()
    return off([(full_value, other_modes), (here, other), (x.grad.to_local(), block.grad)])


@pytest.mark.parametrize("vector", [False, True])
def test_agrees_with_distributed_modules(vector):
    assert max(run_on_ranks(against_distributed_modules, 4, vector)) < 1e-12


# ---------------------------------------------------------------------- models


class Layers(nn.Module):
    """Two spectral layers between grids, in float64."""

    def __init__(self) -> None:
        super().__init__()
        th = harmonics()
        self.down = th.RealSHT(12, 24, lmax=6, mmax=6)
        self.inner = th.InverseRealSHT(8, 16, lmax=6, mmax=6, grid="legendre-gauss")
        self.again = th.RealSHT(8, 16, lmax=6, mmax=6, grid="legendre-gauss")
        self.up = th.InverseRealSHT(12, 24, lmax=6, mmax=6)
        self.weights = nn.ParameterList(torch.randn(3, 3, 6, dtype=torch.complex128) for _ in range(2))
        self.mlp = nn.Sequential(nn.Conv2d(3, 6, 1), nn.GELU(), nn.Conv2d(6, 3, 1))
        self.norm = nn.InstanceNorm2d(3, affine=True)

    def forward(self, x):
        modes = self.down(x)
        residual = self.inner(modes)
        inner = self.inner(torch.einsum("...ilm,oil->...olm", modes, self.weights[0]))
        inner = self.mlp(self.norm(inner)) + residual
        return F.gelu(self.up(torch.einsum("...ilm,oil->...olm", self.again(inner), self.weights[1]))) + x


def trained(make, dtype, mesh, placements, lengths, channels) -> float:
    """Return the largest difference of a model's output and gradients from one device."""
    full, x = on_sphere(mesh, placements, lengths, (2, channels, 12, 24), dtype)
    torch.manual_seed(0)
    model = make()
    if dtype is torch.float64:
        model.double()
    with strict():
        out = model(x.requires_grad_())
        out.square().mean().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = model(full.requires_grad_())
    expected.square().mean().backward()
    pairs = [(out.full_tensor(), expected), (x.grad.full_tensor(), full.grad)]
    return off(pairs + [(grad, p.grad) for grad, p in zip(found, model.parameters(), strict=True)])


@pytest.mark.parametrize(("mesh", "placements", "lengths"), SHARDINGS)
def test_spectral_layers(mesh, placements, lengths):
    assert max(run_on_ranks(trained, 4, Layers, torch.float64, mesh, placements, lengths, 3)) < 1e-10


def sfno() -> nn.Module:
    """Return the package's example model, which works in float32."""
    make = harmonics().examples.models.SphericalFourierNeuralOperator
    return make((12, 24), scale_factor=2, in_chans=2, out_chans=2, embed_dim=6, num_layers=3, pos_embed="spectral")


@pytest.mark.parametrize(("mesh", "placements", "lengths"), SHARDINGS)
def test_sfno(mesh, placements, lengths):
    assert max(run_on_ranks(trained, 4, sfno, torch.float32, mesh, placements, lengths, 2)) < 2e-5


# ---------------------------------------------------------------------- discrete-continuous convolutions


class Discos(nn.Module):
    """Convolutions on the sphere: between grids, in groups, with fused weights, to few channels, and back."""

    def __init__(self) -> None:
        super().__init__()
        th = harmonics()
        fine, coarse, kernel = (12, 24), (6, 12), (3, 3)
        self.same = th.DiscreteContinuousConvS2(2, 4, fine, fine, kernel, theta_cutoff=0.5)
        self.down = th.DiscreteContinuousConvS2(4, 4, fine, coarse, kernel, groups=2, theta_cutoff=0.6)
        self.fused = th.DiscreteContinuousConvS2(4, 6, coarse, coarse, kernel, theta_cutoff=0.6, fused=True)
        self.few = th.DiscreteContinuousConvS2(6, 2, coarse, coarse, kernel, theta_cutoff=0.6)
        self.up = th.DiscreteContinuousConvTransposeS2(2, 2, coarse, fine, kernel, theta_cutoff=0.6)

    def forward(self, x):
        y = F.gelu(self.same(x))
        y = F.gelu(self.fused(F.gelu(self.down(y))))
        return self.up(F.gelu(self.few(y))) + x


@pytest.mark.parametrize(("mesh", "placements", "lengths"), SHARDINGS)
def test_discrete_continuous_convolutions(mesh, placements, lengths):
    assert max(run_on_ranks(trained, 4, Discos, torch.float64, mesh, placements, lengths, 2)) < 1e-10


def disco_sent() -> tuple[int, int, str]:
    """Return the bytes of a convolution, forward and backward, and the layout of its result."""
    th = harmonics()
    conv = th.DiscreteContinuousConvS2(3, 3, (48, 24), (48, 24), (3, 3), theta_cutoff=0.15).double()
    _, x = on_sphere((4,), LATITUDES, None, (1, 3, 48, 24))
    with explain() as report, strict():
        out = conv(x.requires_grad_())
        out.sum().backward()
    row = next(r for r in report.rows if "contraction" in r.op)
    return row.bytes, row.back_bytes, str(out._layout)


def test_a_convolution_sends_bands_of_latitudes():
    """A filter of 0.15 rad reaches two latitudes on each side, of 48 over 3.14 rad."""
    band = 2 * 3 * 24 * 8
    for rank, (forward, backward, layout) in enumerate(run_on_ranks(disco_sent, 4)):
        assert forward == backward == (band if rank in (0, 3) else 2 * band)
        assert layout == "(1, 3, 48, 24) Shard(2) as 12+12+12+12 over 'h'"
