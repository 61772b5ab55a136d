"""Layouts of results: rows that two mesh axes shard become tiles again, and every resolution keeps its proportions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from shardfield import ShardTensor, explain, strict
from shardfield.layout import DimSharding, Layout
from shardfield.redistribute import redistribute
from shardfield.testing import run_on_ranks
from tests.harness import to_full_tensor, world_mesh

C = 8
WEIGHT = torch.randn(C, C, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) / 5
MIX = WEIGHT[:, :, 0, 0]


def sharded(layout: Layout) -> tuple[torch.Tensor, ShardTensor]:
    """Return a random global field and its ShardTensor."""
    full = torch.randn(layout.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    local = redistribute(full, Layout.replicate(layout.mesh, layout.shape), layout).clone()
    return full.requires_grad_(), ShardTensor(local, layout).requires_grad_()


def error(out, full_out, x, full) -> float:
    """Return the largest error of the results and of the gradients of the field."""
    (out * out.sin()).sum().backward()
    (full_out * full_out.sin()).sum().backward()
    pairs = (to_full_tensor(out), full_out), (to_full_tensor(x.grad), full.grad)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


# ---------------------------------------------------------------------- a dim that two mesh axes shard

STENCILS = {
    "conv2d": lambda x: F.conv2d(x, WEIGHT, padding=1),
    "conv2d, stride 2": lambda x: F.conv2d(x, WEIGHT, None, 2, 1),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, WEIGHT, None, 2, 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 1, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (9, 7)),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pad": lambda x: F.pad(x, (0, 0, 2, 2), mode="reflect") * 1,
    "roll": lambda x: x.roll(3, 2),
}


def stencils_of_nested_rows(shard_sizes) -> list[str]:
    mesh, found = world_mesh((2, 2)), []
    shape = (1, C, sum(shard_sizes), 12)
    layout = Layout.make(mesh, [*((DimSharding(n),) for n in shape)]).with_dim(
        2, DimSharding(shape[2], (0, 1), shard_sizes)
    )
    field = math.prod(shape) * 8
    for name, call in STENCILS.items():
        full, x = sharded(layout)
        with explain() as report, strict():
            out = call(x)
        if out.placements != (Shard(2), Shard(3)):
            found.append(f"{name}: {out._layout}")
        if report.bytes > field * (0.5 * max(shard_sizes) / sum(shard_sizes) + 0.25):
            found.append(f"{name}: {report.bytes} bytes of {field}")  # half of a shard, and the halos of tiles
        wrong = error(out, call(full), x, full)
        if wrong > 1e-11:
            found.append(f"{name}: error {wrong}")
    return found


@pytest.mark.parametrize("shard_sizes", [(4, 4, 4, 4), (5, 2, 6, 1), (0, 9, 3, 2)])
def test_rows_sharded_by_two_axes_become_tiles(shard_sizes):
    assert sum(run_on_ranks(stencils_of_nested_rows, 4, shard_sizes), []) == []


# ---------------------------------------------------------------------- attention between cells, then a convolution


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def heads(x):
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def field_of(t, x):
    return t.transpose(1, 2).reshape(x.shape)


def one_head(x):
    t = tokens(x)
    return field_of(F.scaled_dot_product_attention(F.linear(t, MIX), t, F.linear(t, MIX.T)), x)


def several_heads(x):
    t = tokens(x)
    out = F.scaled_dot_product_attention(heads(F.linear(t, MIX)), heads(t), heads(F.linear(t, MIX.T)))
    return field_of(F.linear(out.transpose(1, 2).flatten(2), MIX), x)


def with_context(x):
    context = torch.ones(1, 5, C, dtype=x.dtype)
    return field_of(F.scaled_dot_product_attention(tokens(x), context, context * 2), x)


def causal(x):
    t = tokens(x)
    return field_of(F.scaled_dot_product_attention(t, t, t, is_causal=True), x)


def by_einsum(x):
    q, k, v = F.conv2d(x, torch.cat([MIX, MIX.T, MIX])[:, :, None, None]).reshape(2, C // 2, 3, -1).unbind(2)
    weights = torch.einsum("ncq,nck->nqk", q, k / 2).softmax(2)
    return torch.einsum("nqk,nck->ncq", weights, v).reshape(x.shape)


def by_product(x):
    t = tokens(x)
    return field_of(F.linear((F.linear(t, MIX) @ t.transpose(1, 2)).softmax(-1) @ t, MIX), x)


def by_bmm(x):
    t = tokens(x)
    return field_of(torch.bmm(torch.bmm(t, t.transpose(1, 2)).softmax(-1), F.linear(t, MIX)), x)


def linear_attention(x):
    t = tokens(x)
    return field_of(t.softmax(-1) @ (t.softmax(1).transpose(1, 2) @ F.linear(t, MIX)), x)


def with_class_token(x):
    t = torch.cat([torch.ones(1, 1, C, dtype=x.dtype), tokens(x)], 1)
    return field_of((t + F.scaled_dot_product_attention(t, t, t))[:, 1:], x)


AS_QUERIES = [one_head, several_heads, with_context, causal, linear_attention]
# Explicit products divide queries and keys by one axis each: partial sums of the values, which become tiles. A class
# token shifts the others: both axes shard the sequence, which becomes tiles.
ATTENTIONS = [*AS_QUERIES, by_einsum, by_product, by_bmm, with_class_token]


def attention_then_convolution(rows, columns) -> list[str]:
    found = []
    shape = (1, C, sum(rows), sum(columns))
    layout = Layout.of(world_mesh((2, 2)), (Shard(2), Shard(3)), shape, {2: rows, 3: columns})

    def model(x, attention):
        out = F.group_norm(F.conv2d(attention(x), WEIGHT, padding=1), 2)
        return F.conv2d(torch.cat([out, x], 1), torch.cat([WEIGHT, WEIGHT], 1), padding=1)

    for attention in ATTENTIONS:
        full, x = sharded(layout)
        with strict():
            of_attention, out = attention(x), model(x, attention)
        if attention in AS_QUERIES and of_attention._layout.bare is not layout:
            found.append(f"{attention.__name__}: {of_attention._layout}")
        if out.placements != (Shard(2), Shard(3)):
            found.append(f"{attention.__name__}, convolved: {out._layout}")
        wrong = error(out, model(full, attention), x, full)
        if wrong > 1e-10:
            found.append(f"{attention.__name__}: error {wrong}")
    return found


@pytest.mark.parametrize(("rows", "columns"), [((4, 4), (3, 3)), ((5, 2), (1, 4)), ((6, 0), (2, 3))])
def test_attention_has_the_layout_of_its_queries(rows, columns):
    assert sum(run_on_ranks(attention_then_convolution, 4, rows, columns), []) == []


def sent_by_attention() -> list[int]:
    """Return the bytes of attention between tiles, and between the same tokens as one sharded sequence."""
    mesh = world_mesh((2, 2))
    _, x = sharded(Layout.of(mesh, (Shard(2), Shard(3)), (1, C, 8, 6)))
    _, t = sharded(Layout.of(mesh, (Shard(1), Shard(1)), (1, 48, C)))
    with explain() as tiles:
        one_head(x)
    with explain() as sequence:
        F.scaled_dot_product_attention(F.linear(t, MIX), t, F.linear(t, MIX.T))
    return [tiles.bytes, sequence.bytes]


def test_tokens_of_tiles_send_what_a_sequence_sends():
    for tiles, sequence in run_on_ranks(sent_by_attention, 4):
        assert 0 < tiles == sequence


# ---------------------------------------------------------------------- resolutions


def go_down_and_up(x, levels, sizes=None):
    """Return the field after `levels` strides and as many refinements; add the layout of each to `sizes`."""
    skips = []
    for level in range(levels):
        skips.append(x)
        x = F.conv2d(x, WEIGHT, None, 2, 1) if level % 2 else F.max_pool2d(x, 2, ceil_mode=True)
        if sizes is not None:
            sizes.append(x._layout.shard_sizes(2))
    for level, skip in enumerate(reversed(skips)):
        if level % 2:
            x = F.interpolate(x, size=skip.shape[2:], mode="nearest")
        else:
            x = F.conv_transpose2d(x, WEIGHT, None, 2, 1, output_padding=[1 - n % 2 for n in skip.shape[2:]])
        if sizes is not None:
            sizes.append(x._layout.shard_sizes(2))
        x = F.group_norm(F.conv2d(torch.cat([x, skip], 1), torch.cat([WEIGHT, WEIGHT], 1), padding=1), 2)
    return x


def resolutions(shard_sizes, levels) -> tuple[list, float, int]:
    layout = Layout.of(world_mesh((len(shard_sizes),)), (Shard(2),), (1, C, sum(shard_sizes), 32), {2: shard_sizes})
    full, x = sharded(layout)
    sizes: list = [layout.shard_sizes(2)]
    with explain() as report:
        out = go_down_and_up(x, levels, sizes)
    moved = sum(row.bytes for row in report.rows if row.op.endswith("cat"))
    return sizes, error(out, go_down_and_up(full, levels), x, full), moved


@pytest.mark.parametrize("shard_sizes", [(17, 15), (20, 12), (32, 0), (12, 9, 11), (9, 9, 7, 7), (1, 20, 0, 11)])
def test_every_resolution_keeps_the_proportions_of_the_field(shard_sizes):
    total = sum(shard_sizes)
    for sizes, wrong, moved in run_on_ranks(resolutions, len(shard_sizes), shard_sizes, 5):
        assert wrong < 1e-10
        assert sizes[0] == sizes[-1] and moved == 0  # skip connections meet without communication
        assert sizes[1:5] == sizes[-2:-6:-1]  # the same sizes down and up
        for level in sizes:
            scale = sum(level) / total
            bounds = [(sum(level[:i]), sum(shard_sizes[:i]) * scale) for i in range(len(level))]
            assert all(abs(a - b) <= 1 for a, b in bounds), (level, shard_sizes)
