"""Pointwise functions, losses, random numbers, recurrent layers, factories."""
