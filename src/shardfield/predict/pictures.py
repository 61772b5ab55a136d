"""Plots of a forecast: globes of truth, forecast and error, and the scores by lead time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..train.task import ForecastSpec
from .run import Forecast
from .store import ForecastStore

PIXELS = 300  # across a globe
CENTER = (35.0, 0.0)  # latitude and longitude in the middle of a globe
LABELS = {"rmse": "forecast", "persistence": "persistence (nothing changes)", "crps": "fair CRPS of the members"}


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
    figure = plt.figure(figsize=(10.2, 3.1 * len(leads) + 3.6), layout="constrained")
    globes, scores = np.ravel(figure.subfigures(2, 1, height_ratios=[3.1 * len(leads), 3.6]))  # type: ignore[arg-type]
    panels = globes.subplots(len(leads), 3, squeeze=False)
    slices = tuple(slice(0, n) for n in (len(names), *store.points))
    title = "forecast" if store.members == 1 else f"mean of {store.members} members"
    truths = [spec.read(0, lead, slices)[variable].double().numpy() for lead in leads]
    limit = max(np.abs(truth).max() for truth in truths)  # one scale for all globes
    for row, lead, truth in zip(panels, leads, truths, strict=True):
        forecast = np.asarray(store.arrays[variable][:, 0, lead]).mean(0)
        for panel, field in zip(row, (truth, forecast, forecast - truth), strict=True):
            image = _draw_globe(panel, field, spec.coords, limit)
        row[0].set_ylabel(_lead_text(lead * spec.hours), fontsize=12)
    for panel, text in zip(panels[0], ("truth", title, f"error ({title} - truth)"), strict=True):
        panel.set_title(text, fontsize=12)
    units = spec.variables[names[variable]].get("units", "")
    globes.colorbar(image, ax=panels.ravel().tolist(), label=f"{names[variable]} ({units})", shrink=0.6)
    _plot_scores(scores, found, spec)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lead_text(hours: float) -> str:
    """Return a lead time in words.

    >>> _lead_text(60.0), _lead_text(6.0)
    ('after 2.5 days', 'after 6 hours')
    """
    return f"after {hours:g} hours" if hours < 24 else f"after {hours / 24:.3g} days"


def _plot_scores(figure: Any, found: Forecast, spec: ForecastSpec) -> None:
    """Plot the errors by lead time, with that of persistence next to them."""
    panels = figure.subplots(1, len(spec.variables), squeeze=False)[0]
    cases = "mean of all cases" if ForecastStore(found.path).cases > 1 else "one case"
    figure.suptitle(f"error by lead time (RMSE, weighted by area, {cases})", fontsize=12)
    for panel, (name, attrs) in zip(panels, spec.variables.items(), strict=True):
        for score, label in LABELS.items():
            values = found.scores.get(score, {}).get(name)
            if values:
                days = spec.hours / 24 * np.arange(1, len(values) + 1)
                panel.plot(days, values, label=label, linestyle="--" if score == "persistence" else "-")
        panel.set(
            xlabel="lead time (days)", ylabel=f"{name} ({attrs.get('units', '')})", xlim=(0, None), ylim=(0, None)
        )
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)


def _draw_globe(panel: Any, field: np.ndarray, coords: dict[str, Any], limit: float) -> Any:
    """Draw a field on the visible half of the globe, with its outline and every 30th meridian and parallel."""
    image = panel.imshow(
        _globe(field, coords),
        cmap="RdBu_r",
        vmin=-limit,
        vmax=limit,
        origin="lower",
        extent=(-1, 1, -1, 1),
        interpolation="bilinear",
    )
    circle = np.linspace(0, 2 * np.pi, 361)
    panel.plot(np.cos(circle), np.sin(circle), color="0.3", linewidth=1)
    lines = [(np.full(181, lat), np.linspace(-180, 180, 181)) for lat in range(-60, 90, 30)]
    lines += [(np.linspace(-90, 90, 181), np.full(181, lon)) for lon in range(-180, 180, 30)]
    for lat, lon in lines:
        x, y, visible = _project(np.deg2rad(lat), np.deg2rad(lon))
        panel.plot(np.where(visible, x, np.nan), np.where(visible, y, np.nan), color="0.3", linewidth=0.3, alpha=0.6)
    panel.set(xticks=[], yticks=[], xlim=(-1.02, 1.02), ylim=(-1.02, 1.02), aspect="equal")
    panel.spines[:].set_visible(False)
    return image


def _project(lat: np.ndarray, lon: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the orthographic projection of points (in radians), and whether they are on the visible half."""
    tilt, lon = np.deg2rad(CENTER[0]), lon - np.deg2rad(CENTER[1])
    y = np.cos(tilt) * np.sin(lat) - np.sin(tilt) * np.cos(lat) * np.cos(lon)
    depth = np.sin(tilt) * np.sin(lat) + np.cos(tilt) * np.cos(lat) * np.cos(lon)
    return np.cos(lat) * np.sin(lon), y, depth >= 0


def _globe(field: np.ndarray, coords: dict[str, Any]) -> np.ndarray:
    """Return an image of the visible half of the globe (the inverse of `_project`), NaN outside of it.

    Latitudes and longitudes are in any order; longitudes are periodic.
    """
    lat, lon = (np.asarray(coords[name]) for name in ("lat", "lon"))
    y, x = np.meshgrid(np.linspace(-1, 1, PIXELS), np.linspace(-1, 1, PIXELS), indexing="ij")
    z = np.sqrt(np.clip(1 - x**2 - y**2, 0, None))
    tilt = np.deg2rad(CENTER[0])
    sine = np.clip(y * np.cos(tilt) + z * np.sin(tilt), -1, 1)
    at_lat = np.rad2deg(np.arcsin(sine))
    at_lon = np.rad2deg(np.arctan2(x, z * np.cos(tilt) - y * np.sin(tilt))) + CENTER[1]
    rows, columns = np.argsort(lat), np.argsort(lon % 360)
    values, west = field[rows][:, columns], (lon % 360)[columns]
    values = np.concatenate([values, values[:, :1]], 1)
    at_row = np.interp(at_lat, lat[rows], np.arange(len(lat)))
    at_column = np.interp((at_lon - west[0]) % 360, np.append(west - west[0], 360), np.arange(len(lon) + 1))
    image = _bilinear(values, at_row, at_column)
    image[x**2 + y**2 > 1] = np.nan
    return image


def _bilinear(values: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    bottom, right = np.minimum(top + 1, values.shape[0] - 1), np.minimum(left + 1, values.shape[1] - 1)
    down, across = rows - top, columns - left
    upper = values[top, left] * (1 - across) + values[top, right] * across
    lower = values[bottom, left] * (1 - across) + values[bottom, right] * across
    return upper * (1 - down) + lower * down
