"""Convert checkpoints to and from safetensors files and plain torch.distributed.checkpoint (DCP) folders.

    shardfield convert runs/darcy/step-000400 model.safetensors --weights
    shardfield convert runs/darcy/step-000400 darcy-dcp
    shardfield convert darcy-dcp runs/again/step-000400

Runs in one process, which holds all tensors. Everything is kept: names ("model.", "optimizer.", "extra."), dtypes and
the scalars. `--weights` keeps the model alone, under the names and dtypes of the plain model, complex parameters
included. Tensors under other names are taken as the weights of a plain model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint_index import INDEX, CheckpointError, check_scalars
from .complex_params import SUFFIX, to_complex_state
from .storage import (
    CheckpointWriter,
    fsync_folder,
    read_checkpoint,
    save_snapshots,
    take_snapshots,
    temporary_name,
)

SCALARS = "shardfield_scalars"  # the name of the scalars, as JSON, in other formats
PREFIXES = ("model.", "optimizer.", "extra.")
Content = tuple[dict[str, Any] | None, dict[str, Tensor]]  # the scalars if it has them, and the tensors


def command(words: list[str]) -> int:
    """Run `shardfield convert` and return the exit code."""
    parser = argparse.ArgumentParser(
        "shardfield convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a checkpoint, a DCP folder, or a .safetensors file")
    parser.add_argument(
        "target", type=Path, help="a .safetensors file, or a folder: DCP for a checkpoint, else a checkpoint"
    )
    parser.add_argument("--weights", action="store_true", help="only the model, under the names of the plain model")
    options = parser.parse_args(words)
    print(convert(options.source, options.target, options.weights))
    return 0


def convert(source: Path, target: Path, weights: bool = False) -> str:
    """Convert a checkpoint, and return what was done."""
    kind = _kind_of(source)
    if os.path.lexists(target):
        raise CheckpointError(f"{target}: exists already")
    to = "safetensors" if target.suffix == ".safetensors" else "dcp" if kind == "shardfield" else "shardfield"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about saving in a single process
        scalars, tensors = READERS[kind](source)
        if weights:
            scalars, tensors = None, _weights_of(source, tensors)
        elif to == "shardfield" and scalars is None:
            tensors = _as_model(tensors)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = temporary_name(target)
        try:
            WRITERS[to](part, scalars, tensors)
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)
    fsync_folder(target.parent)
    size = sum(t.numel() * t.itemsize for t in tensors.values())
    return f"{target}: {len(tensors)} tensors, {size / 1e6:.1f} MB, as {to}{'' if scalars else ', without scalars'}"


def _kind_of(source: Path) -> str:
    if (source / INDEX).is_file():
        return "shardfield"
    if (source / ".metadata").is_file():
        return "dcp"
    if source.is_file() and source.suffix == ".safetensors":
        return "safetensors"
    raise CheckpointError(f"{source}: neither a checkpoint, nor a DCP folder, nor a .safetensors file")


def _weights_of(source: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of the plain model."""
    found = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    if not found:
        raise CheckpointError(f"{source}: has no tensor of a model (model.*)")
    return to_complex_state(found)


def _as_model(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a plain model as a checkpoint has them, complex ones as real pairs."""
    if tensors and all(name.startswith(PREFIXES) for name in tensors):
        return dict(tensors)
    return {
        f"model.{name}{SUFFIX if t.is_complex() else ''}": torch.view_as_real(t) if t.is_complex() else t
        for name, t in tensors.items()
    }


def _parse_scalars(path: Path, text: Any) -> dict[str, Any]:
    try:
        scalars = json.loads(text)
        check_scalars(scalars)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its scalars are malformed: {error}") from None
    return scalars


# ---------------------------------------------------------------------- shardfield


def _write_shardfield(folder: Path, scalars: dict[str, Any] | None, tensors: Mapping[str, Tensor]) -> None:
    writer = CheckpointWriter(folder, uuid.uuid4().hex[:12], scalars or {"step": 0, "optimizer": {}, "run": {}})
    save_snapshots(take_snapshots(tensors), writer)


# ---------------------------------------------------------------------- torch.distributed.checkpoint


def _read_dcp(folder: Path) -> Content:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        reader = dcp.FileSystemReader(folder)
        held = reader.read_metadata().state_dict_metadata
        state: dict[str, Any] = {
            name: torch.empty(md.size, dtype=md.properties.dtype) if isinstance(md, TensorStorageMetadata) else None
            for name, md in held.items()
        }
        others = sorted(name for name, value in state.items() if value is None and name != SCALARS)
        if others:
            raise CheckpointError(f"{folder}: has values that are not tensors ({', '.join(others[:3])})")
        dcp.load(state, storage_reader=reader, no_dist=True)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
        raise CheckpointError(f"{folder}: cannot be read: {type(error).__name__}: {error}") from error
    scalars = state.pop(SCALARS, None)
    return None if scalars is None else _parse_scalars(folder, scalars), state


def _write_dcp(folder: Path, scalars: dict[str, Any] | None, tensors: Mapping[str, Tensor]) -> None:
    import torch.distributed.checkpoint as dcp

    notes = {} if scalars is None else {SCALARS: json.dumps(scalars)}
    dcp.save({**tensors, **notes}, checkpoint_id=folder, no_dist=True)


# ---------------------------------------------------------------------- safetensors


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise CheckpointError(
            "convert: .safetensors files need a package: pip install 'shardfield[safetensors]'"
        ) from None
    return safetensors


def _read_safetensors(path: Path) -> Content:
    package = _safetensors()
    try:
        with package.safe_open(path, framework="pt") as file:
            notes = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (package.SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return (_parse_scalars(path, notes[SCALARS]) if SCALARS in notes else None), tensors


def _write_safetensors(path: Path, scalars: dict[str, Any] | None, tensors: Mapping[str, Tensor]) -> None:
    package = _safetensors()
    notes = {"format": "pt"} | ({} if scalars is None else {SCALARS: json.dumps(scalars)})
    try:
        package.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, notes)
    except (package.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be written as safetensors: {error}") from error


READERS = {"shardfield": read_checkpoint, "dcp": _read_dcp, "safetensors": _read_safetensors}
WRITERS = {"shardfield": _write_shardfield, "dcp": _write_dcp, "safetensors": _write_safetensors}
