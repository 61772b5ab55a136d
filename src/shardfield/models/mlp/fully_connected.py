"""A fully connected network, with the options that physics-informed training uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activations import get_activation


class FullyConnected(nn.Module):
    """`num_layers` hidden layers of `layer_size` features, each followed by an activation, and a linear layer.

    activation_fn: a name, or a list of names, one per hidden layer; the last name is repeated.
    skip_connections: adds the output of every second layer to the output of the layer two further on.
    adaptive_activations: scales the input of all activations by one learned number.
    weight_norm: parametrizes each row of a hidden layer's weight by its norm and its direction.
    weight_fact: parametrizes each row of a hidden layer's weight by a factor and a row.

    >>> FullyConnected(in_features=32, out_features=64)(torch.zeros(8, 32)).shape
    torch.Size([8, 64])
    """

    def __init__(
        self,
        in_features: int = 512,
        layer_size: int = 512,
        out_features: int = 512,
        num_layers: int = 6,
        activation_fn: str | Sequence[str] = "silu",
        skip_connections: bool = False,
        adaptive_activations: bool = False,
        weight_norm: bool = False,
        weight_fact: bool = False,
    ):
        super().__init__()
        if weight_norm and weight_fact:
            raise ValueError("FullyConnected: weight_norm and weight_fact exclude each other")
        names = [activation_fn] if isinstance(activation_fn, str) else list(activation_fn)
        if num_layers < 1 or not names:
            raise ValueError(f"FullyConnected: {num_layers} hidden layers with {len(names)} activations")
        names += names[-1:] * (num_layers - len(names))
        linear = WeightNormLinear if weight_norm else WeightFactLinear if weight_fact else _plain_linear
        scale = nn.Parameter(torch.ones(1)) if adaptive_activations else None
        sizes = [in_features] + [layer_size] * num_layers
        self.in_features, self.out_features, self.skip_connections = in_features, out_features, skip_connections
        self.layers = nn.ModuleList(
            FCLayer(linear(n_in, n_out), get_activation(name, n_out), scale)
            for n_in, n_out, name in zip(sizes, sizes[1:], names, strict=False)
        )
        self.final_layer = FCLayer(_plain_linear(layer_size, out_features), nn.Identity(), None)

    def forward(self, x: Tensor) -> Tensor:
        skip = None
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.skip_connections and i % 2 == 0:
                x, skip = (x if skip is None else x + skip), x
        return self.final_layer(x)


class FCLayer(nn.Module):
    """A linear layer, a scaling by `activation_par` unless it is None, and an activation."""

    def __init__(self, linear: nn.Module, activation_fn: nn.Module, activation_par: nn.Parameter | None):
        super().__init__()
        self.linear, self.activation_fn, self.activation_par = linear, activation_fn, activation_par

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.activation_fn(x if self.activation_par is None else self.activation_par * x)


def _plain_linear(in_features: int, out_features: int) -> nn.Linear:
    linear = nn.Linear(in_features, out_features)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class WeightNormLinear(nn.Module):
    """A linear layer whose weight has rows of the direction of `weight` and the norm of `weight_g`."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(out_features, in_features)))
        self.weight_g = nn.Parameter(torch.ones(out_features, 1))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_g * self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


class WeightFactLinear(nn.Module):
    """A linear layer whose weight has the rows `g * v`; each factor `g` is initialized to exp of a normal(1, 0.1)."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        weight = nn.init.xavier_uniform_(torch.empty(out_features, in_features))
        g = torch.exp(torch.normal(1.0, 0.1, (out_features, 1)))
        self.g, self.v = nn.Parameter(g), nn.Parameter(weight / g)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.g * self.v, self.bias)
