"""Store complex parameters as pairs of real numbers, for wrappers that need parameters of one dtype.

FSDP flattens the parameters of a module together and refuses a mix of complex and real ones, which every spectral
layer has. `real_pairs` stores each complex parameter as a real one with a last dim of two. The module still reads a
complex tensor under the old name, a view of the pairs, so its code and its gradients do not change.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

SUFFIX = "_real_pair"  # a parameter `weight` is stored as `weight_real_pair`


def real_pairs(module: nn.Module) -> nn.Module:
    """Store every complex parameter in `module` as real pairs, in place; shared parameters stay shared.

    >>> layer = nn.Module()
    >>> layer.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    >>> real_pairs(layer).weight
    tensor([1.+0.j, 1.+0.j, 1.+0.j], grad_fn=<ViewAsComplexBackward0>)
    >>> {name: (tuple(p.shape), p.dtype) for name, p in layer.named_parameters()}
    {'weight_real_pair': ((3, 2), torch.float32)}
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        names = [n for n, p in part._parameters.items() if p is not None and p.is_complex()]
        for name in names:
            parameter = part._parameters.pop(name)
            assert parameter is not None
            if parameter not in made:
                pairs = torch.view_as_real(parameter.detach().resolve_conj()).contiguous()
                made[parameter] = nn.Parameter(pairs, requires_grad=parameter.requires_grad)
            part.register_parameter(name + SUFFIX, made[parameter])
        if names:
            part.__class__ = _complex_view_class(type(part), tuple(names))
    return module


def _complex_view_class(kind: type, names: tuple[str, ...]) -> type:
    """Return a subclass whose attributes `names` are complex views of the pairs."""

    def view(name: str) -> property:
        # An instance created later, by `type(self)(...)`, has its parameters under their original names.
        def get(self):
            pairs = _find_pairs(self, name)
            if pairs is not None:
                return torch.view_as_complex(pairs)
            if name in self.__dict__:
                return self.__dict__[name]
            raise AttributeError(name)  # nn.Module.__getattr__ is called next

        def set(self, value):
            pairs = _find_pairs(self, name)
            if pairs is None:
                self.__dict__[name] = value
                return
            with torch.no_grad():
                pairs.copy_(torch.view_as_real(value.resolve_conj()))

        return property(get, set)

    def body(scope: dict[str, Any]) -> None:
        scope.update({name: view(name) for name in names}, __module__=kind.__module__, __doc__=kind.__doc__)

    try:
        return types.new_class(kind.__name__, (kind,), {}, body)
    except TypeError:  # a class with a `name` argument for its subclasses, as in tensorly-torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tensorly-torch warns about an empty name
            return types.new_class(kind.__name__, (kind,), {"name": ""}, body)


def _find_pairs(module: nn.Module, name: str) -> Tensor | None:
    """Return the pairs of a parameter; FSDP1 without `use_orig_params` has them as a plain attribute."""
    found = module._parameters.get(name + SUFFIX)
    return module.__dict__.get(name + SUFFIX) if found is None else found


def to_complex_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict of unsharded tensors to that of the module before `real_pairs`."""
    return {
        name.removesuffix(SUFFIX): torch.view_as_complex(value.contiguous()) if name.endswith(SUFFIX) else value
        for name, value in state.items()
    }


def to_pair_state(state: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Convert a state dict with complex values to that of `module`, whose parameters may be pairs."""
    wanted = {n for n, _ in module.named_parameters()}
    return {
        name + SUFFIX if name + SUFFIX in wanted else name: torch.view_as_real(value.resolve_conj()).contiguous()
        if name + SUFFIX in wanted
        else value
        for name, value in state.items()
    }
