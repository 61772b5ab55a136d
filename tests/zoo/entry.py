"""What the tables of models share: rows, imports of packages, and changes of models that a comparison needs."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass

from torch import nn

from tests.zoo.import_stubs import stubbed

# What a package imports apart from its models, for images, cloud storage, export: stubbed where it is not installed.
UNUSED = {
    "timm": ("torchvision",),
    "aurora": ("torchvision",),
    "the_well": ("torchvision",),
    "vit_pytorch": ("torchvision",),
    "credit": ("torchvision", "segmentation_models_pytorch"),
    "physicsnemo": ("torchvision", "s3fs", "onnx"),
}
# Of models that compute in float32, and of neuraloperator, which hard-codes torch.cfloat: values written into its zeros
# are rounded.
SINGLE, ROUNDED = 1e-4, 2e-6


@dataclass(frozen=True)
class Entry:
    """A model by its factory's name: its input, the dims to shard over one axis, and the two to shard over two axes.

    A factory without a shape here returns the tensors too, of which the first is sharded, or those that `sharded`
    names. Without its `package` the row is skipped. `gathers`: the calls that have no rule. `lost`: the functions that
    lose a sharding. `unbalanced`: those with an unbalanced result. `balance` and `redundancy`: the largest accepted
    figures; the fields are tiny, so windows of a few rows and the indices of a graph show in them. `steps`: of gradient
    descent.
    """

    title: str
    shape: tuple[int, ...] | None
    dims: tuple[int, ...] = (2, 3)
    tiles: tuple[int, ...] | None = (2, 3)
    tolerance: float = 1e-9
    package: str = "torch"
    gathers: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    unbalanced: tuple[str, ...] = ()
    balance: float = 1.2
    redundancy: float = 1.15
    steps: int = 3
    sharded: tuple[str, ...] = ()


def imported(module: str):
    """Import a module of a third-party package without its warnings and without what its models never use."""
    with warnings.catch_warnings(), stubbed(*UNUSED.get(module.partition(".")[0], ())):
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


class Single(nn.Module):
    """Keep a model in float32 whose layers call `float()`, so that its parameters must not be converted to float64."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def _apply(self, fn, recurse=True):
        return super()._apply(lambda t: fn(t).to(t.dtype), recurse)

    def forward(self, *args, **kwargs):
        return self.model(*(x.float() for x in args), **{name: x.float() for name, x in kwargs.items()})
