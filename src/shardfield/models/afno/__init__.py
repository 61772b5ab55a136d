"""Adaptive Fourier neural operators."""
