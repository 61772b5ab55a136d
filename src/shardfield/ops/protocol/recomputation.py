"""Inputs of `torch.utils.checkpoint(use_reentrant=False)` that are ShardTensors.

torch saves the inputs of a checkpoint as it saves tensors for backward: a checkpoint around it does not keep them, but
computes them again, and a write into one is found. Both must happen to the local tensor, which has the graph.
"""

from __future__ import annotations

from ..._compat import has_saved_tensor_hooks
from ..._compat.saved import make_saved_tensor, replace_checkpoint_inputs
from ...tensor import ShardTensor, wrap, wrap_deferred


class CheckpointInput:
    """A ShardTensor that a checkpoint needs for its recomputation.

    Without hooks, the ShardTensor itself is kept: a deferred one stays deferred. With hooks (an outer checkpoint, an
    offload), the hooks decide what is kept of its local tensor.
    """

    def __init__(self, value: ShardTensor):
        value._consumed = True  # ranks agree before backward on a write into it
        self._kept = None if has_saved_tensor_hooks() else value
        self._layout, self._reduced = value._layout, value._reduced_cache
        self._flags = value._copied_view, value._narrowed, value._pending_shares
        # A deferred value that is kept takes a snapshot before a write.
        self._deferred = None if self._kept is None else value._deferred
        self._local = None if self._deferred is not None else make_saved_tensor(value._local_tensor)

    def unpack(self) -> ShardTensor:
        """Return the input as it was; an outer checkpoint recomputes it. Raise torch's error if it was written since.

        A Partial input that was reduced since and a deferred one that was materialized, perhaps by this checkpoint, are
        returned as they were: calls would save other tensors than before.
        """
        local = None if self._local is None else self._local.unpack()
        kept, deferred = self._kept, self._deferred
        if kept is not None and deferred is not None:
            if kept._deferred is deferred or not deferred.repeatable:
                return kept
            return wrap_deferred(deferred, kept._dtype, kept._device)
        if kept is not None and not self._layout.partial:
            return kept
        made = wrap(local if kept is None or kept._layout is not self._layout else kept._local_tensor, self._layout)
        made._copied_view, made._narrowed, made._pending_shares = self._flags
        made._consumed = True
        if kept is not None:
            made._reduced_cache = self._reduced
        return made

    def check_unmodified(self) -> None:
        """Raise torch's error if the input was written since it was saved. Computes nothing."""
        if self._kept is not None and self._local is not None:
            self._local.unpack()


replace_checkpoint_inputs(ShardTensor, CheckpointInput, CheckpointInput)
