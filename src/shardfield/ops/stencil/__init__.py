"""Ops whose output reads a neighborhood of the input: convolution, pooling, padding, resampling, differences."""
