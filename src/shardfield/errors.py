"""Exception types."""


class ShardfieldError(RuntimeError):
    """Base of every error shardfield raises on purpose."""


class ShardingError(ShardfieldError):
    """An operation is not possible with the layouts of its operands; raised on every rank."""


class WorldError(ShardfieldError):
    """The process world cannot be set up, or has no group or mesh of the requested name."""


class Untraceable(ShardingError):
    """A callable cannot be traced into one program. `needs_values`: because it reads the values of tensors."""

    needs_values = False
