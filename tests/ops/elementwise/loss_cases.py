"""Every loss of torch.nn.functional, with input and target sharded equally, differently, or one of them plain."""

import warnings

import torch
import torch.nn.functional as F

from tests.harness import T, case, raises

FEW = {"layouts": 4}
ALONE = {"layouts": 3}


def zeros(shape, generator):
    """Draw samples of which some are zero: their norm is below any eps."""
    value = torch.randn(shape, dtype=torch.float64, generator=generator)
    value[::2] = 0
    return value


def signs(shape, generator):
    return torch.randint(2, shape, generator=generator).double() * 2 - 1


def classes(number, ignored=False):
    """Return a fill of class indices, some of them -100."""

    def make(shape, generator):
        found = torch.randint(number, shape, generator=generator)
        return found.masked_fill(torch.rand(shape, generator=generator) < 0.3, -100) if ignored else found

    return make


def labels(shape, generator):
    """Draw lists of labels that end with -1."""
    found = torch.stack([torch.randperm(shape[-1], generator=generator) for _ in range(shape[0])])
    found[:, shape[-1] // 2 :] = -1
    return found.reshape(shape)


def quiet(fn):
    """Return `fn` without torch's warnings about deprecated arguments and broadcast shapes."""

    def call(*args, **kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fn(*args, **kwargs)

    call.__name__ = f"quiet {fn.__name__}"
    return call


def with_and_without_autocast(fn):
    """Return a call of `fn` under autocast, which may use float32, and without: their cached plans must differ."""

    def call(*args, **kwargs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = fn(*args, **kwargs)
        return inside, fn(*args, **kwargs)

    call.__name__ = f"autocast {fn.__name__}"
    return call


def reductions(fn, *args, **kwargs):
    options = {"layouts": 6} | kwargs.pop("options", {})
    return [
        case(fn, *args, **kwargs, reduction="mean", options=options),
        case(fn, *args, **kwargs, reduction="sum", options=options | ALONE),
        case(fn, *args, **kwargs, reduction="none", options=options | ALONE),
    ]


def linear_cross_entropy_in_chunks(input, weight, target):
    """Call `linear_cross_entropy` with explicit options."""
    return F.linear_cross_entropy(input, weight, target, options=torch.nn.LinearCrossEntropyOptions())


def step(x, w, y):
    """Compute a loss as a training step does: the gradient of a replicated parameter must be counted once."""
    return F.mse_loss(x * w, y)


X, Y = T(5, 6), T(5, 6)
UNIT = T(5, 6, fill="unit")
LOGITS, INDEX = T(6, 5), T(6, fill=classes(5, True))
IMAGE, SPATIAL = T(3, 4, 2, 5), T(3, 2, 5, fill=classes(4, True))
HALF = T(6, 5, dtype=torch.bfloat16)
WEIGHT = T(5, fill="unit", grad=False)
QUIET = quiet(F.kl_div)
LACKING = {F.multi_margin_loss: raises(NotImplementedError, "not implemented for")}  # outside of autocast

CASES = [
    *reductions(F.mse_loss, X, Y),
    *reductions(F.l1_loss, X, Y),
    *reductions(F.smooth_l1_loss, X, Y, beta=0.7),
    *reductions(F.huber_loss, X, Y, delta=0.6),
    case(F.mse_loss, T(5, 6), T(5, 6), weight=T(5, 6, fill="unit"), options=FEW),
    case(F.l1_loss, T(5, 6), T(5, 6), weight=T(5, 6, fill="unit"), options=FEW),
    case(F.huber_loss, T(5, 6), T(5, 6), weight=T(5, 6, fill="unit"), options=FEW),
    case(F.smooth_l1_loss, X, Y, beta=0.0, options=ALONE),
    case(quiet(F.mse_loss), T(5, 6), T(6), options=FEW),
    case(quiet(F.mse_loss), X, Y, size_average=False, options=ALONE),
    case(quiet(F.l1_loss), X, Y, reduce=False, options=ALONE),
    case(F.mse_loss, T(), T(), options=ALONE),
    case(F.mse_loss, T(0, 3), T(0, 3), reduction="sum", options=ALONE),
    case(
        F.mse_loss,
        T(4, 3),
        T(4, 3),
        reduction="wrong",
        options=ALONE | raises(ValueError, "is not a valid value for reduction"),
    ),
    case(F.mse_loss, T(6, 5, dtype=torch.bfloat16), T(6, 5, dtype=torch.bfloat16), options=FEW | {"tolerance": 2e-2}),
    case(step, T(5, 6), T(6, shard_dims=()), T(5, 6)),
    case(torch.nn.MSELoss(), X, Y, options=FEW | {"name": "nn.MSELoss"}),
    *reductions(F.soft_margin_loss, X, T(5, 6, fill=signs, grad=False)),
    *reductions(F.binary_cross_entropy, UNIT, T(5, 6, fill="unit")),
    case(F.binary_cross_entropy, UNIT, T(5, 6, fill="unit", grad=False), weight=T(6, fill="unit", grad=False)),
    case(  # the weight alone is sharded
        F.binary_cross_entropy,
        T(5, 6, fill="unit", shard_dims=()),
        T(5, 6, fill="unit", shard_dims=(), grad=False),
        weight=T(5, 6, fill="unit", grad=False),
        options=FEW,
    ),
    case(
        F.binary_cross_entropy,
        X,
        UNIT,
        options=FEW | raises(RuntimeError, "all elements of input should be between 0 and 1", device_asserts=True),
    ),
    *reductions(F.binary_cross_entropy_with_logits, X, T(5, 6, fill="unit")),
    case(F.binary_cross_entropy_with_logits, X, T(5, 6, fill="unit"), weight=T(5, 1, fill="unit", grad=False)),
    case(F.binary_cross_entropy_with_logits, X, T(5, 6, fill="unit"), pos_weight=T(6, fill="unit", grad=False)),
    *reductions(F.kl_div, X, T(5, 6, fill="unit"))[1:],
    case(QUIET, X, T(5, 6, fill="unit"), reduction="mean"),
    case(F.kl_div, X, Y, reduction="batchmean", log_target=True, options=FEW),
    *reductions(F.poisson_nll_loss, X, T(5, 6, fill="positive")),
    case(
        F.poisson_nll_loss, T(5, 6, fill="positive"), T(5, 6, fill="positive"), log_input=False, full=True, options=FEW
    ),
    *reductions(F.gaussian_nll_loss, X, Y, T(5, 6, fill="positive")),
    case(F.gaussian_nll_loss, X, Y, T(5, fill="positive"), full=True, options=FEW),
    case(F.gaussian_nll_loss, X, Y, T(5, 1, fill="positive"), options=FEW),
    case(F.gaussian_nll_loss, X, Y, T(5, 6), options=FEW | raises(ValueError, "var has negative entry/entries")),
    *reductions(F.hinge_embedding_loss, X, T(5, 6, fill=signs, grad=False), margin=0.8),
    *reductions(F.margin_ranking_loss, X, Y, T(5, 6, fill=signs, grad=False), margin=0.3),
    *reductions(F.cosine_embedding_loss, X, Y, T(5, fill=signs, grad=False), margin=0.1),
    case(F.cosine_embedding_loss, T(6), T(6), T(fill=signs, grad=False), options=FEW),
    case(
        F.cosine_embedding_loss,
        T(5, 6),
        T(4, 6),
        T(5, fill=signs, grad=False),
        options=FEW | raises(RuntimeError, "must match the size of tensor b"),
    ),
    *reductions(F.triplet_margin_loss, X, Y, T(5, 6)),
    case(F.triplet_margin_loss, X, Y, T(5, 6), p=1, margin=0.5, swap=True, options=FEW),
    case(F.triplet_margin_with_distance_loss, X, Y, T(5, 6), swap=True, options=FEW),
    *reductions(F.multilabel_soft_margin_loss, X, T(5, 6, fill="unit")),
    case(F.multilabel_soft_margin_loss, X, T(5, 6, fill="unit"), weight=T(6, fill="unit"), options=FEW),
    *reductions(F.multilabel_margin_loss, T(6, 5), T(6, 5, fill=labels)),
    case(F.multilabel_margin_loss, T(5), T(5, fill=lambda s, g: torch.tensor([3, 0, -1, 1, 4])), options=FEW),
    case(
        F.multilabel_margin_loss,
        T(6, 5),
        T(6, 5, fill="ints", high=9),
        options=FEW | raises(RuntimeError, "'target' is out of range", device_asserts=True),
    ),
    *reductions(F.multi_margin_loss, LOGITS, T(6, fill=classes(5))),
    case(F.multi_margin_loss, LOGITS, T(6, fill=classes(5)), p=2, margin=0.6, weight=WEIGHT),
    case(F.multi_margin_loss, T(5), T(fill=classes(5)), options=FEW),
    case(
        F.multi_margin_loss,
        LOGITS,
        T(6, fill=classes(9)),
        options=FEW | raises(RuntimeError, "target out of range", device_asserts=True),
    ),
    *reductions(F.nll_loss, LOGITS, INDEX),
    case(F.nll_loss, LOGITS, INDEX, weight=WEIGHT),
    case(F.nll_loss, LOGITS, INDEX, weight=WEIGHT, ignore_index=2, reduction="sum", options=FEW),
    case(F.nll_loss, LOGITS, T(6, fill=classes(5)), ignore_index=3, options=FEW),
    case(
        F.nll_loss,
        LOGITS,
        T(6, fill=classes(9)),
        options=FEW | raises(IndexError, "is out of bounds", device_asserts=True),
    ),
    case(
        F.nll_loss,
        LOGITS,
        T(6, fill=classes(9)),
        reduction="none",
        options=FEW | raises(IndexError, "is out of bounds", device_asserts=True),
    ),
    case(F.nll_loss, LOGITS, T(5, fill=classes(5)), options=FEW | raises(ValueError, "to match target batch_size")),
    case(F.nll_loss, LOGITS, T(6, fill="ints", dtype=torch.uint8), options=FEW),
    case(
        F.nll_loss,
        LOGITS,
        T(6, fill="ints", dtype=torch.int32),
        options=FEW | raises(RuntimeError, "Int"),
    ),
    case(F.nll_loss, T(5), T(fill=classes(5)), options=FEW),
    *reductions(F.nll_loss, IMAGE, SPATIAL),
    *reductions(F.cross_entropy, LOGITS, INDEX),
    case(F.cross_entropy, LOGITS, INDEX, weight=WEIGHT),
    *reductions(F.cross_entropy, LOGITS, INDEX, weight=WEIGHT, label_smoothing=0.2),
    case(F.cross_entropy, LOGITS, INDEX, label_smoothing=0.1),
    case(F.cross_entropy, IMAGE, SPATIAL),
    case(F.cross_entropy, IMAGE, SPATIAL, label_smoothing=0.1, reduction="none", options=FEW),
    case(F.cross_entropy, T(3, 4, 5), T(3, 5, fill=classes(4)), options=FEW),
    case(F.cross_entropy, T(5), T(fill=classes(5)), options=FEW),
    *reductions(F.cross_entropy, LOGITS, T(6, 5, fill="unit")),
    case(F.cross_entropy, LOGITS, T(6, 5, fill="unit"), weight=T(5, fill="unit"), label_smoothing=0.2),
    case(
        F.cross_entropy, LOGITS, T(4, fill=classes(5)), options=FEW | raises(ValueError, "to match target batch_size")
    ),
    case(
        F.cross_entropy,
        LOGITS,
        T(6, 5, fill="ints"),
        options=FEW | raises(RuntimeError, "Expected floating point type for target"),
    ),
    # a recurrence over time and labels per sample, which torch has as one op only
    case(
        F.ctc_loss,
        T(6, 2, 4),
        T(2, 3, fill=lambda s, g: torch.randint(1, 4, s, generator=g)),
        T(2, fill=lambda s, g: torch.full(s, 6), shard_dims=()),
        T(2, fill=lambda s, g: torch.tensor([3, 2]), shard_dims=()),
        options=FEW | {"may_gather": True},
    ),
    *[
        case(with_and_without_autocast(fn), *args, options=ALONE | {"tolerance": 5e-2} | LACKING.get(fn, {}))
        for fn, args in [
            (F.mse_loss, (HALF, HALF)),
            (F.cross_entropy, (HALF, INDEX)),
            (F.nll_loss, (HALF, INDEX)),
            (F.multi_margin_loss, (HALF, T(6, fill=classes(5)))),
            (F.triplet_margin_loss, (HALF, HALF, HALF)),
            (F.cosine_embedding_loss, (HALF, HALF, T(6, fill=signs, grad=False))),
            (torch.prod, (HALF, 0)),
            (torch.softmax, (HALF, 0)),
            (torch.linalg.vector_norm, (HALF,)),
        ]
    ],
    case(torch.cosine_similarity, X, Y),
    case(torch.cosine_similarity, T(5, 1, 4), T(6, 4), dim=-1, options=FEW),
    case(torch.cosine_similarity, T(5, 6), T(5, 1), dim=1, options=FEW),
    case(torch.cosine_similarity, T(5, 6, fill=zeros), Y, dim=1, options=FEW),
    case(F.pairwise_distance, X, Y),
    case(F.pairwise_distance, T(5, 6), T(6), p=1, keepdim=True, options=FEW),
]

if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
    CASES += [
        case(F.linear_cross_entropy, T(6, 3), T(5, 3), INDEX, options=FEW),
        case(linear_cross_entropy_in_chunks, T(6, 3), T(5, 3), INDEX, options=ALONE),
    ]
