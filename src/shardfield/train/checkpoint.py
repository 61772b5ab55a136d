"""Checkpoints that survive a kill at any moment and load on another mesh, under another strategy."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from .complex_params import to_complex_state, to_pair_state
from .storage import INDEX, CheckpointError, CheckpointReader, CheckpointWriter


class Checkpoints:
    """The checkpoints of one run, in folders `step-<n>` of `folder`; the newest `keep` of them are kept.

    Each rank writes its shards of the parallelized model and the optimizer. Any number of ranks can load them under any
    strategy. A save runs in the background; it has the state at the time of the call. All ranks make the same calls.
    `scalars` is the other state of a run, as JSON values.
    """

    def __init__(self, folder: str | Path, keep: int = 3):
        if keep < 1:
            raise ValueError(f"Checkpoints: keep={keep}; at least one must be kept")
        self.folder, self.keep = Path(folder), keep
        self._pending_save: Any = None
        # Messages of the background thread must not mix with those of training.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def steps(self) -> dict[int, Path]:
        """Return the complete checkpoints, oldest first."""
        found = {int(p.name[5:]): p for p in self.folder.glob("step-*") if p.name[5:].isdigit() and p.is_dir()}
        return dict(sorted(found.items()))

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint."""
        return next(reversed(self.steps().values()), None)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scalars: Mapping[str, Any] | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Start a save once the previous one is complete. `extra`: further tensors, with equal names on all ranks."""
        import torch.distributed.checkpoint as dcp

        self.wait()
        tensors, plain = _flat_state(model, optimizer)
        tensors |= {f"extra.{name}": value for name, value in (extra or {}).items()}
        content = {"step": step, "optimizer": plain, "run": dict(scalars or {})}
        writer = _PruningWriter(self.folder / f"step-{step:06d}", content, self)
        with _suppress_warnings():
            begun = dcp.async_save(
                tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None
            )
        self._pending_save = getattr(begun, "upload_completion", begun)

    def wait(self) -> None:
        """Block until the last save is on disk; raise on all ranks if it failed on any."""
        saving, self._pending_save = self._pending_save, None
        if saving is not None:
            try:
                saving.result()
            except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
                raise CheckpointError(
                    f"{self.folder}: a checkpoint could not be written: {_first_error(error)}"
                ) from error

    def load(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint into model, optimizer and `extra`, and return its scalars."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        reader = CheckpointReader(Path(path))
        tensors, plain = _flat_state(model, optimizer)
        tensors |= {f"extra.{name}": value for name, value in (extra or {}).items()}
        _check_names(Path(path), reader.index["tensors"], tensors, optimizer is not None)
        content = reader.index["scalars"]
        try:
            with _suppress_warnings():
                dcp.load(tensors, storage_reader=reader, process_group=self._group, no_dist=self._group is None)
                set_model_state_dict(model, _select_prefix(tensors, "model."))
                if optimizer is not None:
                    saved = {n: tuple(v) if isinstance(v, list) else v for n, v in content["optimizer"].items()}
                    # Settings that a newer torch has added to an optimizer keep their defaults.
                    state = _select_prefix(tensors, "optimizer.") | plain | saved
                    set_optimizer_state_dict(model, optimizer, state, options=_flat_options())
        except CheckpointError:
            raise
        except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
            raise CheckpointError(f"{path}: {_first_error(error)}") from error
        return content["run"]


class _PruningWriter(CheckpointWriter):
    """Removes older checkpoints, and the files of a killed save, once a new checkpoint is complete."""

    def __init__(self, folder: Path, scalars: dict[str, Any], owner: Checkpoints):
        super().__init__(folder, scalars)
        self.owner = owner

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        stale = [*list(self.owner.steps().values())[: -self.owner.keep], *self.owner.folder.glob("step-*.part")]
        for path in stale:
            (path / INDEX).unlink(missing_ok=True)  # first: a kill here leaves no damaged checkpoint
            shutil.rmtree(path, ignore_errors=True)


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the unsharded state of a parallelized model on every rank, with names and dtypes of the plain model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    with _suppress_warnings():
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))
    return to_complex_state(state)


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the state of a plain model, unsharded on every rank, into a parallelized one."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    with _suppress_warnings():
        set_model_state_dict(model, to_pair_state(state, inner), options=StateDictOptions(full_state_dict=True))


def _flat_options() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True)


def _flat_state(model: nn.Module, optimizer: Optimizer | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of model and optimizer by name, and the optimizer's other settings."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    with _suppress_warnings():
        tensors = {f"model.{n}": v for n, v in get_model_state_dict(model).items() if isinstance(v, Tensor)}
        if optimizer is None:
            return tensors, {}
        state = get_optimizer_state_dict(model, optimizer, options=_flat_options())
    tensors |= {f"optimizer.{n}": v for n, v in state.items() if isinstance(v, Tensor)}
    return tensors, {n: v for n, v in state.items() if not isinstance(v, Tensor)}


def _select_prefix(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}


def _check_names(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Tensor], with_optimizer: bool) -> None:
    """Raise if a checkpoint is of another model or optimizer."""
    stored = {n: v for n, v in stored.items() if with_optimizer or not n.startswith("optimizer.")}
    lacks = sorted(wanted.keys() - stored.keys())
    more = sorted(n for n in stored.keys() - wanted.keys() if not n.startswith("extra."))
    shapes = [n for n in wanted.keys() & stored.keys() if tuple(stored[n]["shape"]) != tuple(wanted[n].shape)]
    if lacks or more or shapes:
        reasons = [f"lacks {len(lacks)} tensors ({lacks[0]}, ...)"] if lacks else []
        reasons += [f"has {len(more)} tensors that are not wanted ({more[0]}, ...)"] if more else []
        reasons += [
            f"has {n} of shape {tuple(stored[n]['shape'])}, wanted is {tuple(wanted[n].shape)}"
            for n in sorted(shapes)[:1]
        ]
        raise CheckpointError(f"{path}: the checkpoint is of another model or optimizer: it {'; it '.join(reasons)}")


def _first_error(error: BaseException) -> str:
    """Return the first rank's error on one line: DCP raises one error with the tracebacks of all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"


@contextmanager
def _suppress_warnings() -> Iterator[None]:
    """Suppress torch's warnings about its own calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
