"""Random programs as data: inputs with layouts, and steps that call torch functions on earlier values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardfield import ShardTensor
from shardfield.debug.parity import load
from shardfield.layout import Layout
from tests.harness import local_shard, world_mesh


@dataclass(frozen=True)
class Ref:
    """Refer to an input or to the result of an earlier step."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Sharding:
    """Describe a layout without a mesh: one placement per mesh axis ("S0", "R", "P"), and shard sizes by dim."""

    placements: tuple[str, ...]
    sizes: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def layout(self, mesh: Any, shape: tuple[int, ...]) -> Layout:
        """Build the layout on a mesh."""
        known: dict[str, Placement] = {"R": Replicate(), "P": Partial()}
        placements = [known[p] if p in known else Shard(int(p[1:])) for p in self.placements]
        return Layout.of(mesh, placements, shape, dict(self.sizes))


@dataclass(frozen=True)
class Input:
    """Describe an input: its shape, its values (a seed and a kind), and its layout; None is a plain tensor."""

    name: str
    shape: tuple[int, ...]
    seed: int
    kind: str = "normal"  # or "index:N" (integers below N), "mask"
    sharding: Sharding | None = None

    def value(self) -> torch.Tensor:
        """Draw the global tensor; it is the same on all ranks."""
        generator = torch.Generator().manual_seed(self.seed)
        if self.kind.startswith("index:"):
            return torch.randint(int(self.kind[6:]), self.shape, generator=generator)
        if self.kind == "mask":
            return torch.rand(self.shape, generator=generator) > 0.4
        return torch.randn(self.shape, dtype=torch.float64, generator=generator)


@dataclass(frozen=True)
class Step:
    """Call a function; `pick` takes one of several results."""

    name: str
    fn: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    pick: int | None = None

    def run(self, env: dict[str, Any]) -> Any:
        """Run the step on the values of `env`."""
        args = substitute(self.args, env)
        out = resolve(self.fn)(*args, **substitute(self.kwargs, env))
        return out if self.pick is None else out[self.pick]

    @property
    def writes(self) -> bool:
        return self.fn.endswith("_") or self.fn == "setitem"

    def __str__(self) -> str:
        if self.fn == "getitem":
            text = f"{self.args[0]}[{self.args[1]!r}]"
        elif self.fn == "setitem":
            text = f"set({self.args[0]}, {self.args[1]!r}, {self.args[2]!r})"
        else:
            words = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
            text = f"{self.fn}({', '.join(words)})"
        return f"{self.name} = {text}" + ("" if self.pick is None else f"[{self.pick}]")


@dataclass(frozen=True)
class Program:
    """Hold a mesh shape, inputs and steps. Its text is Python that can be read; its repr can be run again."""

    mesh: tuple[int, ...]
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    compiled: bool = False  # run it compiled too

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)

    def leaves(self) -> list[torch.Tensor]:
        """Return fresh plain inputs."""
        return [_leaf(x.value()) for x in self.inputs]

    def sharded_leaves(self) -> list[Any]:
        """Return fresh inputs with their layouts, on the ranks of the mesh."""
        mesh = world_mesh(self.mesh)
        out: list[Any] = []
        for x in self.inputs:
            value = x.value()
            if x.sharding is None:
                out.append(_leaf(value))
                continue
            layout = x.sharding.layout(mesh, x.shape)
            out.append(ShardTensor(_leaf(local_shard(value, layout)), layout))
        return out

    def run(self, leaves: list[Any]) -> list[Any]:
        """Run all steps; return the values that they made, in order."""
        env = dict(zip((x.name for x in self.inputs), leaves, strict=True))
        for step in self.steps:
            env[step.name] = step.run(env)
        return [env[step.name] for step in self.steps]

    def __str__(self) -> str:
        lines = [f"mesh {'x'.join(map(str, self.mesh))}{', compiled' if self.compiled else ''}"]
        for x in self.inputs:
            lines.append(f"{x.name} = {x.kind} {x.shape} seed {x.seed}: {x.sharding or 'plain'}")
        return "\n".join([*lines, *map(str, self.steps)])


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.requires_grad_(value.is_floating_point())


def substitute(value: Any, env: dict[str, Any]) -> Any:
    """Replace the references in nested arguments by values."""
    if isinstance(value, Ref):
        return env[value.name]
    if isinstance(value, (list, tuple)):
        return type(value)(substitute(v, env) for v in value)
    if isinstance(value, dict):
        return {k: substitute(v, env) for k, v in value.items()}
    return value


def setitem(x: Any, index: Any, value: Any) -> Any:
    """Write `x[index] = value`, and return x."""
    x[index] = value
    return x


def reshard(x: Any, sharding: Sharding) -> Any:
    """Redistribute a ShardTensor; a plain tensor is returned as a view of itself."""
    if not isinstance(x, ShardTensor):
        return x.view_as(x) * 1
    return x._redistribute_to(sharding.layout(x._layout.mesh, tuple(x.shape))) * 1


def attention(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)


def batch_norm(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Normalize; one device gets a copy in standard strides.

    torch's backward on CPUs misreads a dim of size 1 with another stride: its input gradient is wrong.
    """
    x = x if isinstance(x, ShardTensor) else x.clone(memory_format=torch.contiguous_format)
    return F.batch_norm(x, *args, **kwargs)


def median(x: Any, **kwargs: Any) -> Any:
    """Return medians and indices; one device gets a dense copy, as its kernel misreads an expanded dim."""
    return torch.median(x if isinstance(x, ShardTensor) else x.contiguous(), **kwargs)


def truncated_spectrum(x: Any, modes: int, size: int, norm: str) -> Any:
    """Keep low modes along the last two dims, as a spectral layer does."""
    spectrum = torch.fft.rfft2(x, norm=norm)
    kept = torch.zeros_like(spectrum)
    kept[..., :modes, :size] = spectrum[..., :modes, :size]
    kept[..., -modes:, :size] = spectrum[..., -modes:, :size] * 0.5
    return torch.fft.irfft2(kept, s=x.shape[-2:], norm=norm)


OWN: dict[str, Callable] = {
    "getitem": lambda x, index: x[index],
    "setitem": setitem,
    "reshard": reshard,
    "attention": attention,
    "batch_norm": batch_norm,
    "median": median,
    "truncated_spectrum": truncated_spectrum,
    "greater": lambda x, c: x > c,
}


@functools.cache
def resolve(name: str) -> Callable:
    """Return the function that a step names: "F.conv2d", "Tensor.mul_", one of `OWN`, or "module:function"."""
    if name in OWN:
        return OWN[name]
    if ":" in name:
        return load(name)
    head, *rest = name.split(".")
    found: Any = {"torch": torch, "F": F, "Tensor": torch.Tensor}[head]
    for part in rest:
        found = getattr(found, part)
    return found
