"""Former module paths: importing one warns and gives the module at its new path."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from shardfield._moved import MOVED

# Runs in a process of its own, so that no former path stays in sys.modules of this one.
SCRIPT = """
import importlib, sys, warnings
import shardfield
from shardfield._moved import MOVED

for old, new in MOVED.items():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
    messages = [str(w.message) for w in seen if w.category is DeprecationWarning and old in str(w.message)]
    assert any(new in m for m in messages), (old, messages)
    assert module is importlib.import_module(new) is sys.modules[old], old
    assert module.__name__ == module.__spec__.name == new, (old, module.__spec__)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from shardfield.plan import Plan
    from shardfield.neighbours import knn
    from shardfield.report import explain
    import shardfield.neighbours.search
assert (Plan, knn, explain) == (shardfield.Plan, shardfield.knn, shardfield.explain)
assert shardfield.report is sys.modules["shardfield.debug.explain"]
with shardfield.lockstep():  # the import of the former path put the module here
    pass

for wrong in ("shardfield.no_such_module", "shardfield.neighbours.no_such_module"):
    try:
        importlib.import_module(wrong)
    except ModuleNotFoundError:
        continue
    raise AssertionError(wrong)
"""


def test_former_paths_import_the_module_at_its_new_path():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert not run.returncode, run.stderr


def test_the_table_is_consistent():
    assert list(MOVED) == sorted(MOVED)
    assert all(importlib.util.find_spec(new) is not None for new in MOVED.values())
    assert not set(MOVED) & set(MOVED.values())
