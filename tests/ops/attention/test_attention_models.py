"""Attention models run unmodified on unevenly sharded sequences: outputs and all gradients equal one device."""

from __future__ import annotations

import contextlib
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from shardfield import ShardTensor
from shardfield.layout import Layout
from shardfield.testing import run_on_ranks
from tests.harness import local_shard, no_gathers, to_full_tensor, world_mesh
from tests.ops.attention import attention_models as models


class Mha(nn.Module):
    """nn.MultiheadAttention with fixed options and masks."""

    def __init__(self, pad=False, bias=False, call=None, **kwargs):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **kwargs)
        self.pad, self.bias, self.call = pad, bias, call or {"need_weights": False}

    def forward(self, query, key=None, value=None):
        key = query if key is None else key
        value = key if value is None else value
        given = dict(self.call)
        if self.pad:
            batch, length = key.shape[:2]
            given["key_padding_mask"] = torch.arange(length).expand(batch, length) >= length - 2
        if self.bias:
            rows, columns = query.shape[1], key.shape[1]
            given["attn_mask"] = torch.linspace(-1, 1, rows * columns, dtype=query.dtype).view(rows, columns)
        return self.attention(query, key, value, **given)


class Causal(nn.Module):
    """Encoder layer with is_causal=True."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layer(x, src_mask=mask, is_causal=True)


class Padded(nn.Module):
    """Encoder with a padding mask, called without gradients."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2).eval()

    def forward(self, x):
        length = torch.tensor([[x.shape[1] - 2], [x.shape[1]]])
        kept = torch.arange(x.shape[1]) < length
        # Outputs at padding are undefined: zeros by torch's fast path, other values without it.
        return self.encoder(x, src_key_padding_mask=~kept) * kept.unsqueeze(-1)


first = partial(Mha, batch_first=True)
encoder = partial(nn.TransformerEncoderLayer, 8, 2, 16, 0.0, batch_first=True)
SEQUENCE, OTHER = (2, 7, 8), (2, 5, 8)
# name -> (model, shapes of its inputs, the sharded dim, or two dims for two axes)
MODELS = {
    "mha": (first, [SEQUENCE], 1),
    "mha with weights": (partial(first, call={"need_weights": True}), [SEQUENCE], 1),
    "mha with each head's weights": (partial(first, call={"average_attn_weights": False}), [SEQUENCE], 1),
    "mha sequence first": (Mha, [(7, 2, 8)], 0),
    "mha unbatched": (Mha, [(7, 8)], 0),
    "mha across": (first, [SEQUENCE, OTHER], 1),
    "mha of other widths": (partial(first, kdim=6, vdim=5), [SEQUENCE, (2, 5, 6), (2, 5, 5)], 1),
    "mha padded": (partial(first, pad=True), [SEQUENCE], 1),
    "mha padded, with weights": (partial(first, pad=True, call={}), [SEQUENCE], 1),
    "mha masked": (partial(first, bias=True), [SEQUENCE, OTHER], 1),
    "mha with extra keys": (partial(first, add_bias_kv=True, add_zero_attn=True), [SEQUENCE], 1),
    "encoder layer": (encoder, [SEQUENCE], 1),
    "encoder layer, evaluated": (lambda: encoder().eval(), [SEQUENCE], 1),
    "encoder layer, norm first": (partial(encoder, activation="gelu", norm_first=True), [SEQUENCE], 1),
    "encoder layer, causal": (Causal, [SEQUENCE], 1),
    "encoder": (lambda: nn.TransformerEncoder(encoder(), 2).eval(), [SEQUENCE], 1),
    "encoder, padded": (Padded, [SEQUENCE], 1),
    "decoder layer": (partial(nn.TransformerDecoderLayer, 8, 2, 16, 0.0, batch_first=True), [SEQUENCE, OTHER], 1),
    "transformer": (partial(nn.Transformer, 8, 2, 1, 1, 16, 0.0, batch_first=True), [SEQUENCE, OTHER], 1),
    "rope": (partial(models.RotaryAttention, 8, 2), [SEQUENCE], 1),
    "swin": (partial(models.SwinBlock, (8, 12), 8, 2, 4, 0), [(2, 8, 12, 8)], 1),
    "swin, shifted": (partial(models.SwinBlock, (8, 12), 8, 2, 4, 2), [(2, 8, 12, 8)], 1),
    "neighbourhood": (partial(models.NeighborhoodAttention1d, 8, 2), [(2, 9, 8)], 1),
    "neighbourhood of a field": (partial(models.NeighborhoodAttention2d, 4, 2, 3), [(2, 4, 8, 7)], (2, 3)),
    "swin of tiles": (partial(models.SwinBlock, (8, 12), 8, 2, 4, 2), [(2, 8, 12, 8)], (1, 2)),
    "vit": (partial(models.Vit, (8, 12), 2, 8, 2, 5), [(2, 3, 8, 12)], 2),
    "slices": (partial(models.SliceAttention, 8, 2, 3), [(2, 11, 8)], 1),
    "latents": (partial(models.LatentAttention, 8, 2, 3), [(2, 11, 8)], 1),
}
SHARD_SIZES = {5: (1, 4, 0), 7: (4, 0, 3), 8: (5, 1, 2), 9: (6, 2, 1), 11: (3, 7, 1), 12: (7, 0, 5)}


def shards(x: torch.Tensor, mesh, dim: int | tuple[int, int]) -> ShardTensor:
    """Shard the sequence unevenly over three ranks, or the sequence and another dim over 2 x 2."""
    dim, *more = (dim,) if isinstance(dim, int) else dim
    lengths = SHARD_SIZES[x.shape[dim]]
    if mesh.ndim == 2 and more:
        tiles = {d: (SHARD_SIZES[x.shape[d]][0], sum(SHARD_SIZES[x.shape[d]][1:])) for d in (dim, *more)}
        layout = Layout.of(mesh, [Shard(d) for d in tiles], x.shape, tiles)
    elif mesh.ndim == 1:
        layout = Layout.of(mesh, [Shard(dim)], x.shape, {dim: lengths})
    else:
        batch = 1 - dim if x.ndim == 3 and dim < 2 else 0
        other = Shard(batch) if x.shape[batch] == 2 and batch != dim else Replicate()
        layout = Layout.of(mesh, [Shard(dim), other], x.shape, {dim: (lengths[0], sum(lengths[1:]))})
    return ShardTensor(local_shard(x, layout), layout)


def results(model: nn.Module, inputs, grad: bool) -> list[torch.Tensor]:
    """Return outputs, then the gradients of inputs and parameters."""
    model.zero_grad()
    inputs = [x.requires_grad_(grad) for x in inputs]
    with contextlib.nullcontext() if grad else torch.no_grad():
        out = model(*inputs)
    out = [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]
    if not grad:
        return [to_full_tensor(o) for o in out]
    weights = [torch.linspace(-1, 2, o.numel(), dtype=o.dtype).view(o.shape) for o in out]
    sum((o * w).sum() for o, w in zip(out, weights, strict=True)).backward()
    grads = [x.grad for x in inputs] + [p.grad for p in model.parameters() if p.grad is not None]
    return [to_full_tensor(x).detach().clone() for x in (*out, *grads)]


def compare(name: str, mesh_shape, grad: bool) -> None:
    torch.manual_seed(0)
    make, shapes, dim = MODELS[name]
    model = make().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    values = [torch.randn(s, dtype=torch.float64) for s in shapes]
    wanted = results(model, [v.clone() for v in values], grad)
    mesh = world_mesh(mesh_shape)
    with no_gathers():
        found = results(model, [shards(v, mesh, dim) for v in values], grad)
    assert len(found) == len(wanted) and (not grad or all(w.abs().max() > 0 for w in wanted))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    for mesh in ((3,), (2, 2)):
        run_on_ranks(compare, math.prod(mesh), name, mesh, True, timeout=60)


@pytest.mark.parametrize("name", ["mha", "mha with weights", "encoder layer, evaluated", "encoder", "encoder, padded"])
def test_without_gradients(name):
    """torch's fast path for inference, whose kernels take no shards, is not used."""
    run_on_ranks(compare, 3, name, (3,), False)
