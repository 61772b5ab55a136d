"""Freeze the public names: a name that scripts import is not added or removed by accident."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

# Public names are those that an __init__ lists as `from .x import X as X`.
PUBLIC: dict[str, list[str]] = {
    "shardfield": [
        "Plan",
        "ShardTensor",
        "ShardTensorSpec",
        "ShardfieldError",
        "ShardingError",
        "TensorPromotionMode",
        "check",
        "compile",
        "composed",
        "einsum",
        "explain",
        "knn",
        "local",
        "lockstep",
        "neighborhood_attention",
        "ops",
        "parallelize",
        "partition_points",
        "radius_search",
        "rollout",
        "rule",
        "scatter_tensor",
        "stencil",
        "strict",
        "sync_module_over_mesh",
        "tensordot",
        "transpose",
        "uninstall",
    ],
    "shardfield.data": [
        "Darcy",
        "Ellipsoid",
        "Ellipsoids",
        "Field",
        "Mesh",
        "MeshDataset",
        "ShallowWater",
        "ShardedLoader",
        "TimeWindows",
        "UnitGaussian",
        "area_norm",
        "force_coefficients",
        "open_field",
        "open_mesh",
    ],
    "shardfield.metrics": [
        "acc",
        "bias",
        "crps",
        "ensemble_mean",
        "latitude_weights",
        "mse",
        "rmse",
        "spectral_mse",
        "spread",
        "spread_skill_ratio",
        "weighted_mean",
    ],
    "shardfield.planning": [
        "Cost",
        "DEVICES",
        "Device",
        "Link",
        "Network",
        "Seen",
        "Subject",
        "count",
        "predict",
        "simulated",
        "watch",
        "without_data",
    ],
    "shardfield.predict": ["Forecast", "ForecastStore", "Grid", "ensemble_state", "export_netcdf", "predict"],
    "shardfield.shard_utils": [
        "HaloConfig",
        "RingPassingConfig",
        "halo_blocks",
        "halo_padding",
        "perform_ring_iteration",
        "perform_ring_iteration_async",
        "unhalo_padding",
    ],
    "shardfield.train": [
        "CheckpointError",
        "Checkpoints",
        "NonFinite",
        "Preempted",
        "Task",
        "TrainConfig",
        "Trainer",
        "clip_grad_norm_",
        "fit",
        "full_state_dict",
        "load_full_state_dict",
        "no_sync",
        "parallelize",
        "real_pairs",
        "rollout",
    ],
    "shardfield.virtual": ["VirtualWorld", "virtualize"],
    "shardfield.testing": ["RankError", "RanksFailed", "run_on_ranks"],
    "shardfield.distributed": [
        "DistributedIRFFT2",
        "DistributedManager",
        "DistributedRFFT2",
        "PhysicsNeMoUndefinedGroupError",
        "PhysicsNeMoUninitializedDistributedManagerWarning",
        "ProcessGroupConfig",
        "ProcessGroupNode",
        "all_gather_v",
        "fused_all_reduce",
        "gather_v",
        "indexed_all_to_all_v",
        "mark_module_as_shared",
        "reduce_loss",
        "scatter_v",
        "unmark_module_as_shared",
    ],
}


def exported(module) -> set[str]:
    """Return the names that a module re-exports under their own name."""
    tree = ast.parse(Path(module.__file__).read_text())
    # names that are imported on first use stand under `if TYPE_CHECKING`
    body = [*tree.body, *(node for block in tree.body if isinstance(block, ast.If) for node in block.body)]
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {alias.asname for node in imports for alias in node.names if alias.asname == alias.name}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_surface(name):
    module = importlib.import_module(name)
    now, frozen = exported(module), set(PUBLIC[name])
    assert now == frozen, (
        f"{name}: new {sorted(now - frozen)}, gone {sorted(frozen - now)}. If this is meant, change PUBLIC in "
        f"tests/test_public.py and add a line to CHANGELOG.md. A name that scripts may use already goes only after "
        f"one release in which it warns."
    )
    assert PUBLIC[name] == sorted(PUBLIC[name]), f"keep PUBLIC[{name!r}] sorted"
    missing = [n for n in PUBLIC[name] if not hasattr(module, n)]
    assert not missing


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_in_the_reference(name):
    module = importlib.import_module(name)
    page = (Path(__file__).parents[1] / "docs/api.md").read_text()
    section = page.split(f"\n::: {name}\n")[1].split("\n:::")[0]
    listed = [line.strip()[2:] for line in section.splitlines() if line.strip().startswith("- ")]
    wanted = [n for n in PUBLIC[name] if not inspect.ismodule(getattr(module, n))]
    assert sorted(listed) == sorted(wanted), f"docs/api.md: list the names of {name} as PUBLIC has them"
