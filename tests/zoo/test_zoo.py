"""Third-party models, unmodified, on unevenly sharded fields: forward, backward and three steps equal one device.

`make test-models` installs them and writes docs/models.md from the results.
"""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from pathlib import Path

import pytest

from shardfield import check
from tests.zoo.small import MODELS

CASES = [
    (name, mesh, dims)
    for name, entry in MODELS.items()
    for mesh, dims in [*(((2,), (d,)) for d in entry.dims), *([((2, 2), entry.tiles)] if entry.tiles else [])]
]


@pytest.mark.parametrize(
    ("name", "mesh", "dims"), CASES, ids=lambda v: v if isinstance(v, str) else "x".join(map(str, v))
)
def test_model(name, mesh, dims):
    entry = MODELS[name]
    if importlib.util.find_spec(entry.package) is None:
        pytest.skip(f"{entry.package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of third-party packages
        found = check(
            f"tests.zoo.small:{name}",
            entry.shape,
            mesh,
            dims=dims,
            shard=dict.fromkeys(entry.sharded, dims),
            steps=entry.steps,
            tolerance=entry.tolerance,
        )
    assert found, str(found)
    assert set(found.gathers) <= set(entry.gathers), found.gathers
    assert {lost.split()[0] for lost in found.lost} <= set(entry.lost), found.lost
    assert found.balance <= entry.balance * found.input_balance and found.redundancy <= entry.redundancy, str(found)
    results = os.environ.get("SHARDFIELD_MODELS")
    if results:
        row = [entry.title, found.shape, mesh, dims, found.worst, len(found.gathers), found.lost]
        row += [found.balance / found.input_balance, found.redundancy, found.bytes, found.messages]
        with open(Path(results), "a") as file:
            file.write(json.dumps(row) + "\n")
    assert {call.split()[0] for call in found.unbalanced} <= set(entry.unbalanced), found.unbalanced
