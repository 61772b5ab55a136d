"""Run a program on the ranks, eagerly and compiled, and compare it with one device."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch

import shardfield
from shardfield import ShardingError, ShardTensor
from shardfield.dispatch.registry import run_backward
from shardfield.testing import RanksFailed, run_on_ranks
from shardfield.virtual.scheduler import Aborted
from tests.harness import describe_mismatch, to_full_tensor
from tests.harness.virtual import VirtualRanks

from .generate import Reference, reference, seeds
from .program import Program

UNTRACED = "ran eagerly: it cannot be traced"


@dataclass
class Verdict:
    """Hold the outcome of a program: "right", "refused", "wrong", "error", "hang" or "died", and why."""

    kind: str
    why: str = ""


def judge(program: Program, timeout: float = 60.0, virtual: VirtualRanks | None = None) -> Verdict:
    """Run a program on its ranks and return the verdict over all ranks and modes. Virtual ranks run it eagerly."""
    modes = ("eager", "compiled") if program.compiled and virtual is None else ("eager",)
    expected = reference(program)
    if expected is None:
        return Verdict("ill-conditioned")
    try:
        if virtual is not None:
            found = virtual.run(program.ranks, run_modes, program, expected, modes)
        else:
            found = run_on_ranks(run_modes, program.ranks, program, expected, modes, timeout=timeout)
    except Aborted as blocked:
        return Verdict("hang", str(blocked))
    except RanksFailed as failed:
        kinds = {error.kind for error in failed.errors.values()}
        return Verdict("hang" if "stuck" in kinds else "died" if "died" in kinds else "error", str(failed))
    except Exception as error:
        if virtual is None:
            raise
        return Verdict("error", f"{type(error).__name__}: {error}")
    for mode in range(len(found[0])):
        kinds = [verdicts[mode].kind for verdicts in found]
        bad = next((v[mode] for v in found if v[mode].kind == "wrong"), None)
        if bad is not None:
            return Verdict(bad.kind, f"{modes[mode]}, ranks {kinds}: {bad.why}")
        if len(set(kinds)) > 1:
            return Verdict("wrong", f"{modes[mode]}: ranks disagree: {kinds}")
    return found[0][-1]


def run_modes(program: Program, expected: Reference, modes: tuple[str, ...]) -> list[Verdict]:
    """Run a program on a rank in each mode; a program that is refused eagerly is not compiled."""
    found: list[Verdict] = []
    logging.disable(logging.ERROR)  # torch logs what cannot be traced
    for mode in modes:
        found.append(run_sharded(program, expected, mode == "compiled"))
        if found[-1].kind != "right":
            break
    return found


def run_sharded(program: Program, expected: Reference, compiled: bool) -> Verdict:
    """Run a program on ShardTensors; compare values and gradients. Any error but a refusal is raised."""
    try:
        leaves = program.sharded_leaves()
        run: Any = program.run
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gathers, and programs that cannot be traced
            if compiled:
                run = shardfield.compile(program.run, backend="aot_eager", fullgraph=False)
            values = run(leaves)
            outs = [v for v in values if v.requires_grad]
            if outs:
                run_backward(outs, seeds(outs), None, False, None)
        verdict = compare(program, expected, values, leaves)
        if compiled and verdict.kind == "right" and not any(run._programs.values()):
            verdict.why = UNTRACED
        return verdict
    except ShardingError as error:
        return Verdict("refused", f"{_first_line(error)}")


def compare(program: Program, expected: Reference, values: list[Any], leaves: list[Any]) -> Verdict:
    """Compare values and gradients with those of one device; every rank gathers all of them."""
    wrong = []
    for step, got, want, error in zip(program.steps, values, expected.values, expected.value_errors, strict=True):
        if why := _mismatch(got, want, error):
            wrong.append(f"{step}: {why}")
    for x, leaf, want, error in zip(program.inputs, leaves, expected.gradients, expected.gradient_errors, strict=True):
        got = leaf.grad
        if want is None or got is None:
            # torch leaves out a gradient that is zero by construction; ours may be computed, as zeros
            other = to_full_tensor(got) if want is None else want
            if other is not None and other.numel() and other.abs().max() > 0:
                wrong.append(f"gradient of {x.name} is {'missing' if got is None else 'not zero'}")
        elif why := _mismatch(got, want, error):
            wrong.append(f"gradient of {x.name}: {why}")
    return Verdict("wrong", "\n".join(wrong)) if wrong else Verdict("right")


def _mismatch(got: Any, want: torch.Tensor, error: float) -> str | None:
    local = ""
    if isinstance(got, ShardTensor) and got._local_tensor.shape != got._layout.local_shape:
        local = f"holds {tuple(got._local_tensor.shape)}, its layout has local shape {got._layout.local_shape}"
    full = to_full_tensor(got).detach() if not local else None
    if full is None:
        return local
    if full.shape == want.shape and full.dtype == want.dtype and (want.is_floating_point() or want.is_complex()):
        if not want.numel() or (full - want).abs().max().item() <= error:
            return None
    return describe_mismatch(full, want, 0.0)


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:300]
