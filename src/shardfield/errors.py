"""What shardfield raises."""


class ShardfieldError(RuntimeError):
    """Base of every error shardfield raises on purpose."""


class ShardingError(ShardfieldError):
    """An operation cannot be done on the layouts it was given; raised on every rank alike."""


class WorldError(ShardfieldError):
    """The process world cannot be set up, or has no group or mesh of the name that was asked for."""


class Untraceable(ShardingError):
    """A callable cannot be traced into one program. `needs_values`: because it reads the values of tensors."""

    needs_values = False
