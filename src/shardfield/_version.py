"""The version, in one place: the package, its metadata and `shardfield info` read it here."""

__version__ = "0.2.0"
