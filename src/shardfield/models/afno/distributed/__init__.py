"""The adaptive Fourier neural operator with its channels sharded over the ranks of a group."""

from .afno import DistributedAFNO as DistributedAFNO
