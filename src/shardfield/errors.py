"""What shardfield raises."""


class ShardfieldError(RuntimeError):
    """Base of every error shardfield raises on purpose."""


class ShardingError(ShardfieldError):
    """An operation cannot be done on the layouts it was given; raised on every rank alike."""
