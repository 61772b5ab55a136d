"""Imports go one way, and private torch names live in one package.

Both are read off the source with `ast`, so a wrong import is found even where it would happen to work.
"""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

# From the bottom up. A module may import its own row's package and every row above it in this list, nothing further
# down. The longest matching name decides the row; a package's name stands for all its modules.
LAYERS = [
    {"_compat", "_moved"},
    {"errors", "trace_state", "triton_kernels"},
    {"testing"},
    {"layout", "distributed", "dispatch.torch_aliases", "dispatch.__init__", "debug.__init__"},
    {"comm", "debug.explain"},
    # The documented names over comm/. The package's __init__ lists them, so it stands above comm/ too.
    {
        "distributed." + x
        for x in ("__init__", "vcollective_args", "utils", "autograd", "mappings", "fft", "coalesced", "shared_params")
    },
    {"dispatch.plan", "spec"},
    {"redistribute", "dispatch.write_tracking"},
    {"dispatch.arguments"},
    {"dispatch.fallback", "dispatch.call_cache", "debug.lockstep"},
    {"dispatch.executor"},
    {"dispatch.registry"},
    {"tensor"},
    {"ops", "distribute"},
    # Building blocks for users' own ops, and older paths of the same things.
    {"shard_utils", "neighbors"},
    {"distributed.shard_tensor", "distributed.shard_utils"},
    {"compiler"},
    {"models", "data"},
    {"train"},
    {"debug.parity"},
    {"planning"},
    {"bench"},
    {"cli"},
    {"__main__"},
    {""},  # shardfield/__init__: the public surface
]
# Neighbours in one row that may use each other.
BESIDE = {("comm", "debug.explain"), ("debug.explain", "comm")}

MODULES = {
    ".".join(p.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): p
    for p in sorted((SRC / "shardfield").rglob("*.py"))
}


def row(module: str) -> tuple[int, str]:
    """The row of a module and the name that put it there."""
    name = module.removeprefix("shardfield").removeprefix(".")
    hits = [
        (len(unit), i, unit.removesuffix(".__init__"))
        for i, units in enumerate(LAYERS)
        for unit in units
        if unit in (name, f"{name}.__init__") or (unit and name.startswith(unit + "."))
    ]
    assert hits, f"{module} has no place in the order of imports: add it to LAYERS in {Path(__file__).name}"
    _, i, unit = max(hits)
    return i, unit


def imported_modules(module: str, tree: ast.AST, known=MODULES) -> set[str]:
    """The modules of shardfield that `module` imports, anywhere in its text, relative imports resolved."""
    is_package = known[module].name == "__init__.py"
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] == "shardfield"}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.split(".")
                up = up[: len(up) - node.level + is_package]
                base = ".".join(up + ([base] if base else []))
            if base.split(".")[0] == "shardfield":
                # `from package import module` names the module; `from package import thing` the package.
                found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names}
    # Importing a.b runs a's __init__ first, so whoever stands outside of a imports that too.
    packages = {".".join(o.split(".")[:i]) for o in found for i in range(2, len(o.split(".")))}
    return (found | {p for p in packages if not module.startswith(p + ".")}) - {module}


def wrong_imports(module: str, tree: ast.AST, known=MODULES) -> list[str]:
    """Each import of `module` that goes up, or sideways to a neighbour."""
    here, unit = row(module)
    wrong = []
    for other in sorted(imported_modules(module, tree, known)):
        there, other_unit = row(other)
        sideways = unit.split(".")[0] != other_unit.split(".")[0] and (unit, other_unit) not in BESIDE
        if there > here or (there == here and sideways):
            wrong.append(f"{module} (row {here}) imports {other} (row {there})")
    return wrong


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    tree = ast.parse(MODULES[module].read_text())
    assert not wrong_imports(module, tree)


def torch_names(tree: ast.AST) -> dict[str, str]:
    """What each imported name means: {"F": "torch.nn.functional"}."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                if a.name.split(".")[0] == "torch":
                    names[a.asname or "torch"] = a.name if a.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            for a in node.names:
                names[a.asname or a.name] = f"{node.module}.{a.name}"
    return names


def private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


def private_torch_names(tree: ast.AST) -> list[str]:
    """Private names of torch that a module imports or reaches through an attribute chain or getattr."""
    names = torch_names(tree)

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute):
            base = dotted(node.value)
            return f"{base}.{node.attr}" if base else None
        return None

    found = [(0, n) for n in names.values() if private(n)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, a.name) for a in node.names if a.name.startswith("torch.") and private(a.name)]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            base = dotted(node.value)
            if base:
                found.append((node.lineno, f"{base}.{node.attr}"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            base, key = dotted(node.args[0]), node.args[1]
            if base and isinstance(key, ast.Constant) and private(str(key.value)):
                found.append((node.lineno, f"{base}.{key.value}"))
    return [f"line {line}: {name}" for line, name in sorted(set(found))]


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith("shardfield._compat")])
def test_private_torch_names_are_in_compat_alone(module):
    found = private_torch_names(ast.parse(MODULES[module].read_text()))
    assert not found, f"{module} uses private names of torch; reach them through shardfield._compat: {found}"


def test_the_checks_can_fail():
    assert row("shardfield.distributed") > row("shardfield.comm") > row("shardfield.distributed.manager")
    known = {
        "shardfield.comm": Path("__init__.py"),
        "shardfield.ops": Path("__init__.py"),
        "shardfield.comm.ring": Path("ring.py"),
    }
    for text in (
        "from shardfield.ops import conv",
        "from ..ops import conv",
        "from .. import ops",
        "import shardfield",
    ):
        assert wrong_imports("shardfield.comm.ring", ast.parse(text), known), text
    for text in ("from shardfield.errors import ShardingError", "from . import fetch", "import torch"):
        assert not wrong_imports("shardfield.comm.ring", ast.parse(text), known), text
    assert wrong_imports(
        "shardfield.layout",
        ast.parse("import shardfield.distributed.manager"),
        MODULES | {"shardfield.layout": Path("layout.py")},
    )
    for text in (
        "import torch._dynamo",
        "import torch._dynamo as d",
        "from torch._C import x",
        "from torch.distributed import _functional_collectives",
        "import torch\ntorch._C.f()",
        "import torch.distributed as dist\ndist.distributed_c10d._get_group_tag(g)",
        "import torch\ntorch.ops._c10d_functional.wait_tensor(x)",
        "from torch import nn\ngetattr(nn.Module, '_call_impl')",
    ):
        assert private_torch_names(ast.parse(text)), text
    for text in ("import torch\nx._local_tensor", "import torch\ntorch.Tensor.__torch_function__", "self._torch = 1"):
        assert not private_torch_names(ast.parse(text)), text
