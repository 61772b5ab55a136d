"""One op against one device: values and all gradients, for every way of cutting its operands.

A case is a call, `Case(torch.sum, T(5, 6), dim=1)`: T stands for a tensor argument. The harness draws layouts for the
tensors, runs the call on ShardTensors and on plain whole tensors, and compares in float64. It runs on the ranks;
what it returns is a list of complaints, empty when all is well.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardfield import ShardingError, ShardTensor, strict
from shardfield.comm import collectives
from shardfield.dispatch.registry import run_backward
from shardfield.layout import Layout
from shardfield.redistribute import redistribute

# Where the rows run: `SHARDFIELD_DEVICE=cuda pytest tests/ops/test_case_tables.py` takes the table to a GPU, which all
# ranks share.
DEVICE = os.environ.get("SHARDFIELD_DEVICE", "cpu")
MESHES = [(1,), (2,), (3,), (4,), (2, 2)] if DEVICE == "cpu" else [(1,), (1, 1), (2,), (4,), (2, 2)]


@dataclass(frozen=True)
class T:
    """A tensor argument: its shape, dtype, how it is filled, and whether it may be cut.

    fill: "normal", "positive", "unit" (in (0, 1)), "ints" (0..high-1), "bool", "distinct" (no ties), or a function of
    (shape, generator). shard_dims: dims that may be sharded (None: all; (): always whole and plain).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    fill: Any = "normal"
    high: int = 5
    grad: bool = True
    shard_dims: tuple[int, ...] | None = None

    def __init__(self, *shape: int, dtype=torch.float64, fill="normal", high=5, grad=True, shard_dims=None):
        for name, value in dict(
            shape=shape, dtype=dtype, fill=fill, high=high, grad=grad, shard_dims=shard_dims
        ).items():
            object.__setattr__(self, name, value)

    def make(self, generator: torch.Generator) -> torch.Tensor:
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


@dataclass
class Case:
    """`fn(*args, **kwargs)` with T for tensors.

    no_messages: none is sent in forward, for any layout drawn. gather: no rule is claimed; a gather is fine.
    layouts: how many assignments of layouts are drawn on each mesh. partial: a Partial operand is tried too.
    refused: raising ShardingError is fine (on all ranks). exact=False: compare to 1e-6 only (float32 inside torch).
    """

    fn: Callable
    args: tuple
    kwargs: dict = field(default_factory=dict)
    name: str = ""
    no_messages: bool = False
    may_gather: bool = False
    try_partial: bool = True
    may_refuse: bool = False
    grad: bool = True
    layouts: int = 10
    tolerance: float = 1e-10

    def __post_init__(self):
        shapes = ",".join("x".join(map(str, t.shape)) or "0d" for t in _leaves(self.args) if isinstance(t, T))
        rest = ",".join(f"{a}" for a in self.args if not isinstance(a, T) and not _contains_tensor_arg(a))
        more = ",".join(f"{k}={'T' if isinstance(v, T) else v}" for k, v in self.kwargs.items())
        base = self.name or getattr(self.fn, "__name__", str(self.fn))
        self.name = " ".join(p for p in (base, shapes, rest, more) if p)


def case(fn: Callable, *args: Any, options: dict | None = None, **kwargs: Any) -> Case:
    """A row of the table: `case(torch.sum, T(5, 6), dim=1)`; `options` holds the Case's own options."""
    return Case(fn, args, kwargs, **(options or {}))


def double_backward(fn: Callable) -> Callable:
    """A gradient that is differentiated again: every rank must meet the same moves, with empty pieces too."""

    def run(*tensors: Any) -> Any:
        return torch.autograd.grad((fn(*tensors) ** 3).sum(), tensors, create_graph=True)

    return run


def _leaves(value: Any) -> list:
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in _leaves(v)]
    return [value]


def _contains_tensor_arg(value: Any) -> bool:
    return any(isinstance(v, T) for v in _leaves(value))


def _substitute(value: Any, make: Callable[[T], Any], device: str) -> Any:
    if isinstance(value, T):
        return make(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_substitute(v, make, device) for v in value)
    if isinstance(value, dict):
        return {k: _substitute(v, make, device) for k, v in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


# ---------------------------------------------------------------------- layouts


@lru_cache
def world_mesh(shape: tuple[int, ...]):
    """A mesh over all ranks of the world. One rank alone uses its device's own backend; several on one GPU cannot."""
    names = ("h", "w", "d")[: len(shape)]
    if DEVICE != "cpu":
        torch.get_device_module(DEVICE).set_device(dist.get_rank() % torch.get_device_module(DEVICE).device_count())
    if DEVICE == "cpu" or math.prod(shape) > 1:
        return init_device_mesh(DEVICE, shape, mesh_dim_names=names)
    groups = [dist.new_group(backend=dist.get_default_backend_for_device(DEVICE)) for _ in shape]
    given: Any = groups if len(shape) > 1 else groups[0]
    return DeviceMesh.from_group(given, DEVICE, torch.zeros(shape, dtype=torch.int), mesh_dim_names=names)


def draw_shard_sizes(size: int, parts: int, rng: random.Random) -> list[int]:
    """Lengths: chunked, random, or with empty pieces."""
    kind = rng.randrange(4)
    if kind == 0:
        step = -(-size // parts)
        return [max(0, min(step, size - i * step)) for i in range(parts)]
    if kind == 1:
        who = rng.randrange(parts)
        return [size if i == who else 0 for i in range(parts)]
    marks = sorted(rng.randint(0, size) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *marks], [*marks, size], strict=True)]


def draw_layout(mesh, t: T, rng: random.Random, try_partial: bool) -> Layout:
    placements: list[Placement] = []
    dims = list(range(len(t.shape))) if t.shard_dims is None else list(t.shard_dims)
    for _ in range(mesh.ndim):
        choice = rng.random()
        if try_partial and choice < 0.15 and t.fill in ("normal", "positive", "unit", "distinct"):
            placements.append(Partial())
        elif dims and choice < 0.9:
            placements.append(Shard(rng.choice(dims)))
        else:
            placements.append(Replicate())
    chunked = Layout.of(mesh, placements, t.shape)
    lengths = {
        d: draw_shard_sizes(t.shape[d], len(chunked.shard_sizes(d)), rng)
        for d in range(len(t.shape))
        if chunked.axes_of(d)
    }
    return Layout.of(mesh, placements, t.shape, lengths)


def local_shard(full: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's piece of a whole tensor; a Partial is spread unevenly over its axes."""
    whole = layout.with_partial(())
    local = redistribute(full, Layout.replicate(layout.mesh, full.shape), whole).clone()
    for axis in layout.partial_axes:
        size, coord = layout.mesh.size(axis), layout.coords[axis]
        # addends of very different sizes that sum to the value: all but the last carry a quarter more each
        local = local * (coord + 1) / (size * (size + 1) / 2)
    return local


# ---------------------------------------------------------------------- one case


def check_case(
    case: Case,
    mesh_shape: tuple[int, ...],
    seed: int = 0,
    transform: Callable | None = None,
    layout_indices: Sequence[int] | None = None,
) -> list[str]:
    """Run a case on this rank (every rank of the world calls this); the complaints.

    `through` makes of the case's function on tensors the one that is called on ShardTensors. `numbers`: of the layouts
    that are drawn, instead of all that the case asks for; even ones may cut several operands, odd ones cut one alone.
    """
    mesh = world_mesh(mesh_shape)
    complaints: list[str] = []
    for number in range(case.layouts) if layout_indices is None else layout_indices:
        rng = random.Random(f"{case.name}|{mesh_shape}|{number}|{seed}")
        complaints += _check_once(case, mesh, rng, number, transform)
    return complaints


def _check_once(case: Case, mesh, rng: random.Random, number: int, transform: Callable | None = None) -> list[str]:
    generator = torch.Generator().manual_seed(1234)
    tensors = [t for t in _leaves((case.args, list(case.kwargs.values()))) if isinstance(t, T)]
    values = [t.make(generator).to(DEVICE) for t in tensors]
    cuttable = [i for i, t in enumerate(tensors) if t.shard_dims != ()]
    alone = rng.choice(cuttable) if cuttable else 0
    together = number % 2 == 0
    layouts: list[Layout | None] = []
    for i, t in enumerate(tensors):
        use = i == alone or (together and i in cuttable and rng.random() < 0.8)
        layouts.append(draw_layout(mesh, t, rng, case.try_partial) if use else None)
    label = f"{case.name} on {tuple(mesh.shape)} with {[repr(x) if x else 'plain' for x in layouts]}"

    def wants_grad(t: T, v: torch.Tensor) -> bool:
        return case.grad and t.grad and (v.is_floating_point() or v.is_complex())

    ref_in = [v.clone().requires_grad_(wants_grad(t, v)) for t, v in zip(tensors, values, strict=True)]
    got_in: list[Any] = []
    for t, v, layout in zip(tensors, values, layouts, strict=True):
        local = v.clone() if layout is None else local_shard(v, layout)
        local.requires_grad_(wants_grad(t, v))
        got_in.append(local if layout is None else ShardTensor(local, layout))
    ref_error = got_error = None
    beside = None
    if (
        DEVICE != "cpu"
    ):  # a kernel that finds a value out of bounds ends the process; and some have answers of their own
        beside = [v.detach().cpu().requires_grad_(v.requires_grad) for v in ref_in]
        try:
            with torch.device("cpu"):
                beside = beside, _call(case, beside, "cpu")
        except Exception:
            return []
    try:
        ref = _call(case, ref_in)
    except Exception as error:  # what one device raises, we must raise
        ref_error, ref = error, None
        if beside is not None:
            ref_in, ref = beside
            beside = None
    failed: list[str] = []
    sent = [0, 0]
    collectives.meter = lambda kind, messages, nbytes: sent.__setitem__(0, sent[0] + messages)
    try:
        with ignore_gather_warnings() if case.may_gather else strict(), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", ".*Triggered internally"
            )  # what torch's own kernels say, on one device too
            got = _call(case, got_in) if transform is None else transform(partial(_call, case))(got_in)
    except ShardingError as error:
        got_error, got = error, None
        if not case.may_refuse and ref_error is None:
            failed = [f"{label}: refused: {error}"]
    except Exception as error:
        got_error, got = error, None
        if ref_error is None:
            failed = [f"{label}: raised {type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"]
    finally:
        collectives.meter = None
    if any_rank(got_error is not None) and got_error is None:
        return [f"{label}: another rank raised, this one did not"]
    if failed:
        return failed
    if ref_error is not None:
        if transform is not None and isinstance(ref_error, NotImplementedError):
            return []  # other kernels may do what one device's cannot
        if DEVICE == "cpu" or got_error is not None:
            return [] if got_error is not None else [f"{label}: one device raises {ref_error!r}, this did not"]
    if got_error is not None:
        return []
    out = []
    if case.no_messages and sent[0]:
        out.append(f"{label}: sent {sent[0]} messages in forward, should send none")
    return out + _compare(case, label, ref_in, got_in, ref, got, beside)


@contextlib.contextmanager
def ignore_gather_warnings():
    """A case that may gather is not failed by the warning that it does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "shardfield: no rule")
        yield


def _call(case: Case, tensors: Sequence[Any], device: str = DEVICE) -> Any:
    left = iter(tensors)
    args = _substitute(case.args, lambda _: next(left), device)
    kwargs = _substitute(case.kwargs, lambda _: next(left), device)
    return case.fn(*args, **kwargs)


def _flatten(out: Any) -> list[Any]:
    return [x for o in out for x in _flatten(o)] if isinstance(out, (list, tuple)) else [out]


def to_full_tensor(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ShardTensor) else value


def any_rank(flag: bool) -> bool:
    """Whether any rank says so. A rank that stops alone would leave the others waiting in their next message."""
    said = torch.tensor(int(flag))
    dist.all_reduce(said, dist.ReduceOp.MAX)
    return bool(said)


def describe_mismatch(got: Any, ref: Any, tolerance: float) -> str | None:
    """Why two whole values are not the same, or None."""
    if not isinstance(ref, torch.Tensor):
        return None if got == ref or (got != got and ref != ref) else f"{got!r} is not {ref!r}"
    if not isinstance(got, torch.Tensor):
        return f"{type(got).__name__} instead of a tensor"
    if got.shape != ref.shape or got.dtype != ref.dtype:
        return f"shape/dtype {tuple(got.shape)} {got.dtype}, should be {tuple(ref.shape)} {ref.dtype}"
    if ref.numel() == 0 or torch.equal(got, ref):
        return None
    if not (ref.is_floating_point() or ref.is_complex()):
        return f"values differ: {got.flatten()[:8].tolist()} should be {ref.flatten()[:8].tolist()}"
    if torch.allclose(got, ref, rtol=tolerance, atol=tolerance, equal_nan=True):
        return None
    by = (got - ref).abs().max().item()
    return f"values differ by {by:.3g}: {got.flatten()[:6].tolist()} vs {ref.flatten()[:6].tolist()}"


def _compare(case: Case, label: str, ref_in, got_in, ref, got, cpu_reference=None) -> list[str]:
    """`beside`: inputs and results on a CPU, where `ref` is on a device: where torch itself is of two minds, either."""
    refs, gots = _flatten(ref), _flatten(got)
    others = [None] * len(refs) if cpu_reference is None else _flatten(cpu_reference[1])
    pick = iter([None] * len(ref_in) if cpu_reference is None else cpu_reference[0])

    def differ(got: Any, ref: Any, other: Any) -> str | None:
        why = describe_mismatch(got, ref, case.tolerance)
        if why is None or other is None:
            return why
        return (
            why
            if describe_mismatch(got.cpu() if isinstance(got, torch.Tensor) else got, other, case.tolerance)
            else None
        )

    if len(refs) != len(gots):
        return [f"{label}: {len(gots)} results, should be {len(refs)}"]
    out = []
    for i, (r, g) in enumerate(zip(refs, gots, strict=True)):
        if isinstance(g, ShardTensor) and g._local_tensor.shape != g._layout.local_shape:
            out.append(
                f"{label}: result {i} holds {tuple(g._local_tensor.shape)}, its layout says {g._layout.local_shape}"
            )
        if any_rank(bool(out)):
            return out
        value = to_full_tensor(g)
        if isinstance(value, torch.Tensor) and isinstance(r, torch.Tensor):
            value = value.to(r.device)
        why = differ(value, r, others[i])
        if why:
            out.append(f"{label}: result {i}: {why}")
        if isinstance(r, torch.Tensor) and isinstance(g, torch.Tensor) and r.requires_grad != g.requires_grad:
            out.append(f"{label}: result {i}: requires_grad is {g.requires_grad}, should be {r.requires_grad}")
    pairs = [(r, g) for r, g in zip(refs, gots, strict=True) if isinstance(r, torch.Tensor) and r.requires_grad]
    if any_rank(bool(out)) or not pairs:
        return out
    generator = torch.Generator().manual_seed(99)
    seeds = [torch.randn(r.shape, dtype=r.dtype, generator=generator) for r, _ in pairs]
    theirs = [t for t in others if isinstance(t, torch.Tensor) and t.requires_grad]
    if [t.shape for t in theirs] == [s.shape for s in seeds]:
        torch.autograd.backward(theirs, seeds)
    else:  # results that one of the two leaves empty
        pick = iter([None] * len(ref_in))
    try:
        torch.autograd.backward([r for r, _ in pairs], [s.to(r.device) for s, (r, _) in zip(seeds, pairs, strict=True)])
    except RuntimeError:  # the device's own kernel has no gradient of this
        if cpu_reference is None:
            raise
        return out
    run_backward([g for _, g in pairs], [s.to(DEVICE) for s in seeds], None, False, None)
    for i, (r, g) in enumerate(zip(ref_in, got_in, strict=True)):
        other = next(pick)
        if r.grad is None:
            if g.grad is not None and to_full_tensor(g.grad).abs().max() > 0:
                out.append(f"{label}: input {i} got a gradient, should have none")
            continue
        if g.grad is None:
            out.append(f"{label}: input {i} got no gradient")
            continue
        why = differ(to_full_tensor(g.grad).to(r.device), r.grad, None if other is None else other.grad)
        if why:
            out.append(f"{label}: gradient of input {i}: {why}")
    return out
