"""Factories: zeros_like, new_zeros and their relatives."""

import warnings

import torch

from tests.harness import T, case

NO_MESSAGES = {"no_messages": True, "layouts": 4, "grad": False}


def filled(fn, *args, **kwargs):
    """Fill an uninitialized result, which has no values to compare."""
    return lambda x: torch.full_like(fn(x, *args, **kwargs), 3)


def copy_constructed(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about it
        return x.new_tensor(x.long())


def named(name, fn, *args):
    return case(fn, *args, options=NO_MESSAGES | {"name": name})


CASES = [
    case(torch.zeros_like, T(4, 5), options=NO_MESSAGES),
    case(torch.ones_like, T(4, 5), dtype=torch.int32, options=NO_MESSAGES),
    case(torch.full_like, T(4, 5), 2.5, options=NO_MESSAGES),
    case(torch.full_like, T(4, 5), fill_value=7, dtype=torch.int64, options=NO_MESSAGES),
    case(torch.zeros_like, T(2, 3, 4, 5), memory_format=torch.channels_last, options=NO_MESSAGES),
    named("empty_like", filled(torch.empty_like), T(4, 5)),
    case(torch.Tensor.new_zeros, T(4, 5), (4, 5), options=NO_MESSAGES),
    case(torch.Tensor.new_zeros, T(4, 5), 4, 5, options=NO_MESSAGES),
    case(torch.Tensor.new_ones, T(4, 5), 3, options=NO_MESSAGES),
    case(torch.Tensor.new_ones, T(4, 5), size=(4, 5), dtype=torch.int64, options=NO_MESSAGES),
    case(torch.Tensor.new_full, T(4, 5), (4, 5), 2.0, options=NO_MESSAGES),
    case(torch.Tensor.new_full, T(4, 5), (2, 2), fill_value=2.0, options=NO_MESSAGES),
    named("new_empty", filled(torch.Tensor.new_empty, (4, 5)), T(4, 5)),
    named("new_empty of another shape", filled(torch.Tensor.new_empty, 2, 3), T(4, 5)),
    case(torch.Tensor.new_tensor, T(4, 5), [[1, 2], [3, 4]], options=NO_MESSAGES),
    named("new_tensor of a tensor", copy_constructed, T(4, 5, fill="ints", dtype=torch.int32)),
    named(
        "new tensors take the layout",
        lambda x: x.new_zeros(x.shape) + torch.ones_like(x) + x.long(),
        T(4, 5, fill="ints"),
    ),
]
