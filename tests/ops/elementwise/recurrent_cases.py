"""Recurrent layers and cells with batch, steps and features sharded, and weights sharded or plain."""

import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.harness import T, case, raises

FEW = {"layouts": 5}
ONE = 1, 0.0, False, False, False  # layers, dropout, training, bidirectional, batch_first


def weights(gates: int, features: int, hidden: int, out: int | None = None):
    """Return the weights and biases of one layer in one direction; `out` is the size of a projection."""
    rows = gates * hidden
    projected = [] if out is None else [T(out, hidden, shard_dims=())]
    sizes = [(rows, features), (rows, out or hidden), (rows,), (rows,)]
    return [T(*size, shard_dims=()) for size in sizes] + projected


def lstm_module(x):
    """Call nn.LSTM on a padded and on a packed batch."""
    torch.manual_seed(3)
    module = torch.nn.LSTM(4, 3, bidirectional=True, batch_first=True).double()
    packed = pack_padded_sequence(x, torch.tensor([5, 4, 2]), batch_first=True)
    return module(x)[0], pad_packed_sequence(module(packed)[0])[0]


CASES = [
    case(torch.lstm, T(5, 3, 4), [T(1, 3, 2), T(1, 3, 2)], weights(4, 4, 2), True, *ONE),
    case(
        torch.lstm,
        T(3, 5, 4),
        [T(4, 3, 2), T(4, 3, 2)],
        [*weights(4, 4, 2), *weights(4, 4, 2), *weights(4, 4, 2), *weights(4, 4, 2)],
        True,
        2,
        0.0,
        True,
        True,
        True,
        options=FEW,
    ),
    case(
        torch.lstm,
        T(5, 3, 4),
        [T(1, 3, 2, shard_dims=()), T(1, 3, 3, shard_dims=())],
        weights(4, 4, 3, 2),
        True,
        *ONE,
        options=FEW,
    ),
    # in float64 only: the float32 kernel checks nothing here and reads beyond the end
    case(
        torch.lstm,
        T(5, 3, 4),
        [T(1, 2, 2), T(1, 3, 2)],
        weights(4, 4, 2),
        True,
        *ONE,
        options=FEW | raises(RuntimeError, "The size of tensor a"),
    ),
    case(torch.lstm, T(5, 3, 4), [T(1, 3, 2), T(1, 3, 2)], [T(8, 4), T(8, 2)], False, *ONE, options=FEW),
    case(torch.gru, T(5, 3, 4), T(1, 3, 2), weights(3, 4, 2), True, *ONE),
    case(torch.rnn_tanh, T(5, 3, 4), T(1, 3, 2), weights(1, 4, 2), True, *ONE, options=FEW),
    case(torch.rnn_relu, T(5, 3, 4), T(1, 3, 2), weights(1, 4, 2), True, *ONE, options=FEW),
    case(torch.lstm_cell, T(3, 4), [T(3, 2), T(3, 2)], *weights(4, 4, 2)),
    case(torch.gru_cell, T(3, 4), T(3, 2), *weights(3, 4, 2)[:2], options=FEW),
    case(torch.rnn_tanh_cell, T(3, 4), T(3, 2), *weights(1, 4, 2), options=FEW),
    case(torch.rnn_relu_cell, T(3, 4), T(3, 2), *weights(1, 4, 2), options=FEW),
    case(lstm_module, T(3, 5, 4), options=FEW | {"may_gather": True}),
]
