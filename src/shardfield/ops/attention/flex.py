"""`torch.nn.attention.flex_attention` on sharded tensors: `score_mod` and `mask_mod` receive global indices.

Queries stay on their ranks. A rank receives the keys and values that the block mask allows its queries to read: a
sliding window receives a halo, a dense mask all keys. Scores are computed like those of torch's own eager form.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..._compat import dynamo_disable
from ..._compat.autocast import concatenate
from ..._compat.patches import replace_flex_attention
from ..._compat.storage import base_and_version
from ...dispatch.arguments import map_tensors, mesh_of
from ...layout import Span
from ...tensor import ShardTensor, torch_function
from .._common.derived import kept_with
from .ranged import SEQUENCE, attend, precision, weigh

MAX_SCORE_BYTES = 256 << 20  # scores held at a time; backward computes those of longer sequences again


def call_flex(plain: Callable, module: types.ModuleType, *args: Any, **kwargs: Any) -> Any:
    """Run the rule if a query, key or value is a ShardTensor, else torch's function `plain` of `module`."""
    given = inspect.signature(plain).bind(*args, **kwargs)
    given.apply_defaults()
    a = given.arguments
    query, key, value = a["query"], a["key"], a["value"]
    if mesh_of((query, key, value), None) is None:
        return plain(*args, **kwargs)
    mask, aux, wants_lse = a["block_mask"], a.get("return_aux"), a["return_lse"]
    if wants_lse and aux is not None:
        raise ValueError("Cannot specify both return_lse and return_aux")
    _check(query, key, value, mask, a["enable_gqa"])
    mods = Mods(a["score_mod"], None if mask is None else mask.mask_mod, None if mask is None else BlockTable.of(mask))
    scale = 1 / math.sqrt(query.shape[-1]) if a["scale"] is None else a["scale"]
    out, lse, largest = torch_function(ShardTensor, attend, (), (query, key, value, mods.captured(), mods, scale), {})
    if aux is not None:
        return out, module.AuxOutput(lse=lse if aux.lse else None, max_scores=largest if aux.max_scores else None)
    return (out, lse) if wants_lse else out


def _check(query: Any, key: Any, value: Any, mask: Any, gqa: bool) -> None:
    """Raise torch's errors for invalid calls; only global shapes are read, so that all ranks raise the same."""
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise NotImplementedError("NYI: query, key, and value must be 4D tensors")
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2] or key.shape[:2] != value.shape[:2]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise ValueError(f"Expect query and key/value to have the same embedding dimension and length but got {shapes}")
    heads, key_heads, samples = query.shape[1], key.shape[1], query.shape[0]
    if heads != key_heads and not gqa:
        raise ValueError(
            f"Expect query and key/value to have the same number of heads but got Hq={heads} and Hkv={key_heads}"
        )
    if heads % max(key_heads, 1):
        raise ValueError(
            f"Expect number of query heads to be a multiple of kv heads for GQA but got Hq={heads} and Hkv={key_heads}"
        )
    if samples != key.shape[0] and (mask is None or key.shape[0] != 1):
        raise ValueError(
            f"Expect query and key/value to have the same batch size but got Bq={samples}, Bkv={key.shape[0]}"
        )
    if mask is None:
        return
    if (query.shape[-2], key.shape[-2]) != tuple(mask.shape[-2:]):
        raise ValueError(
            f"block_mask was created for block_mask.shape={mask.shape} but got q_len={query.shape[-2]} and "
            f"kv_len={key.shape[-2]}"
        )


# ---------------------------------------------------------------------- functions of the user


class BlockTable(NamedTuple):
    """The blocks of keys that blocks of rows read: a key outside of them is hidden, whatever the mask_mod says."""

    blocks: Tensor  # (samples or 1, heads or 1, blocks of rows, blocks of keys), bool
    visible: Tensor  # the same for any sample and head, on the CPU
    rows: int
    keys: int

    @staticmethod
    def of(mask: Any) -> BlockTable:
        """Return the table of a block mask; it is kept as long as the mask is alive and not written."""
        tensors = [t for t in vars(mask).values() if isinstance(t, Tensor)]
        versions = [base_and_version(t) for t in tensors]
        if any(v is None for v in versions):
            return BlockTable.read(mask)
        key = tuple((id(t), v[1]) for t, v in zip(tensors, versions, strict=True) if v is not None)
        return kept_with(mask, key, (), lambda: BlockTable.read(mask))

    @staticmethod
    def read(mask: Any) -> BlockTable:
        """Return the table of a block mask."""
        blocks = mask.to_dense().bool()
        return BlockTable(blocks, blocks.any(0).any(0).cpu(), *mask.BLOCK_SIZE)

    def allows(self, samples: Tensor, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        """Return (sample, head, row, key): whether the key is in a block that the row reads."""
        samples, heads = (i if n > 1 else i * 0 for i, n in zip((samples, heads), self.blocks.shape, strict=False))
        rows, keys = rows // self.rows, keys // self.keys
        return self.blocks[samples[:, None, None, None], heads[:, None, None], rows[:, None], keys]

    def columns(self, first: int, stop: int, size: int) -> Span:
        """Return the range of keys that the rows `first` to `stop` read: at least one, of `size`."""
        used = self.visible[first // self.rows : -(-stop // self.rows)].any(0).nonzero().flatten().tolist()
        if first >= stop or not used:
            return Span(0, min(1, size))
        return Span(used[0] * self.keys, min((used[-1] + 1) * self.keys, size))


class Mods:
    """The functions that a call passes: of scores, and of the mask. Not hashable, so that no plan holds them."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, score_mod: Callable | None, mask_mod: Callable | None, blocks: BlockTable | None):
        self.score_mod, self.mask_mod, self.blocks = score_mod, mask_mod, blocks
        self.originals: list[Tensor] = []

    def captured(self) -> list[Tensor]:
        """Return the tensors that the functions read and that have gradients or are sharded.

        Each function is called once for one score: every rank finds the same tensors, also with an empty shard.
        """
        index = [torch.zeros((), dtype=torch.int64) for _ in range(4)]
        score = torch.zeros(())
        with torch.no_grad(), _Finder([score, *index]) as finder:
            if self.score_mod is not None:
                self.score_mod(score, *index)
            if self.mask_mod is not None:
                self.mask_mod(*index)
        self.originals = finder.found
        return list(finder.found)

    def scores(self, scores: Tensor, offsets: Sequence[int], captured: Sequence[Tensor]) -> Tensor:
        """Return the scores of local rows and columns after both functions; masked ones are -inf."""
        index = [torch.arange(o, o + n, device=scores.device) for o, n in zip(offsets, scores.shape, strict=True)]
        with _Substitution(self.originals, captured):
            modified = scores if self.score_mod is None else _vectorized(self.score_mod, 1)(scores, *index)
            if self.blocks is None or self.mask_mod is None:
                return modified
            allowed = _vectorized(self.mask_mod, 0)(*index)
        return modified.masked_fill(~(allowed & self.blocks.allows(*index)), -math.inf)

    def columns(self, first: int, stop: int, size: int) -> Span:
        """Return the range of keys that the block mask lets the rows `first` to `stop` read."""
        return Span(0, size) if self.blocks is None else self.blocks.columns(first, stop, size)

    def compute(self, query, key, value, offsets, captured, scale) -> tuple[Tensor, Tensor, Tensor]:
        """Compute blocks of rows whose scores fit `MAX_SCORE_BYTES`; several blocks are computed again in backward."""
        row_bytes = query.shape[0] * query.shape[1] * key.shape[SEQUENCE] * precision(query).itemsize
        step = max(1, MAX_SCORE_BYTES // max(row_bytes, 1))
        if step >= query.shape[SEQUENCE]:
            return self._compute_block(query, key, value, offsets, captured, scale)
        parts = []
        for i, rows in enumerate(query.split(step, SEQUENCE)):
            first = [*offsets[:SEQUENCE], offsets[SEQUENCE] + i * step, offsets[3]]
            parts.append(checkpoint(self._compute_block, rows, key, value, first, captured, scale, use_reentrant=False))
        out, lse, largest = (concatenate(x, SEQUENCE) for x in zip(*parts, strict=True))
        return out, lse, largest

    def _compute_block(self, query, key, value, offsets, captured, scale) -> tuple[Tensor, Tensor, Tensor]:
        """Compute rows in the precision of torch's eager form."""
        group, dtype = query.shape[1] // key.shape[1], precision(query)
        key, value = (t.repeat_interleave(group, 1) if group > 1 else t for t in (key, value))
        scores = (query.to(dtype) @ key.to(dtype).mT) * scale
        return weigh(self.scores(scores, offsets, captured), query, value)


def _vectorized(function: Callable, scores: int) -> Callable:
    """Return the function of a score's indices as one of vectors of them; `scores` counts leading score arguments."""
    for dim in (3, 2, 1, 0):
        function = torch.vmap(function, in_dims=(0,) * scores + tuple(0 if d == dim else None for d in range(4)))
    return function


class _ScalarIndex(TorchFunctionMode):
    """Inside a function of the user, `table[b, h]` with scalar tensors looks a value up without reading them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = map_tensors(args, self.replace)
        if func is Tensor.__getitem__:
            source, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, Tensor) for i in index) and all(isinstance(i, (Tensor, int)) for i in index):
                return self.seen(
                    torch.ops.aten.index(source, [torch.as_tensor(i, device=source.device) for i in index])
                )
        return self.seen(func(*args, **(kwargs or {})))

    def replace(self, value: Any) -> Any:
        return value

    def seen(self, result: Any) -> Any:
        return result


class _Finder(_ScalarIndex):
    """Collect the tensors that a function reads other than its arguments, if they have gradients or are sharded."""

    def __init__(self, arguments: Sequence[Tensor]):
        super().__init__()
        self.made = list(arguments)
        self.found: list[Tensor] = []

    def replace(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or any(value is t for t in self.made):
            return value
        if isinstance(value, ShardTensor) or value.requires_grad:
            if not any(value is t for t in self.found):
                self.found.append(value)
            # only the type of the function's result is used
            value = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
            self.made.append(value)
        return value

    def seen(self, result: Any) -> Any:
        self.made += [t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, Tensor)]
        return result


class _Substitution(_ScalarIndex):
    """Replace the captured tensors by this rank's local ones, whose gradients are summed over the ranks."""

    def __init__(self, originals: Sequence[Tensor], local: Sequence[Tensor]):
        super().__init__()
        self.pairs = list(zip(originals, local, strict=True))

    def replace(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            for original, local in self.pairs:
                if value is original:
                    return local
        return value


replace_flex_attention(dynamo_disable(call_flex), ShardTensor)
