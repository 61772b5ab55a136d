"""Users' handlers of calls on ShardTensors, and what happens to plain tensors in these calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import runtime
from ..dispatch.promotion import TensorPromotionMode


class Handlers:
    """Class methods of ShardTensor that change how calls on ShardTensors are dispatched."""

    @classmethod
    def register_function_handler(
        cls, func: Any, handler: Callable | None = None, *, function_handler: Callable | None = None
    ) -> None:
        """Dispatch calls of `func` on ShardTensors to `handler(func, types, args, kwargs)`.

        One handler serves all spellings of a torch function: that of `torch.sin` also gets `x.sin()`. Its argument
        `func` is the one that was called. `function_handler` is another name of `handler`.
        """
        runtime.active.registry.register_spellings(func, _either("handler", handler, function_handler))

    @classmethod
    def register_named_function_handler(
        cls,
        func_name: str | None = None,
        handler: Callable | None = None,
        *,
        name: str | None = None,
        function_handler: Callable | None = None,
    ) -> None:
        """Dispatch by name: `"mylib.op.default"` of a custom op, or a function's qualified name.

        The handler of a custom op's overload also gets the calls `torch.ops.mylib.op(x)` that select this overload.
        `name` and `function_handler` are other names of the arguments.
        """
        found = _either("handler", handler, function_handler)
        runtime.active.registry.register_named(_either("func_name", func_name, name), found)

    @classmethod
    def register_dispatch_handler(
        cls, op: Any, handler: Callable | None = None, *, function_handler: Callable | None = None
    ) -> None:
        """Dispatch calls of the operator `op`, such as `torch.ops.aten.add.Tensor`, to `handler(*args, **kwargs)`.

        `function_handler` is another name of `handler`.
        """
        runtime.active.registry.register_dispatch(op, _either("handler", handler, function_handler))

    @classmethod
    def patches_enabled(cls) -> bool:
        """Return True: the rules are part of dispatch, and nothing has to be patched for them."""
        return True

    @classmethod
    def get_promotion_mode(cls) -> TensorPromotionMode:
        """Return what happens to plain tensors in calls on ShardTensors."""
        return runtime.active.promotion or TensorPromotionMode.SILENT

    @classmethod
    def set_promotion_mode(cls, mode: TensorPromotionMode | str) -> None:
        """Set what happens to plain tensors in calls on ShardTensors: a mode, or its name in lower case."""
        mode = TensorPromotionMode(mode)
        runtime.active.promotion = None if mode is TensorPromotionMode.SILENT else mode

    @classmethod
    @contextmanager
    def promotion_mode(cls, mode: TensorPromotionMode | str) -> Iterator[None]:
        """Set the promotion mode inside the body."""
        mode = TensorPromotionMode(mode)
        with runtime.observing(promotion=None if mode is TensorPromotionMode.SILENT else mode):
            yield


def _either(name: str, value: Any, other: Any) -> Any:
    """Return an argument that has two names."""
    if (value is None) == (other is None):
        raise TypeError(f"pass {name}, once")
    return other if value is None else value
