"""Check a case in bf16 and under autocast: dtypes of results as on one device, errors no larger than twice its errors.

The call runs three times on equal values: on one device in fp64, on one device in low precision, and on ShardTensors in
low precision. Errors are distances from the fp64 result, relative to its largest value. Shards have shapes that one
device rarely has (sizes 0, 1 and 2), for which torch's low-precision kernels may differ or be wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardfield import ShardingError
from shardfield.comm.consensus import gather_texts
from shardfield.dispatch.registry import run_backward

from .cases import Case
from .compare import Outcome, any_rank, flatten, to_full_tensor
from .draw import DEVICE, Operands, draw_operands, world_mesh
from .run import run_plain, run_sharded

# mode -> the dtype of inputs, and the one of autocast if it is enabled
MODES: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "bf16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
    "autocast of bf16": (torch.bfloat16, torch.bfloat16),  # functions that autocast runs in fp32 return float32
}
OTHER_HALF = "autocast to fp16 of bf16"  # one device refuses calls that join tensors, which sharded calls may accept
# Errors below this many roundings of a bf16 value are accepted. One device rounds a result once; partial sums of
# several ranks are rounded on each rank and once more when they are added.
FLOOR = 3 * torch.finfo(torch.bfloat16).eps


def check_precision(case: Case, mesh_shape: tuple[int, ...], mode: str, layout_indices: Sequence[int]) -> list[str]:
    """Check a case in low precision on all ranks of the world and return this rank's failures."""
    dtype, autocast = (torch.bfloat16, torch.float16) if mode == OTHER_HALF else MODES[mode]
    if not case.runs or (dtype == torch.bfloat16 and any(t.dtype.is_complex for t in case.tensors)):
        return []
    # The partial sums of a bf16 value are rounded themselves, so that a Partial operand would be another value.
    drawn = dataclasses.replace(case, try_partial=False)
    drawn.name = case.name
    failures: list[str] = []
    for index in layout_indices:
        rng = random.Random(f"{case.name}|{mesh_shape}|{index}|0")
        operands = _with_dtype(draw_operands(drawn, world_mesh(mesh_shape), rng, index), dtype)
        failures += _check(operands, f"{mode}: {operands.label}", autocast)
    return failures


def _check(operands: Operands, label: str, autocast: torch.dtype | None) -> list[str]:
    case = operands.case

    def run(call: Callable, inputs: list[Any]) -> Outcome:
        torch.manual_seed(0)
        with torch.autocast(DEVICE, autocast) if autocast else contextlib.nullcontext():
            return call(case, inputs)

    plain = run(run_plain, operands.plain())
    got = run(run_sharded, operands.sharded())
    names = gather_texts("" if got.error is None else type(got.error).__name__, dist.group.WORLD)
    if len(set(names)) > 1:
        return [f"{label}: ranks differ, they raised {[n or 'nothing' for n in names]}\n{got.traceback}"]
    if plain.error is not None or got.error is not None:
        if type(plain.error) is type(got.error) or (case.may_refuse and isinstance(got.error, ShardingError)):
            return []
        if got.error is None and autocast is torch.float16:
            return []
        return [f"{label}: raised {got.error!r}, one device raised {plain.error!r}\n{got.traceback}"]
    wide = _with_dtype(operands, torch.float64)  # the same rounded values
    exact = run_plain(wide.case, wide.plain())
    outcomes = (got, plain, plain if exact.error is not None else exact)
    gots, plains, exacts = (flatten(x.value) for x in outcomes)
    if not len(gots) == len(plains) == len(exacts):
        return [f"{label}: {len(gots)} results, should be {len(plains)}"]
    failures = _compare(f"{label}: result", gots, plains, exacts)
    if any_rank(bool(failures)):
        return failures
    chosen = [i for i, p in enumerate(plains) if isinstance(p, torch.Tensor) and p.requires_grad]
    if not chosen or exact.error is not None or not all(exacts[i].requires_grad for i in chosen):
        return []
    return _compare_gradients(label, outcomes, [[x[i] for i in chosen] for x in (gots, plains, exacts)])


def _compare_gradients(label: str, outcomes: Sequence[Outcome], results: Sequence[list]) -> list[str]:
    gots, plains, exacts = results
    generator = torch.Generator().manual_seed(99)
    seeds = [torch.randn(p.shape, generator=generator).to(p.dtype).to(DEVICE) for p in plains]
    errors = []
    for backward in (
        lambda: torch.autograd.backward(plains, seeds),
        lambda: run_backward(gots, seeds, None, False, None),
    ):
        try:
            backward()
            errors.append("")
        except RuntimeError as error:
            errors.append(type(error).__name__)
    if any_rank(any(errors)):  # a kernel that one device lacks is missing on every rank
        return [] if errors[0] == errors[1] else [f"{label}: backward raised {errors[1]!r}, one device {errors[0]!r}"]
    torch.autograd.backward(exacts, [s.to(e.dtype) for s, e in zip(seeds, exacts, strict=True)])
    return _compare(f"{label}: gradient of input", *([t.grad for t in x.inputs] for x in outcomes))


def _with_dtype(operands: Operands, dtype: torch.dtype) -> Operands:
    """Return the same draw with the values and the constants of the case in `dtype`, but for those in float16."""

    def cast(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(cast, value))
        if isinstance(value, dict):
            return {k: cast(v) for k, v in value.items()}
        if not isinstance(value, torch.Tensor) or value.dtype == torch.float16:
            return value
        if value.is_complex() and dtype != torch.bfloat16:
            return value.to(dtype.to_complex())
        return value.to(dtype) if value.is_floating_point() else value

    case = dataclasses.replace(operands.case, args=cast(operands.case.args), kwargs=cast(operands.case.kwargs))
    case.name = operands.case.name
    return dataclasses.replace(operands, case=case, values=cast(operands.values))


def _compare(label: str, gots: list, plains: list, exacts: list) -> list[str]:
    triples = zip([to_full_tensor(g) for g in gots], plains, exacts, strict=True)
    found = [(i, _describe(*triple)) for i, triple in enumerate(triples)]
    return [f"{label} {i}: {why}" for i, why in found if why]


def _describe(got: Any, plain: Any, exact: Any) -> str | None:
    """Return why a value in low precision is worse than that of one device, or None."""
    if isinstance(plain, float) and isinstance(got, float):
        return _describe(*(torch.tensor(float(x)) for x in (got, plain, exact)))
    if not isinstance(plain, torch.Tensor):
        return None if got == plain else f"{got!r} is not {plain!r}"
    if not isinstance(got, torch.Tensor):
        return f"{type(got).__name__} instead of a tensor"
    if got.shape != plain.shape or got.dtype != plain.dtype:
        return f"shape/dtype {tuple(got.shape)} {got.dtype}, should be {tuple(plain.shape)} {plain.dtype}"
    if not plain.numel():
        return None
    if not (plain.is_floating_point() or plain.is_complex()):
        shown = f"{got.flatten()[:8].tolist()} should be {plain.flatten()[:8].tolist()}"
        return None if torch.equal(got, plain) else f"values differ: {shown}"
    wide = torch.complex128 if plain.is_complex() else torch.float64
    got, plain = got.detach().to(wide), plain.detach().to(wide)
    exact = exact.detach().to(wide) if isinstance(exact, torch.Tensor) and exact.shape == plain.shape else plain
    ours, theirs = _error(got, exact), _error(plain, exact)
    if ours <= 2 * theirs + FLOOR or _error(got, plain) <= FLOOR:
        return None
    shown = f"{got.flatten()[:6].tolist()} vs {plain.flatten()[:6].tolist()}"
    return f"error {ours:.3g}, one device's is {theirs:.3g}: {shown}"


def _error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference relative to the largest finite reference; infinity if special values differ."""
    finite = torch.isfinite(reference)
    equal = torch.where(finite, torch.isfinite(value), (value == reference) | (value.isnan() & reference.isnan()))
    if not bool(equal.all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    scale = reference[finite].abs().max().item()
    # A reference of zero but for rounding, as the gradient of a constant function, has no scale of its own.
    return (value - reference)[finite].abs().max().item() / (scale if scale > 1e-9 else 1.0)
