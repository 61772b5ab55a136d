"""All messages of the library are sent here.

Plain tensors in, new plain tensors out, no autograd: the differentiable collectives are in `autograd_collectives.py`.
Every function takes a process group, works for shards of any size (0 too) and any dtype, and reports to the meter what
this rank sent. A group of one rank sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from .. import runtime, trace_state
from .._compat import is_zero_tensor, materialize_zeros
from .._compat.autocast import concatenate, stack
from . import stalls
from .pending import Pending as Pending
from .transport import cached_transport, transport_for

Shape = Sequence[int]


def _record_sent(kind: str, messages: int, nbytes: float) -> None:
    meter = runtime.active.meter
    if meter is not None:
        meter(kind, messages, int(nbytes))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# Dtypes that both gloo and NCCL support; all others (bool, complex, int16, float8) are sent as bytes.
_SUPPORTED_DTYPES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
}


def contiguous(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor without lazy conjugate or negation: a backend sends the raw memory."""
    if torch.compiler.is_compiling() or is_zero_tensor(tensor) or tensor.is_neg() or tensor.is_conj():
        tensor = materialize_zeros(tensor).resolve_conj().resolve_neg()
    return tensor.contiguous()


def _flat_view(packed: Tensor) -> Tensor:
    """Return a flat view of a contiguous tensor in a dtype that backends support."""
    flat = packed.as_strided((packed.numel(),), (1,))  # view(-1) may keep an odd stride of one element
    return flat if flat.dtype in _SUPPORTED_DTYPES else flat.view(torch.uint8)


# ---------------------------------------------------------------------- reductions

_OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.SUM,  # followed by a division: gloo has no AVG
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "prod": ReduceOp.PRODUCT,
    "product": ReduceOp.PRODUCT,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
}

# Accumulation dtypes of sums: fp32 for half precision, wider integers for those that backends do not add.
_ACCUMULATE_DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}

_HALF_DTYPES = frozenset([torch.float16, torch.bfloat16])
_REDUCED_IN_PLACE = frozenset([torch.float32, torch.float64, torch.int32, torch.int64])
_SUMMED_IN_PLACE = _REDUCED_IN_PLACE | {torch.complex64, torch.complex128}


def all_reduce(tensor: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
    """Return the reduction over all ranks, on every rank. Half precision is summed in fp32; max and min keep NaN."""
    if op == "sum" and runtime.active.tracer is None and tensor.numel():
        if tensor.dtype in _REDUCED_IN_PLACE:
            buffer = contiguous(tensor)
            return all_reduce_(buffer.clone() if buffer is tensor else buffer, group) if group.size() > 1 else tensor
        if tensor.dtype in _HALF_DTYPES and group.size() > 1:
            return all_reduce_(contiguous(tensor.float()), group).to(tensor.dtype)
    return start_all_reduce(tensor, group, op).wait()


def all_reduce_(buffer: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
    """Return the reduction over all ranks, in `buffer` itself (a tensor of the caller) where dtype and strides allow.

    A maximum may ignore NaN: backends differ.
    """
    size, rt = group.size(), runtime.active
    if rt.tracer is not None or size == 1 or buffer.dtype not in _REDUCED_IN_PLACE:
        return all_reduce(buffer, group, op)
    if not buffer.is_contiguous() or not buffer.numel():
        return all_reduce(buffer, group, op)
    try:
        for handle in transport_for(buffer, group).all_reduce(buffer, _OPS[op], group):
            handle.wait()
    except RuntimeError as error:
        stalls.reraise(error, group)
    if runtime.active.meter is not None:
        _record_sent("all_reduce", 1, 2 * (size - 1) / size * _nbytes(buffer))
    return buffer


def start_all_reduce(tensor: Tensor, group: ProcessGroup, op: str = "sum", owned: bool = False) -> Pending[Tensor]:
    """Start an `all_reduce`. `owned`: the tensor may be overwritten, which saves a copy."""
    size, dtype = group.size(), tensor.dtype
    in_place = dtype in _SUMMED_IN_PLACE if op == "sum" else op == "max" and dtype is torch.int64
    if in_place and size > 1 and runtime.active.tracer is None and tensor.numel():
        # Backends compute it in the dtype of the tensor: the common case, in few calls.
        work = contiguous(tensor)
        if work is tensor and not owned:
            work = tensor.clone()
        buffer = torch.view_as_real(work) if dtype.is_complex else work
        handles = transport_for(buffer, group).all_reduce(buffer, _OPS[op], group)
        if runtime.active.meter is not None:
            _record_sent("all_reduce", 1, 2 * (size - 1) / size * _nbytes(work))
        return Pending(handles, work, None, work, group)
    if op not in _OPS:
        raise ValueError(f"all_reduce: op {op!r} is not one of {', '.join(_OPS)}")
    if op == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"all_reduce: the average of {tensor.dtype} is not {tensor.dtype}; convert it first")
    if size == 1 or tensor.numel() == 0:
        return Pending((), (), lambda: tensor)
    if tensor.is_complex() and op not in ("sum", "avg"):
        if op in ("prod", "product"):
            parts = all_gather(tensor, [tensor.shape] * size, group)
            return Pending((), (), lambda: stack(parts).prod(0))
        raise ValueError(f"all_reduce: {op} of complex numbers is not defined")
    if runtime.active.tracer is not None:
        return Pending((), (), runtime.active.tracer.all_reduce(tensor, group, op))
    reduce_op = _OPS[op]
    ordered = dtype.is_floating_point and op in ("max", "min")
    if dtype is torch.bool:
        work = tensor.to(torch.uint8)
        reduce_op = {"sum": ReduceOp.MAX, "prod": ReduceOp.MIN, "product": ReduceOp.MIN}.get(op, reduce_op)
    elif ordered:
        work = _as_ordered(tensor.to(accumulate_dtype(dtype)), op)
    elif dtype in _ACCUMULATE_DTYPES:
        work = tensor.to(_ACCUMULATE_DTYPES[dtype]).contiguous()
    else:
        work = contiguous(tensor)
        work = work.clone() if work is tensor and not owned else work
    buffer = torch.view_as_real(work) if work.is_complex() else work
    handles = transport_for(buffer, group).all_reduce(buffer, reduce_op, group)
    _record_sent("all_reduce", 1, 2 * (size - 1) / size * _nbytes(work))

    def finish() -> Tensor:
        out = _from_ordered(work, op) if ordered else work / size if op == "avg" else work
        return out.to(dtype)

    in_place = work.dtype == dtype and not ordered and op != "avg"
    return Pending(handles, work, finish, recv_buffers=work if in_place else None, group=group)


def all_reduce_half(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum, sent in half precision: each rank sums one shard in fp32 and all-gathers the rounded sums."""
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        return all_reduce(tensor, group)
    size = group.size()
    lengths = [tensor.numel() // size + (c < tensor.numel() % size) for c in range(size)]
    mine = reduce_scatter(tensor.reshape(-1).split(lengths), group)
    return concatenate(all_gather(mine, [(n,) for n in lengths], group)).view(tensor.shape)


def _as_ordered(tensor: Tensor, op: str) -> Tensor:
    """Return integers that sort like the floats, with NaN as the extreme: backends lose NaN in a max of floats."""
    ints, flip = (torch.int32, 0x7FFFFFFF) if tensor.dtype is torch.float32 else (torch.int64, 0x7FFFFFFFFFFFFFFF)
    bits = contiguous(tensor).view(ints)
    bits = torch.where(bits < 0, bits ^ flip, bits)
    return torch.where(tensor.isnan(), flip if op == "max" else -flip, bits)


def _from_ordered(bits: Tensor, op: str) -> Tensor:
    floats, flip = (torch.float32, 0x7FFFFFFF) if bits.dtype is torch.int32 else (torch.float64, 0x7FFFFFFFFFFFFFFF)
    values = torch.where(bits < 0, bits ^ flip, bits).view(floats)
    return torch.where(bits == (flip if op == "max" else -flip), float("nan"), values)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype of sums of `dtype`."""
    return _ACCUMULATE_DTYPES.get(dtype, dtype)


def reduce_scatter(shards: Sequence[Tensor], group: ProcessGroup, widen: bool = True) -> Tensor:
    """Return the sum over ranks of the shard of this coord. Each shard is sent once.

    Half precision is summed in fp32, or in its own dtype without `widen`.
    """
    size, coord = group.size(), group.rank()
    if size == 1:
        return shards[0]
    mine = shards[coord]
    received = exchange(shards, [mine.shape] * size, group)
    total = received[0].to(accumulate_dtype(mine.dtype) if widen else mine.dtype, copy=True)
    for shard in received[1:]:
        total += shard
    return total.to(mine.dtype)


# ---------------------------------------------------------------------- copies


def all_gather(tensor: Tensor, shapes: Sequence[Shape], group: ProcessGroup) -> list[Tensor]:
    """Return every rank's tensor, by coord. All ranks pass the same `shapes`."""
    size = group.size()
    if size == 1:
        return [tensor]
    first = tuple(shapes[0])
    if any(tuple(s) != first for s in shapes):
        return exchange([tensor] * size, shapes, group)
    return list(all_gather_even(tensor, group).unbind(0))


def all_gather_even(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, of equal shape, stacked by coord."""
    if runtime.active.tracer is not None:
        return runtime.active.tracer.all_gather(tensor, group)()
    size = group.size()
    out = tensor.new_empty((size, *tensor.shape))
    if tensor.numel():
        transport_for(out, group).all_gather(_flat_view(out), _flat_view(contiguous(tensor)), group)
        if runtime.active.meter is not None:
            _record_sent("all_gather", 1, (size - 1) * _nbytes(tensor))
    return out


def broadcast(tensor: Tensor, source: int, group: ProcessGroup) -> Tensor:
    """Return the tensor of coord `source`. The other ranks pass one of the same shape and dtype."""
    size = group.size()
    if size == 1 or tensor.numel() == 0:
        return tensor
    if runtime.active.tracer is not None:
        return runtime.active.tracer.broadcast(tensor, source, group)()
    work = contiguous(tensor)
    work = work.clone() if work is tensor else work
    transport_for(work, group).broadcast(_flat_view(work), source, group)
    _record_sent("broadcast", 1, _nbytes(work) if group.rank() == source else 0)
    return work


def start_sends(
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Shape]],
    group: ProcessGroup,
    like: Tensor,
    into: Sequence[Tensor] | None = None,
    packed: bool = False,
) -> Pending[list[Tensor]]:
    """Send a tensor to each of some peers and receive one of a known shape from each of some peers.

    `sends` and `receives` list (coord of a peer, tensor) and (coord of a peer, shape); the received tensors come in the
    order of `receives`. Both ends know the shapes: an empty tensor takes no message. Every rank of the group takes
    part, also one that has nothing to send or receive; `like` has the dtype and device of the messages. `into`: receive
    buffers, in the order of `receives`. `packed`: no message is empty, and `sends` are contiguous. The work of a rank
    does not depend on the size of the group.
    """
    if runtime.active.tracer is not None:
        return Pending((), (), runtime.active.tracer.exchange(sends, receives, group, like))
    received = [like.new_empty(shape) for _, shape in receives] if into is None else list(into)
    incoming = [(peer, buffer) for (peer, _), buffer in zip(receives, received, strict=True)]
    if not packed:
        sends = [(peer, contiguous(tensor)) for peer, tensor in sends if tensor.numel()]
        incoming = [(peer, buffer) for peer, buffer in incoming if buffer.numel()]
    return start_packed(sends, incoming, received, group, like)


def start_packed(
    outgoing: Sequence[tuple[int, Tensor]],
    incoming: Sequence[tuple[int, Tensor]],
    received: list[Tensor],
    group: ProcessGroup,
    like: Tensor,
) -> Pending[list[Tensor]]:
    """Apply `start_sends` to contiguous tensors, none of them empty, and the receive buffers of some peers.

    `received` is the value of the result: the buffers, and empty tensors for which no message comes.
    """
    kept = outgoing
    if like.dtype not in _SUPPORTED_DTYPES:
        incoming, outgoing = ([(peer, _flat_view(t)) for peer, t in pairs] for pairs in (incoming, kept))
    handles = transport_for(like, group).exchange(incoming, outgoing, group)
    if runtime.active.meter is not None:
        _record_sent("exchange", len(kept), sum(_nbytes(t) for _, t in kept))
    return Pending(handles, kept, None, recv_buffers=received, group=group)


def start_exchange(sends: Sequence[Tensor], shapes: Sequence[Shape], group: ProcessGroup) -> Pending[list[Tensor]]:
    """Send `sends[c]` to coord c and receive a tensor of `shapes[c]` from it: `start_sends` with all ranks of a group.

    This rank's own tensor is not copied.
    """
    if len(shapes) == 1:
        return Pending((), (), lambda: list(sends), recv_buffers=list(sends))
    coord = group.rank()
    mine = sends[coord]
    outgoing = [(peer, tensor) for peer, tensor in enumerate(sends) if peer != coord]
    incoming = [(peer, shape) for peer, shape in enumerate(shapes) if peer != coord]
    pending = start_sends(outgoing, incoming, group, mine)

    def with_mine(received: list[Tensor]) -> list[Tensor]:
        return [*received[:coord], mine, *received[coord:]]

    buffers = None if pending.recv_buffers is None else with_mine(pending.recv_buffers)
    return Pending((), (), lambda: with_mine(pending.wait()), recv_buffers=buffers)


def exchange(sends: Sequence[Tensor], shapes: Sequence[Shape], group: ProcessGroup) -> list[Tensor]:
    """Exchange tensors with all peers: `start_exchange` and wait."""
    return start_exchange(sends, shapes, group).wait()


def gather_ints(values: Sequence[int], group: ProcessGroup, device: torch.device) -> list[list[int]]:
    """Return every rank's list of integers, of equal length, by coord."""
    size = group.size()
    if size == 1:
        return [list(values)]
    with trace_state.concrete():
        mine = torch.tensor(list(values), dtype=torch.int64, device=device)
        return [t.tolist() for t in all_gather(mine, [mine.shape] * size, group)]


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank's tensors on `mesh`."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def coords_of(mesh: DeviceMesh, position: int) -> tuple[int, ...]:
    """Return the coordinates of the rank at a row-major position on the mesh."""
    coords = []
    for size in reversed(mesh.shape):
        position, coord = divmod(position, size)
        coords.append(coord)
    return tuple(reversed(coords))


def broadcast_over(tensor: Tensor, mesh: DeviceMesh, position: int) -> Tensor:
    """Return the tensor of the rank at a row-major position on the mesh, on all its ranks. One broadcast per axis."""
    for axis, coord in enumerate(coords_of(mesh, position)):
        tensor = broadcast(tensor, coord, mesh.get_group(axis))
    return tensor


def scatter_from(
    shards: dict[int, Tensor] | None, shape: Shape, dtype: torch.dtype, device: torch.device, source: int
) -> Tensor:
    """Send each rank its shard from global rank `source`; the others pass None. Empty shards take no message."""
    if shards is None:
        shard = torch.empty(tuple(shape), dtype=dtype, device=device)
        if shard.numel():
            cached_transport(shard, dist.group.WORLD).recv_from_rank(_flat_view(shard), source)
        return shard
    kept = {rank: contiguous(shard.to(device)) for rank, shard in shards.items() if rank != source and shard.numel()}
    transport = cached_transport(shards[source].to(device), dist.group.WORLD)
    handles = transport.send_to_ranks([(rank, _flat_view(shard)) for rank, shard in kept.items()])
    _record_sent("deliver", len(kept), sum(map(_nbytes, kept.values())))
    for handle in handles:
        handle.wait()
    return contiguous(shards[source].to(device, copy=True))
