"""See every operator that a virtual rank calls, so that the pager brings its operands in and learns of its results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._compat import DispatchMode
from .._compat.fake import is_fake
from .paging import Pager

IN_MESSAGES = -1  # in the place of a rank: operators that copy and add what ranks exchange
KNOWN_SIZES = 4096  # calls whose result sizes are remembered
# Calls that give the address of a tensor's memory to code that the pager does not see.
_EXPOSING = frozenset(
    [Tensor.numpy, Tensor.data_ptr, Tensor.tolist, Tensor.storage, Tensor.untyped_storage, Tensor.share_memory_]
    + [Tensor.__array__, Tensor.__dlpack__, Tensor.__reduce_ex__, Tensor.__deepcopy__]
)
_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_COMPONENTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROW,
    torch.sparse_bsr: _BY_ROW,
    torch.sparse_csc: _BY_COLUMN,
    torch.sparse_bsc: _BY_COLUMN,
}
_PRINTING = frozenset([Tensor.__repr__, Tensor.__format__])  # they call operators without modes


class PagedOperators(DispatchMode):
    """Call the operators of one rank with their operands in memory."""

    def __init__(self, pager: Pager, rank: int):
        super().__init__()
        self._pager, self._rank = pager, rank

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        wrappers = [kind for kind in types if kind is not Tensor and kind is not nn.Parameter]
        if any(is_fake(kind) for kind in wrappers):  # DTensor derives shapes with tensors without data
            return func(*args, **(kwargs or {}))
        if wrappers:
            return NotImplemented  # DTensor: its own operators on local tensors come here again
        return call(self._pager, func, args, kwargs or {}, self._rank)


def call(pager: Pager, func: Any, args: tuple, kwargs: dict, rank: int) -> Any:
    """Call an operator with its operands in memory, and make its results pages."""
    operands = list(_tensors((args, kwargs)))
    if rank != IN_MESSAGES:
        pager.active = rank
    for tensor in operands:
        if tensor.layout is not torch.strided:
            _expose_components(pager, tensor)
    used = pager.use(operands)
    pager.will_write(written(pager, func, args, kwargs, operands))
    key = func, tuple((t.shape, t.dtype) for t in operands)
    expected = pager.result_bytes.get(key)
    if expected is None:
        expected = max((t.numel() * t.element_size() for t in operands), default=0)
    pager.make_room(expected, used)
    outer = pager.running.get(rank)  # an operator in Python may call others, and wait for messages
    pager.running[rank] = used if outer is None else used | outer
    try:
        out = func(*args, **kwargs)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or func._schema.is_mutable:  # operands may have been written in part
            raise
        pager.evict_all(used)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        out = func(*args, **kwargs)
    finally:
        if outer is None:
            del pager.running[rank]
        else:
            pager.running[rank] = outer
    for tensor in _tensors(out):
        if tensor.layout is not torch.strided:
            _expose_components(pager, tensor)
    if rank == IN_MESSAGES:  # tensors of ranks are pages already, unless an operator in Python that waits has made them
        return out
    if len(pager.result_bytes) > KNOWN_SIZES:
        pager.result_bytes.clear()
    pager.result_bytes[key] = pager.add(_tensors(out), rank)
    return out


def written(pager: Pager, func: Any, args: tuple, kwargs: dict, operands: list[Tensor]) -> Iterable[Tensor]:
    """Return the operands that an operator may write."""
    if func not in pager.written:
        pager.written[func] = _names_of_written(func)
    names = pager.written[func]
    if not names:
        return operands if names is None else ()
    arguments = zip((a.name for a in func._schema.arguments), args, strict=False)
    return _tensors([value for name, value in (*arguments, *kwargs.items()) if name in names])


def _names_of_written(func: Any) -> frozenset[str] | None:
    """Return the arguments that an operator writes; None: any, as its schema need not be right."""
    if getattr(func, "namespace", None) != "aten" or "batch_norm" in func._schema.name:  # which writes statistics
        return None
    return frozenset(a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def _expose_components(pager: Pager, tensor: Tensor) -> None:
    """Keep the indices and values of a sparse tensor in memory: operators reach them without naming them."""
    for name in _COMPONENTS.get(tensor.layout, ()):
        pager.expose(getattr(tensor, name)())


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an operator had too little memory: for its results, or for the workspace of its kernel."""
    # cuDNN finds no engine if the memory is too small for the workspace of any.
    texts = ("can't allocate memory", "unable to find an engine", "STATUS_ALLOC_FAILED", "CUDA error: out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in texts)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            if isinstance(item, (Tensor, tuple, list, dict)):
                yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            if isinstance(item, (Tensor, tuple, list, dict)):
                yield from _tensors(item)


def _local_tensors(values: Any) -> Iterator[Tensor]:
    """Yield tensors, and those in the place of wrappers."""
    for tensor in _tensors(values):
        yield tensor
        local = vars(tensor).get("_local_tensor")  # a deferred value is not computed
        if local is not None:
            yield from _local_tensors([local])


class ExposedAddresses(TorchFunctionMode):
    """Keep tensors in memory whose address is given to numpy, DLPack or a kernel that is launched directly."""

    def __init__(self, pager: Pager):
        super().__init__()
        self._pager = pager

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _EXPOSING:
            for tensor in _tensors(args[:1]):
                self._pager.expose(tensor)
        elif func in _PRINTING:
            self._pager.use(_local_tensors(args[:1]))
        return func(*args, **(kwargs or {}))
