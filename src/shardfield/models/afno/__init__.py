"""Adaptive Fourier neural operators."""

from .distributed import DistributedAFNO as DistributedAFNO
