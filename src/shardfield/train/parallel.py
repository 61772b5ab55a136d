"""Distribute a model over a mesh of data x domain ranks with one call."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as checkpointed

from .. import runtime
from .._compat import foreach_mul_
from .._compat.world import BUFFER_SYNC, flatten_mesh
from ..comm.grad_deferral import defer_to_average
from ..distribute import sync_module_over_mesh
from .buffers import check_buffers
from .complex_params import real_pairs
from .ddp_simulation import SimulatedDDP
from .fsdp_dims import make_placement_fn, warn_about_padding

Strategy = Literal["fsdp", "hsdp", "ddp"]
MIN_UNIT_NUMEL = 1 << 20  # elements of a module below which a separate gather costs more time than it saves memory
ModuleSelector = Collection[type[nn.Module]] | Callable[[nn.Module], bool]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    data: str | None = "data",
    domain: str | Sequence[str] | None = "spatial",
    strategy: Strategy = "fsdp",
    units: ModuleSelector | None = None,
    mixed_precision: torch.dtype | None = None,
    checkpoint: bool | ModuleSelector = False,
    reshard_after_forward: bool = True,
    sync: bool = True,
) -> nn.Module:
    """Train a model on fields that are sharded over the mesh axes `domain`, with different samples along axis `data`.

    Call the model with ShardTensors on `mesh[domain]` (or plain tensors), and take the mean of the loss over the local
    samples, as in any data-parallel run. Parameters are broadcast from rank 0. Buffers must be equal on all ranks: a
    difference is refused, here and when a checkpoint is saved. The gradients of parameters are summed over the domain
    and averaged over the data axis in one message: the domain adds no message.

    - "fsdp": parameters, gradients and optimizer state are sharded over data x domain (FSDP2), in place;
    - "hsdp": they are sharded over the domain and replicated along the data axis (FSDP2 on a mesh of two axes);
    - "ddp": they are replicated, and gradients are all-reduced in buckets in backward (DistributedDataParallel).

    `units`: modules that FSDP gathers separately, as classes or a predicate; by default the members of a ModuleList
    with a million elements or more. `checkpoint`: modules whose activations are recomputed in backward (True: the
    units). `mixed_precision`: the dtype of autocast; parameters and their gradient sums keep their dtype. Complex
    parameters are stored as pairs of real numbers (see `real_pairs`), which FSDP needs, under every strategy: a
    checkpoint of one strategy loads under the others.

    On a mesh of one rank there is nothing to average, and the model is returned without a wrapper.

    As with any data-parallel wrapper, `parameter.grad` is complete after backward. `torch.autograd.grad` or a hook on a
    parameter sees this rank's partial gradient, times the number of ranks in the average.
    """
    axes, domain_axes = _resolve_axes(mesh, data, domain)
    if strategy not in ("fsdp", "hsdp", "ddp"):
        raise ValueError(f"parallelize: strategy {strategy!r} is none of 'fsdp', 'hsdp', 'ddp'")
    over = mesh[axes] if len(axes) < mesh.ndim else mesh
    check_buffers(model, over, "parallelize")
    if sync:
        sync_module_over_mesh(model, over, verify=True)
    groups = [over.get_group(a) for a in axes]
    chosen = _select_modules(model, units)
    if checkpoint is not False:
        for module in chosen if checkpoint is True else _select_modules(model, checkpoint):
            module.forward = _with_checkpointing(module.forward)  # type: ignore[method-assign]
    if mixed_precision is not None:
        autocast = torch.autocast(mesh.device_type, dtype=mixed_precision)
        model.forward = autocast(model.forward)  # type: ignore[method-assign]
    real_pairs(model)
    if over.size() == 1 and strategy != "hsdp":  # nothing to average: a wrapper would only cost time
        return model
    if strategy == "ddp":
        return _ddp(model, _to_1d_mesh(over), groups)
    if strategy == "fsdp":
        target = _to_1d_mesh(over)
    else:
        if not domain_axes or len(domain_axes) == len(axes):
            raise ValueError(
                f"parallelize: 'hsdp' shards parameters over the domain and replicates them along the data axis, but "
                f"the mesh {mesh.mesh_dim_names} has data={data!r} and domain={domain!r}. With one of them use 'fsdp'"
            )
        target = mesh[(data, *domain_axes)] if len(domain_axes) == 1 else _hsdp_mesh(mesh, str(data), domain_axes)
    return _fsdp(model, chosen, target, groups, reshard_after_forward)


def _resolve_axes(
    mesh: DeviceMesh, data: str | None, domain: str | Sequence[str] | None
) -> tuple[tuple[str, ...], list[str]]:
    """Return the mesh axes over which gradients are averaged, in mesh order, and the domain axes among them."""
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("parallelize: the mesh's axes have no names; pass mesh_dim_names to init_device_mesh")
    domain_axes = [domain] if isinstance(domain, str) else list(domain or [])
    wanted = [*([data] if data is not None else []), *domain_axes]
    missing = [n for n in wanted if n not in names]
    if missing:
        raise ValueError(
            f"parallelize: the mesh has axes {names}, and none is named {', '.join(map(repr, missing))}; "
            f"name them with data= and domain= (None if there is none)"
        )
    if not wanted:
        raise ValueError("parallelize: neither a data axis nor a domain axis is named")
    return tuple(n for n in names if n in wanted), domain_axes


def _to_1d_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else flatten_mesh(mesh, "_".join(mesh.mesh_dim_names or ()))


def _hsdp_mesh(mesh: DeviceMesh, data: str, domain_axes: Sequence[str]) -> DeviceMesh:
    """Return a mesh of the data axis and one flattened axis of all domain axes."""
    flat = _to_1d_mesh(mesh[tuple(n for n in mesh.mesh_dim_names or () if n in domain_axes)])
    return mesh[(data, (flat.mesh_dim_names or ("",))[0])]


def _select_modules(model: nn.Module, selector: ModuleSelector | None) -> list[nn.Module]:
    """Return the selected modules, innermost first, without the model itself."""
    if selector is None:
        members = {m for holder in model.modules() if isinstance(holder, nn.ModuleList) for m in holder}
        chosen: list[nn.Module] = []
        for m in model.modules():  # outermost first
            if m in members and _is_unit(m, model) and not any(m in set(c.modules()) for c in chosen):
                chosen.append(m)
    elif isinstance(selector, Collection):
        chosen = [m for m in model.modules() if isinstance(m, tuple(selector))]
    else:
        chosen = [m for m in model.modules() if selector(m)]
    return [m for m in reversed(chosen) if m is not model]


def _is_unit(module: nn.Module, model: nn.Module) -> bool:
    """Return whether a module is called, is large enough, and shares no parameters with modules outside it."""
    if type(module).forward is nn.Module.forward:  # a list in a list
        return False
    own, inside = set(module.parameters()), set(module.modules())
    return sum(p.numel() for p in own) >= MIN_UNIT_NUMEL and not any(
        own & set(m.parameters(recurse=False)) for m in model.modules() if m not in inside
    )


def _with_checkpointing(forward: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpointed(forward, *args, use_reentrant=False, **kwargs)

    return run


def _ddp(model: nn.Module, mesh: DeviceMesh, groups: list[ProcessGroup]) -> nn.Module:
    for parameter in model.parameters():
        defer_to_average(parameter, groups)
    if not any(p.requires_grad for p in model.parameters()):
        return model
    if runtime.active.fake_tensors:
        SimulatedDDP(model, mesh.get_group())
        return model
    # No init_sync: `sync_module_over_mesh` has broadcast the parameters. No sync of buffers: if rank 0's replaced the
    # others' before each forward, `check_buffers` could not find that they differ.
    options: dict[str, Any] = {"process_group": mesh.get_group(), "init_sync": False, BUFFER_SYNC: False}
    return nn.parallel.DistributedDataParallel(model, **options)


def _fsdp(model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, groups: list[ProcessGroup], reshard: bool):
    from torch.distributed.fsdp import fully_shard  # imported here: it takes half a second

    ranks = mesh.size(mesh.ndim - 1)
    if not runtime.active.fake_tensors:  # a simulated step counts the padding in its bytes
        warn_about_padding(model, ranks)
    for module in [*units, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, shard_placement_fn=make_placement_fn(ranks))
    # FSDP creates the unsharded parameters in the first call of a module and swaps them in for each call. They are the
    # leaves of the autograd graph, so a forward pre-hook marks them; a mark on the sharded ones would not be found.
    held: set[nn.Module] = set()
    for module in [*units, model]:
        inside = [m for m in module.modules() if m not in held]
        held.update(inside)
        named = [(m._parameters, name) for m in inside for name in m._parameters]
        if named:
            module.register_forward_pre_hook(_defer_averaging_hook(named, groups))
    return model


def _defer_averaging_hook(named: list[tuple[dict[str, Any], str]], groups: list[ProcessGroup]) -> Callable:
    def hook(module: nn.Module, args: Any) -> None:
        for parameters, name in named:
            found = parameters.get(name)
            if found is not None and not isinstance(found, DTensor) and not hasattr(found, "_averaged_later"):
                defer_to_average(found, groups)

    return hook


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication inside this context; use it for all micro-batches but the last."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        with model.no_sync():
            yield
        return
    switch = getattr(model, "set_requires_gradient_sync", lambda on: None)
    switch(False)
    try:
        yield
    finally:
        switch(True)


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients of a parallelized model so that their norm over all ranks is at most `max_norm`.

    Returns the norm before clipping, a plain tensor that is equal on every rank.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class LocalGrads:
    """This rank's gradients of a parallelized model, as plain tensors: DTensor ops cost more than those of the step."""

    def __init__(self, model: nn.Module):
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        self.local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        # How many ranks hold the same gradients: all of them, or those along the axes of a DTensor's Replicate.
        self.replicas = dist.get_world_size()
        if grads and isinstance(grads[0], DTensor):
            spans = [
                n for n, p in zip(grads[0].device_mesh.shape, grads[0].placements, strict=True) if p.is_replicate()
            ]
            self.replicas = math.prod(spans)

    def sum_of_squares(self) -> Tensor:
        """Return this rank's share of the squared norm of all gradients: the sum over all ranks is the square."""
        return nn.utils.get_total_norm(self.local).double().square() / self.replicas

    def clip_(self, norm: Tensor, max_norm: float) -> None:
        """Scale the gradients, whose norm over all ranks is `norm`, to at most `max_norm`."""
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        foreach_mul_(self.local, scale.to(self.local[0].dtype))
