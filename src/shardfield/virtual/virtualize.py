"""Train a plain model on plain tensors with its field divided over virtual ranks: one call, no launcher."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..dispatch.arguments import map_tensors
from ..errors import ShardfieldError
from ..layout import DimSharding, Layout, balanced
from ..tensor import ShardTensor, wrap
from .paged_operators import is_out_of_memory
from .paging import BudgetExceeded
from .replica import Replica, settings_of
from .world import VirtualWorld

Memory = Literal["keep", "offload", "recompute", "auto"]
RECOMPUTES_FIRST = frozenset(["cuda"])  # devices that compute faster than they move tensors


def virtualize(
    loss: Callable[..., Any],
    model: nn.Module,
    ranks: int,
    *,
    dim: int | Sequence[int | None],
    memory: Memory = "auto",
    budget: int | None = None,
    folder: str | None = None,
) -> VirtualStep:
    """Return a step that computes a loss and its gradients with the field divided over virtual ranks.

    `step(*batch)` calls `loss(model, *batch)` on every rank, with the tensors of the batch sharded along `dim` (one dim
    for all of them, or one for each, None for those that every rank has), then backward. A batch in host memory is
    moved to the device of the model shard by shard. It returns the loss and adds
    the gradients to `parameter.grad`, as `loss.backward()` does; the optimizer stays the caller's. Without gradients
    (`torch.no_grad()`) `loss` may return any tensors: predictions, for example. They are returned as plain tensors.

    memory: "keep", "offload" or "auto", as of `VirtualWorld`. "recompute" recomputes the activations inside the
    children of the model in backward; what is left is moved out above `budget` bytes, if a budget is passed. On a GPU
    "auto" recomputes from the first step on that exceeds the budget, since computing is faster there than moving: that
    step begins again. Without a budget, it keeps all tensors until a step runs out of memory, then recomputes, and
    moves tensors only if that runs out of memory too. Operators are not watched in steps on batches of the same shapes
    as one in which no tensor had to be moved.

    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 1, 3, padding=1))
    >>> step = virtualize(lambda model, x, y: (model(x) - y).square().mean(), model, 4, dim=2)
    >>> x = torch.ones(1, 1, 13, 8)
    >>> with step:
    ...     loss = step(x, 2 * x)
    >>> model[0].weight.grad.shape, loss.requires_grad
    (torch.Size([4, 1, 3, 3]), False)
    """
    policy = ("keep" if budget is None else "auto") if memory == "recompute" else memory
    world = VirtualWorld(ranks, memory=policy, budget=budget, folder=folder)
    recompute = True if memory == "recompute" else None if memory == "auto" else False
    return VirtualStep(loss, model, world, dim, recompute, keeps_first=memory == "auto" and budget is None)


class VirtualStep:
    """A step on virtual ranks; see `virtualize`. `world` runs them, `world.pager` has figures of memory.

    recompute: None recomputes once a step on a GPU has exceeded the budget. keeps_first: no tensor of a GPU is moved,
    until a step that recomputes has run out of memory.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        model: nn.Module,
        world: VirtualWorld,
        dim: int | Sequence[int | None],
        recompute: bool | None = False,
        keeps_first: bool = False,
    ):
        self.loss, self.model, self.world, self.dim, self.recompute = loss, model, world, dim, recompute
        self._keeps_first = keeps_first
        self._replicas: dict[int, Replica] = {}
        self._settings: Any = None
        self._fitting: set[Any] = set()  # kinds of batches whose step moved no tensor
        self._grads: dict[Tensor, Tensor] = {}  # of the caller's parameters: the sum over ranks, times their number

    def __call__(self, *batch: Any) -> Any:
        shards = [self._shardings(batch, rank) for rank in range(self.world.size)]
        settings = settings_of(self.model)
        if settings != self._settings:
            self._replicas.clear()
            self._fitting.clear()
            self._settings = settings
        self._grads.clear()
        outputs: dict[int, Tensor] = {}
        jobs = [self._job(rank, batch, shards[rank], outputs) for rank in range(self.world.size)]
        kind = _kind(batch), torch.is_grad_enabled(), self.model.training
        try:
            with self._moving(kind):
                results = self.world.run_each(jobs)
            with torch.no_grad():
                self._replicas[0].return_buffers(self.model)
            if not torch.is_grad_enabled():
                return results[0]
            self._pass_on(batch, shards, results)
            return results[0][0]
        except (ShardfieldError, RuntimeError) as error:
            if not _exceeds_memory(error) or not self._take_less(kind):
                raise
        finally:
            self._grads.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return self(*batch)

    @contextmanager
    def _moving(self, kind: Any) -> Iterator[None]:
        """Have the pager see the operators of a run, unless it need not: they take three times as long then."""
        pager = self.world.pager
        if pager is None:
            yield
            return
        fast = _device(self.model).type in RECOMPUTES_FIRST
        self.world.paging = not (self._keeps_first and fast) and kind not in self._fitting
        pager.refuses = fast and self.recompute is None and torch.is_grad_enabled()
        before = pager.moved_out
        try:
            yield
            if self.world.paging and pager.moved_out == before:
                self._fitting.add(kind)
        finally:
            self.world.paging, pager.refuses = True, False

    def _take_less(self, kind: Any) -> bool:
        """Recompute, then move tensors, in the steps that follow one that exceeded the memory. Return False at last."""
        if kind in self._fitting:  # another step on such a batch needed less
            self._fitting.clear()
        elif self.recompute is None:
            self.recompute = True
            self._replicas.clear()
        elif self._keeps_first:
            self._keeps_first = False
        else:
            return False
        return True

    def close(self) -> None:
        """End the virtual ranks."""
        self._replicas.clear()
        self.world.close()

    def __enter__(self) -> VirtualStep:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # Before and after the ranks run.

    def _shardings(self, batch: Sequence[Any], rank: int) -> list[tuple[int, int, int] | None]:
        """Return (dim, start, size) of a rank's shard of each item of the batch; None for a whole item."""
        dims = [self.dim] * len(batch) if isinstance(self.dim, int) else list(self.dim)
        if len(dims) != len(batch):
            raise ShardfieldError(f"virtualize: {len(dims)} dims are named, and the batch has {len(batch)} items")
        found: list[tuple[int, int, int] | None] = []
        for at, (item, dim) in enumerate(zip(batch, dims, strict=True)):
            if dim is None or not isinstance(item, Tensor):
                found.append(None)
                continue
            if isinstance(item, ShardTensor):
                raise ShardfieldError("virtualize: the step takes plain tensors and shards them itself")
            if not -item.ndim <= dim < item.ndim:
                raise ShardfieldError(
                    f"virtualize: item {at} of the batch has shape {tuple(item.shape)} and no dim {dim}; pass "
                    "dim=(...) with one dim for each item, None for those that are not sharded"
                )
            sizes = balanced(item.shape[dim], self.world.size)
            found.append((dim % item.ndim, sum(sizes[:rank]), sizes[rank]))
        return found

    def _pass_on(self, batch: Sequence[Any], shards: Sequence[Any], results: Sequence[Any]) -> None:
        """Add the gradients of all ranks to those of the caller's parameters and of the batch. Hooks are called."""
        targets = list(self._grads)
        grads = [grad.div_(self.world.size) for grad in self._grads.values()]
        for at, item in enumerate(batch):
            parts = [result[1][at] for result in results]
            if parts[0] is not None:
                targets.append(item)
                parts = [part.to(item.device) for part in parts]
                grads.append(parts[0] if shards[0][at] is None else torch.cat(parts, shards[0][at][0]))
        if targets:
            torch.autograd.backward(targets, grads)

    # On a rank.

    def _job(
        self, rank: int, batch: Sequence[Any], shards: Sequence[Any], outputs: dict[int, Tensor]
    ) -> Callable[[], Any]:
        def run() -> Any:
            replica = self._replica(rank)
            with torch.no_grad():
                replica.update(self.model)
                device = _device(self.model)
                local = [_shard(item, where, replica.mesh, device) for item, where in zip(batch, shards, strict=True)]
            if not torch.is_grad_enabled():
                found = _collect(self.loss(replica.model, *local), outputs)
                replica.gather_buffers()
                return found
            items = [
                x.requires_grad_() if isinstance(x, Tensor) and item.requires_grad else x
                for x, item in zip(local, batch, strict=True)
            ]
            value = self.loss(replica.model, *items)
            if not isinstance(value, Tensor) or value.numel() != 1:
                shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ShardfieldError(
                    f"virtualize: the loss returned {shown}: one number is expected; call the step under "
                    "torch.no_grad() for other results"
                )
            self._check_leaves(value, {*replica.parameters.values()}, items)
            value.backward()
            replica.gather_buffers()
            of_items = [
                _local(x.grad) if isinstance(x, Tensor) and x.requires_grad and x.grad is not None else None
                for x in items
            ]
            value = value.detach()
            return (value.full_tensor() if isinstance(value, ShardTensor) else value), of_items

        return run

    def _replica(self, rank: int) -> Replica:
        if rank not in self._replicas:
            mesh = init_device_mesh(_device(self.model).type, (dist.get_world_size(),), mesh_dim_names=("domain",))
            with torch.inference_mode(False):
                self._replicas[rank] = Replica(self.model, mesh, bool(self.recompute), self._add_gradient)
        return self._replicas[rank]

    def _add_gradient(self, original: Tensor, mine: Tensor) -> None:
        grad, mine.grad = mine.grad, None
        if grad is None:
            return
        if original in self._grads:
            self._grads[original].add_(grad)
        else:
            self._grads[original] = grad

    def _check_leaves(self, value: Tensor, parameters: set[Tensor], items: Sequence[Any]) -> None:
        """Refuse parameters that the ranks would share: each rank would add the whole gradient to theirs."""
        known = {id(p) for p in parameters} | {id(_local(x)) for x in items if isinstance(x, Tensor)}
        # Not the local tensor: reading that of a sum in flight would wait for it, with all activations in memory.
        root = (value._local_for_backward() if isinstance(value, ShardTensor) else value).grad_fn
        ahead, seen = [root], {root}
        while ahead:
            node = ahead.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                raise ShardfieldError(
                    f"virtualize: the loss has a gradient with respect to a tensor of shape {tuple(leaf.shape)} that "
                    "is no parameter of the model; make it a parameter of a module that holds the model too"
                )
            for following, _ in getattr(node, "next_functions", ()):
                if following is not None and following not in seen:
                    seen.add(following)
                    ahead.append(following)


def _device(model: nn.Module) -> torch.device:
    tensor = next((t for t in [*model.parameters(), *model.buffers()]), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _kind(batch: Sequence[Any]) -> tuple[Any, ...]:
    """Return shapes, dtypes and devices of a batch: steps on batches of one kind take the same memory."""
    return tuple((x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else type(x) for x in batch)


def _exceeds_memory(error: Exception) -> bool:
    """Return whether a rank ran out of memory, or its pager refused to move a page."""
    causes = (error, *getattr(error, "errors", {}).values())
    return any(isinstance(e, BudgetExceeded) or is_out_of_memory(e) for e in causes)


def _shard(item: Any, where: tuple[int, int, int] | None, mesh: DeviceMesh, device: torch.device) -> Any:
    """Return a rank's shard of an item of the batch as a ShardTensor with memory of its own, on the model's device."""
    if not isinstance(item, Tensor):
        return item
    if where is None:
        return wrap(item.detach().to(device, copy=True), Layout.replicate(mesh, item.shape))
    dim, start, size = where
    dims = [[DimSharding(n)] for n in item.shape]
    dims[dim] = [DimSharding(item.shape[dim], (0,), balanced(item.shape[dim], mesh.size()))]
    local = item.detach().narrow(dim, start, size)
    local = local.to(device, copy=True, memory_format=torch.contiguous_format)
    return wrap(local, Layout.make(mesh, dims))


def _local(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, ShardTensor) else tensor


def _collect(value: Any, outputs: dict[int, Tensor]) -> Any:
    """Copy a rank's shards of results into plain tensors that all ranks share. Return the structure with these."""
    numbers = itertools.count()

    def place(leaf: Tensor) -> Tensor:
        at = next(numbers)
        if isinstance(leaf, ShardTensor) and (leaf._layout.partial_axes or not leaf._layout.is_simple):
            leaf = leaf.full_tensor()
        if not isinstance(leaf, ShardTensor):
            return leaf
        local = leaf.to_local()
        if at not in outputs:
            outputs[at] = local.new_empty(leaf.shape)
        target = outputs[at]
        for dim, (start, size) in enumerate(zip(leaf._layout.offsets(), local.shape, strict=True)):
            target = target.narrow(dim, start, size)
        target.copy_(local)
        return outputs[at]

    return map_tensors(value, place)
