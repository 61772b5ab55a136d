"""The index of a checkpoint, `index.json`: what each file holds, checked before a byte of data is read.

The first line names the format, the run, and the SHA-256 of the run and the second line. The second line has the
scalars and, for each tensor, dtype, shape and chunks: {"format": ..., "run": ..., "sha256": ..., "content":
{"scalars": {...}, "tensors": {"model.weight": {"dtype": "float32", "shape": [4, 2], "chunks": [{"offsets": [0, 0],
"sizes": [2, 2], "file": "rank-0.bin", "at": 0, "bytes": 16, "crc32": ...}, ...]}}}}

An index is accepted if its hash is right, the chunks of each tensor tile its shape, and the chunks in each file tile
the file. The checksum of a chunk includes the name of its tensor and its position in it, so bytes of another chunk are
refused too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import ShardfieldError

FORMAT = "shardfield checkpoint 2"
# This format has no run, no hash of the index, and no position of a chunk in its checksum. Its data is checked like
# that of `FORMAT`; its scalars are accepted, with a warning.
OLD_FORMAT = "shardfield checkpoint 1"
INDEX = "index.json"
HEAD = re.compile(rb'\{"format": "([^"\n]*)", "run": "([0-9a-f]+)", "sha256": "([0-9a-f]{64})", "content":\n')
FILE = re.compile(r"rank-[0-9]+\.bin")
Box = tuple[tuple[int, int], ...]  # (start, stop) in each dim


class CheckpointError(ShardfieldError):
    """A checkpoint cannot be read or written; the message has its path and the reason."""


def write_index(folder: Path, run_id: str, scalars: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Write the index of a checkpoint to disk, durably."""
    body = encode({"scalars": scalars, "tensors": tensors})
    head = f'{{"format": "{FORMAT}", "run": "{run_id}", "sha256": "{_digest(run_id, body)}", "content":\n'
    with open(folder / INDEX, "wb") as file:
        file.write(head.encode() + body + b"\n}\n")
        file.flush()
        os.fsync(file.fileno())


def encode(value: Any) -> bytes:
    """Encode JSON values, all of them finite."""
    return json.dumps(value, allow_nan=False).encode()


def _digest(run_id: str, body: bytes) -> str:
    return hashlib.sha256(f"{run_id}\n".encode() + body).hexdigest()


def run_of(folder: Path) -> str | None:
    """Return the id of the run that wrote a checkpoint; None for an older format and an unreadable index."""
    try:
        with open(folder / INDEX, "rb") as file:
            head = HEAD.match(file.read(1024))
    except OSError:
        return None
    return head[2].decode() if head and head[1] == FORMAT.encode() else None


def read_index(folder: Path) -> dict[str, Any]:
    """Return "scalars" and "tensors" of a checkpoint; raise if any check that needs no data fails."""
    path = folder / INDEX
    if not path.is_file():
        raise CheckpointError(f"{folder}: not a shardfield checkpoint: it has no {INDEX}")
    try:
        content = _parse(path.read_bytes())
        checked = {"signed": content["signed"], "scalars": content["scalars"], "tensors": content["tensors"]}
        check_scalars(checked["scalars"])
        _check_tensors(checked["tensors"])
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: malformed: {error!r}") from None
    _check_files(folder, checked["tensors"])
    return checked


def _parse(data: bytes) -> dict[str, Any]:
    head = HEAD.match(data)
    if head is None:
        content = json.loads(data)
        if not isinstance(content, dict) or content.get("format") != OLD_FORMAT:
            raise ValueError(f"not in the format {FORMAT!r}")
        return content | {"signed": False}
    if head[1] != FORMAT.encode():
        raise ValueError(f"not in the format {FORMAT!r}")
    body = data[head.end() :].removesuffix(b"\n}\n")
    if _digest(head[2].decode(), body) != head[3].decode():
        raise ValueError("it is not as it was saved: its checksum differs")
    return json.loads(body) | {"signed": True}


def check_scalars(scalars: dict[str, Any]) -> None:
    """Raise unless the scalars of a checkpoint have their types and are finite."""
    _typed(scalars["step"], int, "step")
    for key in ("optimizer", "run"):
        _typed(scalars[key], dict, key)

    def check(value: Any) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"a scalar is {value}")
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            check(item)

    check(scalars)


def _typed(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{what} is {value!r:.60}, not {kind.__name__}")
    return value


def _natural_numbers(values: Any, what: str) -> list[int]:
    for n in _typed(values, list, what):
        if _typed(n, int, what) < 0:
            raise ValueError(f"{what} has {n}")
    return values


# ---------------------------------------------------------------------- tensors and files


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name such as "float32"."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r:.60} is not a dtype")
    return found


def chunk_checksum(
    name: str, tensor: dict[str, Any], chunk: dict[str, Any], raw: bytearray | memoryview, signed: bool = True
) -> int:
    """Return the checksum of a chunk's bytes and, unless it is of an older format, of its place in its tensor."""
    place = encode([name, tensor["dtype"], tensor["shape"], chunk["offsets"], chunk["sizes"]])
    return zlib.crc32(raw, zlib.crc32(place) if signed else 0)


def _check_tensors(tensors: dict[str, Any]) -> None:
    """Raise unless the chunks of each tensor tile its shape and have the bytes of their elements."""
    for name, tensor in _typed(tensors, dict, "tensors").items():
        item_size = dtype_of(tensor["dtype"]).itemsize
        shape = _natural_numbers(tensor["shape"], f"the shape of {name}")
        boxes: list[Box] = []
        for chunk in _typed(tensor["chunks"], list, f"the chunks of {name}"):
            offsets, sizes = (_natural_numbers(chunk[key], f"{key} of {name}") for key in ("offsets", "sizes"))
            numbers = _natural_numbers([chunk["at"], chunk["bytes"], chunk["crc32"]], f"a chunk of {name}")
            if not len(offsets) == len(sizes) == len(shape):
                raise ValueError(f"a chunk of {name} has {len(sizes)} dims of {len(shape)}")
            if numbers[1] != math.prod(sizes) * item_size:
                raise ValueError(f"a chunk of {name} has {numbers[1]} bytes for {sizes} elements of {item_size}")
            if not FILE.fullmatch(_typed(chunk["file"], str, "file")):
                raise ValueError(f"names a file outside the checkpoint: {chunk['file']!r:.60}")
            boxes.append(tuple((o, o + n) for o, n in zip(offsets, sizes, strict=True)))
        if not tiles([b for b in boxes if all(i < j for i, j in b)], tuple((0, n) for n in shape)):
            raise ValueError(f"the chunks of {name} do not tile its shape {shape}")


def tiles(boxes: Sequence[Box], outer: Box) -> bool:
    """Return whether `boxes` fill `outer` without overlap, as nested shards do: by planes across all of a box.

    >>> tiles([((0, 2), (0, 3)), ((2, 5), (0, 1)), ((2, 5), (1, 3))], ((0, 5), (0, 3)))
    True
    >>> tiles([((0, 3), (0, 3)), ((2, 5), (0, 3))], ((0, 5), (0, 3)))
    False
    """
    if len(boxes) < 2:
        return list(boxes) == [outer] or (not boxes and any(start == stop for start, stop in outer))
    for dim, (start, stop) in enumerate(outer):
        slabs: list[list[Box]] = []  # boxes whose ranges in this dim overlap; planes separate these groups
        end = start
        for box in sorted(boxes, key=lambda b: b[dim][0]):
            if not slabs or box[dim][0] >= end:
                slabs.append([])
            slabs[-1].append(box)
            end = max(end, box[dim][1])
        if len(slabs) > 1:
            planes = [min(b[dim][0] for b in slab) for slab in slabs]
            planes = [start, *planes[1:], stop]
            ranges = zip(planes, planes[1:], strict=False)
            return all(
                tiles(slab, (*outer[:dim], part, *outer[dim + 1 :])) for slab, part in zip(slabs, ranges, strict=True)
            )
    return False


def _check_files(folder: Path, tensors: dict[str, Any]) -> None:
    """Raise unless each file has the size that its chunks add up to, one after the other."""
    parts: dict[str, list[tuple[int, int]]] = {}
    for tensor in tensors.values():
        for chunk in tensor["chunks"]:
            parts.setdefault(chunk["file"], []).append((chunk["at"], chunk["bytes"]))
    for name, ranges in parts.items():
        end = 0
        for at, size in sorted(ranges):
            if at != end:
                raise CheckpointError(f"{folder / INDEX}: the chunks in {name} leave gaps or overlap")
            end += size
        path = folder / name
        size = path.stat().st_size if path.is_file() else -1
        if size < end:
            state = "is missing" if size < 0 else f"has {size} of {end} bytes"
            raise CheckpointError(f"{path}: {state}; the checkpoint is truncated")
        if size > end:
            raise CheckpointError(f"{path}: has {size} bytes, the index names {end} of them")
