"""Check the source: imports go one way, private torch names are in one package, messages are sent by comm/ alone.

All three are read with `ast`, so a wrong import is found even where it would happen to work.
"""

import ast
from pathlib import Path

import pytest
import torch.distributed

SRC = Path(__file__).parents[1] / "src"

# From the bottom up. A module may import its own row's package and every row above it in this list, nothing further
# down. The longest matching name decides the row; a package's name stands for all its modules.
LAYERS = [
    {"_compat", "_moved", "_version"},
    {"errors", "caches", "dim_sharding"},
    {"native"},
    {"runtime"},
    {"triton_kernels"},
    {"trace_state"},
    {"testing"},
    {"layout", "distributed", "dispatch.torch_aliases", "dispatch.__init__", "debug.__init__"},
    {"comm", "debug.explain", "debug.explain_html"},
    # The documented names over comm/. The package's __init__ lists them, so it stands above comm/ too.
    {
        "distributed." + x
        for x in ("__init__", "vcollective_args", "utils", "autograd", "mappings", "fft", "coalesced", "shared_params")
    },
    {"dispatch.plan", "dispatch.promotion", "dispatch.lost_sharding", "spec", "dcp", "pickling"},
    {"redistribute", "dispatch.write_tracking"},
    {"tensor"},
    {"dispatch.arguments", "dispatch.copied_views"},
    {"dispatch.empty_shards"},
    {"dispatch.recorded_backward"},
    {"dispatch.fallback", "dispatch.binding", "dispatch.call_cache", "dispatch.saved_tensors", "debug.lockstep"},
    {"dispatch.executor"},
    {"dispatch.registry"},
    {"ops", "distribute"},
    # Building blocks for users' own ops, and older paths of the same things.
    {"shard_utils", "neighbors"},
    {"distributed.shard_tensor", "distributed.shard_utils", "domain_parallel"},
    {"compiler"},
    {"torch_compile"},
    {"models", "data", "metrics"},
    {"train"},
    {"virtual", "predict", "doctor"},
    {"debug.recipe_models"},
    {"debug.parity", "debug.model_run", "debug.work", "debug.rounding", "debug.model_inputs", "debug.differences"},
    {"planning"},
    {"bench"},
    {"profiling"},
    {"cli"},
    {"__main__"},
    {""},  # shardfield/__init__: the public surface
]
# Packages of one row that may use each other.
MUTUAL = {("comm", "debug.explain"), ("debug.explain", "comm")}

MODULES = {
    ".".join(p.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): p
    for p in sorted((SRC / "shardfield").rglob("*.py"))
}


def row(module: str) -> tuple[int, str]:
    """Return the row of a module and the name that placed it there."""
    name = module.removeprefix("shardfield").removeprefix(".")
    hits = [
        (len(unit), i, unit.removesuffix(".__init__"))
        for i, units in enumerate(LAYERS)
        for unit in units
        if unit in (name, f"{name}.__init__") or (unit and name.startswith(unit + "."))
    ]
    assert hits, f"{module} is in no layer: add it to LAYERS in {Path(__file__).name}"
    _, i, unit = max(hits)
    return i, unit


def imported_modules(module: str, tree: ast.AST, known=MODULES) -> set[str]:
    """Return the modules of shardfield that `module` imports anywhere in its text, relative imports resolved."""
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
    # Importing a.b runs a's __init__ first, so a module outside of a imports that too.
    packages = {".".join(o.split(".")[:i]) for o in found for i in range(2, len(o.split(".")))}
    return (found | {p for p in packages if not module.startswith(p + ".")}) - {module}


def wrong_imports(module: str, tree: ast.AST, known=MODULES) -> list[str]:
    """Return each import of `module` that goes up, or sideways to another package of its row."""
    here, unit = row(module)
    wrong = []
    for other in sorted(imported_modules(module, tree, known)):
        there, other_unit = row(other)
        sideways = unit.split(".")[0] != other_unit.split(".")[0] and (unit, other_unit) not in MUTUAL
        if there > here or (there == here and sideways):
            wrong.append(f"{module} (row {here}) imports {other} (row {there})")
    return wrong


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    tree = ast.parse(MODULES[module].read_text())
    assert not wrong_imports(module, tree)


def test_the_active_runtime_is_not_imported_by_name():
    """`runtime.active` is replaced when a new world begins; a copy of the name would be the runtime of an ended one."""
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] == "runtime":
                assert "active" not in {a.name for a in node.names}, f"{module}: use `runtime.active`"


def torch_names(tree: ast.AST) -> dict[str, str]:
    """Return the dotted path of each imported name: {"F": "torch.nn.functional"}."""
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
    """Return the private names of torch that a module imports or reaches by an attribute chain or getattr."""
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


# Functions of torch.distributed that send messages.
COLLECTIVES = {
    name
    for name in dir(torch.distributed)
    if name.startswith(("all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "scatter"))
    or name.startswith(("send", "recv", "isend", "irecv", "batch_isend_irecv", "barrier", "monitored_barrier"))
} - {"reduce_op"}
# Modules that send messages past comm/, each with the reason.
PAST_COMM = {
    "shardfield._compat.world": "names torch's flat all_gather and reduce_scatter, which have two spellings",
    "shardfield.distributed.world": "starts and ends the process group, below comm/: no ShardTensor exists then",
    "shardfield.testing._worker": "a barrier of the test ranks, below comm/",
    "shardfield.train.ddp_simulation": "stands in for DistributedDataParallel, whose messages bypass comm/ too",
    "shardfield.bench.links": "measures collectives, and takes the slowest rank of a round",
    "shardfield.bench.scaling": "takes the slowest rank of a round",
    "shardfield.bench.measure": "barriers around a measurement, which must not count as its traffic",
}


def collectives_used(tree: ast.AST) -> list[str]:
    """Return the functions of torch.distributed that send messages and that a module names, called or not."""
    names = torch_names(tree)

    def dotted(node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return names.get(node.id, "")
        return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""

    def sends(name: str) -> bool:
        package, _, last = name.rpartition(".")
        return name.startswith("torch.distributed.nn") or (package == "torch.distributed" and last in COLLECTIVES)

    nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.Name, ast.Attribute)) and sends(dotted(n))]
    return [f"line {n.lineno}: {dotted(n)}" for n in nodes]


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith("shardfield.comm.")])
def test_messages_are_sent_by_comm(module):
    found = collectives_used(ast.parse(MODULES[module].read_text()))
    if module in PAST_COMM:
        assert found, f"{module} sends no messages past comm/ any more: remove it from PAST_COMM"
    else:
        assert not found, f"{module} sends messages itself; use shardfield.comm.collectives: {found}"


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
    for text in (
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\nsend = torch.distributed.isend",
        "from torch.distributed import broadcast\nbroadcast(x, 0)",
        "from torch import distributed\ndistributed.batch_isend_irecv(ops)",
        "import torch.distributed.nn.functional as f\nf.all_reduce(x)",
    ):
        assert collectives_used(ast.parse(text)), text
    for text in (
        "import torch.distributed as dist\ndist.get_rank()",
        "from ..comm import collectives\ncollectives.all_reduce(x)",
    ):
        assert not collectives_used(ast.parse(text)), text
