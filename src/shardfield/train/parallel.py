"""One call that puts a model on a mesh of data x domain ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as checkpointed

from .. import runtime
from .._compat.world import flatten_mesh
from ..comm.grad_deferral import defer_to_average
from ..distribute import sync_module_over_mesh
from .complex_params import real_pairs
from .ddp_simulation import SimulatedDDP
from .fsdp_dims import make_placement_fn, warn_about_padding

Strategy = Literal["fsdp", "hsdp", "ddp"]
MIN_UNIT_NUMEL = 1 << 20  # numbers in a module below which gathering it by itself costs more time than it saves memory
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
    """Train a model on fields that are cut over the mesh axes `domain`, with different samples along the axis `data`.

    The model is called with ShardTensors on `mesh[domain]` (or plain tensors); take the mean of the loss over the
    samples at hand, as in any data-parallel run. Parameters start as rank 0 has them. Their gradients are summed over
    the domain and averaged over the data in one message: the domain costs no message of its own for them.

    - "fsdp": parameters, gradients and optimizer state are cut over data x domain (FSDP2), in place;
    - "hsdp": they are cut over the domain and replicated along the data axis (FSDP2 on a mesh of two axes);
    - "ddp": they are whole on every rank, and gradients travel in buckets during backward (DistributedDataParallel).

    `units`: modules that FSDP gathers by themselves, as classes or a predicate; by default the members of a ModuleList
    that have a million numbers or more. `checkpoint`: modules whose activations are computed again in backward (True:
    those same units). `mixed_precision`: the dtype that autocast computes in; parameters and their sums stay as they
    are. Complex parameters are stored as pairs of real numbers (see `real_pairs`), which FSDP needs, under every
    strategy alike: a checkpoint of one is a checkpoint of the others.

    As with any data-parallel wrapper, gradients are whole in `parameter.grad` after backward; what
    `torch.autograd.grad` or a hook on a parameter sees is this rank's part, times the ranks that it is averaged over.
    """
    axes, cut = _resolve_axes(mesh, data, domain)
    if strategy not in ("fsdp", "hsdp", "ddp"):
        raise ValueError(f"parallelize: strategy {strategy!r} is none of 'fsdp', 'hsdp', 'ddp'")
    over = mesh[axes] if len(axes) < mesh.ndim else mesh
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
    if strategy == "ddp":
        return _ddp(model, _to_1d_mesh(over), groups)
    if strategy == "fsdp":
        target = _to_1d_mesh(over)
    else:
        if not cut or len(cut) == len(axes):
            raise ValueError(
                f"parallelize: 'hsdp' cuts parameters over the domain and replicates them along the data axis; "
                f"the mesh {mesh.mesh_dim_names} gives it data={data!r} and domain={domain!r}. With one of them use "
                f"'fsdp'"
            )
        target = mesh[(data, *cut)] if len(cut) == 1 else _hsdp_mesh(mesh, str(data), cut)
    return _fsdp(model, chosen, target, groups, reshard_after_forward)


def _resolve_axes(
    mesh: DeviceMesh, data: str | None, domain: str | Sequence[str] | None
) -> tuple[tuple[str, ...], list[str]]:
    """The mesh axes over which gradients are averaged, in mesh order, and those among them that cut the domain."""
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("parallelize: the mesh's axes have no names; give mesh_dim_names when you make it")
    cut = [domain] if isinstance(domain, str) else list(domain or [])
    wanted = [*([data] if data is not None else []), *cut]
    missing = [n for n in wanted if n not in names]
    if missing:
        raise ValueError(
            f"parallelize: the mesh has axes {names}, and none is named {', '.join(map(repr, missing))}; "
            f"name them with data= and domain= (None for one that is not there)"
        )
    if not wanted:
        raise ValueError("parallelize: neither a data axis nor a domain axis is named")
    return tuple(n for n in names if n in wanted), cut


def _to_1d_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else flatten_mesh(mesh, "_".join(mesh.mesh_dim_names or ()))


def _hsdp_mesh(mesh: DeviceMesh, data: str, cut: Sequence[str]) -> DeviceMesh:
    """A mesh of the data axis and all domain axes as one."""
    flat = _to_1d_mesh(mesh[tuple(n for n in mesh.mesh_dim_names or () if n in cut)])
    return mesh[(data, (flat.mesh_dim_names or ("",))[0])]


def _select_modules(model: nn.Module, selector: ModuleSelector | None) -> list[nn.Module]:
    """The modules to treat one by one, innermost first; the model itself is not among them."""
    if selector is None:
        members = {m for holder in model.modules() if isinstance(holder, nn.ModuleList) for m in holder}
        chosen: list[nn.Module] = []
        for m in model.modules():  # from the outside in
            if m in members and _is_unit(m, model) and not any(m in set(c.modules()) for c in chosen):
                chosen.append(m)
    elif isinstance(selector, Collection):
        chosen = [m for m in model.modules() if isinstance(m, tuple(selector))]
    else:
        chosen = [m for m in model.modules() if selector(m)]
    return [m for m in reversed(chosen) if m is not model]


def _is_unit(module: nn.Module, model: nn.Module) -> bool:
    """True if a module is called, is worth messages of its own, and shares no parameters with modules outside it."""
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
    # the ranks agree already, and a field's statistics are the same on all ranks of a domain
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group(), init_sync=False)


def _fsdp(model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, groups: list[ProcessGroup], reshard: bool):
    from torch.distributed.fsdp import fully_shard  # half a second that plain use of the library need not pay

    ranks = mesh.size(mesh.ndim - 1)
    if not runtime.active.fake_tensors:  # who only counts reads it in the bytes
        warn_about_padding(model, ranks)
    for module in [*units, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, shard_placement_fn=make_placement_fn(ranks))
    # FSDP puts whole parameters in place of its own when a module is called; they are made at the first call.
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
    """Inside, backward adds to gradients and sends none of them: all but the last step of an accumulation."""
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

    Returns the norm before, a plain tensor that is the same on every rank.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
