"""Exception types."""


class ShardfieldError(RuntimeError):
    """Base of every error shardfield raises on purpose."""


class ShardingError(ShardfieldError, ValueError):
    """An operation is not possible with the arguments or the layouts of its operands; raised on every rank."""


class WorldError(ShardfieldError, ValueError):
    """The process world cannot be set up, or a group or mesh cannot be created as requested."""


class UndefinedGroupError(WorldError, KeyError):
    """There is no process group, tree node or mesh axis of the requested name."""

    __str__ = Exception.__str__  # that of KeyError shows the message in quotes


class UninitializedManagerError(WorldError):
    """`DistributedManager()` was called before `DistributedManager.initialize()`, or after `cleanup()`."""


class Untraceable(ShardingError):
    """A callable cannot be traced into one program. `needs_values`: because it reads the values of tensors."""

    needs_values = False
