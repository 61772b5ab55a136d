"""Force the strategy of attention, which `strategy` otherwise chooses by estimated cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ... import runtime
from ...errors import ShardingError

ROLE_OF = {"ring": "ring", "heads": "lead", "gather": "gather", "merge": "merge"}  # strategy -> role of a mesh axis


@contextmanager
def attention_strategy(name: str) -> Iterator[None]:
    """Force the strategy of attention on sharded sequences inside the context: "ring", "heads", "gather" or "merge".

    All ranks enter it together. It holds for each mesh axis that leaves a choice; an axis that does not allow it raises
    a ShardingError on every rank. Results do not depend on it. A compiled program keeps the strategy that it was traced
    with.

        with attention_strategy("ring"):
            out = F.scaled_dot_product_attention(q, k, v)
    """
    if name not in ROLE_OF:
        raise ValueError(f"attention_strategy: {name!r} is not one of {', '.join(map(repr, ROLE_OF))}")
    rt = runtime.active
    before = rt.plans, rt.attention_strategy
    rt.plans = rt.forced_plans.setdefault(name, runtime.PlanCache(runtime.PLANS, rt))
    rt.attention_strategy = name
    try:
        yield
    finally:
        rt.plans, rt.attention_strategy = before
        if runtime.active is not rt:  # a world that began inside
            runtime.active.attention_strategy = before[1]
            runtime.active.plans = runtime.PlanCache(runtime.PLANS, runtime.active)


def allowed_roles(roles: list[Any], heads: int, mesh: DeviceMesh, axis: int) -> list[Any]:
    """Return the roles of a mesh axis that the forced strategy allows; `heads` is the leading dim of the heads."""
    name = runtime.active.attention_strategy
    if name is None or len(roles) == 1:
        return roles
    allowed = [r for r in roles if r.kind == ROLE_OF[name] and (r.kind != "lead" or r.dim == heads)]
    if not allowed:
        kinds = [r.kind if r.kind != "lead" else "heads" if r.dim == heads else "batch" for r in roles]
        where = repr(mesh.mesh_dim_names[axis]) if mesh.mesh_dim_names else axis
        raise ShardingError(
            f"the strategy {name!r} does not apply to mesh axis {where}, which allows {', '.join(dict.fromkeys(kinds))}"
        )
    return allowed
