"""Run a model on one device and sharded over ranks, and compare outputs, gradients, parameters and buffers."""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ..errors import ShardfieldError
from ..layout import Layout
from ..tensor import ShardTensor
from ..testing import RanksFailed, run_on_ranks
from .differences import Line, max_abs, relative_error
from .model_inputs import Inputs, choose_sharded, replicate_input, shard_input
from .model_run import ModelRun
from .rounding import OtherRounding

AXIS_NAMES = ("h", "w", "d")
NOISE = 1e-6  # fraction of the largest gradient; smaller gradients are compared relative to this
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}  # the largest error that passes where rounding noise is smaller
# Classes of modules without parameters whose names contain one of these draw random numbers in training.
RANDOM_MODULES = ("dropout", "droppath", "dropblock", "stochasticdepth")
ONE_DEVICE, REPLICATED = "one device", "the same field replicated, since the model draws random numbers"


@dataclass
class Parity:
    """The result of `check`: True if everything agrees. Print it for the certificate."""

    model: str
    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    dtype: str
    tolerance: float
    reference: str = ONE_DEVICE  # what the sharded run is compared with
    lines: list[Line] = field(default_factory=list)
    first: str | None = None  # the first submodule whose output differs
    gathers: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # calls that lost a sharding, and the axes
    unbalanced: list[str] = field(default_factory=list)  # calls with unbalanced results, and the axes
    messages: int = 0
    bytes: int = 0
    table: str = ""
    work: list[int] = field(default_factory=list)  # of each rank; see debug/work.py
    work_alone: int = 0  # on one device
    input_balance: float = 1.0  # of the input's elements, as `balance` of the work

    @property
    def worst(self) -> float:
        """The largest error."""
        return max((line.error for line in self.lines), default=math.inf)

    @property
    def balance(self) -> float:
        """The largest share of the work that a rank has, times the number of ranks; 1 where all have the same."""
        return max(self.work) * len(self.work) / max(sum(self.work), 1)

    @property
    def redundancy(self) -> float:
        """The work of all ranks together, divided by that of one device; 1 if nothing is computed twice."""
        return sum(self.work) / max(self.work_alone, 1)

    def __bool__(self) -> bool:
        return bool(self.lines) and all(line.agrees(self.tolerance) for line in self.lines)

    def __str__(self) -> str:
        mesh = " x ".join(map(str, self.mesh))
        lines = [
            f"{self.model} on {self.shape}, mesh {mesh}, {self.dtype}: {self.messages} messages, {self.bytes} bytes "
            "on rank 0",
            f"compared with {self.reference}",
        ]
        lines += [f"{'ok     ' if x.agrees(self.tolerance) else 'DIFFERS'} {x}" for x in self.lines]
        agree = sum(x.agrees(self.tolerance) for x in self.lines)
        lines.append(
            f"{agree} of {len(self.lines)} agree within {self.tolerance:g}, or ten times the rounding noise of one "
            f"device; the worst is {self.worst:.1e}"
        )
        if self.first is not None:
            lines.append(f"the first submodule whose output differs: {self.first}")
        lines.append(f"gathered: {', '.join(self.gathers)}" if self.gathers else "no call gathered its operands")
        lines.append(f"lost sharding: {', '.join(self.lost)}" if self.lost else "no result lost its sharding")
        lines.append(f"unbalanced: {', '.join(self.unbalanced)}" if self.unbalanced else "no result is unbalanced")
        lines.append(
            f"work: balance {self.balance:.2f} (shards of the input {self.input_balance:.2f}), "
            f"redundancy {self.redundancy:.2f}"
        )
        return "\n".join([*lines, "same as one device" if self else "NOT the same as one device"])


def check(
    factory: str | Callable[[], Any],
    shape: Sequence[int] | None = None,
    mesh: Sequence[int] = (2,),
    *,
    dims: Sequence[int] | None = None,
    shard: Mapping[str, Sequence[int]] | None = None,
    even: bool = False,
    steps: int = 0,
    dtype: str = "float64",
    tolerance: float | None = None,
    seed: int = 0,
    timeout: float = 300.0,
) -> Parity:
    """Run a model on one device and on gloo ranks of a mesh, forward and backward, and compare.

    `factory`, a module-level function or "package.module:name", returns the model, or the model and its inputs: a tuple
    of arguments, a dict of keyword arguments, or one argument of another type (a dataclass, a graph). Without inputs
    the model is called with random numbers of `shape`. The first floating-point tensor is sharded along `dims`, one per
    mesh axis (by default the second last, or the last two), with uneven shards unless `even`; `shard` names the tensors
    and their dims instead: `{"x": (2, 3), "batch.forcing": (1, 2)}`, by position, key or attribute, joined with dots.

    On every rank outputs, the gradients of a random weighting of them for inputs and parameters, and the buffers
    afterwards are compared; after `steps` of gradient descent the parameters and buffers too. Finite numbers may differ
    by `tolerance` relative to the largest (1e-9 in float64, 1e-5 in float32), or by ten times the rounding noise of one
    device, which a second run that rounds differently measures. If outputs differ, the report names the first submodule
    whose output differs. The report also lists gathers, lost shardings, unbalanced results, and how the ranks share the
    work.

    The model is in training mode except for dropout and stochastic depth, whose random numbers are not those of one
    device. If it still draws random numbers, it is compared with a run on the replicated field, which draws the same
    numbers.

    >>> parity = check("torch.nn:Identity", (1, 3, 8, 12))  # or "mymodel:make"; print(parity) for the report
    >>> bool(parity), parity.gathers, parity.lost
    (True, [], [])
    """
    name = factory if isinstance(factory, str) else f"{factory.__module__}:{factory.__qualname__}"
    ranks = math.prod(mesh)
    if not 1 <= len(mesh) <= len(AXIS_NAMES) or ranks < 1:
        raise ShardfieldError(f"check: the mesh must have one to three axes, not {tuple(mesh)}")
    dims = tuple(dims) if dims is not None else {1: (-2,), 2: (-2, -1), 3: (-3, -2, -1)}[len(mesh)]
    if len(dims) != len(mesh):
        raise ShardfieldError(f"check: {len(dims)} dims {dims} for a mesh of {len(mesh)} axes {tuple(mesh)}")
    if dtype not in TOLERANCE:
        raise ShardfieldError(f"check: dtype must be one of {', '.join(TOLERANCE)}, not {dtype!r}")
    if steps < 0:
        raise ShardfieldError(f"check: {steps} steps")
    if isinstance(factory, str):
        load(factory)  # raise here: an error on the ranks would be longer
    options = (None if shape is None else tuple(shape), dims, dict(shard or {}), even, seed, steps, dtype)
    try:
        found = run_on_ranks(_compare, ranks, name, tuple(mesh), *options, timeout=timeout)
    except RanksFailed as failed:
        texts = {error.message for error in failed.errors.values()}
        if len(texts) == 1 and (text := texts.pop()).startswith("check: "):
            raise ShardfieldError(text) from failed  # an error of the call, not of the model: no traceback is needed
        raise ShardfieldError(f"check: {name} could not be run\n{failed}") from failed
    return _merged(found, TOLERANCE[dtype] if tolerance is None else tolerance)


def _merged(found: list[Parity], tolerance: float) -> Parity:
    """Return the result of rank 0 with the worst line of any rank, and everyone's work."""
    result = found[0]
    result.tolerance = tolerance
    result.work = [one.work[0] for one in found]
    lines = [max(of_ranks, key=lambda x: x.error) for of_ranks in zip(*(one.lines for one in found), strict=True)]
    result.lines = [x for x in lines if x.kind != "module"]
    if not result:
        result.first = next((x.name for x in lines if x.kind == "module" and not x.agrees(tolerance)), None)
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
    name: str, mesh_shape: Any, shape: Any, dims: Any, shard: Any, even: bool, seed: int, steps: int, dtype: str
) -> Parity:
    """Run the model on one device and sharded, and compare; called on every rank."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=AXIS_NAMES[: len(mesh_shape)])
    cast = partial(_cast, dtype=getattr(torch, dtype))
    model, given = _build_model(name, seed, cast)
    if given is None:
        if shape is None:
            raise ShardfieldError(
                f"check: {name} returns a model without inputs: pass the shape of its input, --shape 1,3,64,64"
            )
        given = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    inputs = Inputs.of(given).map(lambda path, t: cast(t))
    chosen = choose_sharded(inputs.tensors(), dims, shard)
    start = [t.detach().clone() for t in _parameters_and_buffers(model)]

    def place(path: str, t: Tensor) -> Any:
        return shard_input(t, mesh, chosen[path], even) if path in chosen else replicate_input(t, mesh)

    def run(placed: Inputs, model: nn.Module | None = None) -> ModelRun:
        return ModelRun(model or _build_model(name, seed, cast, start)[0], placed, seed, steps)

    expected = run(inputs, model)
    with OtherRounding():
        rounded = run(inputs)
    sharded = run(inputs.map(place))
    wanted = run(inputs.map(lambda path, t: replicate_input(t, mesh))) if expected.is_random else expected

    field = inputs.tensors()[next(iter(chosen))]
    found = Parity(name, tuple(field.shape), mesh_shape, dtype, 0.0, REPLICATED if expected.is_random else ONE_DEVICE)
    report = sharded.report
    found.gathers = sorted({row.op for row in report.gathers})
    found.lost = sorted({f"{row.op} over axis {' and '.join(map(repr, row.lost))}" for row in report.lost})
    found.unbalanced = sorted(
        {f"{row.op} over axis {' and '.join(map(repr, row.unbalanced))}" for row in report.unbalanced}
    )
    found.messages, found.bytes, found.table = report.messages, report.bytes, str(report)
    found.input_balance = _balance_of(shard_input(field, mesh, next(iter(chosen.values())), even)._layout)
    # In call order. Every rank compares all outputs, because full_tensor() communicates.
    for (which, value), (_, want), (_, plain), (_, other) in zip(
        sharded.parts, wanted.parts, expected.parts, rounded.parts, strict=True
    ):
        error = relative_error(value, _full(want))
        found.lines.append(Line("module", which, error, relative_error(other, plain), dist.get_rank()))
    largest: dict[str, float] = {}
    for kind, _, value in expected.values:
        largest[kind] = max(largest.get(kind, 0.0), max_abs(value))
    for (kind, which, value), (*_, want), (*_, plain), (*_, other) in zip(
        sharded.values, wanted.values, expected.values, rounded.values, strict=True
    ):
        floor = NOISE * largest[kind]
        error = relative_error(value, _full(want), floor)
        found.lines.append(Line(kind, which, error, relative_error(other, plain, floor), dist.get_rank()))
    found.work, found.work_alone = [sharded.count_work()], expected.count_work()
    return found


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ShardTensor) else value


def _balance_of(layout: Layout) -> float:
    """Return the size of the largest shard times the number of ranks, divided by the full size."""
    coords = itertools.product(*(range(layout.mesh.size(a)) for a in range(layout.mesh.ndim)))
    return max(layout.local_shape_at(c).numel() for c in coords) * layout.mesh.size() / max(layout.numel, 1)


def _build_model(
    name: str, seed: int, cast: Callable[[Tensor], Tensor], start: list[Tensor] | None = None
) -> tuple[nn.Module, Any]:
    """Return the model, with the parameters and buffers of `start`, and its inputs, None if the factory returns none.

    The model is built for every run, not copied: a copy of a model that stores one of its bound methods would call the
    original's submodules.
    """
    torch.manual_seed(seed)
    made = load(name)()
    model, given = made if isinstance(made, tuple) else (made, None)
    if any(p.grad is not None for p in model.parameters()):
        model = copy.deepcopy(model)  # the factory returns one model at every call
    for part in model._apply(cast).train().modules():
        kind = type(part).__name__.lower()
        if any(word in kind for word in RANDOM_MODULES) and next(part.parameters(), None) is None:
            part.eval()
    if start is not None:  # equal seeds do not cover random numbers from other generators
        with torch.no_grad():
            for saved, there in zip(start, _parameters_and_buffers(model), strict=True):
                there.copy_(saved)
    return model, given


def _parameters_and_buffers(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a floating-point tensor in `dtype`, a complex one in the complex dtype of its size, others unchanged."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def command(words: list[str]) -> int:
    """Run `shardfield check module:factory --shape 1,3,64,96 --mesh 2,2` and print the certificate."""
    import argparse

    from ..train.config import UsageError, suggest_name
    from ..train.recipes import TASK_SPECS
    from .recipe_models import find_dims, find_dtype

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(n) for n in text.split(","))

    def named(text: str) -> tuple[str, tuple[int, ...]]:
        path, _, dims = text.rpartition(":")
        return path, numbers(dims)

    parser = argparse.ArgumentParser(prog="shardfield check", description=check.__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument(
        "factory",
        help=f"{', '.join(TASK_SPECS)}; or package.module:name, a function that returns the model, or model and inputs",
    )
    parser.add_argument("--shape", type=numbers, help="shape of the input, e.g. 1,3,64,96")
    parser.add_argument("--mesh", type=numbers, default=(2,), help="ranks along each mesh axis, e.g. 2,2")
    parser.add_argument("--dims", type=numbers, help="the dim that each mesh axis shards; by default the last ones")
    parser.add_argument(
        "--shard", type=named, action="append", default=[], metavar="INPUT:DIMS",
        help="shard this input, e.g. batch.x:2,3; several times for several inputs; by default the first one",
    )  # fmt: skip
    parser.add_argument("--even", action="store_true", help="use equal shards")
    parser.add_argument("--steps", type=int, default=0, help="steps of gradient descent; compare the parameters too")
    parser.add_argument("--dtype", choices=list(TOLERANCE), help="precision of the model, float64 by default")
    parser.add_argument(
        "--tolerance", type=float, help="largest relative difference that passes; by default 1e-9, in float32 1e-5"
    )
    parser.add_argument("--no-table", action="store_true", help="do not print the calls and their messages")
    args = parser.parse_args(words)
    sys.path.insert(0, os.getcwd())
    if args.factory in TASK_SPECS:
        if args.shape or args.shard:
            raise ShardfieldError(f"check: --shape and --shard are for package.module:name, not for {args.factory}")
        args.dims = args.dims or find_dims(args.factory, len(args.mesh))
        args.dtype = args.dtype or find_dtype(args.factory)
        args.factory = f"{__package__}.recipe_models:{args.factory}"
    elif ":" not in args.factory:
        also = "; a model of your own is package.module:name"
        raise UsageError(f"check: unknown recipe {args.factory!r}{suggest_name(args.factory, TASK_SPECS)}{also}")
    options = dict(dims=args.dims, shard=dict(args.shard), even=args.even, steps=args.steps)
    dtype = args.dtype or "float64"
    found = check(args.factory, args.shape, args.mesh, **options, dtype=dtype, tolerance=args.tolerance)
    if not args.no_table:
        print(found.table)
    print(found)
    return 0 if found else 1
