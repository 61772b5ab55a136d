"""Agree, before backward sends a message, on whether a tensor that backward needs was written in place.

torch saves operands for backward, and backward raises if one was written since. What it saves depends on shapes and
strides, which differ from rank to rank: of a shard of size 1, or an empty one, it may save a view where it saves a copy
on one device. One rank would raise in the middle of backward, and the others would block in their next collective.

So every ShardTensor records that a call has read it, or that it is a view (`_consumed`). These are facts of the
program, equal on all ranks. A write into such a tensor is noted (`write_tracking.note_write`). The next backward begins
with a search for saved tensors that were written, on each rank in its own graph, and with one small message: if any
rank found one, all raise. Programs without such writes send nothing and search nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from .. import runtime
from .._compat import in_backward
from .._compat.saved import saved_names, saved_values
from ..comm.consensus import any_rank, mesh_groups
from ..errors import ShardingError
from .recorded_backward import communicates, graph_nodes

# What torch says of a saved tensor that was written: directly, or as the base of a view that a Function returned.
WRITTEN = ("modified by an inplace operation", "has been modified inplace")


def _agree(outputs: Sequence[Tensor]) -> None:
    """Raise on all ranks if backward from `outputs` needs a tensor that was written, on any rank.

    Called if a tensor was written after a call had read it. All ranks have recorded that write.
    """
    rt = runtime.active
    alive = len(rt.written_storages) > 0
    found = next(_modified(outputs), None) if alive else None
    groups = dict.fromkeys(group for mesh in rt.written_meshes for group in mesh_groups(mesh))
    modified, alive = any_rank([found is not None, alive], list(groups))
    if not alive:  # nothing can hold the memory that was written: the next backward need not compare
        rt.written_meshes.clear()
    if modified:
        raise ShardingError(
            f"backward: {found or 'on another rank, a tensor saved for backward was modified by an inplace operation'}"
            "\n  Which tensors backward needs depends on the local shapes. Write into a clone(), or use the function "
            "that returns a new tensor (x = x.mul(2) for x.mul_(2))"
        )


def before_engine_run(outputs: Sequence[Tensor]) -> None:
    """Agree before a backward from ShardTensors, or one that sends messages, so that all ranks run it."""
    rt = runtime.active
    if rt.written_meshes and not in_backward() and (rt.sharded_backward or communicates(outputs)):
        _agree(outputs)


def _modified(outputs: Iterable[Tensor]) -> Iterator[str]:
    """Yield torch's error for each node that saved a tensor which was modified since."""
    for node in graph_nodes(outputs):
        for name in saved_names(type(node)):
            try:
                for saved_input in saved_values(node, name):
                    if hasattr(saved_input, "check_unmodified"):
                        saved_input.check_unmodified()
            except RuntimeError as error:
                if any(text in str(error) for text in WRITTEN):
                    yield str(error).split(" Hint:")[0].split(" This view was created")[0]
