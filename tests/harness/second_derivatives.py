"""Check the second derivatives of a case: the gradient of a random functional of its first gradients.

The first gradients are functions of the inputs and of the output gradients, and are differentiated with respect to
both. A rule that is linear in its input has a second derivative with respect to the output gradient: that of its
adjoint.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardfield.comm.consensus import gather_texts

from .cases import Case
from .compare import any_rank, describe_mismatch, flatten, to_full_tensor
from .draw import DEVICE, Operands, draw_operands, world_mesh
from .run import run_plain, run_sharded

STEP, ACCURACY = 1e-6, 1e-4  # of central differences


def check_second_derivatives(
    case: Case, mesh_shape: tuple[int, ...], layout_indices: Sequence[int], may_refuse: bool = False
) -> list[str]:
    """Check the second derivatives of a case on all ranks of the world and return this rank's failures.

    may_refuse: an error of the second backward, on all ranks, is accepted.
    """
    if not case.runs or not case.grad:
        return []
    failures: list[str] = []
    for index in layout_indices:
        rng = random.Random(f"{case.name}|{mesh_shape}|{index}|2")
        failures += _check(draw_operands(case, world_mesh(mesh_shape), rng, index), may_refuse)
    return failures


def _check(operands: Operands, may_refuse: bool) -> list[str]:
    case, label = operands.case, operands.label
    plain, got = run_plain(case, operands.plain()), run_sharded(case, operands.sharded())
    if any_rank(plain.error is not None or got.error is not None):
        return []  # errors and first derivatives are the subject of another check
    results = [i for i, v in enumerate(flatten(plain.value)) if isinstance(v, torch.Tensor) and v.requires_grad]
    if not results:
        return []
    functional = Functional(operands, results)
    expected, plain_error = functional.differentiate(plain.inputs, plain.value)
    found, error = functional.differentiate(got.inputs, got.value)
    names = gather_texts(type(error).__name__ if error is not None else "", dist.group.WORLD)
    if len(set(names)) > 1:
        return [f"{label}: ranks differ in second derivatives, they raised {[n or 'nothing' for n in names]}: {error}"]
    if plain_error is not None:
        return []  # torch has no second derivative here; ours may have one
    if error is not None and may_refuse:
        return []
    if error is not None:
        return [f"{label}: the second derivative raised {error!r}"]
    failures = []
    for i, (g, e) in enumerate(zip(found, expected, strict=True)):
        if any_rank(g is None) and any_rank(g is not None):
            failures.append(f"{label}: second derivative {i} is None on some ranks: {g is None} on this one")
            continue
        why = _mismatch(to_full_tensor(g), e, 100 * case.tolerance)
        if any_rank(why is not None) and functional.agrees(i, to_full_tensor(g)):
            continue  # torch's own is wrong, and ours is not
        if why:
            failures.append(f"{label}: second derivative {i}: {why}")
    return failures


def _mismatch(got: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float) -> str | None:
    """Return why two global derivatives differ, or None. A derivative of None is zero."""
    if got is None or expected is None:
        one = got if expected is None else expected
        return None if one is None or not one.any() else f"{got} should be {expected}"
    singular = expected.isnan()  # one device has no derivative here; a rule with another formula may have one
    got, expected = got.to(expected.device), expected.masked_fill(singular, 0)
    return describe_mismatch(got.masked_fill(singular, 0) if got.shape == singular.shape else got, expected, tolerance)


@dataclass(frozen=True)
class Functional:
    """Hold a random linear functional of the first gradients, for one draw of a case. It is the same on all ranks."""

    operands: Operands
    results: list[int]

    def first(self, inputs: list[Any], value: Any, output_grads: list[torch.Tensor] | None = None) -> tuple[list, ...]:
        """Return the first gradients that require grad, their weights, and the tensors that they depend on."""
        generator = torch.Generator().manual_seed(99)

        def draw(like: Any) -> torch.Tensor:
            return torch.randn(tuple(like.shape), dtype=like.dtype, generator=generator).to(DEVICE)

        outputs = [flatten(value)[i] for i in self.results]
        drawn = [draw(v).requires_grad_() for v in outputs]
        output_grads = drawn if output_grads is None else output_grads
        inputs = [x for x in inputs if x.requires_grad]
        grads = torch.autograd.grad(outputs, inputs, output_grads, create_graph=True, allow_unused=True)
        weights = [draw(x) for x in inputs]
        chosen = [(g, w) for g, w in zip(grads, weights, strict=True) if g is not None and g.requires_grad]
        return [g for g, _ in chosen], [w for _, w in chosen], [*inputs, *output_grads]

    def differentiate(self, inputs: list[Any], value: Any) -> tuple[list[Any], Exception | None]:
        """Return the derivatives with respect to the inputs and the output gradients, or the error."""
        try:
            grads, weights, variables = self.first(inputs, value)
            if not grads:
                return [None] * len(variables), None
            return list(torch.autograd.grad(grads, variables, weights, allow_unused=True)), None
        except Exception as error:
            return [], error

    def agrees(self, index: int, found: torch.Tensor | None) -> bool:
        """Return whether a derivative agrees with central differences of the functional on one device."""
        plain = run_plain(self.operands.case, self.operands.plain())
        variable = self.first(plain.inputs, plain.value)[2][index]
        found = torch.zeros_like(variable) if found is None else found
        if variable.dtype is not torch.float64:
            return False
        numeric = torch.zeros_like(variable)
        for at in range(variable.numel()):
            ends = [self.at(index, at, step) for step in (STEP, -STEP)]
            numeric.view(-1)[at] = (ends[0] - ends[1]) / (2 * STEP)
        return torch.allclose(found, numeric, rtol=ACCURACY, atol=ACCURACY * float(numeric.abs().max() + 1))

    def at(self, index: int, element: int, step: float) -> float:
        """Return the functional on one device, with one element of one variable moved by `step`."""
        inputs = self.operands.plain()
        wanted = [x for x in inputs if x.requires_grad]
        if index < len(wanted):
            wanted[index].data.view(-1)[element] += step
        plain = run_plain(self.operands.case, inputs)
        grads, weights, variables = self.first(plain.inputs, plain.value)
        if index >= len(wanted):
            output_grads = [g.detach().clone() for g in variables[len(wanted) :]]
            output_grads[index - len(wanted)].view(-1)[element] += step
            plain = run_plain(self.operands.case, inputs)
            grads, weights, _ = self.first(plain.inputs, plain.value, [g.requires_grad_() for g in output_grads])
        return sum(float((g.detach() * w).sum().real) for g, w in zip(grads, weights, strict=True))
