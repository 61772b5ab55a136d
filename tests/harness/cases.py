"""Rows of the case tables: a call with `T` in place of each tensor, the options of the check, the error it declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class T:
    """Describe a tensor argument: shape, dtype, values, and the dims that may be sharded.

    fill: "normal", "positive", "unit" (in (0, 1)), "ints" (0..high-1), "bool", "distinct" (no ties), or a function of
    (shape, generator). shard_dims: dims that may be sharded; None allows all, () keeps the argument a plain tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    fill: Any = "normal"
    high: int = 5
    grad: bool = True
    shard_dims: tuple[int, ...] | None = None

    def __init__(self, *shape: int, dtype=torch.float64, fill="normal", high=5, grad=True, shard_dims=None):
        fields = dict(shape=shape, dtype=dtype, fill=fill, high=high, grad=grad, shard_dims=shard_dims)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """Draw the global tensor."""
        kind = torch.complex128 if self.dtype.is_complex else torch.float64
        if callable(self.fill):
            return self.fill(self.shape, generator)
        if self.fill == "ints":
            return torch.randint(self.high, self.shape, generator=generator).to(
                self.dtype if self.dtype != torch.float64 else torch.int64
            )
        if self.fill == "bool":
            return torch.rand(self.shape, generator=generator) > 0.5
        if self.fill == "distinct":
            n = torch.Size(self.shape).numel()
            return (torch.randperm(n, generator=generator).double() / 3 - n / 6).view(self.shape).to(self.dtype)
        x = torch.randn(self.shape, dtype=kind, generator=generator)
        if self.fill == "positive":
            x = x.abs() + 0.1
        if self.fill == "unit":
            x = x.abs() / (1 + x.abs()) * 0.98 + 0.01
        return x.to(self.dtype)

    def requires_grad(self, value: torch.Tensor) -> bool:
        """Return whether the drawn tensor gets a gradient."""
        return self.grad and (value.is_floating_point() or value.is_complex())


@dataclass(frozen=True)
class Raises:
    """Declare the error of a call: its type, and a fragment of torch's text on one device.

    The sharded call must raise exactly this type on every rank. `ours` is a fragment of its text, if the text is
    checked. A TypeError usually means that the row itself is wrong, so `signature=True` must confirm it.
    """

    type: type[Exception]
    text: str
    ours: str = ""
    signature: bool = False

    def __post_init__(self):
        assert self.type is not TypeError or self.signature, "a TypeError is declared with signature=True"

    def mismatch(self, error: Exception) -> str | None:
        """Return why torch's error is not the declared one, or None."""
        if type(error) is self.type and self.text in fold(error):
            return None
        return f"declared {self.type.__name__} ({self.text!r}), one device raised {type(error).__name__}: {error}"


def fold(error: Exception) -> str:
    """Return the text of an error on one line."""
    return " ".join(str(error).split())


@dataclass
class Case:
    """Describe the call `fn(*args, **kwargs)` with T for tensors, and how it is checked.

    layouts: number of layout assignments drawn on each mesh. try_partial: also draw Partial operands.
    no_messages: the forward sends no message for any drawn layout, except the sum of a result of one element.
    may_gather: the op has no rule, and the fallback to a gather is accepted.
    may_refuse: a ShardingError on all ranks is accepted.
    raises: the call is invalid; the error that torch and the sharded call raise.
    refuses: the sharded call raises ShardingError with this text, whatever torch does.
    device_asserts: an invalid value is first found by an assert in a GPU kernel, which ends the process. The row is
    skipped on GPUs.
    """

    fn: Callable
    args: tuple
    kwargs: dict = field(default_factory=dict)
    name: str = ""
    no_messages: bool = False
    may_gather: bool = False
    try_partial: bool = True
    may_refuse: bool = False
    raises: Raises | None = None
    refuses: str = ""
    device_asserts: bool = False
    grad: bool = True
    layouts: int = 10
    tolerance: float = 1e-10

    def __post_init__(self):
        shapes = ",".join("x".join(map(str, t.shape)) or "0d" for t in leaves(self.args) if isinstance(t, T))
        rest = ",".join(f"{a}" for a in self.args if not isinstance(a, T) and not _contains_tensor_arg(a))
        more = ",".join(f"{k}={'T' if isinstance(v, T) else v}" for k, v in self.kwargs.items())
        base = self.name or getattr(self.fn, "__name__", str(self.fn))
        self.name = " ".join(p for p in (base, shapes, rest, more) if p)

    @property
    def runs(self) -> bool:
        """Return whether the call is meant to return a value."""
        return self.raises is None and not self.refuses

    @property
    def tensors(self) -> list[T]:
        """Return the tensor arguments in the order in which `call` consumes them."""
        return [t for t in leaves((self.args, list(self.kwargs.values()))) if isinstance(t, T)]

    def call(self, tensors: Sequence[Any], device: str) -> Any:
        """Call the function with `tensors` in place of its T arguments; constant tensors are moved to `device`."""
        rest = iter(tensors)
        args = _substitute(self.args, lambda _: next(rest), device)
        kwargs = _substitute(self.kwargs, lambda _: next(rest), device)
        return self.fn(*args, **kwargs)


def case(fn: Callable, *args: Any, options: dict | None = None, **kwargs: Any) -> Case:
    """Build a row: `case(torch.sum, T(5, 6), dim=1, options={"layouts": 4})`; options are the fields of Case."""
    return Case(fn, args, kwargs, **(options or {}))


def raises(
    type: type[Exception],
    text: str,
    ours: str = "",
    signature: bool = False,
    device_asserts: bool = False,
    since_2_15: type[Exception] | None = None,
) -> dict:
    """Build the options that declare an error: `options=FEW | raises(RuntimeError, "negative padding")`.

    `since_2_15`: the type of the error from torch 2.15 on.
    """
    if since_2_15 is not None and torch.__version__ >= "2.15":
        type, signature = since_2_15, True
    return {"raises": Raises(type, text, ours, signature), "device_asserts": device_asserts}


def double_backward(fn: Callable) -> Callable:
    """Return a function that differentiates `fn` once, so that the check's backward is the second derivative.

    All ranks must issue the same collectives in both, also where their shards are empty.
    """

    def run(*tensors: Any) -> Any:
        return torch.autograd.grad((fn(*tensors) ** 3).sum(), tensors, create_graph=True)

    return run


def leaves(value: Any) -> list:
    """Flatten nested lists and tuples."""
    return [leaf for v in value for leaf in leaves(v)] if isinstance(value, (list, tuple)) else [value]


def _contains_tensor_arg(value: Any) -> bool:
    return any(isinstance(v, T) for v in leaves(value))


def _substitute(value: Any, make: Callable[[T], Any], device: str) -> Any:
    if isinstance(value, T):
        return make(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_substitute(v, make, device) for v in value)
    if isinstance(value, dict):
        return {k: _substitute(v, make, device) for k, v in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value
