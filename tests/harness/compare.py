"""Compare the results and gradients of a sharded call with those of one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardfield import ShardTensor
from shardfield.comm import consensus
from shardfield.dispatch.registry import run_backward

from .cases import Case
from .draw import DEVICE


@dataclass(frozen=True)
class Outcome:
    """Hold the outcome of a call: its value or error, the tensors it was called with, and the number of messages."""

    inputs: list[Any]
    value: Any = None
    error: Exception | None = None
    traceback: str = ""
    messages: int = 0


def to_full_tensor(value: Any) -> Any:
    """Gather a ShardTensor; return anything else as it is."""
    return value.full_tensor() if isinstance(value, ShardTensor) else value


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank of the world. If one rank stopped alone, the others would hang."""
    return consensus.any_rank([flag], [dist.group.WORLD])[0]


def describe_mismatch(got: Any, expected: Any, tolerance: float) -> str | None:
    """Return why two global values differ, or None."""
    if not isinstance(expected, torch.Tensor):
        return None if got == expected or (got != got and expected != expected) else f"{got!r} is not {expected!r}"
    if not isinstance(got, torch.Tensor):
        return f"{type(got).__name__} instead of a tensor"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"shape/dtype {tuple(got.shape)} {got.dtype}, should be {tuple(expected.shape)} {expected.dtype}"
    if expected.dtype == torch.complex32:  # torch.equal has no kernel for it
        got, expected = got.to(torch.complex64), expected.to(torch.complex64)
    if expected.numel() == 0 or torch.equal(got, expected):
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        return f"values differ: {got.flatten()[:8].tolist()} should be {expected.flatten()[:8].tolist()}"
    if torch.allclose(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        return None
    by = (got - expected).abs().max().item()
    return f"values differ by {by:.3g}: {got.flatten()[:6].tolist()} vs {expected.flatten()[:6].tolist()}"


def flatten(out: Any) -> list[Any]:
    """Flatten nested lists and tuples of results."""
    return [x for o in out for x in flatten(o)] if isinstance(out, (list, tuple)) else [out]


def _differ(case: Case, got: Any, expected: Any, also: Any) -> str | None:
    """Return why `got` differs from the device's value `expected` and from the CPU's value `also` (None: no value)."""
    if isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor):
        got = got.to(expected.device)
    why = describe_mismatch(got, expected, case.tolerance)
    if why is None or also is None:
        return why
    got = got.cpu() if isinstance(got, torch.Tensor) else got
    return why if describe_mismatch(got, also, case.tolerance) else None


def compare(case: Case, label: str, expected: Outcome, got: Outcome, also: Outcome | None = None) -> list[str]:
    """Return the differences in values and gradients.

    `also` is the outcome on the CPU if `expected` is that of a GPU. If torch's two kernels differ, either is accepted.
    """
    refs, gots = flatten(expected.value), flatten(got.value)
    if len(refs) != len(gots):
        return [f"{label}: {len(gots)} results, should be {len(refs)}"]
    others = [None] * len(refs) if also is None else flatten(also.value)
    failures = _compare_values(case, label, refs, gots, others)
    if any_rank(bool(failures)):
        return failures
    return _compare_gradients(case, label, refs, gots, expected, got, also)


def _compare_values(case: Case, label: str, refs: list, gots: list, others: list) -> list[str]:
    out: list[str] = []
    for i, (r, g) in enumerate(zip(refs, gots, strict=True)):
        if isinstance(g, ShardTensor) and g._local_tensor.shape != g._layout.local_shape:
            held, local_shape = tuple(g._local_tensor.shape), g._layout.local_shape
            out.append(f"{label}: result {i} holds {held}, its layout has local shape {local_shape}")
        if any_rank(bool(out)):  # full_tensor would hang if one rank returned alone
            return out
        why = _differ(case, to_full_tensor(g), r, others[i])
        if why:
            out.append(f"{label}: result {i}: {why}")
        if isinstance(r, torch.Tensor) and isinstance(g, torch.Tensor) and r.requires_grad != g.requires_grad:
            out.append(f"{label}: result {i}: requires_grad is {g.requires_grad}, should be {r.requires_grad}")
    return out


def _compare_gradients(
    case: Case, label: str, refs: list, gots: list, expected: Outcome, got: Outcome, also: Outcome | None
) -> list[str]:
    pairs = [(r, g) for r, g in zip(refs, gots, strict=True) if isinstance(r, torch.Tensor) and r.requires_grad]
    if not pairs:
        return []
    generator = torch.Generator().manual_seed(99)
    seeds = [torch.randn(r.shape, dtype=r.dtype, generator=generator) for r, _ in pairs]
    others = _cpu_gradients(seeds, also)
    try:
        torch.autograd.backward([r for r, _ in pairs], [s.to(r.device) for s, (r, _) in zip(seeds, pairs, strict=True)])
        references = [r.grad for r in expected.inputs]
        missing_kernel = False
    except RuntimeError:  # the device has no kernel for this gradient: the CPU's is the reference
        if others is None:
            raise
        references, missing_kernel = others, True
    raised = False
    try:
        run_backward([g for _, g in pairs], [s.to(DEVICE) for s in seeds], None, False, None)
    except RuntimeError:  # the sharded backward may need the same missing kernel, on all ranks
        if not missing_kernel:
            raise
        raised = True
    if missing_kernel and any_rank(raised):
        return [] if raised else [f"{label}: another rank raised in backward, this one did not"]
    out = []
    for i, (r, g) in enumerate(zip(references, got.inputs, strict=True)):
        if r is None:
            if g.grad is not None and to_full_tensor(g.grad).abs().max() > 0:
                out.append(f"{label}: input {i} got a gradient, should have none")
        elif g.grad is None:
            out.append(f"{label}: input {i} got no gradient")
        elif why := _differ(case, to_full_tensor(g.grad), r, None if others is None else others[i]):
            out.append(f"{label}: gradient of input {i}: {why}")
    return out


def _cpu_gradients(seeds: list[torch.Tensor], also: Outcome | None) -> list[torch.Tensor | None] | None:
    """Return the gradients of the CPU's inputs; None without a CPU outcome or if its results differ in shape."""
    if also is None:
        return None
    results = [t for t in flatten(also.value) if isinstance(t, torch.Tensor) and t.requires_grad]
    if [t.shape for t in results] != [s.shape for s in seeds]:
        return None
    torch.autograd.backward(results, seeds)
    return [t.grad for t in also.inputs]
