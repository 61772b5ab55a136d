"""One process of the benchmark of virtual ranks on a GPU: the largest field that trains in a given device memory.

python -m shardfield.bench.virtual_gpu --model unet3d --memory 8

The memory that this process may allocate on the device is limited, in GiB. Plain torch, plain torch that recomputes the
children of the model, and virtual ranks compute loss and gradients on fields of growing size. The peaks of two small
fields predict the largest one, which a run confirms. The largest field of plain torch is then computed on several
numbers of virtual ranks; `--profile` samples where the host is meanwhile. Each result is printed at once, as one line
of JSON. `--parts` chooses among the comparisons; with `--size` the largest field of plain torch is not searched for.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import ShardfieldError
from ..virtual import virtualize
from ..virtual.replica import blocks_of
from .models import token_mixer, unet
from .sampling import sampled

GIB = 1 << 30
USABLE = 0.6  # of the device memory beside the parameters: what the pages of virtual ranks may take
ATTEMPTS = 4
PARTS = ("same", "checkpointed", "enlarged")


class Problem(NamedTuple):
    """A model and its fields. `shape(n)`: of a field of size n, a multiple of `unit`; `dim` is sharded."""

    make: Callable[[], nn.Module]
    shape: Callable[[int], tuple[int, ...]]
    dim: int
    unit: int
    probes: tuple[int, int]
    power: int  # voxels grow with this power of the size
    ranks: int  # virtual ranks of the largest field
    dtype: torch.dtype = torch.float32


def fno() -> nn.Module:
    from neuralop.models import FNO

    torch.manual_seed(0)
    return FNO(n_modes=(16, 16, 16), in_channels=3, out_channels=3, hidden_channels=32, n_layers=4)


PROBLEMS = {
    "unet3d": Problem(lambda: unet(32, 3), lambda n: (1, 3, n, n, n), 2, 8, (64, 96), 3, 48),
    "fno3d": Problem(fno, lambda n: (1, 3, n, n, n), 2, 8, (64, 96), 3, 32),
    "vit": Problem(lambda: token_mixer(2048, 8), lambda n: (1, n, 2048), 1, 1024, (2048, 4096), 1, 16, torch.bfloat16),
}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


@contextlib.contextmanager
def recomputed(model: nn.Module) -> Iterator[None]:
    """Recompute the activations inside the children of a model in backward, with torch's checkpoint."""
    blocks = blocks_of(model)
    for block in blocks:
        forward = block.forward
        block.forward = lambda *a, forward=forward, **k: checkpoint(forward, *a, use_reentrant=False, **k)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


class Bench:
    """Steps of one model in a limited device memory."""

    def __init__(self, problem: Problem, memory: int):
        self.problem, self.memory = problem, memory
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total))
        self.model = problem.make().cuda()
        if problem.dtype is not torch.float32:  # complex weights would lose their imaginary part
            self.model.to(problem.dtype)
        self.parameters = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.budget = int(USABLE * (min(memory, torch.cuda.mem_get_info()[0]) - 2 * self.parameters))

    def fields(self, n: int, device: str) -> tuple[Tensor, Tensor]:
        """Return an input and a target."""
        shape, dim = self.problem.shape(n), self.problem.dim
        pattern = torch.sin(torch.arange(math.prod(shape[dim + 1 :]), device=device) * 1e-3).view(shape[dim + 1 :])
        rows = torch.cos(torch.arange(math.prod(shape[: dim + 1]), device=device)).view(*shape[: dim + 1])
        x = (rows.view(*rows.shape, *[1] * pattern.ndim) * pattern).to(self.problem.dtype)
        return x, 0.5 * x

    def voxels(self, n: int) -> int:
        return n**self.problem.power

    def size_of(self, voxels: float) -> int:
        """Return the largest size with at most so many voxels."""
        unit = self.problem.unit
        return max(unit, int(max(voxels, 1.0) ** (1 / self.problem.power) / unit + 1e-6) * unit)

    def measure(
        self, n: int, step: Callable[[Tensor, Tensor], Any], repeats: int = 2, device: str = "cuda"
    ) -> dict[str, Any] | None:
        """Return seconds and the peak of a step on a field of size n on a device; None if it does not fit."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = _allocator_counts({})
        seconds = []
        try:
            x, y = self.fields(n, device)
            for _ in range(repeats):
                self.model.zero_grad(set_to_none=True)
                torch.cuda.synchronize()
                start = time.perf_counter()
                loss = step(x, y)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
            peak = torch.cuda.max_memory_reserved()
            found = {"n": n, "voxels": self.voxels(n), "seconds": min(seconds), "peak": peak, "loss": float(loss)}
            return found | {"allocated": torch.cuda.max_memory_allocated(), **_allocator_counts(before)}
        except (RuntimeError, ShardfieldError) as error:
            if not _does_not_fit(error):
                raise
            why = " ".join(str(error).split())[:160]
            show(what="does not fit", n=n, why=why, allocated=torch.cuda.max_memory_allocated(), seconds=seconds)
            return None

    def plain(self, x: Tensor, y: Tensor) -> Tensor:
        return _plain(self.model, x, y)

    def recomputing(self, x: Tensor, y: Tensor) -> Tensor:
        with recomputed(self.model):
            return self.plain(x, y)

    def largest(self, step: Callable[[Tensor, Tensor], Any]) -> dict[str, Any]:
        """Return the figures of the largest field that fits: predicted from two small ones, confirmed by running."""
        small = [self.measure(n, step) for n in self.problem.probes]
        assert small[0] is not None and small[1] is not None
        per_voxel = (small[1]["peak"] - small[0]["peak"]) / (small[1]["voxels"] - small[0]["voxels"])
        rest = small[1]["peak"] - per_voxel * small[1]["voxels"]
        n, p = self.size_of((self.memory - rest) / per_voxel), self.problem.power
        best: dict[str, Any] = small[1]
        tried = set()
        for _ in range(ATTEMPTS):
            tried.add(n)
            found = self.measure(n, step, 1)
            best = found if found is not None and found["n"] > best["n"] else best
            n = n + self.problem.unit if found is not None else min(n - self.problem.unit, self.size_of(0.9 * n**p))
            if n in tried or n <= best["n"]:
                break
        again = self.measure(best["n"], step)
        return {**(again or best), "bytes_per_voxel": per_voxel}

    def virtual(self, n: int, ranks: int, repeats: int, large: bool) -> dict[str, Any] | None:
        """Return the figures of a step on virtual ranks; a large field is in host memory."""
        options: dict[str, Any] = {"memory": "recompute", "budget": self.budget} if large else {"memory": "auto"}
        with virtualize(loss_of, self.model, ranks, dim=self.problem.dim, **options) as step:
            found = self.measure(n, step, repeats, "cpu" if large else "cuda")
            if found is not None:
                found |= {"ranks": ranks, "recomputed": bool(step.recompute)}
                if step.world.pager is not None:
                    pager = step.world.pager
                    found |= {"moved": pager.moved_out / repeats, "pages": pager.peak, "host": pager.away_peak}
        return found


def _allocator_counts(before: dict[str, int]) -> dict[str, int]:
    """Return how often the allocator has asked the device for memory since `before`, given it back, and ran out."""
    stats = torch.cuda.memory_stats()
    names = ("num_device_alloc", "num_device_free", "num_alloc_retries")
    return {name: stats.get(name, 0) - before.get(name, 0) for name in names}


def _plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(model, x, y)
    loss.backward()
    return loss.detach()


def _does_not_fit(error: BaseException) -> bool:
    texts = [str(error), *(str(e) for e in getattr(error, "errors", {}).values())]
    signs = ("out of memory", "no host memory", "unable to find an engine", "alloc_failed")
    return any(sign in text.lower() for text in texts for sign in signs)


def show(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def same_size(bench: Bench, plain: dict[str, Any], ranks: Sequence[int], profile: bool) -> None:
    """Show the time of virtual ranks on the largest field of plain torch."""
    for count in ranks:
        with sampled(profile and count == ranks[-1]) as places:
            found = bench.virtual(plain["n"], count, 3, large=False)
        if found is not None:
            show(what="same size", ratio=found["seconds"] / plain["seconds"], **found)
        if places:
            show(what="profile", ranks=count, places=places.most_common(30))


def enlarged(bench: Bench, plain: dict[str, Any], ranks: int, times: float) -> None:
    """Show a field of `times` the voxels of plain torch, or the largest of the smaller ones that are tried."""
    n = bench.size_of(times * plain["voxels"] * 1.0001)
    if bench.voxels(n) < times * plain["voxels"]:
        n += bench.problem.unit
    for _ in range(ATTEMPTS):
        found = bench.virtual(n, ranks, 1, large=True)
        if found is not None:
            show(what="virtual", times=found["voxels"] / plain["voxels"], **found)
            break
        n = bench.size_of(0.75 * bench.voxels(n))


def check(device: str) -> None:
    """Show how far loss, gradients and buffers of virtual ranks are from plain torch, in fp64, for each policy."""
    norms = [nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.GELU(), nn.Conv3d(8, 1, 3, padding=1)]
    models: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
        "unet": (unet(8, 3), (1, 3, 40, 8, 8), 2),
        "norms": (nn.Sequential(*norms), (2, 1, 22, 6, 6), 2),
        "vit": (token_mixer(64, 2), (1, 110, 64), 1),
    }
    for name, (model, shape, dim) in models.items():
        model.double().to(device)
        start = {key: value.clone() for key, value in model.state_dict().items()}
        x = torch.sin(torch.arange(math.prod(shape), dtype=torch.float64, device=device)).view(shape)
        expected = _two_steps(model, functools.partial(_plain, model), x, start)
        for memory in ("keep", "recompute", "offload", "auto"):
            budget = 100_000 if memory in ("recompute", "auto") else None
            with virtualize(loss_of, model, 3, dim=dim, memory=memory, budget=budget) as step:  # type: ignore[arg-type]
                if step.world.pager is not None:
                    step.world.pager.minimum = 512
                found = _two_steps(model, step, x, start)
            pairs = zip(found, expected, strict=True)  # the gradient of a bias before a norm is 0 but for rounding
            far = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in pairs)
            show(what="check", model=name, memory=memory, difference=far, right=far < 1e-12)


def _two_steps(model: nn.Module, step: Callable[[Tensor, Tensor], Any], x: Tensor, start: dict[str, Tensor]) -> list:
    """Return losses, summed gradients and buffers of two steps, and restore the model."""
    found = [step(x, 0.5 * x) for _ in range(2)]
    found += [p.grad for p in model.parameters()] + [b.clone() for b in model.buffers()]
    model.load_state_dict(start)
    model.zero_grad(set_to_none=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PROBLEMS, default="unet3d")
    parser.add_argument("--check", action="store_true", help="compare with plain torch instead, in fp64")
    parser.add_argument("--memory", type=float, default=8, metavar="GiB")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="on plain torch's largest field")
    parser.add_argument("--size", type=int, help="of the field that is compared, instead of plain torch's largest")
    parser.add_argument("--large-ranks", type=int, help="on the field of so many times the voxels")
    parser.add_argument("--times", type=float, default=16, help="voxels of the first try of virtual ranks, over plain")
    parser.add_argument("--parts", choices=PARTS, nargs="+", help='all, or "same" with --size')
    parser.add_argument("--profile", action="store_true", help="sample the host on the last of the numbers of ranks")
    args = parser.parse_args()
    if args.check:
        check("cuda" if torch.cuda.is_available() else "cpu")
        return
    bench = Bench(PROBLEMS[args.model], int(args.memory * GIB))
    plain = bench.largest(bench.plain) if args.size is None else bench.measure(args.size, bench.plain, 3)
    if plain is None:
        return
    show(what="plain", **plain)
    parts = args.parts or (PARTS if args.size is None else PARTS[:1])
    if "same" in parts:
        same_size(bench, plain, args.ranks, args.profile)
    if "checkpointed" in parts:
        show(what="checkpointed", **bench.largest(bench.recomputing))
    if "enlarged" in parts:
        enlarged(bench, plain, args.large_ranks or bench.problem.ranks, args.times)


if __name__ == "__main__":
    main()
