"""Check a case in inference mode, where tensors count no writes, and again afterwards with what was cached there."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardfield import runtime
from shardfield.comm.consensus import gather_texts

from .cases import Case
from .compare import any_rank, describe_mismatch, flatten, to_full_tensor
from .draw import Operands, draw_operands, world_mesh
from .run import check_case, run_plain, run_sharded


def check_inference_mode(case: Case, mesh_shape: tuple[int, ...], layout_indices: Sequence[int]) -> list[str]:
    """Check a case on all ranks of the world and return this rank's failures.

    Operands are made inside inference mode for odd indices, else outside, as fields that a loader returns. Plans are
    made in inference mode; with autograd they must serve too, as for a model that is evaluated before it is trained.
    """
    if not case.runs:
        return []
    failures: list[str] = []
    for index in layout_indices:
        runtime.active.plans.drop(lambda key: True)
        rng = random.Random(f"{case.name}|{mesh_shape}|{index}|0")
        failures += _check(draw_operands(case, world_mesh(mesh_shape), rng, index), bool(index % 2))
        failures += [f"after inference mode: {failure}" for failure in check_case(case, mesh_shape, 0, None, [index])]
    return failures


def _check(operands: Operands, made_inside: bool) -> list[str]:
    case, label = operands.case, f"inference mode: {operands.label}"
    with torch.inference_mode(made_inside):
        plain_inputs, inputs = operands.plain(), operands.sharded()
    with torch.inference_mode():
        plain = run_plain(case, plain_inputs)
        if plain.error is not None:  # the row needs gradients
            return []
        got = run_sharded(case, inputs)
        names = gather_texts("" if got.error is None else type(got.error).__name__, dist.group.WORLD)
        if len(set(names)) > 1:
            return [f"{label}: ranks differ, they raised {[n or 'nothing' for n in names]}\n{got.traceback}"]
        if got.error is not None:
            refused = case.may_refuse and names[0] == "ShardingError"
            return [] if refused else [f"{label}: raised {type(got.error).__name__}: {got.error}\n{got.traceback}"]
        expected, found = flatten(plain.value), flatten(got.value)
        if len(expected) != len(found):
            return [f"{label}: {len(found)} results, should be {len(expected)}"]
        failures = []
        for i, (want, value) in enumerate(zip(expected, found, strict=True)):
            why = describe_mismatch(to_full_tensor(value), want, case.tolerance)
            if any_rank(why is not None):
                failures.append(f"{label}: result {i}: {why}")
    return failures
