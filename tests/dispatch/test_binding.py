"""Arguments are bound to a planner's parameters as `inspect.Signature.bind` binds them."""

import functools
import inspect

import pytest

from shardfield.dispatch.binding import make_binder, parameter_names


def plain(input, dim=0, *, keepdim=False, fn):
    """A planner with a default, a keyword and the function."""


def rest(input, at: int, *indices):
    """A planner that takes any number of indices."""


def keywords(input, **options):
    """A planner whose other arguments are keywords."""


CALLS = [
    ((1,), {"fn": 9}),
    ((1, 2), {"fn": 9}),
    ((1,), {"dim": 2, "keepdim": True, "fn": 9}),
    ((1,), {"axis": 2, "keepdims": True, "fn": 9}),
    ((), {"input": 1, "fn": 9}),
    ((1,), {}),  # without fn
    ((1, 2), {"dim": 3, "fn": 9}),  # given twice
    ((1, 2, 3), {"fn": 9}),  # too many, or indices
    ((1, 2, 3, 4), {}),
    ((1,), {"other": 3, "fn": 9}),
]


@pytest.mark.parametrize("planner", [plain, rest, keywords])
@pytest.mark.parametrize("given", CALLS)
def test_a_call_is_bound_as_python_binds_it(planner, given):
    signature, (positional, named) = inspect.signature(planner), given
    names = {"axis": "dim", "keepdims": "keepdim"}
    translated = {k if k in signature.parameters else names.get(k, k): v for k, v in named.items()}
    found = make_binder(signature)(positional, dict(named))
    try:
        expected = signature.bind(*positional, **translated)
    except TypeError:
        assert found is None
        return
    expected.apply_defaults()
    assert found is not None
    arguments, by_position, by_name = found
    assert list(arguments.items()) == list(expected.arguments.items())
    assert tuple(by_position) == expected.args and dict(by_name) == expected.kwargs


def test_names_of_parameters_are_those_of_the_signature():
    wrapped = functools.wraps(plain)(lambda *args, **kwargs: None)
    for function in (plain, rest, keywords, wrapped, functools.partial(plain, dim=1), lambda a, b=1: a):
        assert list(parameter_names(function)) == list(inspect.signature(function).parameters)
