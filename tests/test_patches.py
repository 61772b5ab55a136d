"""Importing shardfield changes nothing in torch; patches come with the first ShardTensor and go on request."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import types
from pathlib import Path

import torch.utils.checkpoint

from shardfield._compat.patches import CodePatch, patches, safe_globals

SAFE_GLOBALS = "torch._weights_only_unpickler._marked_safe_globals_set"  # torch 2.13
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"

# Runs in a process of its own: this one has imported shardfield. A snapshot holds the functions, the entries of classes
# and the contents of tables (dicts, lists, sets) of all torch modules that were imported before shardfield.
SCRIPT = """
import inspect, sys, types, warnings
import torch, torch.distributed.tensor, torch.distributed.device_mesh, torch.utils.checkpoint, torch.jit

MODULES = [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "torch" and isinstance(m, types.ModuleType)]

def snapshot():
    found = {}
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if inspect.isclass(value) and value.__module__.split(".")[0] == "torch":
                for entry, member in list(vars(value).items()):
                    if callable(member) or hasattr(member, "__get__"):
                        found[f"{value.__module__}.{value.__qualname__}.{entry}"] = member
            if callable(value):
                found[f"{module.__name__}.{name}"] = value
            elif isinstance(value, (dict, list, set, tuple)) and not name.startswith("__"):
                found[f"{module.__name__}.{name}"] = Contents(value)
    found["torch.get_rng_state()"] = Contents(torch.get_rng_state().tolist())
    return found

class Contents:  # of a table
    def __init__(self, table):
        self.entries = [*table, *(table.values() if isinstance(table, dict) else ())]
        self.ids = sorted(map(id, self.entries))

def changed(a, b):  # new names are no matter: torch itself fills some when tensors are made
    return sorted(n for n in a if not (a[n].ids == b[n].ids if type(a[n]) is Contents else a[n] is b.get(n)))

def our_ops():
    return [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("shardfield::")]

from torch.nn.attention.flex_attention import flex_attention

# Looked up for the first time, an operator is entered in a table of torch.jit.
torch.ops.aten.sparse_compressed_tensor, torch.ops.aten.sparse_coo_tensor

def source():
    return flex_attention.__code__, flex_attention.__defaults__, flex_attention.__kwdefaults__

code = source()
before = snapshot()
import shardfield
from shardfield._compat.patches import patches, safe_globals
after = snapshot()
assert source() == code
print("import", changed(before, after), sorted(after.keys() - before.keys()), our_ops())

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
start = snapshot()
x = shardfield.scatter_tensor(torch.ones(2, 2), 0, mesh, [torch.distributed.tensor.Shard(0)], requires_grad=True)
print("tensor", changed(start, snapshot()))
assert source() != code

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        return grad * 2

Double.apply(x).sum().backward()
assert torch.equal(x.grad.full_tensor(), torch.full((2, 2), 2.0))
shardfield.uninstall()
print("removed", changed(start, snapshot()))
assert source() == code
y = torch.ones(2, requires_grad=True)
Double.apply(y).sum().backward()
assert torch.equal(y.grad, torch.full((2,), 2.0))

x = shardfield.scatter_tensor(torch.ones(2, 2), 0, mesh, [torch.distributed.tensor.Shard(0)], requires_grad=True)
assert [p.path.split(".")[0] for p in patches if p.after is None] == ["natten"]  # not imported
Double.apply(x).sum().backward()
assert torch.equal(x.grad.full_tensor(), torch.full((2, 2), 2.0))

mine = torch.autograd.Function.__dict__["apply"]
torch.autograd.Function.apply = classmethod(lambda cls, *args: mine.__get__(None, cls)(*args))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    shardfield.uninstall()
assert ["torch.autograd.Function.apply" in str(w.message) for w in seen] == [True], seen
Double.apply(torch.ones(2, requires_grad=True))
torch.autograd.Function.apply = mine
shardfield.uninstall()
print("again", changed(start, snapshot()))
torch.distributed.destroy_process_group()
"""


def test_import_changes_nothing_and_patches_can_be_removed():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert not run.returncode, run.stderr
    lines = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    assert lines["import"] == "[] [] []"
    replaced = [patch.path for patch in patches if not isinstance(patch, CodePatch)]  # the script looks at the code
    names = [SAFE_GLOBALS if path == safe_globals.path else path for path in replaced]
    assert all(name.rsplit(".", 1)[1] in lines["tensor"] for name in names), lines["tensor"]
    changed = [name for name in ast.literal_eval(lines["tensor"]) if "_NoopSaveInputs." not in name]  # a class
    assert len(changed) == len(names), f"more than the declared patches changed: {changed}"
    assert lines["removed"] == lines["again"] == "[]"


def test_code_of_a_function_that_another_package_has_wrapped(monkeypatch):
    """Lightning replaces torch.compile by a function around it, with a closure, when it is imported."""
    module = types.ModuleType("wrapped_by_others")
    exec("def double(x, more=0):\n    return 2 * x + more", vars(module))
    original = module.double

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return original(*args, **kwargs)

    module.double = wrapper
    monkeypatch.setitem(sys.modules, module.__name__, module)
    patch = CodePatch("wrapped_by_others.double", lambda plain, module: lambda x: plain(x, more=1), "")
    patch.install()
    assert module.double(3) == original(3) == 7
    patch.uninstall()
    assert module.double is wrapper and module.double(3) == original(3) == 6


def test_a_release_without_the_function(monkeypatch):
    """natten had other functions before 0.20: every layout would look for the missing one."""
    module = types.ModuleType("older_release")
    patch = CodePatch("older_release.double", lambda plain, module: plain, "")
    assert not patch.pending
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert not patch.pending
    exec("def double(x):\n    return 2 * x", vars(module))
    assert patch.pending


def test_the_architecture_page_lists_the_patches():
    section = PAGE.read_text().split("## What is patched in torch\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([^`]+)` \|", section, re.M)
    if not hasattr(torch.utils.checkpoint._CheckpointFrame, "save_inputs"):  # torch 2.11
        listed = [name for name in listed if "_CheckpointFrame" not in name]
        listed.append("torch.utils.checkpoint._NoopSaveInputs")
    assert sorted(listed) == sorted(patch.path for patch in patches)
    assert all(patch.reason for patch in patches)
