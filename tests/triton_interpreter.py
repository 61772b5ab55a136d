"""Interpret Triton kernels without Triton: their source is Python and runs as such, program by program of the grid."""

from __future__ import annotations

import itertools
from collections import Counter

import torch


class Block(torch.Tensor):
    """Emulate a Triton block: a tensor with Triton's dtype conversions."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)


class Pointer:
    """Emulate a Triton pointer: an address plus a block of offsets."""

    def __init__(self, tensor, offset=0):
        self.memory = torch.as_strided(tensor, [tensor.untyped_storage().nbytes() // tensor.itemsize], [1], 0)
        self.offset = offset + tensor.storage_offset()

    def __add__(self, offset):
        moved = object.__new__(Pointer)
        moved.memory, moved.offset = self.memory, self.offset + offset
        return moved

    def load(self, mask=None, other=0):
        if mask is None:
            return self.memory[self.offset]
        mask, place = torch.broadcast_tensors(mask, torch.as_tensor(self.offset))
        load_counts[place.numel()] += 1
        assert bool(((place[mask] >= 0) & (place[mask] < self.memory.numel())).all())
        return torch.where(mask, self.memory[torch.where(mask, place, 0)], other).as_subclass(Block)

    def store(self, block, mask=None):
        if mask is None:
            self.memory[self.offset] = block.as_subclass(torch.Tensor)
            return
        mask, place = torch.broadcast_tensors(mask, torch.as_tensor(self.offset))
        self.memory[place[mask].as_subclass(torch.Tensor)] = block[mask].as_subclass(torch.Tensor)


class KernelInt(int):
    """Emulate an integer argument, which has a dtype in a kernel."""

    def to(self, dtype):
        return self

    def __floordiv__(self, other):
        return KernelInt(int(self) // other)

    def __mod__(self, other):
        return KernelInt(int(self) % other)


class Language:
    """Emulate the part of triton.language that the kernels use, for one program of the grid."""

    int32, int64, float32, float64, constexpr = torch.int32, torch.int64, torch.float32, torch.float64, None
    static_range, exp, log, sqrt = range, torch.exp, torch.log, torch.sqrt
    debug_barrier = staticmethod(lambda: None)

    def __init__(self, *ids):
        self.program_id = lambda axis: KernelInt(ids[axis])

    arange = staticmethod(lambda a, b: torch.arange(a, b).as_subclass(Block))
    zeros = staticmethod(lambda shape, dtype: torch.zeros(shape, dtype=dtype).as_subclass(Block))
    where = staticmethod(lambda mask, a, b: torch.where(mask, a, b))
    max = staticmethod(lambda x, dim: x.amax(dim))
    min = staticmethod(lambda x, dim: x.amin(dim))
    sum = staticmethod(lambda x, dim: x.sum(dim))
    load = staticmethod(lambda pointer, mask=None, other=0: pointer.load(mask, other))
    store = staticmethod(lambda pointer, block, mask=None: pointer.store(block, mask))

    @staticmethod
    def minimum(a, b):
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b)) if isinstance(a, torch.Tensor) else min(a, b)

    @staticmethod
    def maximum(a, b):
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b, dtype=torch.as_tensor(a).dtype))


last_launch_options: dict[str, object] = {}  # of the last launch
load_counts: Counter[int] = Counter()  # number of loads by block length


class jit:
    """Replace triton.jit: `jit(function)[grid](...)` runs the function for all programs of the grid."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        def launch(*given, num_warps=4, enable_fp_fusion=True, **constants):
            last_launch_options.update(num_warps=num_warps, enable_fp_fusion=enable_fp_fusion)
            for ids in itertools.product(*map(range, grid)):
                self.function.__globals__["tl"] = Language(*ids)
                self.function(*(Pointer(v) if isinstance(v, torch.Tensor) else v for v in given), **constants)

        return launch
