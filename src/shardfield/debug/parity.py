"""Run a model on one device and sharded over ranks, and compare outputs, gradients and buffers."""

from __future__ import annotations

import copy
import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from ..dispatch.arguments import map_tensors
from ..errors import ShardfieldError
from ..layout import Layout, balanced, starts
from ..tensor import ShardTensor, wrap
from ..testing import RanksFailed, run_on_ranks
from .explain import explain

AXIS_NAMES = ("h", "w", "d")
NOISE = 1e-6  # fraction of the largest gradient; smaller gradients are compared relative to this
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass
class Line:
    """One comparison: the largest difference, relative to the largest number on one device.

    A gradient that consists of rounding errors (of a bias before a batch norm) is compared relative to the largest
    gradient.
    """

    kind: str  # "output", "input gradient", "parameter gradient", "buffer"
    name: str
    error: float

    def __str__(self) -> str:
        return f"{self.kind:<18} {self.name:<48} {self.error:9.1e}"


@dataclass
class Parity:
    """The result of `check`: True if everything agrees. Print it for the certificate."""

    model: str
    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    tolerance: float
    lines: list[Line] = field(default_factory=list)
    first: str | None = None  # the first submodule whose output differs
    gathers: list[str] = field(default_factory=list)
    messages: int = 0
    bytes: int = 0
    table: str = ""

    @property
    def worst(self) -> float:
        return max((line.error for line in self.lines), default=math.inf)

    def __bool__(self) -> bool:
        return self.worst <= self.tolerance

    def __str__(self) -> str:
        mesh = " x ".join(map(str, self.mesh))
        lines = [
            f"{self.model} on {self.shape}, mesh {mesh}, float64: {self.messages} messages, {self.bytes} bytes a rank"
        ]
        lines += [f"{'ok     ' if x.error <= self.tolerance else 'DIFFERS'} {x}" for x in self.lines]
        agree = sum(x.error <= self.tolerance for x in self.lines)
        lines.append(f"{agree} of {len(self.lines)} agree within {self.tolerance:g}; the worst is {self.worst:.1e}")
        if self.first is not None:
            lines.append(f"the first submodule whose output differs: {self.first}")
        lines.append(f"gathered: {', '.join(self.gathers)}" if self.gathers else "no call gathered its operands")
        return "\n".join([*lines, "same as one device" if self else "NOT the same as one device"])


def check(
    factory: str | Callable[[], Any],
    shape: Sequence[int] | None = None,
    mesh: Sequence[int] = (2,),
    *,
    dims: Sequence[int] | None = None,
    even: bool = False,
    steps: int = 0,
    tolerance: float = 1e-9,
    seed: int = 0,
    timeout: float = 300.0,
) -> Parity:
    """Run a model on one device and on gloo ranks of a mesh, forward and backward, in float64, and compare.

    `factory`, a module-level function or "package.module:name", returns the model, or (model, input tensors); without
    tensors the model is called with random numbers of `shape`. The first tensor is sharded along `dims`, one per mesh
    axis (by default the second last, or the last two), with uneven shards unless `even`. Outputs, the gradients of a
    random weighting of them for input and parameters, and the buffers afterwards are compared; if outputs differ, the
    report names the first submodule whose output does. The model is in training mode except for its dropout modules:
    sharded random numbers differ from those of one device. `steps` adds steps of gradient descent, after which the
    parameters are compared too.

        parity = shardfield.check("mymodel:make", (1, 3, 64, 96), (2, 2))
        print(parity)
        assert parity
    """
    name = factory if isinstance(factory, str) else f"{factory.__module__}:{factory.__qualname__}"
    ranks = math.prod(mesh)
    if not 1 <= len(mesh) <= len(AXIS_NAMES) or ranks < 1:
        raise ShardfieldError(f"check: the mesh must have one to three axes, not {tuple(mesh)}")
    dims = tuple(dims) if dims is not None else {1: (-2,), 2: (-2, -1), 3: (-3, -2, -1)}[len(mesh)]
    if len(dims) != len(mesh):
        raise ShardfieldError(f"check: {len(dims)} dims {dims} for a mesh of {len(mesh)} axes {tuple(mesh)}")
    if isinstance(factory, str):
        load(factory)  # raise here: an error on the ranks would be longer
    args = (name, None if shape is None else tuple(shape), tuple(mesh), dims, even, seed, steps)
    try:
        found = run_on_ranks(_compare, ranks, *args, timeout=timeout)
    except RanksFailed as failed:
        raise ShardfieldError(f"check: {name} could not be run\n{failed}") from failed
    result: Parity = found[0]
    result.tolerance = tolerance
    differing = [x.name for x in result.lines if x.kind == "module" and not x.error <= tolerance]
    result.first = differing[0] if differing else None
    result.lines = [x for x in result.lines if x.kind != "module"]
    return result


def load(name: str, who: str = "check") -> Any:
    """Import the object that "package.module:name" names."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ShardfieldError(f"{who}: {name!r} is not of the form package.module:name")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ShardfieldError(f"{who}: {name!r}: {error}") from None
    return found


def _compare(
    name: str, shape: Any, mesh_shape: Sequence[int], dims: Sequence[int], even: bool, seed: int, steps: int
) -> Parity:
    """Run the model on one device and sharded, and compare; called on every rank."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=AXIS_NAMES[: len(mesh_shape)])
    (model, tensors), (other, _) = _build_model(name, seed), _build_model(name, seed)
    if other is model:
        other = copy.deepcopy(model)
    if tensors is None:
        if shape is None:
            raise ShardfieldError(f"check: {name} returns a model without input tensors: pass the shape of its input")
        tensors = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)),)
    for one in (model, other):
        for part in one._apply(_to_float64).train().modules():
            if isinstance(part, DROPOUT):
                part.eval()
    with torch.no_grad():  # equal seeds do not cover random numbers from other generators
        for here, there in zip(_parameters_and_buffers(model), _parameters_and_buffers(other), strict=True):
            if not torch.equal(here, there):
                there.copy_(here)
    full = [_to_float64(t) if isinstance(t, Tensor) else t for t in tensors]
    sharded = _shard_input(full[0], mesh, dims, even)
    rest = [wrap(t.clone(), Layout.replicate(mesh, t.shape)) if isinstance(t, Tensor) else t for t in full[1:]]

    expected, parts = _run(model, full, seed)
    with explain() as report:
        got, sharded_parts = _run(other, [sharded, *rest], seed)
    if steps:
        expected += _train_steps(model, full, seed, steps)
        got += _train_steps(other, [sharded, *rest], seed, steps)
    found = Parity(name, tuple(full[0].shape), tuple(mesh_shape), 0.0)
    found.gathers = sorted({row.op for row in report.gathers})
    found.messages, found.bytes, found.table = report.messages, report.bytes, str(report)
    # In call order. Every rank compares all outputs, because full_tensor() communicates.
    for (which, wanted), (_, value) in zip(parts, sharded_parts, strict=True):
        found.lines.append(Line("module", which, _relative_error(value, wanted, 0.0)))
    largest: dict[str, float] = {}
    for kind, _, wanted in expected:
        largest[kind] = max(largest.get(kind, 0.0), _max_abs(wanted))
    for (kind, which, wanted), (_, _, value) in zip(expected, got, strict=True):
        found.lines.append(Line(kind, which, _relative_error(value, wanted, NOISE * largest[kind])))
    return found


def _build_model(name: str, seed: int) -> tuple[nn.Module, Any]:
    """Return the model and its input tensors, or None if the factory returns none.

    The model is built twice, not copied: a copy of a model that stores one of its bound methods would call the
    original's submodules.
    """
    torch.manual_seed(seed)
    made = load(name)()
    return made if isinstance(made, tuple) else (made, None)


def _parameters_and_buffers(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _to_float64(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _shard_input(tensor: Tensor, mesh: Any, dims: Sequence[int], even: bool) -> ShardTensor:
    placements, block = [], tensor
    for axis, dim in enumerate(dims):
        dim %= tensor.ndim
        size, ranks = tensor.shape[dim], mesh.size(axis)
        shard_sizes = list(balanced(size, ranks))
        if not even and ranks > 1 and shard_sizes[-1] > 1:
            moved = max(shard_sizes[-1] // 3, 1)
            shard_sizes[0], shard_sizes[-1] = shard_sizes[0] + moved, shard_sizes[-1] - moved
        coord = mesh.get_local_rank(axis)
        block = block.narrow(dim, starts(shard_sizes)[coord], shard_sizes[coord])
        placements.append(Shard(dim) if ranks > 1 else Replicate())
    return ShardTensor.from_local(block.clone(), mesh, placements)


def _run(model: nn.Module, tensors: list[Any], seed: int) -> tuple[list[tuple[str, str, Any]], list[tuple[str, Any]]]:
    """Return all compared values by kind and name, and the outputs of submodules in call order."""
    parts: list[tuple[str, Any]] = []

    def watch(name: str) -> Callable:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            title = f"{name} ({type(module).__name__})"
            map_tensors(_to_nested(out), lambda tensor: parts.append((title, tensor.detach())))

        return hook

    handles = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if n]
    inputs = [t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]
    torch.manual_seed(seed + 1)
    out = model(*inputs)
    for handle in handles:
        handle.remove()
    outputs: list[Tensor] = []
    map_tensors(_to_nested(out), outputs.append)
    total: Any = 0.0
    for i, value in enumerate(outputs):
        if value.requires_grad:
            weight = torch.randn(
                value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 2 + i)
            )
            total = total + ((value.abs().square() if value.is_complex() else value) * weight).sum()
    if isinstance(total, Tensor):
        total.backward()
    found: list[tuple[str, str, Any]] = [("output", str(i), v.detach()) for i, v in enumerate(outputs)]
    found += [("input gradient", str(i), t.grad) for i, t in enumerate(inputs) if isinstance(t, Tensor)]
    found += [("parameter gradient", n, p.grad) for n, p in model.named_parameters()]
    found += [("buffer", n, b) for n, b in model.named_buffers()]
    return found, parts


def _train_steps(model: nn.Module, tensors: list[Any], seed: int, steps: int) -> list[tuple[str, str, Any]]:
    """Return the parameters after steps of gradient descent; the first step uses the current gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        if step:
            optimizer.zero_grad()
            _run(model, tensors, seed)
        optimizer.step()
    return [("parameter after", n, p.detach()) for n, p in model.named_parameters()]


def _to_nested(out: Any) -> Any:
    """Convert output objects that contain tensors, such as dataclasses, to lists."""
    if hasattr(out, "to_tuple"):
        return list(out.to_tuple())
    return list(vars(out).values()) if hasattr(out, "__dataclass_fields__") else out


def _max_abs(value: Any) -> float:
    number = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return value.abs().max().item() if number and value.numel() else 0.0


def _relative_error(value: Any, wanted: Any, floor: float) -> float:
    """Return the largest difference over the largest number (at least `floor`); inf if a value is missing."""
    value = value.full_tensor() if isinstance(value, ShardTensor) else value
    if value is None or wanted is None:
        return 0.0 if value is wanted else math.inf
    if value.shape != wanted.shape:
        return math.inf
    if not wanted.numel():
        return 0.0
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return 0.0 if torch.equal(value, wanted) else math.inf
    error = (value - wanted).abs().max().item() / max(_max_abs(wanted), floor, 1e-30)
    return error if not math.isnan(error) else 0.0 if torch.equal(value.isnan(), wanted.isnan()) else math.inf


def command(words: list[str]) -> int:
    """Run `shardfield check module:factory --shape 1,3,64,96 --mesh 2,2` and print the certificate."""
    import argparse

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(n) for n in text.split(","))

    parser = argparse.ArgumentParser(prog="shardfield check", description=check.__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("factory", help="package.module:name of a function that returns the model")
    parser.add_argument("--shape", type=numbers, help="shape of the input, e.g. 1,3,64,96")
    parser.add_argument("--mesh", type=numbers, default=(2,), help="ranks along each mesh axis, e.g. 2,2")
    parser.add_argument("--dims", type=numbers, help="the dim that each mesh axis shards; by default the last ones")
    parser.add_argument("--even", action="store_true", help="use equal shards")
    parser.add_argument("--steps", type=int, default=0, help="steps of gradient descent; compare the parameters too")
    parser.add_argument("--tolerance", type=float, default=1e-9, help="largest relative difference that passes")
    parser.add_argument("--no-table", action="store_true", help="do not print the calls and their messages")
    args = parser.parse_args(words)
    sys.path.insert(0, os.getcwd())
    options = dict(dims=args.dims, even=args.even, steps=args.steps, tolerance=args.tolerance)
    found = check(args.factory, args.shape, args.mesh, **options)
    if not args.no_table:
        print(found.table)
    print(found)
    return 0 if found else 1
