"""What shardfield changes in torch: declared at import, installed with the first Layout.

Importing shardfield changes nothing in torch. `Layout.make` installs the patches, before any ShardTensor can exist, and
`uninstall` puts torch's own attributes back. `DistributedManager` calls `install_early`, for what a script does before
it has a ShardTensor: `torch.load`, `torch.compile`. docs/architecture.md lists the patches; a test compares that list
with `patches`.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_INHERITED = object()


class Patch:
    """One attribute of torch and its replacement.

    path: dotted name, as "torch.autograd.Function.apply".
    make: called with the entry of the owner's `__dict__`; returns the replacement.
    reason: why no public hook will do.
    """

    def __init__(self, path: str, make: Callable[[Any], Any], reason: str):
        self.path, self.make, self.reason = path, make, reason
        *owner, self.name = path.split(".")[1:]
        self.owner: Any = functools.reduce(getattr, owner, torch)
        self.before: Any = None  # torch's entry in the owner's __dict__, while ours is installed
        self.after: Any = None  # ours, while installed

    def install(self) -> None:
        """Replace the attribute, unless it is replaced already."""
        if self.after is None:
            self.before = vars(self.owner).get(self.name, _INHERITED)
            self.after = self.make(getattr(self.owner, self.name) if self.before is _INHERITED else self.before)
            setattr(self.owner, self.name, self.after)

    def uninstall(self) -> None:
        """Put torch's attribute back. A replacement that other code has replaced again stays, with a warning."""
        if self.after is None:
            return
        if vars(self.owner).get(self.name) is not self.after:
            warnings.warn(
                f"shardfield.uninstall: {self.path} was replaced again by other code, so shardfield's replacement "
                "stays below it. It passes calls without ShardTensors on",
                stacklevel=4,
            )
            return
        if self.before is _INHERITED:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)
        self.before = self.after = None


class CodePatch:
    """A Python function of torch, whose code is replaced: modules that imported its name call the replacement too.

    path: dotted name of the function. Its module may be imported later: the function is replaced with the first Layout
    that is made after that.
    make: called with a function that has torch's code, and its module; returns the replacement.
    """

    def __init__(self, path: str, make: Callable[[Any, Any], Callable], reason: str):
        self.path, self.make, self.reason = path, make, reason
        self.module, self.name = path.rsplit(".", 1)
        self.after: Any = None  # (function, its code and defaults before), while replaced

    @property
    def pending(self) -> bool:
        module = sys.modules.get(self.module)
        if self.after is not None or module is None:
            return False
        # A release without the function must not be asked for it at every layout, unless its import is not finished.
        return hasattr(module, self.name) or getattr(module.__spec__, "_initializing", False)

    def install(self) -> None:
        """Replace the code of the function if its module is imported."""
        if not self.pending:
            return
        module = sys.modules[self.module]
        function: Any = getattr(module, self.name, None)
        while getattr(function, "__closure__", None) and hasattr(function, "__wrapped__"):
            function = function.__wrapped__  # another package has wrapped it: Lightning wraps torch.compile
        if not isinstance(function, types.FunctionType) or function.__closure__:
            return  # the module is being imported
        plain = types.FunctionType(function.__code__, function.__globals__, self.name, function.__defaults__)
        plain.__kwdefaults__ = function.__kwdefaults__
        plain.__annotations__ = function.__annotations__
        run = self.make(plain, module)
        before = (function.__code__, function.__defaults__, function.__kwdefaults__)

        def call(*args, **kwargs):
            return call_replacement(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821

        # A function's code looks names up in the module of the function.
        function.__globals__["call_replacement"] = run
        function.__code__, function.__defaults__, function.__kwdefaults__ = call.__code__, None, None
        self.after = (function, before)

    def uninstall(self) -> None:
        """Put torch's code back."""
        if self.after is None:
            return
        function, before = self.after
        function.__code__, function.__defaults__, function.__kwdefaults__ = before
        del function.__globals__["call_replacement"]
        self.after = None


class SafeGlobals:
    """Functions of shardfield that `torch.load` may call with `weights_only=True`, its default."""

    path = "torch.serialization.get_safe_globals()"
    reason = "`torch.load` refuses a file that names the function that rebuilds a saved ShardTensor"

    def __init__(self) -> None:
        self._declared: list[Any] = []
        self.after: Any = None  # the context of torch that adds the functions, while entered

    def declare(self, function: Callable) -> None:
        """Name a function that saved files call."""
        self._declared.append(function)

    def install(self) -> None:
        """Add the functions that are not in torch's list yet."""
        if self.after is None:
            present = torch.serialization.get_safe_globals()
            self.after = torch.serialization.safe_globals([f for f in self._declared if f not in present])
            self.after.__enter__()

    def uninstall(self) -> None:
        """Remove the functions that `install` has added."""
        if self.after is not None:
            self.after.__exit__(None, None, None)
            self.after = None


class Patches:
    """All declared patches."""

    def __init__(self, *patches: SafeGlobals) -> None:
        self._installed = False
        self._all: list[Patch | CodePatch | SafeGlobals] = list(patches)
        self._of_code: list[CodePatch] = []  # those that may have to wait for an import
        self._early: list[CodePatch | SafeGlobals] = list(patches)  # those that a script needs before the first Layout
        self._modules = -1  # the number of imported modules when nothing was pending

    def __iter__(self) -> Iterator[Patch | CodePatch | SafeGlobals]:
        return iter(self._all)

    @property
    def installed(self) -> bool:
        """Whether all patches of imported modules are in place."""
        if self._installed and len(sys.modules) == self._modules:  # asked for every layout
            return True
        if not self._installed or any(patch.pending for patch in self._of_code):
            return False
        self._modules = len(sys.modules)
        return True

    def declare(self, path: str, make: Callable[[Any], Any], reason: str) -> None:
        """Add a patch. It is installed with the first Layout."""
        self._all.append(Patch(path, make, reason))
        self._installed = False

    def declare_code(
        self, path: str, make: Callable[[Any, Any], Callable], reason: str, *, early: bool = False
    ) -> None:
        """Add a patch of a function's code. It is installed with the first Layout after the import of its module."""
        self._of_code.append(CodePatch(path, make, reason))
        self._modules = -1
        self._all.append(self._of_code[-1])
        if early:
            self._early.append(self._of_code[-1])

    def install_early(self) -> None:
        """Install the patches of functions that scripts call before they have a ShardTensor."""
        for patch in self._early:
            patch.install()

    def install(self) -> None:
        """Install the declared patches that are not in place."""
        for patch in self._all:
            patch.install()
        self._installed = True

    def uninstall(self) -> None:
        """Put torch's attributes back, newest first."""
        for patch in reversed(self._all):
            patch.uninstall()
        self._installed, self._modules = False, -1


safe_globals = SafeGlobals()
patches = Patches(safe_globals)


def uninstall() -> None:
    """Undo every change that shardfield has made in torch.

    The changes are made with the first ShardTensor; importing shardfield changes nothing in torch.
    ShardTensors made before this call must not be used after it. The next one that is made installs them again.
    [Architecture](architecture.md#what-is-patched-in-torch) lists them.
    """
    patches.uninstall()


def replace_function_apply(make: Callable[[Any], Any]) -> None:
    """Declare the patch of `autograd.Function.apply`; `make(before)` gets and returns an entry of the class's __dict__.

    torch 2.11-2.15. Can go when Function.apply honors `__torch_function__`.
    """
    patches.declare(
        "torch.autograd.Function.apply",
        make,
        "C++ records a Function on the wrappers, below every override: gradients of local tensors would be dropped",
    )


def replace_engine_call(before_backward: Callable[[Any], None], run_engine: Callable) -> None:
    """Declare the patch that calls `before_backward(outputs)` and `run_engine(run, ...)` for `run(...)`.

    `create_graph=True` runs in the calling thread: torch 2.11-2.15 run ready nodes in the order in which they were
    recorded, counted per thread. Nodes that a device's own thread records in a first backward would have a position
    among those of the forward that differs from rank to rank, and a second backward would issue its collectives in
    different orders. All entry points (`backward`, `grad`, of ShardTensors or of a plain loss) call this, which has no
    public name.
    """

    def make(run: Callable) -> Callable:
        def ordered(
            outputs: Any,
            gradients: Any,
            retain_graph: Any,
            create_graph: Any,
            inputs: Any = (),
            allow_unreachable: bool = False,
            accumulate_grad: bool = False,
        ) -> Any:
            before_backward(outputs)
            args = run, outputs, gradients, retain_graph, create_graph, inputs, allow_unreachable, accumulate_grad
            if not create_graph:
                return run_engine(*args)
            with torch.autograd.set_multithreading_enabled(False):
                return run_engine(*args)

        return ordered

    patches.declare(
        "torch.autograd._engine_run_backward",
        make,
        "with create_graph, device threads record nodes in an order that differs from rank to rank: a second backward "
        "would issue its collectives in different orders; a saved tensor that was written must raise on all ranks",
    )


def replace_script_call(call: Callable) -> None:
    """Declare the patch that makes scripted functions call `call(before, function, *args, **kwargs)`.

    torch 2.11-2.15 run a `torch.jit.ScriptFunction` (of `script` and of `trace`) in C++ below every override, unlike a
    ScriptModule. Can go when it honors `__torch_function__`.
    """

    def make(before: Callable) -> Callable:
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            return call(before.__get__(self), self, *args, **kwargs)

        return __call__

    patches.declare(
        "torch.jit.ScriptFunction.__call__",
        make,
        "the C++ interpreter of TorchScript calls kernels below the rules",
    )


def check_legacy_backward_hooks(check: Callable[[torch.nn.Module, Any, Any], None]) -> None:
    """Declare the patch that calls `check(module, inputs, result)` after a call with `register_backward_hook` hooks.

    torch 2.11-2.15: such a hook is set on the node of the result, whichever that is; then torch calls this method. No
    public name; can go when `register_backward_hook` goes.
    """

    def make(warn: Callable) -> Callable:
        def checked(self: torch.nn.Module, inputs: Any, result: Any, grad_fn: Any) -> None:
            check(self, inputs, result)
            warn(self, inputs, result, grad_fn)

        return checked

    patches.declare(
        "torch.nn.Module._maybe_warn_non_full_backward_hook",
        make,
        "`register_backward_hook` would see gradients of a local call: refused for ShardTensors",
    )


def _replace_for(kind: type, path: str, call: Callable, reason: str) -> None:
    """Declare the patch by which a function calls `call(plain, module, *args, **kwargs)` if an argument is a `kind`."""

    def make(plain: Callable, module: Any) -> Callable:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            # Compilers trace calls of plain tensors: nothing but types may be read here.
            for value in (*args, *kwargs.values()):
                if isinstance(value, kind):
                    return call(plain, module, *args, **kwargs)
            return plain(*args, **kwargs)

        return replacement

    patches.declare_code(path, make, reason)


def replace_flex_attention(call: Callable, kind: type) -> None:
    """Declare the patch by which `flex_attention` of tensors of `kind` calls `call(plain, module, *args, **kwargs)`.

    `call` must not be traced by a compiler.

    torch 2.11-2.15: the function compiles itself before any tensor's override is called. Can go when it honors
    `__torch_function__`.
    """
    _replace_for(
        kind,
        "torch.nn.attention.flex_attention.flex_attention",
        call,
        "it compiles itself before any override is called; names imported from its module must reach the rule too",
    )


def replace_natten(call: Callable, kind: type) -> None:
    """Declare the patch by which natten's attention of tensors of `kind` calls `call(plain, module, *args, **kwargs)`.

    natten 0.21: `na1d`, `na2d`, `na3d` and the modules call this function, which reorders tokens before it reaches an
    operator. Can go when it honors `__torch_function__`.
    """
    _replace_for(
        kind,
        "natten.functional.neighborhood_attention_generic",
        call,
        "it reorders tokens and selects a kernel before any override is called; its modules must reach the rule too",
    )


def replace_torch_compile(route: Callable[[Any, Any, dict[str, Any]], Any]) -> None:
    """Declare the patch by which `torch.compile(model, **options)` returns `route(compiled, model, options)`.

    torch 2.11-2.15: Dynamo traces the override of a tensor subclass, which is Python code with messages in it. Can go
    when a subclass can choose the compiler of a call.
    """

    def make(plain: Callable, module: Any) -> Callable:
        def replacement(model: Any = None, **options: Any) -> Any:
            compiled = plain(model, **options)  # without a model: a decorator, which calls torch.compile again
            return compiled if model is None else route(compiled, model, options)

        return replacement

    patches.declare_code(
        "torch.compile",
        make,
        "Dynamo cannot trace calls on ShardTensors: with `fullgraph=True` they are compiled by `shardfield.compile`",
        early=True,
    )


def replace_ddp_outputs(kind: type, graph_of: Callable[[Any], torch.Tensor]) -> None:
    """Declare the patch by which DDP looks for used parameters in the graph of `graph_of(x)`, for results of `kind`.

    torch 2.11-2.15: with `find_unused_parameters=True`, DDP walks the C++ graph of the tensors in a result. That of a
    wrapper is empty: all parameters would count as unused, and their gradients would arrive unexpectedly. Can go when
    DDP asks a tensor for its `grad_fn` in Python.
    """

    def make(plain: Callable, module: Any) -> Callable:
        def replacement(obj: Any) -> Any:
            return [graph_of(obj)] if isinstance(obj, kind) else plain(obj)

        return replacement

    patches.declare_code(
        "torch.nn.parallel.distributed._find_tensors",
        make,
        "DDP with `find_unused_parameters=True` walks the C++ graph of the wrapper, which is empty",
    )
