"""Run a trained model forward in time, sharded, and write the forecast in parallel."""

from .netcdf import export_netcdf as export_netcdf
from .run import Forecast as Forecast
from .run import ensemble_state as ensemble_state
from .run import predict as predict
from .store import ForecastStore as ForecastStore
from .store import Grid as Grid
