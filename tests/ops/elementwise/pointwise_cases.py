"""Pointwise functions: all of them by name, then operands of different layouts."""

import torch
import torch.nn.functional as F

from shardfield.ops.elementwise import pointwise as table
from tests.harness import T, case, raises

# Ranges in which functions are defined and smooth; the default is (0, 1).
FILL = {"acosh": "over one", "arccosh": "over one", "special_multigammaln": "over one", "mvlgamma": "over one"}
ARGUMENTS = {
    "mvlgamma": (1,),
    "special_multigammaln": (1,),
    "polygamma": None,
    "special_polygamma": None,
    "threshold": (0.5, 2.0),
    "clamp": (0.2, 0.7),
    "clip": (0.2, 0.7),
    "clamp_max": (0.6,),
    "clamp_min": (0.4,),
    "type": (torch.float32,),
}
INTEGERS = {
    "bitwise_not",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "gcd",
    "lcm",
}
NO_GRAD = {
    "floor_divide",
    "heaviside",
    "nextafter",
    "igamma",
    "igammac",
    "special_gammainc",
    "special_gammaincc",
    "special_zeta",
}
# the sum of a Partial may differ in its last digit, and the cast then rounds to a neighboring number
TOLERANCE = {name: {"tolerance": 2e-3} for name in ("half", "chalf")}
TOLERANCE |= {name: {"tolerance": 1e-6} for name in ("float", "cfloat")} | {"bfloat16": {"tolerance": 1e-2}}
FEW = {"layouts": 2, "no_messages": False}


FEW_BESIDE = {"layouts": 5, "grad": False}


def write_into_source(x, name):
    """Write into a tensor after a call that returns the tensor itself: its result changes too."""
    total = x.sum(0)
    same = getattr(total, name)()
    with torch.no_grad():
        total.sin_()
    return same.detach() * 1


def write_beside(x, share, to_source, name):
    """Write into a tensor that shares the memory of another one, by a call that reduces a Partial."""
    total = x.sum(0)
    with torch.no_grad():
        same = total.data if share == "data" else total.to(total.dtype) if share == "to" else total.detach()
        getattr(total if to_source else same, name)(2.0)
    return total.detach() * 1, same.detach() * 1


def cancelling(shape, generator):
    """Return integers whose sum over rows has few digits, and whose rows have more than float32 has."""
    return torch.tensor([[2**40, -(2**41)], [1 - 2**40, 2**41 + 5]])


def over_one(shape, generator):
    return 2 + torch.rand(shape, dtype=torch.float64, generator=generator)


def function(name):
    for space in (torch, F, torch.special, torch.Tensor):
        short = name.removeprefix("special_") if space is torch.special else name
        found = getattr(space, short, None)
        if callable(found):  # torch.float is a dtype, torch.Tensor.float a cast
            return found
    return None


def unary(name):
    fn = function(name)
    extra = ARGUMENTS.get(name, ())
    fill = over_one if FILL.get(name) == "over one" else "unit"
    x = T(5, 6, fill="ints") if name in INTEGERS else T(5, 6, fill=fill, grad=name not in NO_GRAD)
    options = FEW | {"name": name} | TOLERANCE.get(name, {})
    if extra is None:
        return case(fn, 1, x, options=options)
    return case(fn, x, *extra, options=options)


def binary(name):
    fn = function(name)
    options = FEW | {"name": name}
    if name in INTEGERS or name == "ldexp":
        first = T(5, 6, fill="ints") if name in INTEGERS else T(5, 6)
        return case(fn, first, T(5, 6, fill="ints"), options=options)
    grad = name not in NO_GRAD and not name.startswith("special_")
    if "polynomial" in name:
        return case(
            fn, T(5, 6, fill="unit", grad=False), T(6, fill="ints", grad=False), options=options | {"grad": False}
        )
    low = over_one if name in ("special_zeta",) else "unit"
    return case(fn, T(5, 6, fill=low, grad=grad), T(5, 1, fill="positive", grad=grad), options=options)


SKIP = {"rsub", "fake_quantize_per_tensor_affine", "logsigmoid", "special_spherical_bessel_j0"}
CASES = [unary(n) for n in [*table.UNARY, *table.LINEAR_UNARY] if n not in SKIP and function(n) is not None]
CASES += [binary(n) for n in table.BINARY if n not in SKIP and function(n) is not None]


def named(name, **more):
    return {"name": name} | more


def chain(x, y):
    """Apply several in-place ops to a value of the graph."""
    z = x * 1
    z.add_(y).mul_(2).sub_(y, alpha=0.5)
    z /= 3
    z.clamp_(min=-0.3)
    z.sigmoid_()
    return z


def activations(x):
    """Call in-place activations, whose results are their inputs."""
    changed = [x * 1, x * 2, x * 3, x * 4, x * 5, x * 6]
    F.elu_(changed[0])
    F.leaky_relu_(changed[1], 0.1)
    F.hardtanh_(changed[2], -0.5, 0.5)
    torch.celu_(changed[3])
    torch.selu_(changed[4])
    return [*changed, torch.threshold_(changed[5], 0.2, 0.3)]


def into_out(x, y):
    out = torch.zeros_like(x)
    torch.add(x, y, out=out)
    return out


def by_operators(x, y):
    a = (x + y) * 2 - y / 3 + (-x) ** 2
    b = 1 - x + 2 / (y * y + 1) + (3.0 - y) * 0.5
    return a, b, x > y, (x < y) | (x == y), ~(x >= y), abs(x), x.detach() // 2, x % 3, 2**y


def through_complex(x, y):
    z = torch.complex(x, y)
    return z.abs(), (z * z.conj()).real, torch.view_as_real(z * 2), z.imag + z.angle()


CASES += [
    case(torch.rsub, T(5, 6), T(6), options=named("rsub")),
    case(F.logsigmoid, T(5, 6), options=named("logsigmoid")),
    case(torch.fake_quantize_per_tensor_affine, T(5, 6), 0.1, 2, -8, 8, options=named("fake_quantize")),
    case(torch.add, T(5, 6), T(5, 6), alpha=2.5, options=named("add alpha")),
    case(torch.mul, T(5, 1, 6), T(4, 1)),
    case(torch.sub, T(5, 6), 2.5),
    case(torch.where, T(5, 6, fill="bool"), T(5, 6), T(6)),
    case(torch.where, T(5, 6, fill="bool"), T(5, 6), 0.5),
    case(torch.div, T(5, 6), T(5, 6, fill="positive")),
    case(torch.div, T(5, 6), 0.7, rounding_mode="floor", options=named("div floor")),
    case(torch.addcmul, T(5, 6), T(6), T(5, 1), value=0.5),
    case(torch.addcdiv, T(5, 6), T(6), T(5, 1, fill="positive"), value=0.5),
    case(torch.lerp, T(5, 6), T(6), T(5, 1)),
    case(torch.lerp, T(5, 6), T(5, 6), 0.3),
    case(torch.masked_fill, T(5, 6), T(6, fill="bool"), 0.5),
    case(torch.Tensor.masked_fill, T(5, 6), T(5, 6, fill="bool"), T(grad=True)),
    case(torch.clamp, T(5, 6), T(5, 6), T(6, fill="positive"), options=named("clamp tensors")),
    case(torch.add, T(3, 4, 5), T(3, 4, 5), options={"layouts": 40, "name": "different shardings"}),
    case(torch.mul, T(3, 4, 5), T(4, 5), options={"layouts": 40, "name": "broadcast, different shardings"}),
    case(torch.sub, T(4, 1, 5), T(1, 6, 1), options={"layouts": 20, "name": "outer"}),
    case(torch.add, T(5, 6), T(), options=named("0-d operand")),
    case(torch.add, T(), T(5), options=named("0-d first")),
    case(torch.add, T(5, 6), T(5, 6, dtype=torch.float32), options=named("promotion", tolerance=1e-6)),
    case(torch.add, T(5, 6, fill="ints"), T(5, 6), options=named("int + float")),
    case(torch.mul, T(5, 6, dtype=torch.complex128), T(5, 6), options=named("complex * real")),
    case(torch.add, T(0, 6), T(0, 6), options=named("no rows")),
    case(torch.frexp, T(5, 6), options=named("frexp", grad=False)),
    case(F.prelu, T(2, 3, 4), T(3), options=named("prelu")),
    case(
        F.prelu,
        T(2, 3, 4),
        T(3, dtype=torch.float32),
        options=named("prelu of two dtypes") | raises(RuntimeError, "prelu: Type promoting not supported"),
    ),
    case(
        torch.autocast("cpu", torch.bfloat16)(lambda x, w: F.prelu(x, w)),
        T(2, 3, 4, dtype=torch.float32),
        T(3, dtype=torch.float32),
        options=named("prelu under autocast") | {"tolerance": 3e-2},
    ),
    case(F.glu, T(4, 6), options=named("glu")),
    case(chain, T(5, 6), T(5, 6), options={"layouts": 20}),
    case(chain, T(5, 6), T(6), options={"layouts": 20}),
    case(
        activations,
        T(5, 6),
        options=named("in-place functions that are no methods", no_messages=True, try_partial=False),
    ),
    case(into_out, T(5, 6), T(5, 6), options=named("out=", grad=False)),
    case(by_operators, T(5, 6), T(5, 6, fill="positive"), options={"layouts": 20}),
    case(through_complex, T(5, 6), T(5, 6)),
    case(lambda x: x.to(torch.float32).double() + x.float(), T(5, 6), options=named("casts", tolerance=1e-6)),
    case(lambda x, y: torch.isclose(x, y) | torch.eq(x, y), T(5, 6), T(6), options=named("comparisons")),
    *(case(write_into_source, T(5, 3), name) for name in ("contiguous", "double", "resolve_conj", "positive")),
    *(
        case(write_beside, T(5, 3), share, to_source, write, options=FEW_BESIDE)
        for share in ("detach", "data", "to")
        for to_source in (True, False)
        for write in ("add_", "mul_")
    ),
    # partial sums of integers, which cancel, are added before they are rounded
    *(
        case(fn, T(2, 2, fill=cancelling), options=named(f"sum of integers {name}"))
        for name, fn in {
            "over 3": lambda i: i.sum(0) / 3,
            "times 0.5": lambda i: i.sum(0) * 0.5,
            "times a float": lambda i: i.sum(0).mul(torch.tensor(0.5)),
            "plus a float": lambda i: i.sum(0) + (i * 1.0).sum(0),
            "times 3": lambda i: i.sum(0) * 3,
        }.items()
    ),
]


# ---- integers by zero, which one rank alone may have


def remainder_in_place(x, y):
    x = x.clone()
    x %= y
    return x


def ints(*shape):
    return T(*shape, fill="ints")


def with_a_zero(*shape):
    return T(*shape, fill=lambda shape, generator: (torch.arange(12).view(shape) != 7).long())


DIVISIONS = {
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "div to floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "floor_divide in place": lambda x, y: x.clone().floor_divide_(y),
    "remainder in place": remainder_in_place,
    "fmod in place": lambda x, y: x.clone().fmod_(y),
    "div in place": lambda x, y: x.clone().div_(y, rounding_mode="trunc"),
    "of a number": lambda x, y: 7 // y + x,
}
for _name, _fn in DIVISIONS.items():
    _row = {"layouts": 4, "name": f"integer {_name}"}
    CASES.append(case(_fn, ints(4, 3), with_a_zero(4, 3), options=_row | raises(RuntimeError, "ZeroDivisionError")))
    CASES.append(case(_fn, ints(4, 3), T(4, 3, fill=lambda *of: torch.full(of[0], 3)), options=_row))
ZERO = raises(RuntimeError, "ZeroDivisionError")
CASES += [
    case(lambda x: x // 0, ints(1, 3), options={"layouts": 4, "name": "integer, by the number 0"} | ZERO),
    case(lambda x: x[:0] % 0, ints(4, 3), options={"layouts": 4, "name": "no integer, by the number 0"}),
    # ---- operands that do not broadcast to the target, results that `out` does not take
    case(
        lambda x, y: x.clone().add_(y),
        T(),
        T(4, 3),
        options={"layouts": 4, "name": "add_ of a larger tensor"} | raises(RuntimeError, "doesn't match the broadcast"),
    ),
    case(
        lambda x: torch.sin(x.detach(), out=torch.empty(4, 3, dtype=torch.int64)),
        T(4, 3),
        options={"layouts": 4, "name": "sin into integers"} | raises(RuntimeError, "can't be cast"),
    ),
    case(
        torch.bernoulli,
        T(5, fill=lambda s, g: torch.tensor([0, 0.5, 1, 0.5, 1.5]).double(), grad=False),
        options={"layouts": 4, "try_partial": False} | raises(RuntimeError, "Expected p_in >= 0 && p_in <= 1"),
    ),
]
