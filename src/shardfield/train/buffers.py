"""Check that the buffers of a model are equal on all ranks."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import runtime
from ..comm import collectives, consensus
from ..errors import ShardingError
from ..tensor import ShardTensor

ROUNDING = 64  # times the dtype's epsilon: sums whose order differs between ranks


def check_buffers(model: nn.Module, over: DeviceMesh | ProcessGroup, what: str, flag: bool = False) -> bool:
    """Raise on all ranks if a buffer of the model differs between ranks by more than rounding.

    Return whether any rank set `flag`.

    Buffers have no gradient that a wrapper would average. Saving or broadcasting those of one rank would silently drop
    the others': the statistics that each rank computed from its own samples, for example. Costs two small messages, and
    none if the model has no buffers. `what` is the call that the error names.
    """
    if runtime.active.fake_tensors:
        return flag
    held = [(n, b) for n, b in model.named_buffers() if not (isinstance(b, (ShardTensor, DTensor)) or b.is_meta)]
    names = ", ".join(f"{n} {tuple(b.shape)} {b.dtype}" for n, b in held)
    flags = consensus.check_arguments(what, over, {"buffers": names or "none"}, extra=[int(flag)], always=True)
    flagged = [1] in (flags or [])
    if flagged or not held:
        return flagged
    codes = [_fingerprint(b) for _, b in held]
    highest, lowest = _bounds(torch.tensor(codes, device=_device(over)), over)
    for (name, buffer), differs in zip(held, (highest != lowest).tolist(), strict=True):
        if differs:
            _refuse_unless_rounding(what, name, buffer, over)
    return flagged


def _fingerprint(buffer: Tensor) -> int:
    data = buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def _refuse_unless_rounding(what: str, name: str, buffer: Tensor, over: DeviceMesh | ProcessGroup) -> None:
    value = torch.view_as_real(buffer.detach()) if buffer.is_complex() else buffer.detach()
    # A NaN would hide differences in a maximum; it is compared as the number 1 in a tensor of zeros.
    wide = torch.stack([value.double().nan_to_num(0.0), value.isnan().double()]).to(_device(over))
    highest, lowest = _bounds(wide, over)
    gap, size = (highest - lowest).max().item(), max(highest.abs().max().item(), lowest.abs().max().item())
    epsilon = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
    if gap <= ROUNDING * epsilon * size:
        return
    raise ShardingError(
        f"{what}: buffer {name!r} differs between ranks, by up to {gap:.3g}. Buffers are neither averaged nor taken "
        "from one rank silently. Compute them from the data of all ranks (a batch norm over several data ranks sees "
        "only its rank's samples: use nn.GroupNorm, or one data rank), or take those of one rank with "
        "sync_module_over_mesh(model, mesh)"
    )


def _bounds(values: Tensor, over: DeviceMesh | ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the elementwise maximum and minimum over all ranks."""
    both = torch.stack([values, -values])
    for group in [over] if not isinstance(over, DeviceMesh) else [over.get_group(a) for a in range(over.ndim)]:
        both = collectives.all_reduce(both, group, "max")
    return both[0], -both[1]


def _device(over: DeviceMesh | ProcessGroup) -> torch.device:
    return consensus.group_device(over.get_group(0) if isinstance(over, DeviceMesh) else over)
