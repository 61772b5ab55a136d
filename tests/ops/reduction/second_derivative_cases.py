"""Second derivatives through reductions, norms, softmax and losses: the rows return gradients."""

import torch
import torch.nn.functional as F

from tests.harness import T, case

FEW = {"layouts": 4}


def ties(shape, generator):
    return torch.randint(3, shape, generator=generator).double()


def zeros(shape, generator):
    return torch.randn(shape, dtype=torch.float64, generator=generator) * (torch.rand(shape, generator=generator) > 0.2)


def block(shape, generator):
    """Draw values of which the first half is zero, so that a shard may be zero."""
    value = torch.randn(shape, dtype=torch.float64, generator=generator)
    value[: shape[0] // 2] = 0
    return value


def slope(fn, **kwargs):
    """Return a function that computes the gradient of the cube of `fn`."""

    def call(x, *args):
        out = fn(x, *args, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad((out**3).sum(), x, create_graph=True)[0]

    call.__name__ = f"slope of {fn.__name__} " + " ".join(f"{k}={v}" for k, v in kwargs.items())
    return call


def written_slope(x):
    """Differentiate, and write into the gradient."""
    (grad,) = torch.autograd.grad(x.sin().square().sum(), x, create_graph=True)
    return grad.mul_(2)


CASES = [
    case(slope(torch.sum, dim=0), T(5, 4), options=FEW),
    case(slope(torch.mean, dim=0), T(5, 4), options=FEW),
    case(slope(torch.prod, dim=0), T(5, 4, fill=zeros), options=FEW),
    case(slope(torch.amax, dim=0), T(5, 4, fill=ties), options=FEW),
    case(slope(torch.max), T(5, 4, fill=ties), options=FEW),
    case(slope(torch.max, dim=0), T(5, 4), options=FEW),
    case(slope(torch.var, dim=0), T(5, 4), options=FEW),
    case(slope(torch.std), T(5, 4), options=FEW),
    case(slope(torch.var, dim=0), T(5, 4, dtype=torch.float32), options=FEW | {"tolerance": 1e-4}),
    case(slope(torch.std), T(5, 4, dtype=torch.float32), options=FEW | {"tolerance": 1e-4}),
    case(slope(torch.linalg.vector_norm, ord=2), T(5, 4), options=FEW),
    case(slope(torch.linalg.vector_norm, ord=2), T(4, 6, fill=block), options=FEW),
    case(slope(torch.linalg.vector_norm, ord=3, dim=0), T(5, 4), options=FEW),
    case(slope(torch.softmax, dim=0), T(5, 4), options=FEW),
    case(slope(torch.log_softmax, dim=0), T(5, 4), options=FEW),
    case(slope(torch.logsumexp, dim=0), T(5, 4), options=FEW),
    case(slope(F.normalize, dim=0), T(5, 4), options=FEW),
    case(slope(torch.renorm, p=2, dim=1, maxnorm=2.0), T(5, 4), options=FEW),
    case(slope(torch.renorm, p=3, dim=1, maxnorm=0.5), T(4, 6, fill=block), options=FEW),
    case(slope(F.mse_loss), T(5, 4), T(5, 4), options=FEW),
    case(slope(F.cross_entropy), T(5, 4), T(5, fill="ints", high=4), options=FEW),
    case(slope(F.cosine_similarity), T(5, 4), T(5, 4), options=FEW),
    # a gradient that is written in place, of a Partial tensor too
    case(written_slope, T(5, 4), options={"name": "slope, written"}),
]
