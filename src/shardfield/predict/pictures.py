"""Plots of a forecast: globes of truth, forecast and error, and the scores by lead time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..train.task import ForecastSpec
from .run import Forecast
from .store import ForecastStore

PIXELS = 220  # across a globe


def plot_forecast(found: Forecast, spec: ForecastSpec, path: Path) -> None:
    """Plot the first case: a row of globes for three lead times, and the skill of every variable below.

    The globes show the first variable but one (the vorticity of shallow water), if there are several.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    store = ForecastStore(found.path)
    steps, names = store.times - 1, list(spec.variables)
    variable = min(1, len(names) - 1)
    leads = sorted({max(1, steps // 4), max(1, steps // 2), steps})
    figure = plt.figure(figsize=(3.4 * 3, 3.1 * len(leads) + 3.4), layout="constrained")
    grid = figure.add_gridspec(len(leads) + 1, 12, height_ratios=[1] * len(leads) + [1.1])
    slices = tuple(slice(0, n) for n in (len(names), *store.points))
    for row, lead in enumerate(leads):
        truth = spec.read(0, lead, slices)[variable].double().numpy()
        forecast = np.asarray(store.arrays[variable][:, 0, lead]).mean(0)  # the mean of the members
        limit = np.abs(truth).max()
        for column, (title, field, scale) in enumerate(
            [("truth", truth, limit), ("forecast", forecast, limit), ("error", forecast - truth, limit)]
        ):
            panel = figure.add_subplot(grid[row, 4 * column : 4 * column + 4])
            image = panel.imshow(
                _globe(field, spec.coords),
                cmap="RdBu_r",
                vmin=-scale,
                vmax=scale,
                origin="lower",
                interpolation="bilinear",
            )
            panel.set(xticks=[], yticks=[], title=f"{title}, {lead * spec.hours:g} h")
            panel.axis("off")
        units = spec.variables[names[variable]].get("units", "")
        figure.colorbar(image, ax=figure.axes[-3:], label=f"{names[variable]} ({units})", shrink=0.8)
    _plot_scores(figure, grid[len(leads), :], found, spec)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plot_scores(figure: Any, place: Any, found: Forecast, spec: ForecastSpec) -> None:
    """Plot errors against lead time, with that of persistence next to them."""
    inner = place.subgridspec(1, len(spec.variables))
    for i, (name, attrs) in enumerate(spec.variables.items()):
        panel = figure.add_subplot(inner[i])
        for score in ("rmse", "persistence", "crps"):
            values = found.scores.get(score, {}).get(name)
            if values:
                hours = spec.hours * np.arange(1, len(values) + 1)
                panel.plot(hours, values, label=score, linestyle="--" if score == "persistence" else "-")
        panel.set(title=name, xlabel="lead time (hours)", ylabel=attrs.get("units", ""), ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)


def _globe(field: np.ndarray, coords: dict[str, Any], center: tuple[float, float] = (35.0, 0.0)) -> np.ndarray:
    """Return an image of the hemisphere around `center` (orthographic projection), NaN outside the globe."""
    lat, lon = (np.asarray(coords[name]) for name in ("lat", "lon"))
    y, x = np.meshgrid(np.linspace(-1, 1, PIXELS), np.linspace(-1, 1, PIXELS), indexing="ij")
    z = np.sqrt(np.clip(1 - x**2 - y**2, 0, None))
    tilt = np.deg2rad(center[0])
    sine = np.clip(y * np.cos(tilt) + z * np.sin(tilt), -1, 1)
    at_lat = np.rad2deg(np.arcsin(sine))
    at_lon = (np.rad2deg(np.arctan2(x, z * np.cos(tilt) - y * np.sin(tilt))) + center[1]) % 360
    order = np.argsort(lat)
    rows = np.interp(at_lat, lat[order], np.arange(len(lat)))
    columns = np.interp(at_lon, np.append(lon, lon[0] + 360), np.arange(len(lon) + 1))
    values = np.concatenate([field[order], field[order][:, :1]], 1)
    image = _bilinear(values, rows, columns)
    image[x**2 + y**2 > 1] = np.nan
    return image


def _bilinear(values: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    bottom, right = np.minimum(top + 1, values.shape[0] - 1), np.minimum(left + 1, values.shape[1] - 1)
    down, across = rows - top, columns - left
    upper = values[top, left] * (1 - across) + values[top, right] * across
    lower = values[bottom, left] * (1 - across) + values[bottom, right] * across
    return upper * (1 - down) + lower * down
