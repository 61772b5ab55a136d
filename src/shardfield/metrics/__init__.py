"""Losses and scores of forecasts, for plain tensors and for ShardTensors of any layout."""

from .ensemble import crps as crps
from .ensemble import ensemble_mean as ensemble_mean
from .ensemble import spread as spread
from .ensemble import spread_skill_ratio as spread_skill_ratio
from .scores import acc as acc
from .scores import bias as bias
from .scores import latitude_weights as latitude_weights
from .scores import mse as mse
from .scores import rmse as rmse
from .scores import spectral_mse as spectral_mse
from .scores import weighted_mean as weighted_mean
