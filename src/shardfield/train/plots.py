"""Plots of a run: predictions and loss curves. Without matplotlib no plots are made."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..layout import shard_sizes_of
from ..tensor import ShardTensor
from .log import read_curves

# The axes of the picture of a surface, and the direction to the viewer, who is upstream, beside the body and above it.
VIEW = ((0.8, -0.6, 0.0), (0.24, 0.32, 0.9165), (-0.5499, -0.7332, 0.4))
PlotFields = dict[str, tuple[Tensor, tuple[list[int], list[int]]]]


def plot_prediction(folder: Path, plot_fields: PlotFields, samples: int = 2) -> None:
    """Plot input, truth, prediction and error of the first test samples, with the shard boundaries."""
    plt = _pyplot()
    if plt is None:
        return
    x, y, prediction = (plot_fields[name][0].float().cpu() for name in ("x", "y", "prediction"))
    samples = min(samples, len(x))
    figure, axes = plt.subplots(samples, 4, figsize=(13, 3.1 * samples), squeeze=False, layout="constrained")
    for row, panels in enumerate(axes):
        truth, guess = y[row, 0], prediction[row, 0]
        error = (guess - truth).abs()
        low, high = truth.min().item(), truth.max().item()
        relative = ((guess - truth).norm() / truth.norm()).item()
        fields = [
            ("input", x[row, 0], {"cmap": "Greys"}),
            ("truth", truth, {"vmin": low, "vmax": high}),
            ("prediction", guess, {"vmin": low, "vmax": high}),
            (f"|error|, relative L2 {relative:.4f}", error, {"cmap": "magma"}),
        ]
        for panel, (title, field, style) in zip(panels, fields, strict=True):
            image = panel.imshow(field.numpy(), **style)
            figure.colorbar(image, ax=panel, shrink=0.8)
            panel.set(title=title, xticks=[], yticks=[])
            rows, columns = plot_fields["x"][1]
            for at in rows:
                panel.axhline(at - 0.5, color="tab:red", linewidth=1, linestyle="--")
            for at in columns:
                panel.axvline(at - 0.5, color="tab:red", linewidth=1, linestyle="--")
    _save_figure(plt, figure, folder / "prediction.png")


def plot_surfaces(folder: Path, plot_fields: PlotFields, samples: int = 2) -> None:
    """Plot truth, prediction, error and ranks on the surfaces of the first test samples, seen from upstream.

    "x" has the positions and normals of the points. Points that face away are not drawn. Values between the points are
    interpolated over triangles of the picture; the body must be convex.
    """
    plt = _pyplot()
    if plt is None:
        return
    x, y, prediction = (plot_fields[name][0].float().cpu() for name in ("x", "y", "prediction"))
    samples, boundaries = min(samples, len(x)), plot_fields["x"][1][0]
    ranks = torch.bucketize(torch.arange(x.shape[1]), torch.tensor(boundaries, dtype=torch.int64), right=True)
    figure, axes = plt.subplots(samples, 4, figsize=(13, 3.1 * samples), squeeze=False, layout="constrained")
    for row, panels in enumerate(axes):
        truth, guess = y[row, :, 0], prediction[row, :, 0]
        area = plot_fields["area"][0][row, :, 0].float().cpu()
        relative = (((guess - truth).square() * area).sum() / (truth.square() * area).sum()).sqrt().item()
        scale = {"vmin": truth.min().item(), "vmax": truth.max().item(), "cmap": "coolwarm"}
        fields = [
            ("truth: pressure coefficient", truth, scale),
            ("prediction", guess, scale),
            (f"|error|, relative L2 {relative:.4f}", (guess - truth).abs(), {"cmap": "magma"}),
        ]
        for panel, (title, values, style) in zip(panels, fields, strict=False):
            figure.colorbar(_draw_surface(panel, x[row], values, style), ax=panel, shrink=0.8)
            panel.set_title(title, fontsize=10)
        _draw_ranks(panels[3], x[row], ranks, len(boundaries) + 1)
        _draw_stream(panels[0])
    _save_figure(plt, figure, folder / "prediction.png")


def _project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which points face the viewer, and their two coordinates in the picture."""
    right, up, view = (torch.tensor(axis) for axis in VIEW)
    seen = (x[:, 3:] @ view > 0).nonzero().flatten()
    return seen, x[seen, :3] @ right, x[seen, :3] @ up


def _draw_surface(panel: Any, x: Tensor, values: Tensor, style: dict[str, Any]) -> Any:
    """Draw values on the points that face the viewer: smooth between the points, or dots if they are too few."""
    seen, across, height = _project(x)
    panel.set(aspect="equal", xlim=(-1.05, 1.05), ylim=(-1.05, 1.05))
    panel.axis("off")
    if len(seen) < 20:
        return panel.scatter(across, height, c=values[seen], s=40, linewidths=0, **style)
    return panel.tripcolor(across, height, values[seen], shading="gouraud", rasterized=True, **style)


def _draw_ranks(panel: Any, x: Tensor, ranks: Tensor, n: int) -> None:
    """Draw the points that face the viewer, in the color of the rank that has them."""
    seen, across, height = _project(x)
    for rank in range(n):
        mine = ranks[seen] == rank
        panel.scatter(across[mine], height[mine], s=2e4 / len(x), color=f"C{rank % 10}", linewidths=0, label=f"{rank}")
    panel.set(aspect="equal", xlim=(-1.05, 1.05), ylim=(-1.05, 1.05))
    panel.set_title(f"{len(x):,} points by rank", fontsize=10)
    panel.axis("off")
    if n <= 10:
        panel.legend(
            loc="center left", bbox_to_anchor=(0.95, 0.5), frameon=False, fontsize=8, markerscale=2, title="rank"
        )


def _draw_stream(panel: Any) -> None:
    """Draw an arrow along x, the direction of the stream."""
    (right, _, _), (up, _, _), _ = VIEW
    panel.annotate("", (-1 + 0.4 * right, -0.9 + 0.4 * up), (-1, -0.9), arrowprops={"arrowstyle": "->"})
    panel.text(-1.0, -0.7, "stream", fontsize=8)


def plot_curves(folder: Path) -> None:
    """Plot the training loss and the test metrics of metrics.jsonl by step."""
    plt = _pyplot()
    losses, tests = read_curves(folder / "metrics.jsonl")
    if plt is None or not losses:
        return
    figure, panel = plt.subplots(figsize=(7, 4), layout="constrained")
    panel.semilogy(*zip(*losses, strict=True), linewidth=0.8, label="training loss")
    for name, points in tests.items():
        panel.semilogy(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    panel.set(xlabel="step")
    panel.legend()
    panel.grid(alpha=0.3)
    _save_figure(plt, figure, folder / "curve.png")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save_figure(plt: Any, figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)


def shard_boundaries(tensor: Any) -> tuple[list[int], list[int]]:
    """Return the shard boundaries of a field's last two dims: the first row, or column, of each shard but the first."""
    if not isinstance(tensor, ShardTensor):
        return [], []
    rows, columns = (
        sorted({*accumulate(shard_sizes_of(dim[0]))} - {0, tensor.shape[at]}) if len(dim) == 1 else []
        for at, dim in ((d, tensor._layout.dims[d]) for d in (tensor.ndim - 2, tensor.ndim - 1))
    )
    return rows, columns
