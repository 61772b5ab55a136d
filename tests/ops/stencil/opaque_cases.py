"""Functions that shardfield cannot look into, made exact by `stencil` and `local`."""

import torch
import torch.nn.functional as F

from shardfield import local, stencil
from tests.harness import T, case, double_backward, raises

SOME = {"layouts": 10}
FEW = {"layouts": 5}


# ---------------------------------------------------------------------- kernels that treat the edge in their own way


@stencil(radius=2)
def smooth(x, weight):
    """Convolve with zero padding; channels mix."""
    return F.conv2d(x, weight, padding=2)


@stencil(radius={-1: (3, 0)})
def causal(x, weight):
    """Look back only."""
    return F.conv1d(F.pad(x, (3, 0)), weight)


@stencil(radius={-2: 2, -1: 1})
def mirrored(x):
    """Sum a window of the field that is continued by reflection."""
    return F.avg_pool2d(F.pad(x, (1, 1, 2, 2), mode="reflect"), (5, 3), 1)


def neighborhood(query, key, value, kernel_size):
    """Attend to the kernel_size x kernel_size cells around each cell; at the edge the window shifts inward.

    Tensors are (batch, height, width, heads, features), as natten's.
    """
    half = kernel_size // 2
    (h, w), index = query.shape[1:3], torch.arange(kernel_size)
    rows = (torch.arange(h) - half).clamp(0, h - kernel_size)[:, None] + index
    columns = (torch.arange(w) - half).clamp(0, w - kernel_size)[:, None] + index
    around = [t[:, rows][:, :, :, columns] for t in (key, value)]  # (b, h, k, w, k, heads, features)
    weights = torch.einsum("bhwnf,bhiwjnf->bhwnij", query, around[0]).flatten(-2).softmax(-1)
    weights = weights.unflatten(-1, (kernel_size, kernel_size))
    return torch.einsum("bhwnij,bhiwjnf->bhwnf", weights, around[1])


attend = stencil(
    radius=lambda query, key, value, kernel_size: {0: 0, 1: kernel_size // 2, 2: kernel_size // 2, 3: 0},
    fields=("query", "key", "value"),
)(neighborhood)


@stencil(radius={-1: 1})
def forward_only(x):
    """Return one-sided differences, from a kernel that has no backward."""
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("no backward")
    return torch.gradient(x.detach(), dim=-1)[0]


# ---------------------------------------------------------------------- other edges


@stencil(radius={-2: (1, 2), -1: 1}, edge="periodic")
def wrapped(x):
    return x.roll(1, -2) * x.roll(-2, -2) + x.roll(1, -1).sin()


@stencil(radius={-2: 1, -1: 2}, edge={-1: "periodic"})
def sphere(x):
    """Wrap around longitudes, one-sided differences at the poles."""
    return torch.gradient(x, dim=-2)[0] * x.roll(2, -1)


@stencil(radius={0: 0, -2: (1, 2), -1: 1}, edge="valid")
def full_windows(x, weight):
    return F.conv2d(x, weight)


# ---------------------------------------------------------------------- arguments and results


@stencil(radius={-1: 1}, fields=("x", "mask"))
def several(x, mask, scale, shifts=(), *, bias=None):
    """Take fields of two shapes, weights alone and in a list; return values, an index, and values without a graph."""
    window = F.pad(x * mask * scale, (1, 1)).unfold(-1, 3, 1)
    for shift in shifts:
        window = window + shift
    if bias is not None:
        window = window + bias
    most, where = window.max(-1)
    return most, where, window.detach().sum(-1)


def with_lists(x, mask, scale, a, b):
    return several(x, mask, scale, [a, b], bias=scale)


@stencil(radius={0: 1}, out_dims={0: 1})
def moved(x):
    """Return the dim elsewhere."""
    return torch.gradient(x, dim=0)[0].T.exp()


class Slope(torch.autograd.Function):
    """A kernel with its own backward, which must see plain tensors only."""

    @staticmethod
    def forward(ctx, x, factor):
        assert type(x) is torch.Tensor
        return (F.pad(x, (0, 1)) - F.pad(x, (1, 0)))[..., 1:] * factor

    @staticmethod
    def backward(ctx, grad):
        assert type(grad) is torch.Tensor
        return (F.pad(grad, (1, 0)) - F.pad(grad, (0, 1)))[..., :-1] * 3.0, None


stencil(radius={0: 0, -1: (1, 1)})(Slope)


@torch.library.custom_op("shardfield_tests::lifted", mutates_args=())
def lifted(x: torch.Tensor, power: float) -> torch.Tensor:
    return F.pad(x, (1, 1))[..., 2:] ** power + x


@lifted.register_fake
def _(x, power):
    return torch.empty_like(x)


lifted.register_autograd(
    lambda ctx, grad: (grad + F.pad(grad * 2.0, (1, 0))[..., :-1] * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
stencil(radius={0: 0, -1: (0, 1)})(torch.ops.shardfield_tests.lifted)


@local
def doubled(x, by=2.0):
    return by * x.sinh()


@local(dims=(0,), fields=("x", "y"))
def mixed(x, y, weight):
    """Mix everything but samples."""
    return torch.einsum("nab,nbc,c->nac", x, y, weight)


# ---------------------------------------------------------------------- refused


@stencil(radius={-1: 1})
def shrinks(x):
    return x[..., 1:]


@local
def ambiguous(x, y):
    return x * y


@local
def writes(x):
    return x.mul_(2)


PARAMETER = torch.ones(3, dtype=torch.float64, requires_grad=True)


@local(dims=(0,))
def hidden(x):
    return x * PARAMETER.to(x.device)


@stencil(radius=1)
def flat(x):
    return x


def refuses(text):
    return {"layouts": 3, "refuses": text, "try_partial": False}


CASES = [
    case(smooth, T(2, 3, 7, 6), T(2, 3, 5, 5, shard_dims=()), options=SOME),
    case(smooth, T(1, 2, 2, 9), T(2, 2, 5, 5), options=SOME),
    case(
        double_backward(lambda x, w: smooth(x, w) ** 2), T(1, 2, 5, 4), T(2, 2, 5, 5), options=FEW | {"name": "twice"}
    ),
    case(causal, T(2, 2, 9), T(2, 2, 4, shard_dims=()), options=SOME),
    case(mirrored, T(2, 2, 7, 5), options=SOME),
    *(case(attend, T(2, 6, 5, 2, 3), T(2, 6, 5, 2, 3), T(2, 6, 5, 2, 3), k, options=SOME) for k in (3, 5)),
    case(wrapped, T(2, 5, 6), options=SOME),
    case(wrapped, T(2, 2, 1), options=FEW),
    case(sphere, T(2, 6, 7), options=SOME),
    case(full_windows, T(2, 2, 7, 6), T(3, 2, 4, 3, shard_dims=()), options=SOME),
    case(full_windows, T(1, 2, 4, 3), T(3, 2, 4, 3, shard_dims=()), options=FEW),
    case(several, T(2, 7), T(7), T(1), options=SOME),
    case(with_lists, T(2, 7), T(7), T(1), T(3), T(3), options=FEW),
    case(moved, T(6, 4), options=FEW),
    case(lambda x, factor: Slope.apply(x, factor), T(3, 2, 7), 3.0, options=SOME | {"name": "Slope"}),
    case(torch.ops.shardfield_tests.lifted, T(3, 2, 7), 2.0, options=SOME),
    case(torch.ops.shardfield_tests.lifted.default, T(3, 2, 7), power=2.0, options=FEW),
    case(doubled, T(4, 5), options=FEW | {"no_messages": True, "try_partial": False}),
    case(doubled, T(4, 5), by=3.0, options=FEW),
    case(mixed, T(5, 2, 3), T(5, 3, 4), T(4), options=SOME),
    # ---- what cannot be right is refused, on all ranks
    case(shrinks, T(5, 6), options=refuses("edge='same' needs")),
    case(ambiguous, T(5, 6), T(5, 6), options=refuses("say whether it is a field")),
    case(writes, T(5, 6, grad=False), options=refuses("writes into an argument")),
    case(hidden, T(5, 3), options=refuses("make it an argument")),
    case(flat, T(5, 6), options=refuses("name the dims")),
    case(lambda x: forward_only(x.detach()) + 0 * x, T(2, 7), options=FEW | {"name": "forward only"}),
    case(forward_only, T(2, 7), options=FEW | raises(NotImplementedError, "no backward")),
    case(attend, T(1, 6, 5, 2, 3), T(1, 6, 4, 2, 3), T(1, 6, 5, 2, 3), 3, options=refuses("equal sizes along dim 2")),
    case(moved, T(), options=refuses("radius names dim 0")),
]
