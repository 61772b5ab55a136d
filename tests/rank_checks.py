"""Check derivatives of functions that run on several ranks at once.

`torch.autograd.gradcheck` perturbs one process's input and so never sees that rank 1's output depends on rank 0's
input. Here the function of all local inputs to all local outputs is checked: a perturbation happens on one rank (or
on all, for a replicated input) while every rank calls the function.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(value: Tensor) -> float:
    """Return the sum over ranks of the real part of a number."""
    value = (value.real if value.is_complex() else value).detach().double().clone()
    dist.all_reduce(value)
    return float(value)


def inner_product(a: Tensor, b: Tensor, replicated: bool = False) -> float:
    """Return Re <a, b> summed over ranks; a replicated pair counts once."""
    return sum_over_ranks((a.conj() * b).sum()) / (dist.get_world_size() if replicated else 1)


def random_like(tensor: Tensor, seed: int, same_on_all_ranks: bool = False) -> Tensor:
    """Return random numbers of a tensor's shape and dtype, the same on all ranks or different on each."""
    generator = torch.Generator().manual_seed(1000 * seed + (0 if same_on_all_ranks else 1 + dist.get_rank()))
    return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)


def assert_gradients(
    fn: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    replicated_input: bool = False,
    replicated_output: bool = False,
    linear: bool = True,
    seed: int = 0,
) -> None:
    """Check backward of `fn` against central differences in every element of every rank's input (float64, complex128).

    With a replicated input all ranks' copies are perturbed together and each gradient must be the full one; with a
    replicated output, each rank holds the same value and the full cotangent.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    x = x.detach().clone().requires_grad_()
    y = fn(x)
    v = random_like(y, seed + 7, same_on_all_ranks=replicated_output)
    (grad,) = torch.autograd.grad(y, x, v)
    assert grad.shape == x.shape and grad.dtype == x.dtype
    step = 1.0 if linear else 1e-6  # a linear function has no truncation error, so a large step has no rounding error

    counts: list[int | None] = [None] * world
    dist.all_gather_object(counts, x.numel())
    parts = (1.0, 1j) if x.is_complex() else (1.0,)
    for moved in range(1 if replicated_input else world):
        for i in range(counts[moved] or 0):
            for unit in parts:
                values = []
                for sign in (1, -1):
                    probe = x.detach().clone()
                    if replicated_input or rank == moved:
                        probe.view(-1)[i] += sign * step * unit
                    values.append(inner_product(v, fn(probe).detach(), replicated_output))
                numeric = (values[0] - values[1]) / (2 * step)
                here = grad.reshape(-1)[i] if replicated_input or rank == moved else grad.new_zeros(())
                analytic = sum_over_ranks(here * complex(unit).conjugate()) / (world if replicated_input else 1)
                tolerance = 1e-9 if linear else 1e-6
                assert abs(numeric - analytic) <= tolerance * max(1.0, abs(numeric)), (
                    f"element {i} of rank {moved}, direction {unit}: differences give {numeric}, backward {analytic}"
                )
    if replicated_input:
        first = grad.detach().clone()
        dist.broadcast(torch.view_as_real(first) if first.is_complex() else first, 0)
        assert torch.equal(first, grad.detach()), "the gradient of a replicated input differs between ranks"


def assert_second_order(fn: Callable[[Tensor], Tensor], x: Tensor, **replicated: bool) -> None:
    """Check the backward of the backward of `fn`."""
    x = x.detach().clone().requires_grad_()
    v = random_like(fn(x), 3, same_on_all_ranks=replicated.get("replicated_output", False))

    def gradient(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.requires_grad_()
            y = fn(x)
            # Cubic, so that the gradient depends on x; elementwise, so that no rank's values mix with another's.
            return torch.autograd.grad((y * y * y * v).sum(), x, create_graph=True)[0]

    swapped = {"replicated_input": replicated.get("replicated_input", False)}
    swapped["replicated_output"] = swapped["replicated_input"]
    assert_gradients(gradient, x, linear=False, **swapped)
