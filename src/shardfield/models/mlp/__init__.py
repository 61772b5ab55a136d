"""Multi-layer perceptrons."""

from .fully_connected import FullyConnected as FullyConnected
