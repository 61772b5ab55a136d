"""The adaptive Fourier neural operator with its channels shared by the ranks of a group."""

from .afno import DistributedAFNO as DistributedAFNO
