"""Autograd of a ShardTensor: everything is delegated to the local tensor, which carries the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import runtime
from ..dispatch.write_tracking import INCOMPLETE_GRAD
from ..errors import ShardingError
from ..layout import Layout
from .deferred import DEFERRED_ATTRIBUTES, LocalState, local_attribute

if TYPE_CHECKING:
    from .shard_tensor import ShardTensor


class LocalAutograd(LocalState):
    """Methods of ShardTensor for gradients, which are ShardTensors too."""

    is_leaf: Any = local_attribute("is_leaf", "Whether the local tensor is a leaf.")
    retains_grad: Any = local_attribute("retains_grad", "Whether `retain_grad` was called.")
    output_nr: Any = local_attribute("output_nr", "Index among the outputs of `grad_fn`.")
    _grad_incomplete = False  # its consumers were fused with its source, so its `.grad` is incomplete
    _version: Any = local_attribute("_version", "Number of writes into the local tensor.")

    # Functions that need the class: `shard_tensor.wrap` and `shard_tensor.localize`.
    _wrap_local: Callable[[Tensor, Layout], ShardTensor]
    _localize: Callable[[Tensor, Layout], Tensor]

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are computed for this tensor."""
        deferred = self._deferred
        return self._local_tensor.requires_grad if deferred is None else DEFERRED_ATTRIBUTES["requires_grad"](deferred)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._local_tensor.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set `requires_grad` of the local tensor. Communicates if the tensor is deferred."""
        self._local_tensor.requires_grad_(requires_grad)
        return self

    @property
    def grad_fn(self) -> Any:
        """The node that computed the local tensor. Communicates if the tensor is deferred and requires grad."""
        return self._local_tensor.grad_fn if self.requires_grad else None

    @property
    def grad(self) -> ShardTensor | None:
        """The gradient, sharded as this tensor; Replicate where this tensor is Partial."""
        if self._deferred is not None:
            return DEFERRED_ATTRIBUTES["grad"](self._deferred)
        grad = self._local_tensor.grad
        return None if grad is None else self._wrap_local(grad, self._grad_layout)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._local_tensor.grad = None if value is None else self._localize(value, self._grad_layout)

    @grad.deleter
    def grad(self) -> None:
        self._local_tensor.grad = None

    @property
    def _grad_layout(self) -> Layout:
        """Layout of the gradient: that of the tensor, with Partial axes Replicate."""
        return self._layout.with_partial(()) if self._layout.partial else self._layout

    def retain_grad(self) -> None:
        """Keep the gradient of a non-leaf tensor. Communicates if the tensor is deferred."""
        self._local_for_grad().retain_grad()

    def register_hook(self, hook: Callable[[ShardTensor], Tensor | None]) -> Any:
        """Call `hook` with the gradient as a ShardTensor; it may return another one.

        Communicates if the tensor is deferred.
        """
        layout, wrap, localize = self._grad_layout, self._wrap_local, self._localize

        def run(grad: Tensor) -> Tensor | None:  # without `self`: the local tensor would hold its own wrapper
            changed = hook(wrap(grad, layout))
            return None if changed is None else localize(changed, layout)

        return self._local_for_grad().register_hook(run)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """Call `hook` with this tensor after its gradient was accumulated."""
        return self._local_tensor.register_post_accumulate_grad_hook(lambda _: hook(self))

    def backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None) -> None:
        """Compute gradients, as on a tensor; `gradient` may be a ShardTensor in any layout or a plain global tensor."""
        runtime.active.registry.run_backward([self], [gradient], retain_graph, create_graph, inputs)

    def _local_for_backward(self) -> Tensor:
        """Return the tensor at which backward starts with a gradient of 1: a sum in flight is not waited for."""
        deferred = self._deferred
        return self._local_tensor if deferred is None or deferred.graph_local is None else deferred.graph_local

    def _local_for_grad(self) -> Tensor:
        """Return the local tensor; raise if its gradient would be incomplete."""
        if self._grad_incomplete:
            raise ShardingError(INCOMPLETE_GRAD)
        return self._local_tensor
