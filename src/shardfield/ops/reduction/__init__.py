"""Reductions over sharded dims: sums, extremes, moments, norms, softmax, quantiles, histograms, comparisons."""
