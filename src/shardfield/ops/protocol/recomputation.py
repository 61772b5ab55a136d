"""Inputs of `torch.utils.checkpoint(use_reentrant=False)` that are ShardTensors.

torch saves the inputs of a checkpoint as it saves tensors for backward: a checkpoint around it does not keep them, but
computes them again, and a write into one is found. Both must happen to the local tensor, which has the graph.
"""

from __future__ import annotations

from ..._compat import has_saved_tensor_hooks
from ..._compat.saved import make_saved_tensor, replace_checkpoint_inputs
from ...tensor import ShardTensor, wrap


class CheckpointInput:
    """A ShardTensor that a checkpoint needs for its recomputation.

    Without hooks, the ShardTensor itself is kept: a deferred one stays deferred. With hooks (an outer checkpoint, an
    offload), the hooks decide what is kept of its local tensor.
    """

    def __init__(self, value: ShardTensor):
        value._consumed = True  # ranks agree before backward on a write into it
        self._kept = None if has_saved_tensor_hooks() else value
        self._layout = value._layout
        self._flags = value._copied_view, value._narrowed, value._pending_shares
        # A deferred value that is kept takes a snapshot before a write.
        deferred = self._kept is not None and value._deferred is not None
        self._local = None if deferred else make_saved_tensor(value._local_tensor)

    def unpack(self) -> ShardTensor:
        """Return the ShardTensor. Raise torch's error if it was written since. An outer checkpoint recomputes it."""
        local = None if self._local is None else self._local.unpack()
        if self._kept is not None:
            return self._kept
        made = wrap(local, self._layout)
        made._copied_view, made._narrowed, made._pending_shares = self._flags
        made._consumed = True
        return made

    def check_unmodified(self) -> None:
        """Raise torch's error if the input was written since it was saved. Computes nothing."""
        if self._kept is not None and self._local is not None:
            self._local.unpack()


replace_checkpoint_inputs(ShardTensor, CheckpointInput, CheckpointInput)
