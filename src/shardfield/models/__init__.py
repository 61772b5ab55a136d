"""Models of the tutorials, for one process and for model-parallel ranks."""
