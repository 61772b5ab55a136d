"""Draw programs with hypothesis. Each step is tried on plain tensors first: every program runs on one device."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from . import graph_idioms, graph_ops, pair_idioms  # noqa: F401 - registers its op
from .ops import FAMILIES
from .program import Input, Program, Ref, Sharding, Step

MESHES = [(2,), (3,), (2, 2), (4,), (2,)]
MAX_NUMEL, MAX_DIMS, MAX_VALUE = 600, 5, 1e3
PERTURBATION = 1e-12


class Draw:
    """Draw the arguments of ops, and keep the values that the program has computed on one device so far."""

    def __init__(self, draw: Any, mesh: tuple[int, ...], compiled: bool = False):
        self.compiled = compiled
        self._draw, self.mesh = draw, mesh
        self.inputs: list[Input] = []
        self.drawn = 0  # inputs, those of steps that were rejected included
        self.steps: list[Step] = []
        self.env: dict[str, torch.Tensor] = {}

    # ------------------------------------------------------------------ primitive draws

    def int(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, max(low, high)))

    def flag(self) -> bool:
        return self._draw(st.booleans())

    def pick(self, choices: list) -> Any:
        return choices[self.int(0, len(choices) - 1)]

    def permutation(self, n: int) -> list[int]:
        return self._draw(st.permutations(range(n)))

    # ------------------------------------------------------------------ shapes and layouts

    def shape(self, x: Ref) -> tuple[int, ...]:
        return tuple(self.env[x.name].shape)

    def dim(self, x: Ref) -> int:
        return self.int(0, len(self.shape(x)) - 1)

    def dims(self, x: Ref) -> tuple[int, ...]:
        return tuple(d for d in range(len(self.shape(x))) if self.flag()) or (self.dim(x),)

    def factors(self, n: int) -> tuple[int, ...]:
        out: list[int] = []
        while n > 1 and len(out) < 3:
            out.append(self.pick([d for d in range(1, n + 1) if n % d == 0]))
            n //= out[-1]
        return (*out, n)

    def sharding(self, shape: tuple[int, ...], partial: bool) -> Sharding:
        """Draw a layout: any dims, several axes on one dim, uneven and empty shards."""
        placements = []
        for _ in self.mesh:
            kind = self.int(0, 9)
            shard = f"S{self.int(0, len(shape) - 1)}" if shape else "R"
            placements.append("R" if kind == 0 else "P" if kind == 1 and partial else shard)
        sizes = []
        for dim, size in enumerate(shape):
            axes = [a for a, p in enumerate(placements) if p == f"S{dim}"]
            if axes:
                sizes.append((dim, self.shard_sizes(size, math.prod(self.mesh[a] for a in axes))))
        return Sharding(tuple(placements), tuple(sizes))

    def shard_sizes(self, size: int, parts: int) -> tuple[int, ...]:
        if self.flag():
            step = -(-size // parts)
            return tuple(max(0, min(step, size - i * step)) for i in range(parts))
        marks = sorted(self.int(0, size) for _ in range(parts - 1))
        return tuple(b - a for a, b in zip([0, *marks], [*marks, size], strict=True))

    # ------------------------------------------------------------------ operands

    def input(self, shape: tuple[int, ...], kind: str = "normal", plain: bool | None = None) -> Ref:
        """Add an input to the program."""
        if plain is None:
            plain = self.int(0, 3) == 1
        shape = tuple(shape)
        sharding = None if plain else self.sharding(shape, partial=kind == "normal")
        made = Input(f"x{self.drawn}", shape, 100 + self.drawn, kind, sharding)
        self.drawn += 1
        self.inputs.append(made)
        value = made.value()
        self.env[made.name] = value.requires_grad_(value.is_floating_point())
        return Ref(made.name)

    def names(self, accept: Any) -> list[Ref]:
        """Return the values that `accept` accepts, the latest first."""
        return [Ref(n) for n in reversed(self.env) if accept(self.env[n])]

    def broadcastable(self, x: Ref) -> Ref:
        """Return a value that can be broadcast with x, or a new input."""
        shape = self.shape(x)

        def fits(t: torch.Tensor) -> bool:
            return t.dtype == torch.float64 and t.ndim <= len(shape) and _broadcasts(t.shape, shape)

        known = self.names(fits)
        if known and self.int(0, 2):
            return self.pick(known)
        part = shape[self.int(0, len(shape)) :]
        return self.input(tuple(1 if self.int(0, 3) == 1 else n for n in part))

    def same_shape(self, x: Ref) -> Ref:
        known = self.names(lambda t: t.shape == self.env[x.name].shape and t.dtype == self.env[x.name].dtype)
        return self.pick(known) if self.flag() else self.input(self.shape(x))

    def expandable(self, x: Ref, key: Any = None) -> Ref:
        """Return a value that can be expanded to x (or to x[key])."""
        target = self.env[x.name] if key is None else self.env[x.name][key]
        shape = tuple(target.shape)
        known = self.names(
            lambda t: (
                t.dtype == torch.float64
                and t.ndim <= len(shape)
                and _broadcasts(t.shape, shape)
                and torch.broadcast_shapes(t.shape, shape) == shape
            )
        )
        if known and self.flag():
            return self.pick(known)
        return self.input(shape[self.int(0, len(shape)) :])

    def mask_for(self, x: Ref) -> Ref:
        shape = self.env[x.name].shape
        known = self.names(lambda t: t.dtype == torch.bool and t.ndim <= len(shape) and _broadcasts(t.shape, shape))
        return self.pick(known) if known and self.flag() else self.input(tuple(shape), "mask")

    def index(self, x: Ref) -> tuple[Any, ...]:
        """Draw a basic index."""
        key: list[Any] = []
        for size in self.shape(x):
            kind = self.int(0, 5)
            if kind == 0:
                key.append(slice(None))
            elif kind == 1 and size:
                key.append(self.int(-size, size - 1))
            elif kind == 2:
                key.append(slice(self.int(0, size), None, self.int(1, 2)))
            elif kind == 3:
                key.append(slice(None, self.int(-2, size)))
            elif kind == 4:
                key += [None, slice(None)]
            else:
                return (*key, ...) if self.flag() else tuple(key)
        return tuple(key)

    # ------------------------------------------------------------------ steps

    def try_step(self) -> None:
        """Draw a step, and keep it if one device can run it."""
        family = self.pick([*(f for f in FAMILIES if f != "complex"), "stencils"])
        leaves = {x.name for x in self.inputs}
        if family == "writes":
            known = self.names(lambda t: t.dtype == torch.float64 and t.grad_fn is not None)
        else:
            known = self.names(lambda t: t.dtype in (torch.float64, torch.complex128))
        if family in ("stencils", "norms"):  # most need a field (N, C, ...)
            known = [x for x in known if 3 <= len(self.shape(x)) and 0 not in self.shape(x)] or known
        if not known:
            return
        x = known[min(self.int(0, 2 * len(known)), len(known) - 1) if self.flag() else 0]
        if self.env[x.name].is_complex():
            family = "complex"
        ops = FAMILIES[family]
        make = ops[self.pick(list(ops))]
        if not self.shape(x) and make.__name__ not in (
            "unary",
            "scalar",
            "binary",
            "masked",
            "unsqueeze",
            "write_scalar",
        ):
            return
        before = len(self.inputs)
        call = make(self, x)
        if call is not None:
            fn, args, kwargs, pick = (*call, *((), {}, None)[len(call) - 1 :])
            eager_only = fn.startswith(graph_ops.__name__) or (fn.startswith(graph_idioms.__name__) and "graph" in args)
            if not (self.compiled and eager_only):
                self._add(Step(f"t{len(self.steps)}", fn, args, kwargs, pick))
        used = {r for s in self.steps for r in references((s.args, s.kwargs))}
        self.inputs[before:] = [i for i in self.inputs[before:] if i.name in used]
        for name in {n for n in self.env if n.startswith("x")} - leaves - used:
            del self.env[name]

    def _add(self, step: Step) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = step.run(self.env)
            if not acceptable(value) or (step.writes and not self._differentiable()):
                raise ValueError
        except Exception:
            if step.writes:
                self._replay()
            return
        self.steps.append(step)
        self.env[step.name] = value

    def _differentiable(self) -> bool:
        """Return whether backward still works after a write; torch refuses it if the old value was saved."""
        outs = [t for t in self.env.values() if t.requires_grad]
        leaves = [t for n, t in self.env.items() if n.startswith("x") and t.requires_grad]
        if not all(acceptable(t) for t in outs):
            return False
        torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs], retain_graph=True, allow_unused=True)
        return True

    def _replay(self) -> None:
        """Compute all values again, after a write that one device refuses or that was rejected."""
        program = Program(self.mesh, tuple(self.inputs), tuple(self.steps))
        leaves = program.leaves()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = program.run(leaves)
        order = list(self.env)
        new = dict(zip((x.name for x in self.inputs), leaves, strict=True))
        new |= dict(zip((s.name for s in self.steps), values, strict=True))
        self.env = {name: new[name] for name in order if name in new}


def references(value: Any) -> list[str]:
    """Return the names that nested arguments refer to."""
    if isinstance(value, Ref):
        return [value.name]
    if isinstance(value, dict):
        value = list(value.values())
    return [name for v in value for name in references(v)] if isinstance(value, (list, tuple)) else []


def acceptable(value: Any) -> bool:
    """Return whether a value is small in size and magnitude, and finite."""
    if not isinstance(value, torch.Tensor) or value.ndim > MAX_DIMS or value.numel() > MAX_NUMEL:
        return False
    if value.dtype == torch.bool:
        return True
    return bool(torch.isfinite(value).all()) and (not value.numel() or value.detach().abs().max().item() < MAX_VALUE)


def _broadcasts(a: Any, b: Any) -> bool:
    try:
        return math.prod(torch.broadcast_shapes(a, b)) <= MAX_NUMEL
    except RuntimeError:
        return False


@dataclass
class Reference:
    """Hold the values and input gradients of one device, and the accepted error of each."""

    values: list[torch.Tensor]
    value_errors: list[float]
    gradients: list[torch.Tensor | None]
    gradient_errors: list[float]


def seeds(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the fixed output gradients of a program's values."""
    return [torch.cos(torch.arange(v.numel(), dtype=torch.float64) + 1).view(v.shape).to(v.dtype) for v in values]


def run_plain(program: Program, perturb: float = 0.0) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Run a program on one device; return values and input gradients."""
    leaves = program.leaves()
    if perturb:
        generator = torch.Generator().manual_seed(7)
        for leaf in leaves:
            if leaf.requires_grad:
                noise = torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator)
                leaf.data.mul_(1 + perturb * noise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = program.run(leaves)
        outs = [v for v in values if v.requires_grad]
        if outs:
            torch.autograd.backward(outs, seeds(outs))
    return [v.detach() for v in values], [leaf.grad for leaf in leaves]


def reference(program: Program) -> Reference | None:
    """Run a program on one device, twice; None where rounding decides the result.

    The second run has inputs that differ by 1e-12. A value or gradient may differ from one device by what that changes:
    a hundred times more than rounding does. A program in which it changes a digit that matters is ill-conditioned.
    """
    values, gradients = run_plain(program)
    others, other_gradients = run_plain(program, PERTURBATION)
    found = Reference(values, [], gradients, [])
    for ours, theirs, errors in (
        (values, others, found.value_errors),
        (gradients, other_gradients, found.gradient_errors),
    ):
        for a, b in zip(ours, theirs, strict=True):
            if a is None or b is None or a.dtype == torch.bool or not a.numel():
                if a is not None and b is not None and not torch.equal(a, b):
                    return None
                errors.append(0.0)
                continue
            if a.shape != b.shape or not torch.isfinite(a).all() or not torch.isfinite(b).all():
                return None
            scale, change = 1 + a.abs().max().item(), (a - b).abs().max().item()
            if change > 1e-6 * scale:
                return None
            errors.append(1e-10 * scale + change)
    return found


@st.composite
def programs(draw, compiled: bool = False, min_steps: int = 5, max_steps: int = 20) -> Program:
    """Draw a program that one device runs, with gradients that rounding does not decide."""
    mesh = draw(st.sampled_from(MESHES))
    g = Draw(draw, mesh, compiled)
    for _ in range(draw(st.integers(1, 2))):
        ndim = draw(st.sampled_from([4, 3, 2, 1, 5]))
        g.input(tuple(draw(st.integers(1, 7 if ndim < 5 else 3)) for _ in range(ndim)), plain=False)
    size = draw(st.integers(1, 60))  # shrinks below `min_steps`
    wanted = size if size < min_steps else min_steps + size % (max_steps - min_steps + 1)
    for _ in range(3 * wanted):
        if len(g.steps) == wanted:
            break
        g.try_step()
    assume(g.steps)
    used = {r for s in g.steps for r in references((s.args, s.kwargs))}
    return Program(mesh, tuple(x for x in g.inputs if x.name in used), tuple(g.steps), compiled)
