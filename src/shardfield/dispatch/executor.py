"""Run a call that has a rule: look its plan up, or build it, and execute it.

The key of a plan is the function, the layouts and dtypes of the tensors, the autocast state, and the other arguments.
In the common case, ShardTensors and plain tensors that need no preparation, each argument is read once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import runtime, trace_state
from .._compat.autocast import autocast_on, autocast_state
from ..comm import autograd_collectives
from ..errors import ShardingError
from ..layout import Layout
from ..redistribute import redistribute
from ..tensor import ShardTensor, is_single_sum, wrap, wrap_sum
from ..trace_state import same_memory
from .arguments import as_operand, map_tensors, mark_consumed, mesh_of, scalar_tensors_to_numbers, write_out
from .binding import make_binder, parameter_names
from .call_cache import ArgumentReader, is_inplace, make_reader
from .copied_views import CopiedView
from .fallback import gather_fallback
from .plan import Operand, Plan, Returns, process_groups
from .torch_aliases import function_name
from .write_tracking import ViewConsensus, dims_are_nested, set_copied_view

Handler = Callable[[Any, Sequence[type], tuple, dict], Any]


class BoundPlan:
    """A plan bound to the positions of its tensors."""

    __slots__ = (
        "local",
        "view",
        "unshared",
        "slots",
        "extra_args",
        "targets",
        "grad_sums",
        "layout",
        "first_layout",
        "arg_style",
        "is_view",
        "sum_groups",
        "single_rank",
        "direct",
    )

    def __init__(self, plan: Plan, bound: dict[str, Any], tensors: list[Operand], single_rank: bool, writes: bool):
        # Nothing else of the plan is kept: where sizes change in every step, objects that stay are objects to collect.
        self.local, self.view, self.unshared = plan.local, plan.view, plan.unshared
        self.layout: Any = plan.layout
        returns_new = plan.view.returns is Returns.NEW
        self.is_view = not returns_new
        # The sum of a single number over ranks starts at once, so that a rank alone may read it: `if rank == 0: print`.
        self.sum_groups: tuple[ProcessGroup, ...] | None = None
        if returns_new and is_single_sum(plan.layout):
            partial = cast(Layout, plan.layout)
            self.sum_groups = process_groups(partial, partial.partial_axes)
            self.layout = partial.with_partial(())
        # On a mesh of one rank, torch's function on the local tensors gives the result of the rule.
        self.single_rank = single_rank and not plan.own and returns_new
        self.first_layout = tensors[0].layout if tensors else None
        slots: list[tuple[bool, Any]] = []
        for name in plan.takes or parameter_names(plan.local):
            value = bound[name]
            if isinstance(value, Operand):
                slots.append((True, value.position))
            elif isinstance(value, (list, tuple)) and any(isinstance(v, Operand) for v in value):
                slots.append((True, tuple((True, v.position) if isinstance(v, Operand) else (False, v) for v in value)))
            else:
                slots.append((False, value))
        final = [op.layout for op in tensors]
        for name, target in plan.operands.items():
            value = bound[name]
            pairs: Any = [(value, target)] if isinstance(value, Operand) else zip(value, cast(Any, target), strict=True)
            for operand, layout in pairs:
                final[operand.position] = layout
        found: Any = [plan.layout] if isinstance(plan.layout, Layout) else plan.layout or ()
        results: list[Layout] = [r for r in found if r is not None]
        used = [t.shard_axes + t.partial_axes for t in [*final, *results]]
        work = {a for axes in used for a in axes}
        complete = {bound[n].position for n in plan.complete_grads if isinstance(bound[n], Operand)}
        entering: dict[tuple, list[int]] = {}
        targets: list[tuple[int, Layout, Layout, tuple[int, ...]]] = []
        for i, (operand, layout) in enumerate(zip(tensors, final, strict=True)):
            whole = i in complete or len(used[i]) == len(work)  # most operands: no axis is idle
            idle = () if whole else layout.nontrivial_axes(sorted(work.difference(used[i])))
            scattered: tuple[int, ...] = ()
            if operand.layout is not layout and operand.layout.bare is not layout.bare:
                if layout.numel >= runtime.active.min_scattered:  # half the bytes of an all_reduce of the gradient
                    scattered = tuple([a for a in idle if a in operand.layout.shard_axes])
                targets.append((i, operand.layout, layout, scattered))
            if len(idle) > len(scattered):
                over = process_groups(layout, [a for a in idle if a not in scattered])
                entering.setdefault(over, []).append(i)
        self.targets, self.grad_sums = tuple(targets), tuple(entering.items())
        self.arg_style, self.extra_args = _find_arg_style(slots, len(tensors))
        self.slots = () if self.arg_style else tuple(slots)
        if plan.saves_views and not writes and not all(layout.local_shape.numel() for layout in final):
            self.local = _copy_empty_operands(plan.local)
        # One new tensor or started sum of operands that keep their layouts: `run_direct` runs it.
        self.direct = (
            self.arg_style == "each" and not self.targets and not self.single_rank
            and not self.is_view and self.layout.__class__ is Layout
        )  # fmt: skip

    def run(self, locals_: list[Tensor], source: Any) -> Any:
        """Return the result for these local tensors; a view result is a view of the argument `source`."""
        base = locals_[0]
        for i, now, target, scattered in self.targets:
            locals_[i] = redistribute(locals_[i], now, target, scattered)
        for over, which in self.grad_sums:
            entered = autograd_collectives.replicate_in([locals_[i] for i in which], over)
            for i, tensor in zip(which, entered, strict=True):
                locals_[i] = tensor
        if self.arg_style == "each":
            return self._wrap_results(self.local(*locals_, *self.extra_args), base, source)
        if self.arg_style == "list":
            return self._wrap_results(self.local(locals_), base, source)
        arguments = []
        for is_tensor, value in self.slots:
            if not is_tensor:
                arguments.append(value)
            elif value.__class__ is int:
                arguments.append(locals_[value])
            else:
                arguments.append([locals_[v] if is_one else v for is_one, v in value])
        return self._wrap_results(self.local(*arguments), base, source)

    def run_direct(self, locals_: list[Tensor]) -> Any:
        """Return what `run` returns for a `direct` plan, in fewer calls."""
        for over, which in self.grad_sums:
            entered = autograd_collectives.replicate_in([locals_[i] for i in which], over)
            for i, tensor in zip(which, entered, strict=True):
                locals_[i] = tensor
        return self._wrap_new(self.local(*locals_, *self.extra_args), self.layout)

    def run_unprepared(
        self, reader: ArgumentReader, func: Any, locals_: list[Tensor], args: tuple, kwargs: dict
    ) -> Any:
        """Run the plan for arguments that need no preparation. A mesh of one rank calls `func` on the local tensors."""
        if not self.single_rank or not reader.form:
            return self.run(locals_, args[0] if args else kwargs.get("input"))
        if reader.form == "first":
            out = func(locals_[0], *args[1:], **kwargs)
        elif reader.form == "each":
            out = func(*locals_, *args[len(locals_) :], **kwargs)
        else:
            out = func(locals_, *args[1:], **kwargs)
        if self.layout.__class__ is not Layout:
            return self._wrap_results(out, locals_[0], None)
        return wrap(out, self.layout)

    def _wrap_results(self, out: Any, base: Tensor, source: Any) -> Any:
        """Wrap each tensor of the result in its layout."""
        layout = self.layout
        if layout is None:
            return out
        if layout.__class__ is Layout:
            return self._wrap_result(out, layout, base, source)
        parts = [
            o if x is None else self._wrap_result(o, x, base, source, i)
            for i, (o, x) in enumerate(zip(out, layout, strict=True))
        ]
        # torch.return_types.* take one sequence; tuples and lists too
        return type(out)(parts) if isinstance(out, (tuple, list)) else tuple(parts)

    def _wrap_result(self, out: Tensor, layout: Layout, base: Tensor, source: Any, index: int | None = None) -> Any:
        return self._wrap_view(out, layout, base, source, index) if self.is_view else self._wrap_new(out, layout)

    def _wrap_new(self, out: Tensor, layout: Layout) -> ShardTensor:
        """Wrap a result that torch returns as a new tensor."""
        assert out.shape == layout.local_shape, _mismatch(out, layout)
        if self.sum_groups is not None:
            return wrap_sum(out, layout, self.sum_groups, self.unshared)
        if not out.numel() and out._is_view():  # a write into an empty view of a leaf would raise on this rank alone
            out = out.clone()
        return wrap(out, layout)

    def _view_again(self, source: ShardTensor, index: int | None) -> ShardTensor:
        """Run the plan again on the present value of `source`."""
        local = source._local_tensor
        first = self.first_layout
        if first is not None and source._layout is not first:  # a Partial operand, or merged dims
            local = redistribute(local, source._layout, first)
        out = self.run([local], source)
        return out if index is None else out[index]

    def _wrap_view(self, out: Tensor, layout: Layout, base: Tensor, source: Any, index: int | None) -> Any:
        """Wrap a result that torch returns as a view, and record whether a write into it would be lost."""
        assert out.shape == layout.local_shape, _mismatch(out, layout)
        kind = self.view
        of_shards = source.__class__ is ShardTensor
        before = source._copied_view if of_shards else False
        narrowed = kind.of_slice or (of_shards and source._narrowed)
        always = kind.returns is Returns.VIEW
        copied: bool | ViewConsensus = kind.returns is Returns.LOST_VIEW or before is True
        if not copied and (kind.ranks_differ or (narrowed and kind.merged)):
            here = dims_are_nested(base, kind.merged) if kind.merged else same_memory(out, base)
            if not here and same_memory(out, base):
                out = out.clone()  # on one device torch copies here, or raises
            copied = ViewConsensus(layout, always, here if out.numel() else None, before, narrowed)
        elif not copied and (always or before):
            copied = before if same_memory(out, base) else always and out.numel() > 0
        result = wrap(out, layout)
        result._consumed = True
        if copied:
            set_copied_view(result, copied)
        if copied is True and of_shards:
            nested = not kind.merged or dims_are_nested(base, kind.merged)
            # A source whose shards were moved does not have the strides of one device.
            former = source.__dict__.get("_copy_of")
            moved = before is True and not (former is not None and former.source._layout.partial)
            votes = (True, True) if kind.merged and moved else (nested, not nested)
            CopiedView(result, source, lambda x: self._view_again(x, index), bool(kind.merged), votes, kind.splits)
        if narrowed:
            result._narrowed = True
        return result


def _find_arg_style(slots: Sequence[tuple[bool, Any]], count: int) -> tuple[str, tuple]:
    """Return how `local` takes its arguments: tensors first ("each"), as one list ("list"), or by slots ("")."""
    in_order = tuple([(True, i) for i in range(count)])
    if tuple(slots[:count]) == in_order and not any([is_tensor for is_tensor, _ in slots[count:]]):
        return "each", tuple([value for _, value in slots[count:]])
    return ("list", ()) if slots == [(True, in_order)] else ("", ())


def _mismatch(out: Tensor, layout: Layout) -> str:
    return f"local result {tuple(out.shape)}, planned {layout.local_shape} of {layout}"


def _copy_empty_operands(local: Callable) -> Callable:
    """Return `local` for a rank with empty operands: it gets copies, which no write can change after it saved them.

    The strides of an empty shard allow views where torch copies the operand on one device. Backward would raise on this
    rank alone, after a write that one device accepts.
    """

    def copied(t: Tensor) -> Tensor:
        return t if t.numel() else t.clone()

    return lambda *args: local(*map_tensors(args, copied))


def make_handler(planner: Callable, partial: bool, merged: bool, is_torch_function: bool = False) -> Handler:
    """Return the handler that plans calls with a planner and runs them.

    partial, merged: the planner accepts Partial operands, and merged dims. is_torch_function: the handler serves torch
    functions only, so a mesh of one rank may call the function on the local tensors.
    """
    signature = inspect.signature(planner)
    bind = make_binder(signature)
    wants_fn = "fn" in signature.parameters and signature.parameters["fn"].kind is inspect.Parameter.KEYWORD_ONLY

    def run(func, types, args, kwargs):
        rt = runtime.active
        if kwargs:
            kinds = (func, *map(type, args), *kwargs, *map(type, kwargs.values()))
            reader = rt.readers[kinds] or make_reader(kinds, args, kwargs)
            known = reader.read(*args, *kwargs.values())
        else:
            kinds = (func, *map(type, args))
            reader = rt.readers[kinds] or make_reader(kinds, args, kwargs)
            known = reader.read(*args)
        quick: tuple = ()
        if known is not None:
            quick, given = known
            if autocast_on():
                quick += autocast_state()
            ready = rt.plans[quick]
            if ready is not None:
                if ready.direct:
                    return ready.run_direct(given)
                return ready.run_unprepared(reader, func, given, args, kwargs)
        if "out" in kwargs:
            return _run_with_out(run, func, types, args, kwargs)
        mesh = mesh_of(args, kwargs)
        if known is None:  # the reader has marked them
            mark_consumed((args[1:] if is_inplace(func) else args, kwargs))
        locals_: list[Tensor] = []
        layouts: list[Layout] = []
        key = [func, *autocast_state()]
        _collect_operands(args, partial, merged, mesh, key, locals_, layouts)
        for name, value in kwargs.items():
            key.append(name)
            _collect_operands((value,), partial, merged, mesh, key, locals_, layouts)
        found = tuple(key)
        try:
            ready = rt.plans[found]
        except TypeError:  # an unhashable argument: the plan is not cached
            ready, found = None, ()
        is_new = ready is None
        if is_new:
            alone = is_torch_function and mesh.size() == 1
            try:
                ready = _build_plan(planner, bind, wants_fn, func, args, kwargs, locals_, layouts, alone)
            except (TypeError, RuntimeError) as error:
                numbers = None if isinstance(error, ShardingError) else scalar_tensors_to_numbers(args, kwargs)
                if numbers is None or mesh_of(*numbers) is None:  # the ShardTensor itself became a number
                    raise
                try:
                    return run(func, types, *numbers)
                except (TypeError, AttributeError):  # the argument must be a tensor: raise the first error
                    if isinstance(error, RuntimeError):
                        raise error from None
                    raise
            if ready is None:
                return gather_fallback(func, types, args, kwargs)
        if quick and all([a is b for a, b in zip(locals_, given, strict=True)]):
            rt.plans[quick] = ready  # the operands need no preparation: skip it on the next call
            return ready.run_unprepared(reader, func, locals_, args, kwargs)
        if is_new and found:
            rt.plans[found] = ready
        return ready.run(locals_, args[0] if args else kwargs.get("input"))

    return run


def _collect_operands(
    values: Iterable[Any], partial: bool, merged: bool, mesh: Any, key: list, locals_: list, layouts: list
):
    """Append the arguments to `key`, and the tensors, as operands, to `locals_` and `layouts`."""
    for value in values:
        if isinstance(value, Tensor):
            local, layout = as_operand(value, mesh, partial, merged)
            locals_.append(local)
            layouts.append(layout)
            key.append(layout)
            key.append(local.dtype)
        elif isinstance(value, (list, tuple)) and value.__class__ is not torch.Size:
            key.append(len(value))
            _collect_operands(value, partial, merged, mesh, key, locals_, layouts)
        else:
            key.append(value.__class__)
            key.append((value.start, value.stop, value.step) if value.__class__ is slice else value)


def _build_plan(planner, bind, wants_fn, func, args, kwargs, locals_, layouts, single_rank) -> BoundPlan | None:
    pairs = zip(locals_, layouts, strict=True)
    tensors = [Operand(layout, local.dtype, local.device, i) for i, (local, layout) in enumerate(pairs)]
    left = iter(tensors)

    def swap(value: Any) -> Any:
        if isinstance(value, Tensor):
            return next(left)
        if isinstance(value, (list, tuple)) and value.__class__ is not torch.Size:
            return type(value)([swap(v) for v in value]) if type(value) in (list, tuple) else [swap(v) for v in value]
        # torch accepts numpy integers as ints
        return int(value) if isinstance(value, np.integer) else value

    positional = [swap(v) for v in args]
    named = {k: swap(v) for k, v in kwargs.items()}
    if wants_fn:
        named["fn"] = func
    bound = bind(positional, named)
    if bound is None:
        return None  # the rule does not take these arguments: the fallback runs torch on the gathered operands
    arguments, given, by_name = bound
    try:
        with trace_state.concrete():  # a plan depends on layouts only, not on traced values
            plan = planner(*given, **by_name)
    except ShardingError as error:
        raise ShardingError(f"{function_name(func)}: {error}\n  operands: {tensors}") from None
    if plan is None:
        return None
    return BoundPlan(plan, arguments, tensors, single_rank, is_inplace(func))


def _run_with_out(run, func, types, args, kwargs):
    """Compute the result, then write it to `out`."""
    kwargs = dict(kwargs)
    out = kwargs.pop("out")
    result = run(func, types, args, kwargs)
    if out is None:
        return result
    if isinstance(out, (tuple, list)):
        for target, part in zip(out, result, strict=True):
            write_out(target, part)
    else:
        write_out(out, result)
    return out
