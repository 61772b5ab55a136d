"""The options of a training run: a dataclass that the recipes extend."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..comm.consensus import gather_texts
from ..errors import ShardfieldError

C = TypeVar("C", bound="TrainConfig")
DOMAIN_AXES = ("h", "w", "d")  # the names of the mesh axes that shard a field's dims


class UsageError(ShardfieldError):
    """An invalid option; the message is one line and names valid values."""


@dataclass(kw_only=True)
class TrainConfig:
    """The options of all recipes."""

    out: Path = Path("runs/default")
    """Folder for checkpoints, metrics and plots."""
    domain: tuple[int, ...] = (1,)
    """Ranks along each sharded dim of the field (one to three dims); the remaining factor is the data axis."""
    virtual: int = 1
    """Ranks that each process runs, one after the other, with or without a launcher (`shardfield.virtual`)."""
    virtual_memory: Literal["keep", "offload", "auto"] = "auto"
    """What virtual ranks do with tensors while others run: keep them on the device, move them out, or as needed."""
    strategy: Literal["fsdp", "hsdp", "ddp"] = "fsdp"
    """How parameters are distributed over the ranks."""
    epochs: int = 10
    """Passes over the training samples."""
    max_steps: int | None = None
    """Stop after this number of steps, even if `epochs` has more."""
    batch_size: int = 8
    """Samples per step, over all ranks."""
    accumulate: int = 1
    """Number of micro-batches per step, whose gradients are accumulated."""
    learning_rate: float = 3e-3
    """Maximum learning rate; it decays as a cosine to `final_learning_rate` times this."""
    final_learning_rate: float = 1e-3
    """Learning rate at the last step, as a fraction of the maximum."""
    warmup: int = 20
    """Steps over which the learning rate rises from zero."""
    weight_decay: float = 1e-4
    """Weight decay of AdamW."""
    clip: float | None = 1.0
    """Maximum norm of all gradients; larger gradients are clipped."""
    ema: float | None = None
    """Decay of an exponential moving average of the parameters; the average is then evaluated."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """bf16: autocast to bfloat16, with parameters and sums in fp32."""
    recompute: bool = False
    """Recompute activations in backward instead of storing them (activation checkpointing)."""
    rollout: tuple[int, ...] = (1,)
    """Model steps per sample, each compared with the data; several lengths are a schedule of equal parts."""
    rollout_grad_steps: int | None = None
    """Number of last steps of a rollout through which gradients flow; by default all of them."""
    rollout_checkpoint: bool = False
    """Recompute the activations of each step of a rollout in backward."""
    push_forward: bool = False
    """Detach the state between the steps of a rollout."""
    graphs: bool | None = None
    """Run each step as a CUDA graph, messages included (--graphs, --no-graphs); by default on one CUDA device."""
    seed: int = 0
    """Seed of the parameters, the order of samples, and dropout."""
    resume: str = "auto"
    """"auto": resume from the newest checkpoint in `out`, if any; "never"; or the path of a checkpoint."""
    save_every: int = 200
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    evaluate_every: int = 1
    """Epochs between evaluations; 0: only at the end."""
    log_every: int = 20
    """Steps between reads of the losses, and between lines of progress if the output is not a terminal."""
    logger: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Loggers that get the losses, metrics and pictures too (each is an extra package): --logger tensorboard wandb."""
    record: int = 0
    """Steps after each start whose module outputs and gradients are recorded for `shardfield compare --modules`."""
    picture: bool = True
    """Plot prediction.png and curve.png at the end, if matplotlib is installed."""

    def check(self) -> None:
        """Raise a UsageError for invalid values."""
        for name, value in self.as_json().items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"--{name.replace('_', '-')} is {value}; a finite number is needed")
        for name in ("epochs", "batch_size", "accumulate", "keep", "log_every", "virtual"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}; at least 1 is needed")
        for name in ("save_every", "evaluate_every", "warmup", "record"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}; 0 or more is needed")
        if not 1 <= len(self.domain) <= len(DOMAIN_AXES) or min(self.domain) < 1:
            raise UsageError(f"--domain {self.domain}: ranks along one to three dims, at least 1 each")
        if not self.rollout or min(self.rollout) < 1:
            raise UsageError(f"--rollout {self.rollout}: one or more lengths, at least 1 each")
        if self.rollout_grad_steps is not None and self.rollout_grad_steps < 1:
            raise UsageError(f"--rollout-grad-steps is {self.rollout_grad_steps}; at least 1 is needed")
        if self.ema is not None and not 0 < self.ema < 1:
            raise UsageError(f"--ema is {self.ema}; a decay between 0 and 1 is needed")

    def check_ranks(self) -> None:
        """Raise a UsageError on all ranks unless all of them have this configuration."""
        own = json.dumps({"recipe": type(self).__name__, **self.as_json()})
        values = [json.loads(text) for text in gather_texts(own, dist.group.WORLD)]
        for name in values[0]:
            ranks: dict[str, int] = {}  # the first rank of each value
            for rank, each in enumerate(values):
                ranks.setdefault(json.dumps(each.get(name)), rank)
            if len(ranks) > 1:
                found = ", ".join(
                    f"{value} on rank {rank}" for value, rank in sorted(ranks.items(), key=lambda i: i[1])
                )
                raise UsageError(f"the ranks have different configurations: --{name.replace('_', '-')} is {found}")

    def mesh(self, device_type: str) -> DeviceMesh:
        """Build the mesh of all ranks: a data axis, and one axis for each entry of `domain`."""
        ranks, domain_ranks = dist.get_world_size(), torch.Size(self.domain).numel()
        if ranks % domain_ranks:
            fits = [n for n in range(1, ranks + 1) if ranks % n == 0]
            domain = " x ".join(map(str, self.domain))
            raise UsageError(
                f"--domain {domain} needs groups of {domain_ranks} ranks, and there are {ranks}: "
                f"the product must be one of {fits}"
            )
        data = ranks // domain_ranks
        if self.batch_size % (data * self.accumulate):
            raise UsageError(
                f"--batch-size {self.batch_size} is not a multiple of {data} data ranks"
                + (f" times {self.accumulate} parts" if self.accumulate > 1 else "")
            )
        return init_device_mesh(
            device_type, (data, *self.domain), mesh_dim_names=("data", *DOMAIN_AXES[: len(self.domain)])
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the domain axes."""
        return DOMAIN_AXES[: len(self.domain)]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "fp64" else torch.float32

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step: a function of its number, so that a scheduler need not be saved."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(steps - self.warmup, 1)
        low = self.final_learning_rate
        return self.learning_rate * (low + (1 - low) * 0.5 * (1 + torch.cos(torch.tensor(done * torch.pi)).item()))

    def rollout_length(self, step: int, steps: int) -> int:
        """Return the length of the rollouts of a step: like the learning rate, a function of its number."""
        return self.rollout[min(step * len(self.rollout) // max(steps, 1), len(self.rollout) - 1)]

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))


def from_file(kind: type[C], path: Path) -> C:
    """Read a configuration from a TOML or JSON file, with defaults for missing keys."""
    try:
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"--config {path}: {error}") from None
    return apply_overrides(kind(), values, f"--config {path}")


def apply_overrides(config: C, overrides: dict[str, Any], where: str) -> C:
    """Return a copy with the values of `overrides`, parsed as on the command line."""
    valid = {f.name: f for f in dataclasses.fields(config)}
    overrides = {name.replace("-", "_"): value for name, value in overrides.items()}
    for name in overrides:
        if name not in valid:
            raise UsageError(f"{where}: unknown key {name!r}{suggest_name(name, valid)}")
    words: list[str] = []
    for name, value in overrides.items():
        key = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{key}" if value else f"--no-{key}")
        else:
            words += [f"--{key}", *(str(v) for v in (value if isinstance(value, list) else [value]))]
    return parse_args(config, words, where)


def parse_args(config: C, words: list[str], where: str) -> C:
    """Return a copy of the configuration with command-line arguments applied."""
    import tyro

    try:
        return tyro.cli(type(config), args=expand_flags(words), default=config, console_outputs=False)
    except SystemExit:
        raise UsageError(f"{where}: a value has the wrong type; {' '.join(words)}") from None


def expand_flags(words: list[str]) -> list[str]:
    """Write flags that also have the value None as tyro reads them.

    >>> expand_flags(["--graphs", "--epochs", "3"]), expand_flags(["--no-graphs"]), expand_flags(["--graphs", "None"])
    (['--graphs', 'True', '--epochs', '3'], ['--graphs', 'False'], ['--graphs', 'None'])
    >>> expand_flags([])
    []
    """
    found: list[str] = []
    for word, following in zip(words, [*words, "--"][1:], strict=True):
        if word == "--no-graphs":
            found += ["--graphs", "False"]
        else:
            found += [word, "True"] if word == "--graphs" and following.startswith("-") else [word]
    return found


def suggest_name(name: str, valid_names: Any) -> str:
    """Return a hint with the closest valid name, or with all of them."""
    found = difflib.get_close_matches(name, list(valid_names), 1, 0.5)
    return f"; did you mean {found[0]!r}?" if found else f"; valid are {', '.join(sorted(valid_names))}"
