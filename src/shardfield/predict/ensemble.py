"""The initial state of an ensemble: members are samples, which a mesh axis shards, and noise is equal on every mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShardingError
from ..layout import DimSharding, chunk
from ..tensor import ShardTensor, wrap


def ensemble_state(
    state: Tensor, members: int, axis: str = "ensemble", noise: Tensor | float = 0.0, seed: int = 0
) -> Tensor:
    """Return the initial state of an ensemble: `members` copies of the cases of `state`, with noise added.

    `state` (case, channel, ...) is Replicate along the mesh axis `axis`; the members are sharded over it. `noise` is
    the standard deviation of the noise, a number or one per channel (channel, 1, ...). The first member has none. The
    noise of a ShardTensor depends on `seed` and on the global index alone: it is the same for every mesh.
    """
    if members < 1:
        raise ShardingError(f"ensemble_state: {members} members; at least 1 is needed")
    layout = state._layout if isinstance(state, ShardTensor) else None
    local, target = state if layout is None else state._local_tensor, None  # type: ignore[attr-defined]
    copies = members
    if layout is not None:
        names = layout.mesh.mesh_dim_names or ()
        if axis not in names:
            raise ShardingError(f"ensemble_state: the mesh has the axes {names}, and none is called {axis!r}")
        ranks = layout.mesh.size(names.index(axis))
        if members % ranks:
            raise ShardingError(
                f"ensemble_state: {members} members cannot be divided among the {ranks} ranks of the axis {axis!r}: "
                f"{', '.join(str(n) for n in range(1, members + 1) if members % n == 0)} divide them"
            )
        if layout.axes_of(0) or names.index(axis) in layout.shard_axes:
            raise ShardingError(f"ensemble_state: the cases (dim 0) must be unsharded, and {axis!r} free: {layout}")
        copies = members // ranks
        total = members * layout.shape[0]
        target = layout.with_dim(0, DimSharding(total, (names.index(axis),), chunk(total, ranks)))
    local = local.repeat(copies, *[1] * (state.ndim - 1))
    made = local if target is None else wrap(local, target)
    if isinstance(noise, float) and noise == 0.0:
        return made
    devices = [] if local.device.type == "cpu" else [local.device]
    with torch.random.fork_rng(devices, device_type=local.device.type if devices else "cuda"):
        torch.manual_seed(seed)
        drawn = torch.randn_like(made).reshape(members, -1, *state.shape[1:])
    later = (torch.arange(members, device=local.device) > 0).reshape(-1, *[1] * state.ndim)
    return made + (drawn * later.to(drawn.dtype)).reshape(made.shape) * noise
