"""Forecasts: a rollout whose states are scored and written while it runs, and continued after a kill."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
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
from ..layout import Layout
from ..tensor import ShardTensor, to_full_tensor, wrap
from ..train.rollout import rollout
from .store import ForecastStore, Grid
from .writer import BackgroundWriter

Scores = dict[str, dict[str, list[float]]]
# How much a step may differ between meshes, relative to the largest value of a variable.
ROUNDING = {torch.float16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-9}


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
    skipna: bool = False,
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
    own shard, in a thread, while up to `depth` further steps are computed. With `members` > 1 the samples are an
    ensemble, with all cases of the first member first (see `ensemble_state`).

    If `out` has the first part of this forecast, it is continued after the last time that is complete, on any mesh. The
    initial state and the last step are compared with those on disk, up to rounding: a forecast of another model or
    from another state is refused, and so is a model that draws random numbers. `source` is a name of model and state,
    stored as an attribute, and must be equal too.

    `truth(i)` is the state at lead time i (1 for the first step), without members. Scores are computed at every step,
    are kept in the attribute `scores`, and are returned: "rmse", "bias" and "persistence", the error of the first
    state; for ensembles "rmse" of the mean, fair "crps", "spread_skill", and "persistence" of the first member. They
    are means over the cases, with the area `weights`; with `skipna`, over the points at which the truth is not NaN.
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
    scores: Scores = store.scores if complete else {}
    fresh: dict[int, dict[str, list[float]]] = {}  # scores of states that are not complete on disk
    first = state

    def stored(index: int) -> Tensor:
        block = run_with_error_sync(f"predict: {out}", over, lambda: store.read(index, region)).to(first.device)
        return block if layout is None else wrap(block, target)._redistribute_to(layout)  # type: ignore[arg-type]

    if complete:
        state = _last_state(model, first, complete, stored, options, out)
    if members > 1:
        first = first.reshape(members, -1, *first.shape[1:])[0]

    def done(index: int) -> None:
        for name, values in fresh.pop(index, {}).items():
            for variable, value in zip(grid.variables, values, strict=True):
                listed = scores.setdefault(name, {}).setdefault(variable, [])
                # Lead times that an earlier call computed without a truth have no score.
                listed[index - 1 :] = [*[math.nan] * (index - 1 - len(listed)), value]
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
                    fresh[index] = _score(x, first, truth(index), weights, members, skipna)
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


def _check(state: Tensor, layout: Layout | None, steps: int, members: int, grid: Grid) -> None:
    grid.check(state.shape)
    if state.dtype not in (torch.float16, torch.float32, torch.float64):
        raise ShardingError(f"predict: zarr has no {state.dtype}; a forecast is of float16, float32 or float64")
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
    """Create the store, or open it and return how many lead times are complete. Called on the first rank."""
    try:
        if out.exists():
            return _open(out, grid, layout, steps, members, dtype, source)
        ForecastStore.create(out, grid, layout, steps, members, dtype, source)
        return 0
    except (OSError, ShardfieldError):
        raise
    except Exception as error:  # of zarr, about attributes that are no JSON or damaged files: the other ranks wait
        what = "opened" if out.exists() else "created"
        raise ShardfieldError(f"{out}: cannot be {what}: {type(error).__name__}: {error}") from error


def _open(out: Path, grid: Grid, layout: Any, steps: int, members: int, dtype: torch.dtype, source: str) -> int:
    """Return how many lead times of a store are complete; raise if it has another forecast."""
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
    differ = [f"{k} {has[k]} (here {wanted[k]})" for k in has if has[k] != wanted[k]]
    if differ := differ or [f"other values of {name}" for name in store.differing_coords(grid)]:
        raise ShardfieldError(f"{out}: has another forecast: {', '.join(differ)}; choose another path")
    return int(store.attrs["complete"])


def _last_state(
    model: Any, first: Tensor, complete: int, stored: Callable[[int], Tensor], options: dict[str, Any], out: Path
) -> Tensor:
    """Return the last complete state; raise unless it is of this initial state and of this model."""
    begun = stored(0)
    if not _is_close(begun, first):
        raise ShardfieldError(f"{out}: has a forecast from another initial state; choose another path")
    if complete == 1:
        return first
    last, before = stored(complete - 1), stored(complete - 2)
    with torch.no_grad(), strict() if isinstance(first, ShardTensor) else nullcontext():
        (again,) = rollout(model, before, 1, first_step=complete - 2, **options)
    if not _is_close(last, again):
        raise ShardfieldError(
            f"{out}: has a forecast of another model: the step to lead time {complete - 1} has another result here; "
            "choose another path"
        )
    return last


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two states are equal up to rounding, in units of the largest value of each variable."""
    dims = [d for d in range(one.ndim) if d != 1]
    a, b = torch.nan_to_num(one), torch.nan_to_num(other)
    difference, largest = (_full(x.abs().amax(dims)) for x in (a - b, a))
    return bool((difference <= ROUNDING[one.dtype] * largest).all())


def _states(
    model: Any, state: Tensor, complete: int, steps: int, options: dict[str, Any]
) -> Iterator[tuple[int, Tensor]]:
    """Yield lead times that are not complete with their states."""
    if complete == 0:
        yield 0, state
    begin = max(complete - 1, 0)
    yield from enumerate(rollout(model, state, steps - begin, first_step=begin, **options), begin + 1)


def _score(x: Tensor, first: Tensor, truth: Tensor, weights: Any, members: int, skipna: bool) -> dict[str, list[float]]:
    """Return each score of one lead time, by variable: the mean over the cases."""
    how = {"weights": weights, "skipna": skipna}
    if members == 1:
        found = {"rmse": metrics.rmse(x, truth, **how), "bias": metrics.bias(x, truth, **how)}
    else:
        ensemble = x.reshape(members, -1, *x.shape[1:])
        found = {
            "rmse": metrics.rmse(metrics.ensemble_mean(ensemble), truth, **how),
            "crps": metrics.crps(ensemble, truth, fair=True, **how),
            "spread_skill": metrics.spread_skill_ratio(ensemble, truth, **how),
        }
    found["persistence"] = metrics.rmse(first, truth, **how)
    return {name: _full(value).double().mean(0).tolist() for name, value in found.items()}


def _full(value: Tensor) -> Tensor:
    """Return the global value of a score, on all ranks."""
    return to_full_tensor(value) if isinstance(value, ShardTensor) else value


def _is_first_replica(layout: Layout | None) -> bool:
    """Return whether this rank writes its shard: the first of the ranks that hold the same one."""
    if layout is None:
        return True
    return all(layout.coords[a] == 0 for a in range(layout.mesh.ndim) if a not in layout.shard_axes)


def _mesh_group(mesh: Any) -> Any:
    from .._compat.world import flatten_mesh

    return mesh.get_group() if mesh.ndim == 1 else flatten_mesh(mesh, "_".join(mesh.mesh_dim_names or ())).get_group()


def _report(progress: Any, index: int, complete: int, steps: int, begun: float) -> None:
    done = index + 1 - complete
    every = max(1, math.ceil((steps + 1) / 10))
    if progress is not None and (index % every == 0 or index == steps) and index > 0:
        took = (time.monotonic() - begun) / done
        progress(f"step {index}/{steps}  {1 / max(took, 1e-9):.1f} steps/s  {took * (steps - index):.0f} s left")
