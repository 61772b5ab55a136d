"""Scores of one forecast against the truth: weighted by area, over the points where the truth is known.

Every score is a mean over `dims` (by default the last two, latitude and longitude) and keeps the other dims: a forecast
(sample, channel, lat, lon) has one number per sample and channel. `weights` broadcast to the field, such as
`latitude_weights(lat)`. `skipna=True` leaves out the points at which the truth is NaN; without it they make the score
NaN. All scores are differentiable, and equal to those of one device for every layout of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import ShardingError

LAT_LON = (-2, -1)


def latitude_weights(latitudes: Tensor) -> Tensor:
    """Return cos(latitude) with mean 1, of latitudes in degrees, as a column (lat, 1) that broadcasts over longitudes.

    >>> latitude_weights(torch.tensor([60.0, 0.0, -60.0])).flatten()
    tensor([0.7500, 1.5000, 0.7500])
    """
    if latitudes.ndim != 1 or not bool((latitudes.abs() <= 90.0001).all()):
        raise ValueError("latitude_weights: one dim of latitudes in degrees is needed, from -90 to 90")
    cosines = torch.cos(torch.deg2rad(latitudes)).clamp(min=0)
    return (cosines / cosines.mean())[:, None]


def weighted_mean(
    values: Tensor, weights: Tensor | None = None, dims: Sequence[int] = LAT_LON, mask: Tensor | None = None
) -> Tensor:
    """Return the mean of values over `dims`, with weights, over the points where `mask` is True."""
    if weights is None and mask is None:
        return values.mean(tuple(dims))
    _check_broadcast("weights", weights, values)
    total = torch.ones_like(values) if weights is None else weights.to(values.dtype).expand(values.shape)
    if mask is not None:
        values, total = torch.where(mask, values, 0.0), torch.where(mask, total, 0.0)
    return (values * total).sum(tuple(dims)) / total.sum(tuple(dims))


def bias(
    forecast: Tensor, truth: Tensor, weights: Tensor | None = None, dims: Sequence[int] = LAT_LON, skipna: bool = False
) -> Tensor:
    """Return the mean of forecast - truth."""
    difference, mask = _difference(forecast, truth, skipna)
    return weighted_mean(difference, weights, dims, mask)


def mse(
    forecast: Tensor, truth: Tensor, weights: Tensor | None = None, dims: Sequence[int] = LAT_LON, skipna: bool = False
) -> Tensor:
    """Return the mean of (forecast - truth)^2."""
    difference, mask = _difference(forecast, truth, skipna)
    return weighted_mean(difference.square(), weights, dims, mask)


def rmse(
    forecast: Tensor, truth: Tensor, weights: Tensor | None = None, dims: Sequence[int] = LAT_LON, skipna: bool = False
) -> Tensor:
    """Return the root of the mean of (forecast - truth)^2."""
    return mse(forecast, truth, weights, dims, skipna).sqrt()


def acc(
    forecast: Tensor,
    truth: Tensor,
    climatology: Tensor,
    weights: Tensor | None = None,
    dims: Sequence[int] = LAT_LON,
    skipna: bool = False,
) -> Tensor:
    """Return the anomaly correlation: of forecast - climatology with truth - climatology, uncentered."""
    _, mask = _difference(forecast, truth, skipna)
    truth = truth if mask is None else torch.where(mask, truth, 0.0)
    found, expected = forecast - climatology, truth - climatology
    both = weighted_mean(found * expected, weights, dims, mask)
    squares = [weighted_mean(x.square(), weights, dims, mask) for x in (found, expected)]
    return both / (squares[0] * squares[1]).sqrt()


def spectral_mse(
    forecast: Tensor,
    truth: Tensor,
    transform: Callable[[Tensor], Tensor] | None = None,
    dims: Sequence[int] = LAT_LON,
) -> Tensor:
    """Return the mean of |c|^2 over the coefficients c of forecast - truth.

    `transform` maps a field to its coefficients along `dims`, such as torch-harmonics' `RealSHT`. By default they are
    the Fourier coefficients along the last dim, divided by its size: the amplitudes of zonal waves.
    """
    difference, _ = _difference(forecast, truth, False)
    found = torch.fft.rfft(difference, dim=-1, norm="forward") if transform is None else transform(difference)
    return found.abs().square().mean(tuple(dims))


def _difference(forecast: Tensor, truth: Tensor, skipna: bool) -> tuple[Tensor, Tensor | None]:
    """Return forecast - truth, 0 where the truth is not known, and where it is known."""
    if forecast.shape != truth.shape:
        raise ShardingError(
            f"a forecast of shape {tuple(forecast.shape)} cannot be compared with a truth of {tuple(truth.shape)}"
        )
    if not skipna:
        return forecast - truth, None
    mask = ~torch.isnan(truth)
    # The NaN is replaced before the subtraction: its derivative would be NaN times 0.
    return torch.where(mask, forecast - torch.where(mask, truth, 0.0), 0.0), mask


def _check_broadcast(name: str, weights: Tensor | None, values: Tensor) -> None:
    if weights is None:
        return
    pairs = zip(reversed(weights.shape), reversed(values.shape), strict=False)
    if weights.ndim > values.ndim or any(w not in (1, n) for w, n in pairs):
        raise ShardingError(
            f"{name} of shape {tuple(weights.shape)} do not broadcast to a field of {tuple(values.shape)}"
        )
