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

    "x" has the positions and normals of the points. Points that face away are not drawn.
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
        right, up, view = VIEW
        seen = (x[row, :, 3:] @ torch.tensor(view) > 0).nonzero().flatten()
        across, height = (x[row, seen, :3] @ torch.tensor(side) for side in (right, up))
        fields = [
            ("pressure coefficient", truth, scale),
            ("prediction", guess, scale),
            (f"|error|, relative L2 {relative:.4f}", (guess - truth).abs(), {"cmap": "magma"}),
            (f"{len(boundaries) + 1} ranks", ranks.float(), {"cmap": "tab10", "vmin": 0, "vmax": 9}),
        ]
        for panel, (title, values, style) in zip(panels, fields, strict=True):
            image = panel.scatter(across, height, c=values[seen], s=7e4 / len(truth), linewidths=0, **style)
            panel.set(title=title, aspect="equal", xlim=(-1.05, 1.05), ylim=(-1.05, 1.05))
            panel.axis("off")
            if not title.endswith("ranks"):
                figure.colorbar(image, ax=panel, shrink=0.8)
        stream = (-1 + 0.4 * right[0], -0.9 + 0.4 * up[0])
        panels[0].annotate("", stream, (-1, -0.9), arrowprops={"arrowstyle": "->"})
        panels[0].text(-1.0, -0.7, "stream", fontsize=8)
    _save_figure(plt, figure, folder / "prediction.png")


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
