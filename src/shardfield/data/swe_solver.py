"""Shallow water on a rotating sphere: a pseudospectral solver on the transforms of torch-harmonics.

With wind V, absolute vorticity q = zeta + f, geopotential Phi, kinetic energy K = |V|^2 / 2 (Williamson et al. 1992):

    d zeta  / dt = - div (q V)
    d delta / dt =   curl(q V) - laplacian(Phi + K)
    d Phi   / dt = - div (Phi V)

Products are taken on the Gauss-Legendre grid and are free of quadratic aliasing (degrees below two thirds of the number
of latitudes). Time steps are classical Runge-Kutta of order 4, each followed by a hyperdiffusion of order 8. The mean
of Phi is the coefficient of degree 0, and a divergence has none: mass is conserved to rounding.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

RADIUS = 6.37122e6  # m
OMEGA = 7.292e-5  # 1/s
GRAVITY = 9.80616  # m/s^2
VARIABLES = MappingProxyType({"height": "m", "vorticity": "s-1", "divergence": "s-1"})  # their units


class ShallowWaterSolver(nn.Module):
    """Solve the shallow water equations on `nlat` x `nlon` points in float64, for any leading dims of the state.

    A state is either its spectral coefficients (Phi, zeta, delta), complex (..., 3, degree, order), or a grid (height,
    vorticity, divergence), real (..., 3, nlat, nlon), from north to south.
    """

    coriolis: Tensor
    laplacian: Tensor
    damping: Tensor

    def __init__(self, nlat: int, nlon: int, seconds: float | None = None, damping_hours: float = 3.0):
        super().__init__()
        th = _harmonics()
        self.nlat, self.nlon, self.degrees = nlat, nlon, max(2, 2 * nlat // 3)
        # Divides the hour; gravity waves of 250 m/s at the largest degree are well inside the region of stability.
        self.seconds = 3600 / math.ceil(self.degrees / 7) if seconds is None else seconds
        how = dict(lmax=self.degrees, mmax=self.degrees, grid="legendre-gauss")
        with _default_float64():  # else vector transforms have factors of single precision
            self.analysis, self.synthesis = th.RealSHT(nlat, nlon, **how), th.InverseRealSHT(nlat, nlon, **how)
            self.vector_analysis = th.RealVectorSHT(nlat, nlon, **how)
            self.vector_synthesis = th.InverseRealVectorSHT(nlat, nlon, **how)
        degree = torch.arange(self.degrees, dtype=torch.float64)[:, None]
        eigenvalues = degree * (degree + 1)
        self.register_buffer("laplacian", -eigenvalues / RADIUS**2)
        rate = (eigenvalues / eigenvalues[-1]) ** 4 / (3600 * damping_hours)
        self.register_buffer("damping", torch.exp(-rate * self.seconds))
        self.register_buffer("coriolis", 2 * OMEGA * torch.sin(torch.deg2rad(latitudes(nlat)))[:, None])
        self.double()

    # ------------------------------------------------------------------ states

    def to_spectral(self, grid: Tensor) -> Tensor:
        """Return the coefficients of a grid state, truncated to the degrees of the solver."""
        scale = grid.new_tensor([GRAVITY, 1, 1])[:, None, None]
        return self.analysis(grid * scale)

    def to_grid(self, state: Tensor) -> Tensor:
        """Return height, vorticity and divergence on the grid."""
        found = self.synthesis(state)
        return found / found.new_tensor([GRAVITY, 1, 1])[:, None, None]

    def wind(self, state: Tensor) -> Tensor:
        """Return the wind on the grid, southward and eastward (..., 2, nlat, nlon)."""
        inverse = torch.zeros_like(self.laplacian)
        inverse[1:] = 1 / self.laplacian[1:]
        zeta, delta = state[..., 1, :, :], state[..., 2, :, :]
        return self.vector_synthesis(torch.stack([delta * inverse, -zeta * inverse], -3) / RADIUS)

    def balanced(self, zeta: Tensor, mean_height: float) -> Tensor:
        """Return the state with coefficients `zeta` of vorticity, no divergence, and a divergence that does not grow.

        The mean of the height of the free surface is `mean_height`.
        """
        state = torch.stack([torch.zeros_like(zeta), zeta, torch.zeros_like(zeta)], -3)
        wind = self.wind(state)
        _, curl = self._div_curl((self.synthesis(zeta) + self.coriolis).unsqueeze(-3) * wind)
        inverse = torch.zeros_like(self.laplacian)
        inverse[1:] = 1 / self.laplacian[1:]
        phi = curl * inverse - self.analysis(wind.square().sum(-3) / 2)
        phi[..., 0, 0] = mean_height * GRAVITY * math.sqrt(4 * math.pi)
        state[..., 0, :, :] = phi
        return state

    # ------------------------------------------------------------------ time

    @torch.no_grad()
    def advance(self, state: Tensor, seconds: float) -> Tensor:
        """Return the coefficients after a time of (a multiple of) the solver's time step."""
        steps = round(seconds / self.seconds)
        if steps < 0 or abs(steps * self.seconds - seconds) > 1e-6 * self.seconds:
            raise ValueError(f"{seconds} s are no multiple of the time step of {self.seconds} s")
        for _ in range(steps):
            state = self._step(state)
        return state

    def _step(self, state: Tensor) -> Tensor:
        dt = self.seconds
        first = self.tendency(state)
        second = self.tendency(state + dt / 2 * first)
        third = self.tendency(state + dt / 2 * second)
        fourth = self.tendency(state + dt * third)
        return (state + dt / 6 * (first + 2 * second + 2 * third + fourth)) * self.damping

    def tendency(self, state: Tensor) -> Tensor:
        """Return the time derivative of the coefficients."""
        phi, zeta = self.synthesis(state[..., :2, :, :]).unbind(-3)
        wind = self.wind(state)
        flux = torch.stack([(zeta + self.coriolis).unsqueeze(-3) * wind, phi.unsqueeze(-3) * wind], -4)
        div, curl = self._div_curl(flux)
        energy = self.analysis(phi + wind.square().sum(-3) / 2)
        vorticity, mass = div.unbind(-3)
        return torch.stack([-mass, -vorticity, curl[..., 0, :, :] - self.laplacian * energy], -3)

    def _div_curl(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coefficients of divergence and curl of vectors (..., 2, nlat, nlon)."""
        potentials = self.vector_analysis(vectors) * RADIUS * self.laplacian
        return potentials[..., 0, :, :], -potentials[..., 1, :, :]


def latitudes(nlat: int) -> Tensor:
    """Return the latitudes of the Gauss-Legendre grid in degrees, from north to south."""
    nodes, _ = _gauss(nlat)
    return torch.rad2deg(torch.asin(nodes.flip(0)))


def area_weights(nlat: int) -> Tensor:
    """Return the weights of the latitudes in an integral over the sphere; their mean is 1."""
    _, weights = _gauss(nlat)
    return weights.flip(0) * (nlat / 2)


def random_flow(solver: ShallowWaterSolver, seed: int, n: int, speed: float = 25.0, height: float = 6000.0) -> Tensor:
    """Return balanced random flows (n, 3, degree, order): jets and vortices of degree 2 to 10, winds of `speed` m/s.

    `speed` is the root mean square of the wind. Flow i depends on `seed + i` alone.
    """
    zeta = torch.zeros(n, solver.degrees, solver.degrees, dtype=torch.complex128)
    degree = torch.arange(solver.degrees, dtype=torch.float64)
    spectrum = torch.where((degree > 1) & (degree < 11), degree * torch.exp(-(((degree - 5) / 3.5) ** 2)), 0.0)
    for i in range(n):
        generator = torch.Generator().manual_seed(seed + i)
        parts = torch.randn(2, *zeta.shape[1:], dtype=torch.float64, generator=generator)
        zeta[i] = torch.complex(parts[0], parts[1]).tril()
        zeta[i, :, 0] = 2.0 * parts[0, :, 0]  # jets
    state = torch.stack([torch.zeros_like(zeta), zeta * spectrum[:, None], torch.zeros_like(zeta)], -3)
    weights = area_weights(solver.nlat)[:, None]
    rms = (solver.wind(state).square().sum(-3) * weights).mean((-2, -1)).sqrt()
    return solver.balanced(state[..., 1, :, :] * (speed / rms)[:, None, None], height)


def _gauss(nlat: int) -> tuple[Tensor, Tensor]:
    _harmonics()
    from torch_harmonics.quadrature import legendre_gauss_weights

    nodes, weights = legendre_gauss_weights(nlat, -1, 1)
    return torch.as_tensor(nodes, dtype=torch.float64), torch.as_tensor(weights, dtype=torch.float64)


@contextmanager
def _default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _harmonics() -> Any:
    """Import torch-harmonics, which imports deprecated parts of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch_harmonics
    return torch_harmonics
