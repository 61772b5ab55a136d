"""Forecasts: a rollout whose states are scored and written while it runs, and continued after a kill."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import metrics
from ..comm import consensus
from ..data.error_sync import run_with_error_sync
from ..debug.explain import strict
from ..errors import ShardfieldError, ShardingError
from ..layout import DimSharding, Layout, chunk
from ..tensor import ShardTensor, to_full_tensor, wrap
from ..train.rollout import rollout
from .store import ForecastStore, Grid
from .writer import BackgroundWriter

Scores = dict[str, dict[str, list[float]]]


@dataclass
class Forecast:
    """The outcome of `predict`: where the states are, and the scores, by name and variable, of lead times 1, 2, ...

    `seconds` is the time of the steps that this call computed, `waited` the part of it in which output blocked them.
    """

    path: Path
    scores: Scores
    seconds: float
    waited: float


def predict(
    model: Callable[[Tensor], Any],
    state: Tensor,
    steps: int,
    out: str | os.PathLike,
    grid: Grid,
    *,
    members: int = 1,
    truth: Callable[[int], Tensor] | None = None,
    weights: Tensor | None = None,
    source: str = "",
    depth: int = 2,
    progress: Callable[[str], Any] | None = None,
    **options: Any,
) -> Forecast:
    """Forecast `steps` steps from `state` and write the states, with the first one, to the zarr group `out`.

        grid = Grid({"t2m": {"units": "K"}}, {"lat": lat, "lon": lon}, hours=6)
        forecast = predict(model, x0, 40, "forecast.zarr", grid, truth=lambda i: truth[i])
        xarray.open_zarr("forecast.zarr").t2m.sel(lead_time=24)

    The model runs under `strict()`: the state (sample, channel, ...) stays sharded. Each rank writes the files of its
    own shard, in a thread, while up to `depth` further steps are computed. If `out` has the first part of this
    forecast, it is continued after the last time that is complete, on any mesh: `source` names model and initial state,
    and must equal the `source` of the first part. With `members` > 1 the samples are an ensemble, with all cases of the
    first member first (see `ensemble_state`).

    `truth(i)` is the state at lead time i (1 for the first step), without members. Scores are computed at every step,
    are kept in the attribute `scores`, and are returned: "rmse", "bias" and, of the first state, "persistence"; for
    ensembles "rmse" of the mean, fair "crps" and "spread_skill"; means over the cases, with the area `weights`.
    `options` are those of `rollout`: forcings, constants, normalizer. `progress` is called with a line of text from
    time to time.
    """
    if isinstance(state, ShardTensor):
        state = state._unmerged_value()
    layout = state._layout if isinstance(state, ShardTensor) else None
    mesh = None if layout is None else layout.mesh
    _check(state, layout, steps, members, grid)
    out = Path(out)
    over = None if mesh is None or mesh.size() == 1 else mesh
    group = None if over is None else dist.group.WORLD if over.size() == dist.get_world_size() else _mesh_group(over)
    complete = consensus.ask_first_rank(
        lambda: _begin(out, grid, layout or state.shape, steps, members, state.dtype, source), group
    )
    store = run_with_error_sync("predict", over, lambda: ForecastStore(out))
    target = None if layout is None else store.aligned(layout)
    region = store.region(target)
    writes = mesh is None or _is_first_replica(target)
    scores: Scores = store.attrs["scores"] if complete else {}
    fresh: dict[int, dict[str, list[float]]] = {}  # scores of states that are not complete on disk
    first = state
    if complete:
        block = _read_together(store, complete - 1, region, over).to(state.device)
        state = block if layout is None else wrap(block, target)._redistribute_to(layout)  # type: ignore[arg-type]
        if truth is not None and complete > 1:
            block = _read_together(store, 0, region, over).to(state.device)
            first = block if layout is None else wrap(block, target)._redistribute_to(layout)  # type: ignore[arg-type]

    def done(index: int) -> None:
        for name, values in fresh.pop(index, {}).items():
            for variable, value in zip(grid.variables, values, strict=True):
                listed = scores.setdefault(name, {}).setdefault(variable, [])
                del listed[index - 1 :]
                listed.append(value)
        if group is None or dist.get_rank(group) == 0:
            store.mark(index + 1, scores)

    def write(index: int, block: Any) -> None:
        if writes:
            store.write(index, block, region)

    writer = BackgroundWriter(f"predict: {out}", write, done, group, depth)
    begun, failed = time.monotonic(), True
    try:
        with torch.no_grad(), strict() if layout is not None else nullcontext():
            for index, x in _states(model, state, complete, steps, options):
                if index > 0 and truth is not None:
                    fresh[index] = _score(x, first, truth(index), weights, members)
                writer.submit(index, x if layout is None else x._redistribute_to(target)._local_tensor)  # type: ignore[attr-defined]
                _report(progress, index, complete, steps, begun)
        failed = False
    finally:
        writer.close(failed)
    took = time.monotonic() - begun
    if progress is not None:
        share = 100 * writer.waited / max(took, 1e-9)
        progress(f"{steps + 1 - complete} states in {took:.1f} s, {share:.1f} % of it waiting for output; see {out}")
    return Forecast(out, scores, took, writer.waited)


def ensemble_state(
    state: Tensor, members: int, axis: str = "ensemble", noise: Tensor | float = 0.0, seed: int = 0
) -> Tensor:
    """Return the initial state of an ensemble: `members` copies of the cases of `state`, with noise added.

    `state` (case, channel, ...) is Replicate along the mesh axis `axis`; the members are sharded over it. `noise` is
    the standard deviation of the noise, a number or one per channel (channel, 1, ...). The first member has none. The
    noise of a ShardTensor depends on `seed` and on the global index alone: it is the same for every mesh.
    """
    if members < 1:
        raise ShardingError(f"ensemble_state: {members} members; at least 1 is needed")
    layout = state._layout if isinstance(state, ShardTensor) else None
    local, target = state if layout is None else state._local_tensor, None  # type: ignore[attr-defined]
    copies = members
    if layout is not None:
        names = layout.mesh.mesh_dim_names or ()
        if axis not in names:
            raise ShardingError(f"ensemble_state: the mesh has the axes {names}, and none is called {axis!r}")
        ranks = layout.mesh.size(names.index(axis))
        if members % ranks:
            raise ShardingError(
                f"ensemble_state: {members} members cannot be divided among the {ranks} ranks of the axis {axis!r}: "
                f"{', '.join(str(n) for n in range(1, members + 1) if members % n == 0)} divide them"
            )
        if layout.axes_of(0) or names.index(axis) in layout.shard_axes:
            raise ShardingError(f"ensemble_state: the cases (dim 0) must be unsharded, and {axis!r} free: {layout}")
        copies = members // ranks
        total = members * layout.shape[0]
        target = layout.with_dim(0, DimSharding(total, (names.index(axis),), chunk(total, ranks)))
    local = local.repeat(copies, *[1] * (state.ndim - 1))
    made = local if target is None else wrap(local, target)
    if isinstance(noise, float) and noise == 0.0:
        return made
    devices = [] if local.device.type == "cpu" else [local.device]
    with torch.random.fork_rng(devices, device_type=local.device.type if devices else "cuda"):
        torch.manual_seed(seed)
        drawn = torch.randn_like(made).reshape(members, -1, *state.shape[1:])
    later = (torch.arange(members, device=local.device) > 0).reshape(-1, *[1] * state.ndim)
    return made + (drawn * later.to(drawn.dtype)).reshape(made.shape) * noise


def _check(state: Tensor, layout: Layout | None, steps: int, members: int, grid: Grid) -> None:
    grid.check(state.shape)
    if steps < 1 or members < 1 or state.shape[0] % members:
        raise ShardingError(
            f"predict: {steps} steps of {state.shape[0]} samples with {members} members: both are at least 1, and the "
            "members divide the samples"
        )
    if layout is not None and layout.axes_of(0):
        cases, sizes = state.shape[0] // members, layout.shard_sizes(0)
        if any(n % cases for n in sizes):
            raise ShardingError(f"predict: shards of {sizes} samples must have complete members of {cases} cases each")


def _begin(out: Path, grid: Grid, layout: Any, steps: int, members: int, dtype: torch.dtype, source: str) -> int:
    """Create the store, or open it and return how many lead times are complete."""
    if not out.exists():
        ForecastStore.create(out, grid, layout, steps, members, dtype, source)
        return 0
    store = ForecastStore(out)
    shape = layout.shape if isinstance(layout, Layout) else layout
    has = {
        "source": store.source,
        "variables": list(store.variables),
        "steps": store.times - 1,
        "members": store.members,
        "cases": store.cases,
        "points": tuple(store.points),
        "dtype": store.dtype,
    }
    wanted = {
        "source": source,
        "variables": list(grid.variables),
        "steps": steps,
        "members": members,
        "cases": shape[0] // members,
        "points": tuple(shape[2:]),
        "dtype": dtype,
    }
    if differ := [f"{k} {has[k]} (here {wanted[k]})" for k in has if has[k] != wanted[k]]:
        raise ShardfieldError(f"{out}: has another forecast: {', '.join(differ)}; choose another path")
    return int(store.attrs["complete"])


def _states(
    model: Any, state: Tensor, complete: int, steps: int, options: dict[str, Any]
) -> Iterator[tuple[int, Tensor]]:
    """Yield lead times that are not complete with their states."""
    if complete == 0:
        yield 0, state
    begin = max(complete - 1, 0)
    yield from enumerate(rollout(model, state, steps - begin, first_step=begin, **options), begin + 1)


def _score(x: Tensor, first: Tensor, truth: Tensor, weights: Any, members: int) -> dict[str, list[float]]:
    """Return each score of one lead time, by variable: the mean over the cases."""
    if members == 1:
        found = {"rmse": metrics.rmse(x, truth, weights), "bias": metrics.bias(x, truth, weights)}
        found["persistence"] = metrics.rmse(first, truth, weights)
    else:
        ensemble = x.reshape(members, -1, *x.shape[1:])
        found = {
            "rmse": metrics.rmse(metrics.ensemble_mean(ensemble), truth, weights),
            "crps": metrics.crps(ensemble, truth, weights, fair=True),
            "spread_skill": metrics.spread_skill_ratio(ensemble, truth, weights),
        }
    return {name: to_full_tensor(value).double().mean(0).tolist() for name, value in found.items()}


def _is_first_replica(layout: Layout | None) -> bool:
    """Return whether this rank writes its shard: the first of the ranks that hold the same one."""
    if layout is None:
        return True
    return all(layout.coords[a] == 0 for a in range(layout.mesh.ndim) if a not in layout.shard_axes)


def _read_together(store: ForecastStore, time: int, region: Sequence[slice], over: Any) -> Tensor:
    """Read a block; if a rank cannot, all raise."""
    return run_with_error_sync(f"predict: {store.path}", over, lambda: store.read(time, tuple(region)))


def _mesh_group(mesh: Any) -> Any:
    from .._compat.world import flatten_mesh

    return mesh.get_group() if mesh.ndim == 1 else flatten_mesh(mesh, "_".join(mesh.mesh_dim_names or ())).get_group()


def _report(progress: Any, index: int, complete: int, steps: int, begun: float) -> None:
    done = index + 1 - complete
    every = max(1, math.ceil((steps + 1) / 10))
    if progress is not None and (index % every == 0 or index == steps) and index > 0:
        took = (time.monotonic() - begun) / done
        progress(f"step {index}/{steps}  {1 / max(took, 1e-9):.1f} steps/s  {took * (steps - index):.0f} s left")
