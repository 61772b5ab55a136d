"""Run a trained model forward in time, sharded, and write the forecast in parallel."""

from .ensemble import ensemble_state as ensemble_state
from .netcdf import export_netcdf as export_netcdf
from .run import Forecast as Forecast
from .run import predict as predict
from .store import ForecastStore as ForecastStore
from .store import Grid as Grid
