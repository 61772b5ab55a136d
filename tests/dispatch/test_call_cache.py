"""Repeated calls of layers on one rank: planned once, right when arguments, parameters or handlers change."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from shardfield import ShardTensor, explain, runtime
from shardfield.testing import run_on_ranks
from tests.ops.stencil.test_conv import field


def planned(func) -> int:
    """How many plans the active runtime has for calls of `func` that need no preparation."""
    return sum(getattr(key[0], "func", None) is func for key in runtime.active.plans)


def alone(size=(2, 3, 8, 6), dim=2):
    full, x = field((1,), [Shard(dim)], size)
    return full.requires_grad_(), x.requires_grad_()


def same(found, expected):
    assert isinstance(found, ShardTensor) and type(found._local_tensor) is torch.Tensor
    torch.testing.assert_close(found.full_tensor(), expected)


def in_fresh_runtime(check, *args):
    with runtime.fresh():
        return check(*args)


LAYERS = {
    "conv": (F.conv2d, lambda: nn.Conv2d(3, 4, 3, padding=1)),
    "linear": (F.linear, lambda: nn.Linear(6, 5)),
    "batch_norm": (F.batch_norm, lambda: nn.BatchNorm2d(3)),
    "batch_norm in eval": (F.batch_norm, lambda: nn.BatchNorm2d(3).eval()),
    "layer_norm": (F.layer_norm, lambda: nn.LayerNorm(6)),
    "group_norm": (F.group_norm, lambda: nn.GroupNorm(1, 3)),
}


def repeated(name):
    func, make = LAYERS[name]
    torch.manual_seed(0)
    layer, twin = make().double(), make().double()
    twin.load_state_dict(layer.state_dict())
    for _ in range(4):
        full, x = alone()
        found, expected = layer(x), twin(full)
        same(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), full.grad)
    for ours, theirs in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for ours, theirs in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)  # written once a call
    assert planned(func) == 1


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_planned_once(name):
    run_on_ranks(in_fresh_runtime, 1, repeated, name)


def swapped():
    """torch exchanges the insides of parameters that nothing refers to weakly; others take the place of those gone."""
    full, x = alone()
    layer = nn.Conv2d(3, 4, 3).double()
    for _ in range(3):
        same(layer(x), layer(full))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    same(layer(x.float()), layer(full.float()))
    mesh, places = x.device_mesh, [Replicate()]
    for i in range(200):  # most reuse the memory of the last one
        weight = torch.randn(1 + i % 2, 3, 3, 1 + i % 3, dtype=torch.float64)
        kinds = [nn.Parameter(weight), weight, ShardTensor.from_local(weight, mesh, places)]
        kind = kinds[i % 5 % 3]
        del kinds
        same(F.conv2d(x, weight=kind), F.conv2d(full, weight))
        del kind, weight


def test_parameters_that_go_and_others_at_their_place():
    run_on_ranks(swapped, 1)


def changed_under_way():
    full, x = alone()
    weight = nn.Parameter(torch.randn(4, 3, 3, 3, dtype=torch.float64))
    for _ in range(3):
        same(F.conv2d(x, weight), F.conv2d(full, weight))
    weight.data = torch.randn(2, 3, 1, 5, dtype=torch.float64)
    same(F.conv2d(x, weight), F.conv2d(full, weight))
    # another field, another layout; and a kernel that is a ShardTensor itself
    full, x = alone((1, 3, 7, 9), dim=3)
    out = F.conv2d(x, weight)
    same(out, F.conv2d(full, weight))
    assert out.placements == (Shard(3),)
    spread = ShardTensor.from_local(weight.detach(), x.device_mesh, [Replicate()])
    for _ in range(3):
        same(F.conv2d(x, spread), F.conv2d(full, weight))
    # by name, or not at all, and in another precision
    for _ in range(3):
        same(F.conv2d(x, weight, padding=1), F.conv2d(full, weight, padding=1))
        same(F.conv2d(x, weight, None, (2, 1), 1), F.conv2d(full, weight, None, (2, 1), 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, narrow = x.float(), nn.Parameter(weight.detach().float())
        for _ in range(3):
            assert F.conv2d(half, narrow).dtype == torch.bfloat16
    assert F.conv2d(half, narrow).dtype == torch.float32


CONVOLUTIONS = [
    (F.conv2d, (), {"padding": 1}),
    (F.conv2d, (), {"stride": (2, 2), "padding": (1, 0)}),
    (F.conv2d, (), {"groups": 1, "dilation": 2}),
    (F.conv2d, (), {"padding": "same"}),
    (F.conv2d, ("bias",), {"padding": (1, 1), "dilation": (1, 1)}),
    (F.conv2d, (None, (1, 1), (0, 0), (1, 1), 1), {}),
    (F.conv2d, ("bias", (2, 1), (1, 1), (1, 1), 1), {}),
    (F.conv2d, ("bias", 1, "valid"), {}),
    (F.conv_transpose2d, (), {"output_padding": 1, "stride": (2, 2)}),
    (F.conv_transpose2d, ("bias", (2, 2), (1, 1), (1, 1), 1, (2, 2)), {}),
    (F.conv_transpose2d, (), {"dilation": (2, 2)}),
]


def spelled():
    full, x = alone()
    weight = nn.Parameter(torch.randn(3, 3, 3, 3, dtype=torch.float64))
    bias = nn.Parameter(torch.randn(3, dtype=torch.float64))
    for func, args, kwargs in CONVOLUTIONS:
        args = [bias if a == "bias" else a for a in args]
        for _ in range(3):
            same(func(x, weight, *args, **kwargs), func(full, weight, *args, **kwargs))
    step = [1, 1]
    for padding in (0, 1, 2):  # a list may change
        step[:] = [padding + 1] * 2
        for _ in range(3):
            same(F.conv2d(x, weight, None, step, padding), F.conv2d(full, weight, None, step, padding))
    assert x.type() == full.type()


def test_convolutions_however_they_are_called():
    run_on_ranks(spelled, 1)


def test_what_changes_is_seen():
    run_on_ranks(changed_under_way, 1)


def other_ways():
    full, x = alone()
    conv = nn.Conv2d(3, 4, 3).double()
    ring = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular").double()
    for _ in range(3):
        same(conv(x), conv(full))
        same(ring(x), ring(full))
    same(F.conv2d(input=x, weight=conv.weight), F.conv2d(input=full, weight=conv.weight))
    with explain() as report:
        conv(x)
    assert [r.op for r in report.rows] == ["conv2d"]
    with torch.no_grad():
        assert not conv(x).requires_grad
    before = runtime.active.registry.handlers[F.conv2d]
    try:
        ShardTensor.register_function_handler(F.conv2d, lambda func, types, args, kwargs: "mine")
        assert conv(x) == "mine"
    finally:
        ShardTensor.register_function_handler(F.conv2d, before)
    same(conv(x), conv(full))
    with pytest.raises(RuntimeError):
        conv(alone((2, 2, 8, 6))[1])
    for _ in range(2):  # a computed weight and a parameter; then a bias that is added
        same(F.conv2d(x, conv.weight * 2, conv.bias), F.conv2d(full, conv.weight * 2, conv.bias))
    shift = nn.Parameter(torch.randn(6, dtype=torch.float64))
    for _ in range(3):
        same(x + shift, full + shift)
        same(x - shift, full - shift)
    norm = nn.BatchNorm2d(3, momentum=None).double()  # a new number every time
    for _ in range(20):
        norm(x)


def test_other_ways_of_calling_a_layer():
    run_on_ranks(other_ways, 1)
