"""Every score, with forecast, truth, weights and members sharded equally, differently, or one of them plain."""

import torch

from shardfield import metrics
from shardfield.data.swe_solver import ShallowWaterSolver
from tests.harness import T, case

HOW = {"layouts": 4, "tolerance": 1e-12}
FIELD = (2, 3, 6, 8)
ENSEMBLE = (4, 2, 6, 8)
HARMONICS = ShallowWaterSolver(6, 8).analysis  # torch-harmonics' transform in double precision
WEIGHTS = metrics.latitude_weights(torch.linspace(80, -80, 6, dtype=torch.float64))


def with_nans(shape, generator):
    """Draw a field of which a fifth is not known."""
    value = torch.randn(shape, dtype=torch.float64, generator=generator)
    return value.masked_fill(torch.rand(shape, generator=generator) < 0.2, torch.nan)


KNOWN = T(*FIELD, grad=False, fill=with_nans)
KNOWN_POINT = T(*ENSEMBLE[1:], grad=False, fill=with_nans)

CASES = [
    case(metrics.mse, T(*FIELD), T(*FIELD), options=HOW),
    case(metrics.mse, T(*FIELD), T(*FIELD), WEIGHTS, options=HOW),
    case(metrics.mse, T(*FIELD), T(*FIELD), T(6, 1, fill="positive", grad=False), dims=(0, 2, 3), options=HOW),
    case(metrics.mse, T(*FIELD), KNOWN, WEIGHTS, skipna=True, options=HOW),
    case(metrics.rmse, T(*FIELD), T(*FIELD), WEIGHTS, options=HOW),
    case(metrics.rmse, T(*FIELD), KNOWN, skipna=True, options=HOW),
    case(metrics.bias, T(*FIELD), T(*FIELD), WEIGHTS, options=HOW),
    case(metrics.bias, T(*FIELD), KNOWN, WEIGHTS, skipna=True, options=HOW),
    case(metrics.acc, T(*FIELD), T(*FIELD), T(3, 6, 8), WEIGHTS, options=HOW),
    case(metrics.acc, T(*FIELD), KNOWN, T(3, 6, 8), WEIGHTS, skipna=True, options=HOW),
    case(metrics.spectral_mse, T(*FIELD), T(*FIELD), options=HOW),
    case(metrics.spectral_mse, T(*FIELD), T(*FIELD), HARMONICS, options=HOW),
    case(metrics.crps, T(*ENSEMBLE), T(*ENSEMBLE[1:]), WEIGHTS, options=HOW),
    case(metrics.crps, T(*ENSEMBLE), T(*ENSEMBLE[1:]), fair=True, options=HOW),
    case(metrics.crps, T(*ENSEMBLE), KNOWN_POINT, WEIGHTS, fair=True, skipna=True, options=HOW),
    case(metrics.crps, T(2, 5, 6, 8), T(2, 6, 8), member_dim=1, options=HOW),
    case(metrics.ensemble_mean, T(*ENSEMBLE), options=HOW),
    case(metrics.spread, T(*ENSEMBLE), WEIGHTS, options=HOW),
    case(metrics.spread_skill_ratio, T(*ENSEMBLE), T(*ENSEMBLE[1:]), WEIGHTS, options=HOW),
    case(metrics.spread_skill_ratio, T(*ENSEMBLE), KNOWN_POINT, WEIGHTS, skipna=True, options=HOW),
]
