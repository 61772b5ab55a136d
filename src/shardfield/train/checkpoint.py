"""Checkpoints that survive a kill at any moment and load on another mesh, under another strategy."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from .. import runtime
from ..comm.consensus import ask_first_rank, raise_together
from ..errors import ShardingError
from .buffers import check_buffers
from .checkpoint_index import CheckpointError, encode, read_index, run_of
from .complex_params import to_complex_state, to_pair_state
from .storage import (
    CheckpointReader,
    CheckpointWriter,
    WriteItems,
    remove_checkpoint,
    save_snapshots,
    take_snapshots,
)


def _call_now(function: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()
    try:
        done.set_result(function())
    except (Exception, CheckpointException) as error:  # raised by `wait`, as that of a background save
        done.set_exception(error)
    return done


class Checkpoints:
    """The checkpoints of one run, in folders `step-<n>` of `folder`; the newest `keep` of them are kept.

    Each rank writes its shards of the parallelized model and the optimizer. Any number of ranks can load them under any
    strategy. A save runs in the background; it has the state at the time of the call. All ranks make the same calls.
    `scalars` is the other state of a run, as finite JSON values.

    A folder has the checkpoints of one run, which have its `run_id`. The first save begins a run, or continues that of
    the checkpoint that was loaded. It raises if the folder has checkpoints of another run, or newer ones of this run.
    """

    def __init__(self, folder: str | Path, keep: int = 3, run_id: str | None = None):
        if keep < 1:
            raise ValueError(f"Checkpoints: keep={keep}; at least one must be kept")
        self.folder, self.keep, self.run_id = Path(folder), keep, run_id
        self._loaded: Path | None = None
        self._saves: list[Future[Any]] = []  # the save that nobody has waited for
        weakref.finalize(self, _report_lost, self._saves, self.folder)
        self._process = os.getpid()
        self._write_items: WriteItems = {}
        # One thread for all saves: to start one blocks training until the interpreter switches back, 5 ms. The thread
        # ends with this object, and a process does not end before its save.
        self._executor = ThreadPoolExecutor(1)
        # Messages of the background thread must not mix with those of training. A virtual rank has no such thread.
        self._virtual = runtime.active.virtual is not None
        backend = None if self._virtual else "gloo"
        self.group = dist.new_group(backend=backend) if dist.is_initialized() else None

    def steps(self, run_id: str | None = None) -> dict[int, Path]:
        """Return the complete checkpoints, of one run or of all, oldest first."""
        return {step: path for step, path in _steps_in(self.folder).items() if run_id in (None, run_of(path))}

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint."""
        return latest_checkpoint(self.folder)

    def claim(self, path: str | Path | None) -> None:
        """Begin a run in this folder, or continue that of the checkpoint `path`; raise if another run is in it."""
        self.run_id = ask_first_rank(
            lambda: self.claim_alone(None if path is None else Path(path)), self.group, CheckpointError
        )

    def claim_alone(self, path: Path | None) -> str:
        """Return the run id that `claim` would set, on the first rank and without messages."""
        held, run_id = self.steps(), None if path is None else run_of(path)
        problem = "has checkpoints of another run" if held and path is None else ""
        if held and path is not None:
            step = read_index(path)["scalars"]["step"]
            inside = path.resolve().parent == self.folder.resolve()
            # Checkpoints of an older format name no run.
            others = {run_of(p) for p in held.values()} - {run_id} - ({None} if inside else set())
            if others or not (run_id or inside):
                problem = f"has checkpoints of another run than that of {path}"
            elif step < max(held):
                problem = f"has newer checkpoints than {path}"
        if problem:
            newest = held[max(held)]
            raise CheckpointError(
                f"{self.folder}: {problem}: continue from the newest one, {newest.name}, or choose another folder"
            )
        return run_id if run_id and held else uuid.uuid4().hex[:12]

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scalars: Mapping[str, Any] | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Start a save once the previous one is complete. `extra`: further tensors, with equal names on all ranks."""
        self.wait()
        if self.run_id is None:
            self.claim(self._loaded)
        what = f"checkpoint of step {step}"
        failed: Exception | None = None
        try:
            tensors, plain = _named_state(model, optimizer, extra)
            content = {"step": step, "optimizer": plain, "run": dict(scalars or {})}
            _check_scalars(content)
            snapshots = take_snapshots(tensors)
        except Exception as error:  # perhaps of this rank alone
            failed = error
        if self.group is None or check_buffers(model, self.group, what, failed is not None):
            self._raise_together(f"{self.folder}: {what}", failed)
        writer = _PruningWriter(self.folder / f"step-{step:06d}", content, self)
        write = functools.partial(save_snapshots, snapshots, writer, self.group, self._write_items)
        if self._virtual:  # it sends from its own thread
            self._saves.append(_call_now(write))
            return
        saving, running = self._executor.submit(write), runtime.active.saves
        running.add(saving)
        saving.add_done_callback(running.discard)
        self._saves.append(saving)

    def wait(self) -> None:
        """Block until the last save is on disk; raise on all ranks if it failed on any."""
        if os.getpid() != self._process:
            raise CheckpointError(f"{self.folder}: Checkpoints of process {self._process}, which forked this one")
        if self._saves:
            error = self._saves[0].exception()  # an interrupt leaves the save to the next call
            self._saves.clear()
            if error is not None:
                raise CheckpointError(_lost_text(self.folder, error)) from error

    def _raise_together(self, what: str, failed: Exception | None) -> None:
        """Raise on all ranks if one of them failed."""
        problem = None
        if failed is not None:
            problem = str(failed) if isinstance(failed, CheckpointError) else f"{type(failed).__name__}: {failed}"
        if self.group is None:
            if failed is not None:
                raise CheckpointError(f"{what}: {problem}") from failed
            return
        try:
            raise_together(what, self.group, problem)
        except ShardingError as error:
            raise CheckpointError(str(error)) from failed

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

        path = Path(path)
        index = ask_first_rank(lambda: read_index(path), self.group, CheckpointError)
        if not index["signed"]:
            warnings.warn(f"{path}: is of an older format, without a checksum of its scalars", stacklevel=2)
        content, failed = index["scalars"], None
        try:
            tensors, plain = _named_state(model, optimizer, extra)
            _check_tensors(index["tensors"], tensors, optimizer is not None)
            if optimizer is not None:
                _check_settings(content["optimizer"], plain)
        except Exception as error:  # perhaps of this rank alone
            failed = error
        self._raise_together(str(path), failed)
        reader = CheckpointReader(path, index)
        try:
            with _suppress_warnings():
                dcp.load(tensors, storage_reader=reader, process_group=self.group, no_dist=self.group is None)
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
        self._loaded = path
        return content["run"]


def _lost_text(folder: Path, error: BaseException) -> str:
    return f"{folder}: a checkpoint could not be written: {_first_error(error)}"


def _report_lost(saves: list[Future[Any]], folder: Path) -> None:
    """Print the error of a save that nobody waited for, when it has ended."""

    def report(saving: Future[Any]) -> None:
        if (error := saving.exception()) is not None:
            sys.stderr.write(f"shardfield: {_lost_text(folder, error)}\n")

    for saving in saves:
        saving.add_done_callback(report)


class _PruningWriter(CheckpointWriter):
    """Removes older checkpoints, and the files of a killed save, once a new checkpoint is complete."""

    def __init__(self, folder: Path, scalars: dict[str, Any], owner: Checkpoints):
        assert owner.run_id is not None
        super().__init__(folder, owner.run_id, scalars)
        self.owner = owner

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        for path in list(self.owner.steps(self.run_id).values())[: -self.owner.keep]:
            remove_checkpoint(path)
        for path in self.owner.folder.glob("step-*.part"):
            shutil.rmtree(path, ignore_errors=True)


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a run's folder; one rank may ask alone."""
    return next(reversed(_steps_in(folder).values()), None)


def _steps_in(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    found = {int(p.name[5:]): p for p in folder.glob("step-*") if p.name[5:].isdigit() and p.is_dir()}
    return dict(sorted(found.items()))


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
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

    held: dict[str, Any]
    with _suppress_warnings():
        if optimizer is None:
            held, state = get_model_state_dict(model), {}
        else:
            held, state = get_state_dict(model, optimizer, options=_flat_options())
    tensors = {f"model.{n}": v for n, v in held.items() if isinstance(v, Tensor)}
    tensors |= {f"optimizer.{n}": v for n, v in state.items() if isinstance(v, Tensor)}
    return tensors, {n: v for n, v in state.items() if not isinstance(v, Tensor)}


def _named_state(
    model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Tensor] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all tensors of a checkpoint by name, and the optimizer's other settings."""
    tensors, plain = _flat_state(model, optimizer)
    return tensors | {f"extra.{name}": value for name, value in (extra or {}).items()}, plain


def _select_prefix(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}


def _check_scalars(content: dict[str, Any]) -> None:
    try:
        encode(content)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"scalars must be finite JSON values: {error}") from None


def _check_tensors(stored: Mapping[str, Any], wanted: Mapping[str, Tensor], with_optimizer: bool) -> None:
    """Raise if a checkpoint is of another model or optimizer."""
    stored = {n: v for n, v in stored.items() if with_optimizer or not n.startswith("optimizer.")}
    lacks = sorted(wanted.keys() - stored.keys())
    more = sorted(n for n in stored.keys() - wanted.keys() if not n.startswith("extra."))
    both = sorted(wanted.keys() & stored.keys())
    shapes = [n for n in both if tuple(stored[n]["shape"]) != tuple(wanted[n].shape)]
    dtypes = [n for n in both if f"torch.{stored[n]['dtype']}" != str(wanted[n].dtype)]
    reasons = [f"lacks {len(lacks)} tensors ({lacks[0]}, ...)"] if lacks else []
    reasons += [f"has {len(more)} tensors too many ({more[0]}, ...)"] if more else []
    reasons += [
        f"has {n} of shape {tuple(stored[n]['shape'])}, expected is {tuple(wanted[n].shape)}" for n in shapes[:1]
    ]
    reasons += [f"has {n} of dtype {stored[n]['dtype']}, expected is {wanted[n].dtype}" for n in dtypes[:1]]
    if reasons:
        raise CheckpointError(f"the checkpoint is of another model or optimizer: it {'; it '.join(reasons)}")


def _check_settings(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise if a stored setting, such as a learning rate, is not of the type that the optimizer has for it."""

    def kind(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [kind(v) for v in value]
        return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__

    for name, value in stored.items():
        # None means "choose for me" for several settings (`fused`), so it is accepted for any type.
        if name in wanted and None not in (value, wanted[name]) and kind(value) != kind(wanted[name]):
            raise CheckpointError(f"{name} is {value!r:.60}, expected is a value like {wanted[name]!r}")


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
