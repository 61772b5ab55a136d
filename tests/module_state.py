"""Find the mutable state that the modules of a package keep, by reading the source with `ast`.

`findings(src)` returns one entry per place. It does not see `x = TABLE; x[k] = v`, nor state on function objects.

Kinds:
  container    module-level dict/list/set/deque/Weak*/defaultdict... or comprehension
  constant     a module-level container that nothing in src writes to (a table that is only read)
  class-attr   the same, in a class body
  instance     a module-level object of a class (`x = Something()`), where the class is not known to be immutable
  cache        functools.lru_cache/cache/decorator or call, with its maxsize (and whether it is in a function)
  global       a name rebound by a `global` statement
  rebound      an attribute of a module or class that is assigned elsewhere (`module.name = ...`, `Class.name = ...`)
  patch        an assignment, setattr or delattr on an attribute of torch, sys or another foreign module
  hook         a process-wide hook registered at import: atexit, os.register_at_fork, torch.library.Library
  default      a mutable default argument
"""

import ast
from pathlib import Path
from typing import NamedTuple

CONTAINERS = set(
    """
dict list set bytearray deque defaultdict OrderedDict Counter ChainMap local WeakSet WeakKeyDictionary
WeakValueDictionary WeakIdKeyDictionary TensorWeakRef ref count ContextVar Lock RLock Event Condition Queue
Generator Stream
""".split()
)
IMMUTABLE = set(
    """
tuple frozenset MappingProxyType namedtuple NamedTuple TypeVar ParamSpec compile getLogger attrgetter itemgetter
methodcaller partial Path Fraction int float str bytes bool len min max sum object NewType Literal type getattr
range is_available device iinfo finfo environ version isinstance hasattr any all sorted_tuple slice find_spec
""".split()
)
MUTATORS = set(
    """
append add update pop popitem clear setdefault extend insert remove discard move_to_end appendleft popleft sort
reverse set put difference_update intersection_update __setitem__ __delitem__
""".split()
)
FOREIGN = {"torch", "sys", "builtins", "os", "numpy", "warnings", "threading", "gc", "copyreg", "inspect", "types"}

HOOKS = {"atexit.register", "os.register_at_fork", "torch.library.Library", "torch.library.register_fake"}


class Finding(NamedTuple):
    file: str
    line: int
    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.name} {self.kind}"


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain, or the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def called(node: ast.AST) -> str:
    """Return the last name of a call's function: deque of `collections.deque()`, dict of `dict[int, str]()`."""
    func = node.func
    if isinstance(func, ast.Subscript):
        func = func.value
    return dotted(func).rpartition(".")[2] or (func.attr if isinstance(func, ast.Attribute) else "")


def is_cache(node: ast.AST) -> bool:
    name = dotted(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]
    return name in ("lru_cache", "cache", "cached", "memoize")


def cache_size(node: ast.AST) -> str:
    """maxsize as written: 128 by default of lru_cache, None of cache."""
    if not isinstance(node, ast.Call):
        return "None" if dotted(node).endswith("cache") and not dotted(node).endswith("lru_cache") else "128"
    given = [k.value for k in node.keywords if k.arg == "maxsize"] + node.args
    if not given:
        return "None" if called(node) == "cache" else "128"
    return ast.unparse(given[0])


def value_kind(value: ast.AST | None, local_immutable: set[str]) -> str:
    """container, instance or nothing."""
    if isinstance(value, (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)):
        return "container"
    if isinstance(value, ast.BinOp):
        return value_kind(value.left, local_immutable) or value_kind(value.right, local_immutable)
    if isinstance(value, ast.Call):
        name = called(value)
        if name in CONTAINERS:
            return f"container({name})" if name not in ("dict", "list", "set") else "container"
        if name in ("fromkeys", "copy", "split", "splitlines", "sorted", "vars", "globals"):
            return "container"
        if name[:1].isupper() and name not in IMMUTABLE and name not in local_immutable:
            return f"instance({name})"
    return ""


def frozen_classes(trees: dict[Path, ast.Module]) -> set[str]:
    """Names of classes of the package whose instances cannot change: frozen dataclasses, NamedTuples, Enums."""
    names = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {dotted(b).rpartition(".")[2] for b in node.bases}
                frozen = any(
                    isinstance(d, ast.Call) and called(d) == "dataclass" and any(k.arg == "frozen" for k in d.keywords)
                    for d in node.decorator_list
                )
                if frozen or bases & {"NamedTuple", "Enum", "IntEnum", "StrEnum", "Flag"}:
                    names.add(node.name)
    return names


def written_names(tree: ast.AST) -> set[str]:
    """Dotted names that some code mutates: subscripted stores and deletes, mutating methods, `|=`, attribute stores."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.add(dotted(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            found.add(dotted(node.func.value))
        elif isinstance(node, ast.AugAssign):
            found.add(dotted(node.target))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.add(dotted(node.value))
    return found - {""}


READS = set(
    """
set list sorted len dict tuple any all enumerate zip map filter frozenset join min max sum isinstance fromkeys
issuperset issubset get range repr str print iter next product chain reversed parametrize union isdisjoint
intersection
""".split()
)


def passed_names(tree: ast.AST) -> set[str]:
    """Names passed to a function that may write into them (`update(key, TABLE, ...)`)."""
    return {
        dotted(arg)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called(node) not in READS
        for arg in [*node.args, *(k.value for k in node.keywords)]
        if isinstance(arg, (ast.Name, ast.Attribute))
    } - {""}


def imports(tree: ast.AST) -> dict[str, str]:
    """Return the full name that each imported name means: {"F": "torch.nn.functional"}."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: "." * node.level + f"{node.module or ''}.{a.name}" for a in node.names}
    return names


class Scan(ast.NodeVisitor):
    """Findings of one module."""

    def __init__(self, file: str, tree: ast.Module, immutable: set[str], written: set[str]):
        self.file, self.immutable, self.written = file, immutable, written
        self.imported = imports(tree)
        self.found: list[Finding] = []
        self.classes: list[str] = []
        self.depth = 0  # functions around
        self.local_classes = {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
        self.visit(tree)

    def add(self, node: ast.AST, name: str, kind: str) -> None:
        self.found.append(Finding(self.file, node.lineno, name, kind))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.classes.append(node.name)
        self.generic_visit(node)
        self.classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        where = ".".join([*self.classes, node.name])
        for deco in node.decorator_list:
            if is_cache(deco):
                self.add(node, where, f"cache(maxsize={cache_size(deco)})")
            elif dotted(deco) in HOOKS:
                self.add(node, where, "hook")
        args = node.args
        for value in [*args.defaults, *(d for d in args.kw_defaults if d)]:
            if value_kind(value, self.immutable).startswith("container"):
                self.add(value, where, "default")
        self.depth += 1
        for child in node.body:
            self.visit(child)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    def visit_Global(self, node: ast.Global) -> None:
        for name in node.names:
            self.add(node, name, "global")

    def assigned(self, node: ast.AST, targets: list[ast.AST], value: ast.AST | None) -> None:
        for target in targets:
            for t in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                if isinstance(t, ast.Name) and not self.depth:
                    self.held(node, t.id, value)
                elif isinstance(t, ast.Attribute):
                    self.attribute(node, t)

    def held(self, node: ast.AST, name: str, value: ast.AST | None) -> None:
        where = ".".join([*self.classes, name])
        kind = value_kind(value, self.immutable)
        if isinstance(value, ast.Call) and (is_cache(value) or is_cache(value.func)):
            inner = value if is_cache(value) else value.func
            self.add(node, where, f"cache(maxsize={cache_size(inner)})")
        elif kind and name not in ("__all__", "__slots__", "__match_args__"):
            kind = f"class-attr:{kind}" if self.classes else kind
            quiet = name not in self.written and kind.endswith("container")
            self.add(node, where, kind.replace("container", "constant") if quiet else kind)

    def attribute(self, node: ast.AST, target: ast.Attribute) -> None:
        name = dotted(target)
        head = name.split(".")[0]
        if not name or head in ("self", "cls"):
            return
        meaning = self.imported.get(head, "")
        if meaning.split(".")[0] in FOREIGN:
            self.add(node, name, "patch")
        elif meaning.startswith(".") and (self.depth == 0 or name.count(".") == 1 or target.attr[0].isupper()):
            self.add(node, name, "rebound")
        elif head in self.local_classes:
            self.add(node, name, "rebound")

    def visit_Assign(self, node: ast.Assign) -> None:
        self.assigned(node, node.targets, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.assigned(node, [node.target], node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Attribute):
            self.attribute(node, node.target)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = called(node)
        if name in ("setattr", "delattr") and node.args:
            base = dotted(node.args[0])
            meaning = self.imported.get(base.split(".")[0], "")
            key = node.args[1]
            key = key.value if isinstance(key, ast.Constant) else f"<{ast.unparse(key)}>"
            kind = "patch" if meaning.split(".")[0] in FOREIGN else "rebound"
            if base and base.split(".")[0] not in ("self",):
                self.add(node, f"{base}.{key}", f"{kind}({name})")
        elif not self.depth and dotted(node.func) in HOOKS:
            self.add(node, dotted(node.func), "hook")
        self.generic_visit(node)


def findings(src: Path) -> list[Finding]:
    """All mutable state of the modules under `src`."""
    trees = {p: ast.parse(p.read_text()) for p in sorted(src.rglob("*.py"))}
    immutable = frozen_classes(trees)
    written = {n.rpartition(".")[2] for t in trees.values() for n in written_names(t) | passed_names(t)}
    return [f for p, t in trees.items() for f in Scan(str(p.relative_to(src)), t, immutable, written).found]
