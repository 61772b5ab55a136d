"""Normalization layers: any dims sharded, parameters sharded or plain, running statistics."""

import torch
import torch.nn.functional as F

from tests.harness import T, case, double_backward, raises

FEW = {"layouts": 5}
NO_PARTIAL = {"try_partial": False}
BUFFERS = T(4, grad=False, shard_dims=()), T(4, fill="positive", grad=False, shard_dims=())
SHARDED_BUFFERS = T(4, grad=False), T(4, fill="positive", grad=False)


def named(name: str, fn):
    fn.__name__ = name
    return fn


def tracking(fn, **more):
    """Return `fn` with its updated running statistics as results."""

    def call(x, mean, variance, weight=None, bias=None):
        mean, variance = mean.clone(), variance.clone()
        out = fn(x, mean, variance, weight, bias, **more)
        return out, mean, variance

    return named(f"{fn.__name__} {more}", call)


def first(fn):
    """Return `fn` with gradients of its first result only: torch's gradients of the statistics are wrong."""

    def call(*args):
        out, *rest = fn(*args)
        return out, *(r.detach() for r in rest)

    return named(fn.__name__, call)


def half(fn, *args, dtype=torch.bfloat16):
    """Return `fn` on half precision, without the final rounding."""
    return named(f"{fn.__name__} of halves", lambda x, *rest: fn(x.to(dtype), *args, *rest).double())


def autocast(fn):
    def call(*args):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fn(*args)

    return named(f"{fn.__name__} under autocast", call)


def written(fn):
    """Return a norm whose result the next layer writes into, as ReLU(inplace=True) does."""
    return named("relu_ of a norm", lambda x, w: F.relu(fn(x, w), inplace=True))


def by_places(fn, *args):
    """Return a norm with a channels-last gradient and a contiguous input, also with shards of one sample."""

    def call(x, *parameters):
        return x.flatten(2) @ fn(x, *args, *parameters).flatten(2).transpose(1, 2)

    return named(f"{fn.__name__} by places", call)


def with_a_view(fn, *args, **kwargs):
    """Return a norm and a view of it: a compiled program must add the gradients of both."""

    def call(x):
        y = fn(x, *args, **kwargs)
        return y, y.select(0, 1)

    return named(f"{fn.__name__} and a view of it", call)


CASES = [
    case(with_a_view(F.batch_norm, None, None, training=True), T(3, 4, 5, 3), options=FEW),
    case(with_a_view(F.layer_norm, (5, 3)), T(3, 4, 5, 3), options=FEW),
    case(with_a_view(F.rms_norm, (3,)), T(3, 4, 5, 3), options=FEW),
    case(with_a_view(F.group_norm, 2), T(3, 4, 5, 3), options=FEW),
    # along the last dims
    case(F.layer_norm, T(5, 6), (6,), T(6), T(6)),
    case(F.layer_norm, T(3, 4, 5), (4, 5), T(4, 5), T(4, 5)),
    case(F.layer_norm, T(3, 4, 5), [5], options=FEW),
    case(F.layer_norm, T(3, 4, 5), (3, 4, 5), weight=T(3, 4, 5), options=FEW),
    case(F.layer_norm, T(5, 6), (6,), None, T(6), options=FEW),
    case(F.layer_norm, T(6), (6,), T(6), T(6), options=FEW),
    case(F.layer_norm, T(3, 0), (0,), options=FEW),
    case(F.layer_norm, T(0, 3), (3,), T(3), options=FEW),
    case(F.layer_norm, T(5, 6), (5,), options=FEW | raises(RuntimeError, "expected input with shape")),
    case(
        F.layer_norm,
        T(5, 6),
        (6,),
        T(5),
        options=FEW | raises(RuntimeError, "Expected weight to be of same shape as normalized_shape"),
    ),
    case(F.layer_norm, T(5, 6, fill="ints"), (6,), options=FEW | raises(NotImplementedError, "not implemented for")),
    case(torch.layer_norm, T(5, 6), (6,), T(6), T(6), 0.1, options=FEW),
    case(first(torch.native_layer_norm), T(3, 4, 5), (4, 5), T(4, 5), T(4, 5), 0.1),
    case(
        lambda x, w: F.layer_norm(x.reshape(12, 5), (5,), w), T(3, 4, 5), T(5), options={"name": "layer_norm of tokens"}
    ),
    case(
        lambda x, w: F.layer_norm(x.reshape(3, 20), (20,), w),
        T(3, 4, 5),
        T(20),
        options={"name": "layer_norm of a merge"},
    ),
    case(half(F.layer_norm, (6,)), T(5, 6), options=FEW | {"tolerance": 4e-2}),
    case(half(F.layer_norm, (6,)), T(5, 6), *[T(6, dtype=torch.float32)] * 2, options=FEW | {"tolerance": 4e-2}),
    case(autocast(F.layer_norm), T(5, 6, dtype=torch.float32), (6,), options=FEW | {"tolerance": 1e-5}),
    case(F.rms_norm, T(5, 6), (6,), T(6)),
    case(F.rms_norm, T(3, 4, 5), (4, 5), eps=0.1),
    case(F.rms_norm, T(3, 4, 5), (5,), T(5), options=FEW),
    case(F.rms_norm, T(3, 4, dtype=torch.complex128), (4,), options=FEW | {"may_gather": True}),  # x * x has no norm
    case(half(F.rms_norm, (6,)), T(5, 6), options=FEW | {"tolerance": 4e-2}),
    # over groups of channels
    case(F.group_norm, T(3, 6, 5), 2, T(6), T(6)),
    case(F.group_norm, T(2, 8, 3, 2), 4, T(8), T(8)),
    case(F.group_norm, T(3, 6), 3, T(6), T(6)),
    case(F.group_norm, T(3, 6, 5), 6, T(6), options=FEW),
    case(F.group_norm, T(2, 9, 2, 2), 3),
    case(F.group_norm, T(1, 6, 2), 1, T(6), T(6)),
    case(F.group_norm, T(3, 5, 2), 2, options=FEW | raises(RuntimeError, "to be divisible by num_groups")),
    case(F.group_norm, T(1, 3), 3, options=FEW | raises(ValueError, "Expected more than 1 value per channel")),
    case(F.group_norm, T(0, 4, 3), 2, T(4), options=FEW),
    case(torch.group_norm, T(3, 6, 5), 2, T(6), T(6), 0.1, options=FEW),
    case(torch.native_group_norm, T(3, 6, 5), T(6), T(6), 3, 6, 5, 3, 0.1),
    case(
        lambda x, w, b: F.group_norm(x.flatten(1, 2), 3, w, b),
        T(2, 3, 2, 4),
        T(6),
        T(6),
        options={"name": "merged groups"},
    ),
    case(half(F.group_norm, 2), T(3, 6, 5), options=FEW | {"tolerance": 4e-2}),
    # for each channel
    case(F.batch_norm, T(5, 4, 3), None, None, T(4), T(4), True),
    case(F.batch_norm, T(5, 4), None, None, T(4), None, True),
    case(F.batch_norm, T(5, 4, 2, 2), None, None, None, T(4), True, options=FEW),
    case(tracking(F.batch_norm, training=True), T(5, 4, 3), *BUFFERS, T(4), T(4)),
    case(tracking(F.batch_norm, training=True, momentum=0.3), T(2, 4, 3, 2), *SHARDED_BUFFERS, options=NO_PARTIAL),
    case(tracking(F.batch_norm, training=False), T(5, 4, 3), *BUFFERS, T(4), T(4)),
    case(F.batch_norm, T(5, 4, 3), *SHARDED_BUFFERS, T(4), T(4)),
    case(
        F.batch_norm,
        T(1, 4),
        None,
        None,
        None,
        None,
        True,
        options=FEW | raises(ValueError, "Expected more than 1 value per channel"),
    ),
    case(
        F.batch_norm,
        T(2, 4, 3),
        None,
        None,
        T(3),
        None,
        True,
        options=FEW | raises(RuntimeError, "weight should contain"),
    ),
    case(
        F.batch_norm,
        T(2, 4, 3),
        None,
        None,
        options=FEW | raises(RuntimeError, "running_mean must be defined in evaluation mode"),
    ),
    case(F.batch_norm, T(0, 4, 3), None, None, T(4), None, True, options=FEW),
    case(torch.batch_norm, T(5, 4, 3), T(4), T(4), None, None, True, 0.1, 0.1, False, options=FEW),
    case(first(torch.native_batch_norm), T(5, 4, 3), T(4), T(4), None, None, True, 0.1, 0.1),
    case(first(torch.native_batch_norm), T(5, 4, 3), T(4), T(4), *SHARDED_BUFFERS, False, 0.1, 0.1, options=FEW),
    case(
        lambda x, w: F.batch_norm(x.flatten(2), None, None, w, None, True),
        T(2, 4, 3, 2),
        T(4),
        options={"name": "batch of merged places"},
    ),
    case(by_places(F.batch_norm, None, None, None, None, True), T(2, 4, 3, 2, shard_dims=(0,)), options=FEW),
    case(by_places(F.batch_norm), T(2, 4, 3, 2, shard_dims=(0,)), *BUFFERS, T(4), T(4), options=FEW),
    case(by_places(F.instance_norm), T(2, 4, 3, 2, shard_dims=(0,)), options=FEW),
    case(half(F.batch_norm, None, None, None, None, True), T(5, 4, 3), options=FEW | {"tolerance": 4e-2}),
    case(F.instance_norm, T(3, 4, 5), weight=T(4), bias=T(4)),
    case(F.instance_norm, T(2, 4, 3, 2)),
    case(F.instance_norm, T(3, 4, 5), weight=T(4), options=FEW),
    case(tracking(F.instance_norm), T(3, 4, 5), *BUFFERS, T(4), T(4)),
    case(tracking(F.instance_norm, momentum=0.3), T(3, 4, 5), *SHARDED_BUFFERS, options=NO_PARTIAL),
    case(tracking(F.instance_norm, use_input_stats=False), T(3, 4, 5), *BUFFERS, T(4), T(4)),
    case(F.instance_norm, T(3, 4, 1), options=FEW | raises(ValueError, "Expected more than 1 spatial element")),
    case(torch.instance_norm, T(3, 4, 5), T(4), T(4), None, None, True, 0.1, 0.1, False, options=FEW),
    # nn.SyncBatchNorm calls this and would use local statistics as global ones
    case(torch.batch_norm_stats, T(5, 4, 3), 0.1, options=FEW | {"refuses": "nn.SyncBatchNorm", "grad": False}),
    # over adjacent channels
    case(F.local_response_norm, T(2, 7, 3), 3, 0.5),
    case(F.local_response_norm, T(2, 7, 3, 2), 4, 0.5, 0.6, 2.0),
    case(F.local_response_norm, T(2, 3, 2, 2), 9, 0.5, options=FEW),
    case(F.local_response_norm, T(2, 7), 2, options=FEW | raises(ValueError, "Expected 3D or higher dimensionality")),
    # of weights
    case(torch._weight_norm, T(4, 3, 2), T(4, 1, 1)),
    case(torch._weight_norm, T(4, 3), T(1, 3), 1, options=FEW),
    case(torch._weight_norm, T(4, 3), T(), -1, options=FEW),
    case(torch.norm_except_dim, T(4, 3, 2), 2, 1, options=FEW),
    # written into
    case(written(lambda x, w: F.batch_norm(x, None, None, w, None, True)), T(5, 4, 3), T(4), options=FEW),
    case(written(lambda x, w: F.group_norm(x, 2, w)), T(3, 6, 5), T(6), options=FEW),
    case(written(lambda x, w: F.layer_norm(x, (6,), w)), T(5, 6), T(6), options=FEW),
    # double backward
    case(
        double_backward(lambda x, w, b: F.layer_norm(x, (4, 3), w, b)),
        T(3, 4, 3),
        T(4, 3),
        T(4, 3),
        options={"name": "layer_norm, double backward"},
    ),
    case(
        double_backward(lambda x, w: F.rms_norm(x, (4,), w)),
        T(3, 4),
        T(4),
        options={"name": "rms_norm, double backward"},
    ),
    case(
        double_backward(lambda x, w, b: F.group_norm(x, 2, w, b)),
        T(2, 6, 3),
        T(6),
        T(6),
        options={"name": "group_norm, double backward"},
    ),
    case(
        double_backward(lambda x, w, b: F.batch_norm(x, None, None, w, b, True)),
        T(3, 4, 2),
        T(4),
        T(4),
        options={"name": "batch_norm, double backward"},
    ),
    case(
        double_backward(lambda x, w, b: F.instance_norm(x, None, None, w, b)),
        T(2, 3, 4),
        T(3),
        T(3),
        options={"name": "instance_norm, double backward"},
    ),
    case(
        double_backward(lambda x: F.layer_norm(x, (4,), x.sum(0))),
        T(3, 4),
        options={"name": "a weight made of the input, double backward"},
    ),
    case(
        double_backward(lambda x: F.local_response_norm(x, 3, 0.5)),
        T(2, 4, 3),
        options={"name": "local_response_norm, double backward"},
    ),
]
