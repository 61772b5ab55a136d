"""Lists of tensors: foreach functions, steps of foreach and fused optimizers, clipping, averages, gradient scalers."""

import copy

import torch
from torch import optim
from torch.nn.utils import clip_grad_norm_

from tests.harness import T, case

FEW = {"layouts": 4, "try_partial": False}
STEPS = FEW | {"grad": False}


def foreach(x, name, *args):
    """Call a foreach function on a list of x, a plain tensor and a slice of x. `x`, `xs`: x, and the list."""
    xs = [x * 1, torch.full((3,), 0.5, dtype=torch.float64, requires_grad=x.requires_grad) * 1, x[1:] * 1]
    given = [x if a == "x" else [t + 0.25 for t in xs] if a == "xs" else a for a in args]
    return *getattr(torch, name)(xs, *given), *xs


def numbers_to_powers(x):
    return torch._foreach_pow(2.0, [x, x[1:]])


def steps(x, name):
    """Run steps of an optimizer on a sharded parameter and a plain one; continue with a copy of its state."""
    param, plain = x.detach().clone().requires_grad_(), torch.ones(x.shape[-1], dtype=torch.float64, requires_grad=True)
    optimizer = OPTIMIZERS[name]([param, plain])
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        (param.sin() * plain + param * step).sum().backward()
        norms.append(clip_grad_norm_([param, plain], 0.5, foreach=True))
        optimizer.step()
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return param.detach(), plain.detach(), *norms


def scaled_steps(x, **kwargs):
    """Run steps with a gradient scaler; one element of one gradient is infinite in the second."""
    param = x.detach().clone().requires_grad_()
    optimizer, scaler = optim.AdamW([param], lr=0.1, **kwargs), torch.amp.GradScaler("cpu", 8.0, growth_interval=1)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(param.sin().sum()).backward()
        if step == 1:
            param.grad[-1, -1] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(torch.full((), scaler.get_scale()))
    return param.detach(), *scales


def average(x):
    """Average weights as EMA does."""
    mean = x.detach().clone()
    for step in range(3):
        torch._foreach_lerp_([mean], [x * step], 0.1)
    return mean


def row(name, *args):
    x = T(4, 5, fill="positive", grad=not name.endswith("_"))  # torch has no derivatives of some that write
    return case(foreach, x, name, *args, options=FEW | {"name": name})


OPTIMIZERS = {
    "adam": lambda p: optim.Adam(p, lr=0.1, foreach=True, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: optim.SGD(p, lr=0.1, foreach=True, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1, foreach=True, centered=True, momentum=0.5),
    "radam": lambda p: optim.RAdam(p, lr=0.1, foreach=True),
    "rprop": lambda p: optim.Rprop(p, lr=0.1, foreach=True),
    "fused adam": lambda p: optim.AdamW(p, lr=0.1, fused=True, amsgrad=True),
    "fused adam, rate in a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "fused sgd": lambda p: optim.SGD(p, lr=0.1, fused=True, momentum=0.9),
    "fused adagrad": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
}

CASES = [
    row("_foreach_add_", "xs"),
    row("_foreach_add", [1.0, 2.0, 3.0]),
    row("_foreach_mul_", 2.0),
    row("_foreach_div", "xs"),
    row("_foreach_lerp_", "xs", 0.3),
    row("_foreach_lerp", "xs", "xs"),
    row("_foreach_addcmul_", "xs", "xs", 0.5),
    row("_foreach_addcdiv", "xs", "xs", [0.5, 0.2, 0.1]),
    row("_foreach_addcdiv_", "xs", "xs", torch.tensor([0.5, 0.2, 0.1], dtype=torch.float64)),
    row("_foreach_maximum_", 0.7),
    row("_foreach_minimum", "xs"),
    row("_foreach_pow", 3.0),
    row("_foreach_sqrt_"),
    row("_foreach_zero_"),
    row("_foreach_copy_", "xs"),
    row("_foreach_norm", 1),
    row("_foreach_max"),
    case(numbers_to_powers, T(4, 5), options=FEW),
    case(average, T(4, 5), options=STEPS),
    *(case(steps, T(4, 5), name, options=STEPS) for name in OPTIMIZERS),
    case(scaled_steps, T(4, 5), options=STEPS),
    case(scaled_steps, T(4, 5), fused=True, options=STEPS),
    case(scaled_steps, T(4, 5), foreach=True, options=STEPS),
]
