"""Private torch names for tensors that are saved for backward, by Functions and by `torch.utils.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint

from . import function_apply
from .patches import patches

_requires_grad = torch._C.TensorBase.__dict__["requires_grad"].__get__
_saved_tensors = torch._C._FunctionBase.__dict__["saved_tensors"].__get__


def saved_names(node_type: type) -> tuple[str, ...]:
    """Return the names of the tensors that nodes of this type save for backward, as `saved_values` takes them."""
    return tuple(name[4:] for name in dir(node_type) if name.startswith("_raw_saved_"))


def saved_values(node: Any, name: str) -> Iterator[Any]:
    """Read a saved tensor (or several) of a node, which raises if it was modified in place.

    torch 2.11-2.15. A tensor with hooks (a checkpoint, an offload) is not read: torch does not check it, and its hook
    may compute. The inputs of its checkpoint are yielded, as `replace_checkpoint_inputs` has saved them.
    """
    raw = getattr(node, f"_raw{name}")
    hooks = [getattr(saved, "unpack_hook", None) for saved in (raw if isinstance(raw, tuple) else (raw,))]
    if all(hook is None for hook in hooks):
        getattr(node, "saved_tensors" if name == "_saved_tensors" and hasattr(node, "saved_tensors") else name)
    for hook in hooks:
        cells = getattr(hook, "__closure__", None) or ()
        for frame in (cell.cell_contents for cell in cells):
            if isinstance(frame, checkpoint._CheckpointFrame):
                holder = getattr(frame.input_saver, "grad_fn", None) if hasattr(frame, "input_saver") else frame
                yield from getattr(holder, "saved_args", ())  # torch 2.11: of the node of `_NoopSaveInputs`


def recorded_by_cpp(tensor: torch.Tensor) -> bool:
    """Return whether C++ has recorded a wrapper, whatever its own `requires_grad` says. torch 2.11-2.15."""
    with torch._C.DisableTorchFunctionSubclass():
        return _requires_grad(tensor)


def replace_saved_tensors(function: type[torch.autograd.Function], change: Callable[[Any], Any]) -> None:
    """Have `ctx.saved_tensors` return `change(tensor)` of each tensor, in the backward of this Function of a user.

    torch 2.11-2.15: the class of the nodes has no public name.
    """
    nodes: Any = function._backward_cls  # type: ignore[attr-defined]
    if "saved_tensors" not in vars(nodes):

        def read(self: Any) -> tuple[Any, ...]:
            # C++ detaches what a hook returns, below autograd, where a tensor that requires grad is refused.
            with torch.no_grad():
                saved = _saved_tensors(self)
            return tuple(map(change, saved))

        nodes.saved_tensors = property(read)


class _Save(torch.autograd.Function):
    """Save a tensor for a backward that never runs."""

    apply = function_apply

    @staticmethod
    def forward(ctx: Any, required: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(0)


class _SavedByNode:
    """A tensor saved by a node of its own, as `make_saved_tensor` of torch 2.12 saves it."""

    def __init__(self, tensor: torch.Tensor):
        with torch.enable_grad():
            self._out: Any = _Save.apply(torch.empty(0, requires_grad=True), tensor)  # it owns the node

    def unpack(self) -> torch.Tensor:
        return self._out.grad_fn.saved_tensors[0]


def make_saved_tensor(tensor: torch.Tensor) -> Any:
    """Return an object whose `unpack()` is the tensor, as the hooks that are active now save it.

    torch 2.12-2.15; the class has no public constructor. torch 2.11 has no such class: a node saves the tensor.
    """
    make = getattr(torch._C._autograd, "_make_saved_tensor", None)
    return _SavedByNode(tensor) if make is None else make(tensor, is_output=False)


def replace_checkpoint_inputs(kind: type, save: Callable[[Any], Any], saved: Any) -> None:
    """Declare the patches by which a checkpoint keeps inputs of `kind` as `save(input)`, an object of the type `saved`.

    Its `unpack()` returns the input for the recomputation.

    torch 2.11-2.15 save the wrapper: inside another checkpoint its local tensor would come back without a graph, and
    a write into it would not be found. Can go when torch saves the tensors inside a wrapper (`__tensor_flatten__`).
    """
    reason = "an input of a checkpoint inside a checkpoint would come back without its graph"
    if not hasattr(checkpoint._CheckpointFrame, "save_inputs"):  # torch 2.11 saves inputs by a Function
        patches.declare("torch.utils.checkpoint._NoopSaveInputs", _make_input_saver(kind, save, saved), reason)
        return

    def make_save(before: Callable) -> Callable:
        def save_inputs(self: Any, *args: Any) -> None:
            before(self, *[save(arg) if isinstance(arg, kind) else arg for arg in args])

        return save_inputs

    def make_get(before: Callable) -> Callable:
        def get_inputs(self: Any) -> list[Any]:
            return [arg.unpack() if isinstance(arg, saved) else arg for arg in before(self)]

        return get_inputs

    patches.declare("torch.utils.checkpoint._CheckpointFrame.save_inputs", make_save, reason)
    patches.declare("torch.utils.checkpoint._CheckpointFrame.get_inputs", make_get, reason)


def _make_input_saver(kind: type, save: Callable[[Any], Any], saved: Any) -> Callable[[Any], Any]:
    """Return the maker of a stand-in for `_NoopSaveInputs` of torch 2.11, which keeps `save(input)` of a `kind`."""

    def make(before: Any) -> Any:
        class InputSaver:
            @staticmethod
            def apply(required: torch.Tensor, *args: Any) -> torch.Tensor:
                if not torch.is_grad_enabled():  # nothing is computed again
                    return before.apply(required)
                kept = [save(arg) if isinstance(arg, kind) else arg for arg in args]
                out = before.apply(required, *kept)
                node: Any = out.grad_fn
                read, node.saved_args = node.get_args, kept
                node.get_args = lambda tensors: [a.unpack() if isinstance(a, saved) else a for a in read(tensors)]
                return out

        return InputSaver

    return make
