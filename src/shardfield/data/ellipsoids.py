"""Potential flow past triaxial ellipsoids, in closed form: surface points, areas, normals and pressure coefficients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

CELLS = 192  # cells of the table along each of the two surface parameters, which spreads points evenly by area
GOLDEN = (math.sqrt(5) - 1) / 2


def depolarization_factors(axes: Sequence[float] | Tensor) -> Tensor:
    """Return the three depolarization factors of an ellipsoid with these semi-axes; their sum is 1.

    Factor i is abc / 2 times the integral of 1 / ((a_i^2 + s) sqrt((a^2 + s) (b^2 + s) (c^2 + s))) over s from 0 to
    infinity, which is Carlson's integral R_D.
    """
    from scipy.special import elliprd

    a, b, c = (float(axis) for axis in axes)
    if not (min(a, b, c) > 0 and math.isfinite(a * b * c)):
        raise ValueError(f"an ellipsoid has three positive semi-axes, not {(a, b, c)}")
    squares = [(b * b, c * c, a * a), (c * c, a * a, b * b), (a * a, b * b, c * c)]
    return torch.tensor([a * b * c / 3 * elliprd(*s) for s in squares], dtype=torch.float64)


class Ellipsoid:
    """An ellipsoid in a uniform stream of speed 1 along x, at the origin.

    `axes` are its semi-axes and `rotation` (3, 3) turns its own frame into that of the stream. On the surface the
    potential of the flow is a linear function of position, so that the velocity is the tangential part of one vector,
    `speed`: in the body's frame U_i / (1 - L_i), with the depolarization factors L.

    >>> sphere = Ellipsoid((1.0, 1.0, 1.0))
    >>> points = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    >>> sphere.pressure(points).round(decimals=9).tolist()
    [1.0, -1.25]
    """

    def __init__(self, axes: Sequence[float] | Tensor, rotation: Tensor | None = None):
        self.axes = torch.as_tensor(axes, dtype=torch.float64)
        self.rotation = torch.eye(3, dtype=torch.float64) if rotation is None else rotation.double()
        stream = self.rotation[0]  # of the stream's frame, in the body's frame
        self.speed = self.rotation @ (stream / (1 - depolarization_factors(self.axes)))

    def pressure(self, normals: Tensor) -> Tensor:
        """Return the pressure coefficient 1 - |u|^2 where the surface has the unit normals (..., 3)."""
        speed = self.speed.to(normals)
        return 1 - speed.square().sum() + (normals @ speed).square()

    def points(self, n: int, part: slice = slice(None), seed: int = 0) -> dict[str, Tensor]:
        """Return `part` of n points that are spread evenly by area: "position", "normal" and "area", a row per point.

        The points wind around the body from one pole to the other, so that a contiguous part is a compact band. `seed`
        jitters them, and point i does not depend on `part`. The areas are quadrature weights: their sum is the area of
        the body.
        """
        at = np.arange(n)[part]
        jitter = np.random.default_rng([seed, n]).random((2, n))[:, part]
        z, phi, density = self._spread((at + jitter[0]) / n, (at * GOLDEN + jitter[1] / math.sqrt(n)) % 1)
        r = np.sqrt(np.maximum(1 - z * z, 0))
        on_sphere = torch.from_numpy(np.stack([r * np.cos(phi), r * np.sin(phi), z], 1))
        normal = torch.nn.functional.normalize(on_sphere / self.axes, dim=1)
        return {
            "position": (on_sphere * self.axes) @ self.rotation.T,
            "normal": normal @ self.rotation.T,
            "area": torch.from_numpy(4 * math.pi * self._stretch(z, phi) / density / n)[:, None],
        }

    def triangulation(self, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return n points (n, 3) and the triangles (m, 3) of their convex hull, which are seen from outside."""
        from scipy.spatial import ConvexHull

        points = self.points(n, seed=seed)["position"].numpy()
        faces = ConvexHull(points).simplices
        inward = np.linalg.det(points[faces]) < 0
        faces[inward] = faces[inward][:, ::-1]
        return points, faces

    def _spread(self, height: np.ndarray, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Map the unit square to the sphere so that equal areas of the square become equal areas of the body.

        Returns cos(theta), phi, and the density of the points, which is 1 where they are spread evenly on the sphere.
        The area of the body is tabulated in cells of (cos(theta), phi), and its cumulative sums are inverted.
        """
        cells = (np.arange(CELLS) + 0.5) / CELLS
        table = self._stretch(2 * cells[:, None] - 1, 2 * math.pi * cells)
        by_row = table.sum(1) / table.sum()
        by_cell = table / table.sum(1, keepdims=True)
        ends = by_row.cumsum()
        row = np.minimum(np.searchsorted(ends, height, side="right"), CELLS - 1)
        z = (row + 1 - (ends[row] - height) / by_row[row]) / CELLS
        ends = (np.arange(CELLS)[:, None] + by_cell.cumsum(1)).ravel()  # increasing over all rows
        cell = np.clip(np.searchsorted(ends, row + turn, side="right"), row * CELLS, row * CELLS + CELLS - 1)
        share = by_cell.ravel()[cell]
        phi = (cell % CELLS + 1 - (ends[cell] - row - turn) / share) / CELLS
        return (2 * z - 1).clip(-1, 1), 2 * math.pi * phi, by_row[row] * share * CELLS**2

    def _stretch(self, z: np.ndarray, phi: np.ndarray) -> np.ndarray:
        """Return the area of the body over that of the unit sphere, at cos(theta) = z and phi."""
        a, b, c = self.axes.tolist()
        r = np.sqrt(np.maximum(1 - z * z, 0))
        return a * b * c * np.sqrt((r * np.cos(phi) / a) ** 2 + (r * np.sin(phi) / b) ** 2 + (z / c) ** 2)


class Ellipsoids:
    """Bodies in a stream: n ellipsoids of random axes and attitude, and the pressure on their surfaces.

    A sample has `points` rows: "x" (position and normal, 6 columns), "y" (pressure coefficient) and "area". It depends
    only on `seed` and `start + i`. A rank generates only the rows that it reads, so bodies of any number of points
    cost a rank its own share.

    >>> bodies = Ellipsoids(2, points=500)
    >>> sample = bodies[1]
    >>> {name: tuple(values.shape) for name, values in sample.items()}
    {'x': (500, 6), 'y': (500, 1), 'area': (500, 1)}
    """

    def __init__(
        self, n: int, *, points: int = 1024, seed: int = 0, start: int = 0, dtype: torch.dtype = torch.float32
    ):
        if n < 1 or points < 1 or start < 0 or not 0 <= seed < 2**32:
            raise ValueError(
                f"Ellipsoids: n {n}, points {points}, start {start}, seed {seed}: n and points are at least 1, start "
                f"0, and seed has 32 bits"
            )
        self.n, self.n_points, self.seed, self.start, self.dtype = n, points, seed, start, dtype
        self.shapes = {"x": (points, 6), "y": (points, 1), "area": (points, 1)}
        self._bodies: dict[int, Ellipsoid] = {}

    def __len__(self) -> int:
        return self.n

    def body(self, i: int) -> Ellipsoid:
        """Return the ellipsoid of sample i: semi-axes from 0.4 to 1, any attitude."""
        if i not in self._bodies:
            random = np.random.default_rng([self.seed, self.start + i])
            turned, _ = np.linalg.qr(random.standard_normal((3, 3)))
            self._bodies[i] = Ellipsoid(np.exp(random.uniform(math.log(0.4), 0, 3)), torch.from_numpy(turned))
        return self._bodies[i]

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.read(i, (slice(None),))

    def read(self, i: int, slices: Any) -> dict[str, Tensor]:
        """Return the rows of sample i within `slices` (one per dim; a mapping has them by name)."""
        if not -self.n <= i < self.n:
            raise IndexError(f"Ellipsoids: sample {i} of {self.n}")
        i %= self.n
        part = next(iter(slices.values()))[0] if isinstance(slices, Mapping) else slices[0]
        body = self.body(i)
        found = body.points(self.n_points, part, seed=self.start + i)
        x = torch.cat([found["position"], found["normal"]], 1)
        values = {"x": x, "y": body.pressure(found["normal"])[:, None], "area": found["area"]}
        return {name: value.to(self.dtype) for name, value in values.items()}
