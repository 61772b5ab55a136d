"""Fourier transforms of sharded fields: full transforms, truncated ones, and lazy spectra."""

from .truncation import spectral_conv as spectral_conv
from .truncation import spread_weight as spread_weight
from .truncation import truncated_fft as truncated_fft
from .truncation import truncated_ifft as truncated_ifft
