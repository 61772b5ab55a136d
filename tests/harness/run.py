"""Run a case on one device and on ShardTensors, and judge the errors of both."""

from __future__ import annotations

import contextlib
import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardfield import ShardingError, runtime
from shardfield.comm.consensus import gather_texts

from .cases import Case, fold
from .compare import Outcome, compare
from .draw import DEVICE, MESHES, Operands, draw_operands, world_mesh


def check_case(
    case: Case,
    mesh_shape: tuple[int, ...],
    seed: int = 0,
    transform: Callable | None = None,
    layout_indices: Sequence[int] | None = None,
) -> list[str]:
    """Check a case on all ranks of the world and return this rank's failures.

    `transform` wraps the function that is called on ShardTensors, e.g. by compiling it. `layout_indices` selects
    draws instead of the first `case.layouts`: even ones may shard several operands, odd ones shard a single operand.
    """
    mesh = world_mesh(mesh_shape)
    failures: list[str] = []
    with contextlib.nullcontext() if case.no_messages else scatter_small_partials():
        for index in range(case.layouts) if layout_indices is None else layout_indices:
            rng = random.Random(f"{case.name}|{mesh_shape}|{index}|{seed}")
            failures += _check_operands(case, draw_operands(case, mesh, rng, index), transform)
    return failures


@contextlib.contextmanager
def scatter_small_partials(elements: int = 16):
    """Reduce-scatter Partial values of so few elements inside the body, so that small rows run what large fields do."""
    runtime.active.plans.drop(lambda key: True)  # plans depend on the limit
    try:
        with runtime.observing(min_scattered=elements):
            yield
    finally:
        runtime.active.plans.drop(lambda key: True)


def check_declared_error(case: Case, plain: Outcome) -> str | None:
    """Return why the outcome on plain tensors is not what the case declares, or None."""
    if case.refuses:
        return None
    if plain.error is None:
        return None if case.raises is None else f"declares {case.raises.type.__name__}, but one device runs it"
    if case.raises is not None:
        return case.raises.mismatch(plain.error)
    text = f"one device raises {type(plain.error).__name__}: {fold(plain.error)}"
    return f"{text}\nCorrect the row, or declare the error with raises(...)"


def run_plain(case: Case, inputs: list[torch.Tensor], device: str = DEVICE) -> Outcome:
    """Call the case on plain tensors."""
    try:
        with torch.device(device) if device != DEVICE else contextlib.nullcontext():
            return Outcome(inputs, case.call(inputs, device))
    except Exception as error:
        return Outcome(inputs, error=error)


def run_sharded(case: Case, inputs: list[Any], transform: Callable | None = None) -> Outcome:
    """Call the case on ShardTensors in strict mode and count its messages."""
    sent = [0]
    call = partial(case.call, device=DEVICE)

    def meter(kind: str, messages: int, nbytes: int) -> None:
        sent[0] += messages

    runtime.active.meter = meter
    try:
        with ignore_gather_warnings() if case.may_gather else no_gathers(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Triggered internally")  # torch's own kernels warn on one device too
            warnings.filterwarnings(
                "ignore", "shardfield: .* (lost sharding|unbalanced)"
            )  # tests/dispatch/test_lost_sharding.py
            value = call(inputs) if transform is None else transform(call)(inputs)
            return Outcome(inputs, value, messages=sent[0])
    except Exception as error:
        return Outcome(inputs, error=error, traceback=traceback.format_exc(limit=-6))
    finally:
        runtime.active.meter = None


def no_gathers():
    """Refuse gathers, as `strict()` does, and not lost shardings."""
    return runtime.observing(strict_depth=1)


@contextlib.contextmanager
def ignore_gather_warnings():
    """Ignore the warning of the fallback to a gather, for ops that have no rule."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "shardfield: no rule")
        yield


def _check_operands(case: Case, operands: Operands, transform: Callable | None) -> list[str]:
    if DEVICE != "cpu" and case.device_asserts:
        return []
    if case.refuses:
        return _judge_refusal(case, operands, run_sharded(case, operands.sharded(), transform))
    cpu = run_plain(case, operands.plain("cpu"), "cpu")
    if not _lacks_cpu_kernel(cpu) and (why := check_declared_error(case, cpu)):
        return [f"{operands.label}: {why}"]
    expected, also = _reference(case, operands, cpu)
    got = run_sharded(case, operands.sharded(), transform)
    if DEVICE != "cpu" and cpu.error is not None and type(got.error) is not type(cpu.error):
        expected = run_plain(case, operands.plain())  # the device may raise another type than the CPU, or nothing
    failures, finished = _judge_errors(case, operands.label, expected, got, also, transform is not None)
    if failures or finished:
        return failures
    if expected.error is not None:  # the device lacks the kernel: the CPU's result is the reference
        assert also is not None
        expected, also = also, None
    single = isinstance(expected.value, torch.Tensor) and expected.value.numel() == 1
    if case.no_messages and got.messages > (max(map(len, MESHES)) if single else 0):
        failures = [f"{operands.label}: sent {got.messages} messages in forward, should send none"]
    return failures + compare(case, operands.label, expected, got, also)


def _reference(case: Case, operands: Operands, cpu: Outcome) -> tuple[Outcome, Outcome | None]:
    """Return the outcome on `DEVICE`, and the CPU's as well if that is another device and its call succeeded.

    The CPU runs first: a GPU kernel that reads a value out of bounds ends the process with an assert. If the CPU
    raises, torch is called on the GPU only if the CPU has no kernel for the call, or if the sharded call ends
    otherwise.
    """
    if DEVICE == "cpu" or (cpu.error is not None and not _lacks_cpu_kernel(cpu)):
        return cpu, None
    return run_plain(case, operands.plain()), None if cpu.error is not None else cpu


def _lacks_cpu_kernel(outcome: Outcome) -> bool:
    """Return whether a call failed because the CPU has no kernel for it, which a GPU may have."""
    if DEVICE == "cpu" or not isinstance(outcome.error, NotImplementedError):
        return False
    text = str(outcome.error)
    return "not implemented for" in text or "'CPU' backend" in text


def _judge_errors(
    case: Case, label: str, expected: Outcome, got: Outcome, also: Outcome | None, wrapped: bool
) -> tuple[list[str], bool]:
    """Return failures, and whether the check ends here, which is equal on all ranks."""
    names = gather_texts("" if got.error is None else type(got.error).__name__, dist.group.WORLD)
    if len(set(names)) > 1:
        return [f"{label}: ranks differ, they raised {[n or 'nothing' for n in names]}\n{got.traceback}"], True
    if expected.error is not None and wrapped and isinstance(expected.error, NotImplementedError):
        return [], True  # compiled code may support what no eager kernel does
    if got.error is None:
        if expected.error is not None and also is None:
            return [f"{label}: one device raises {expected.error!r}, this did not"], True
        return [], False
    if case.may_refuse and isinstance(got.error, ShardingError):
        return [], True
    raised = f"{label}: raised {type(got.error).__name__}: {got.error}\n{got.traceback}"
    if expected.error is None:
        return [raised], True
    # torch.compile wraps errors in its own types
    if not wrapped and type(got.error) is not type(expected.error):
        return [f"{raised}\none device raised {expected.error!r}"], True
    if case.raises is not None and case.raises.ours not in fold(got.error):
        return [f"{raised}\ndeclared text {case.raises.ours!r}"], True
    return [], True


def _judge_refusal(case: Case, operands: Operands, got: Outcome) -> list[str]:
    """Return failures of a case that must be refused on every rank."""
    names = gather_texts("" if got.error is None else type(got.error).__name__, dist.group.WORLD)
    if set(names) != {"ShardingError"} or case.refuses not in fold(got.error or Exception()):
        return [f"{operands.label}: should refuse with {case.refuses!r}, ranks raised {names}: {got.error}"]
    return []
