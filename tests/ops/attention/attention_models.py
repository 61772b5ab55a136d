"""Attention models as users write them, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RotaryAttention(nn.Module):
    """Self-attention with rotary position embedding."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        half = q.shape[-1] // 2
        speed = 10 ** (-torch.arange(half, dtype=x.dtype) / half)
        angle = torch.arange(length, dtype=x.dtype)[:, None] * speed
        q, k = (self.rotate(t, angle.cos(), angle.sin()) for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    @staticmethod
    def rotate(x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class SwinBlock(nn.Module):
    """Window attention with a relative position bias; with `shift`, on a rolled field with a mask across its seam."""

    def __init__(self, size: tuple[int, int], width: int, heads: int, window: int, shift: int):
        super().__init__()
        self.size, self.heads, self.window, self.shift = size, heads, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.1)
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None]) + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])
        self.register_buffer("mask", self.shift_mask() if shift else None)

    def shift_mask(self):
        field = torch.zeros(1, *self.size, 1)
        ends = [slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None)]
        for i, rows in enumerate(ends):
            for j, columns in enumerate(ends):
                field[:, rows, columns] = 3 * i + j
        flat = self.split_windows(field).squeeze(-1)
        return torch.where(flat[:, None] == flat[:, :, None], 0.0, -100.0).unsqueeze(1)

    def split_windows(self, x):
        b, h, w, c = x.shape
        n = self.window
        return x.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)

    def merge_windows(self, x, batch):
        n = self.window
        h, w = self.size
        x = x.view(batch, h // n, w // n, n, n, -1).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(batch, h, w, -1)

    def attention(self, x):
        count, length, width = x.shape
        q, k, v = self.qkv(x).reshape(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        scores = scores + self.table[self.index.view(-1)].view(length, length, -1).permute(2, 0, 1).unsqueeze(0)
        if self.mask is not None:
            fields = self.mask.shape[0]
            scores = scores.view(count // fields, fields, self.heads, length, length) + self.mask.unsqueeze(0)
            scores = scores.view(-1, self.heads, length, length)
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(count, length, width))

    def forward(self, x):
        moved = self.norm1(x)
        if self.shift:
            moved = torch.roll(moved, (-self.shift, -self.shift), (1, 2))
        moved = self.merge_windows(self.attention(self.split_windows(moved)), x.shape[0])
        if self.shift:
            moved = torch.roll(moved, (self.shift, self.shift), (1, 2))
        x = x + moved
        return x + self.mlp(self.norm2(x))


class NeighborhoodAttention1d(nn.Module):
    """Every cell of a periodic row attends to its neighbors: keys and values by `Tensor.unfold`."""

    def __init__(self, width: int, reach: int):
        super().__init__()
        self.radius, self.qkv = reach, nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        around = [torch.cat([t[:, -self.radius :], t, t[:, : self.radius]], 1) for t in (k, v)]
        k, v = (t.unfold(1, 2 * self.radius + 1, 1).transpose(-1, -2) for t in around)
        return F.scaled_dot_product_attention(q.unsqueeze(2), k, v).squeeze(2)


class NeighborhoodAttention2d(nn.Module):
    """Every cell of a field attends to the cells around it, itself included: keys and values by `F.unfold`."""

    def __init__(self, width: int, heads: int, window: int):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)
        self.bias = nn.Parameter(torch.randn(heads, window * window))

    def forward(self, x):
        batch, width, height, breadth = x.shape
        q, k, v = self.qkv(x).chunk(3, 1)
        pad, cells = self.window // 2, self.window**2
        k, v = (
            F.unfold(t, self.window, padding=pad).view(batch, self.heads, -1, cells, height * breadth) for t in (k, v)
        )
        q = q.reshape(batch, self.heads, -1, 1, height * breadth)
        inside = F.unfold(torch.ones_like(x[:, :1]), self.window, padding=pad).view(batch, 1, cells, -1)
        scores = (q * k).sum(2) * q.shape[2] ** -0.5 + self.bias[:, :, None]
        weights = scores.masked_fill(inside == 0, float("-inf")).softmax(2)
        mixed = (weights.unsqueeze(2) * v).sum(3)
        return self.out(mixed.reshape(batch, width, height, breadth))


class Vit(nn.Module):
    """A vision transformer on a field: patches, a class token, learned positions."""

    def __init__(self, size: tuple[int, int], patch: int, width: int, heads: int, classes: int):
        super().__init__()
        self.patch = patch
        count = (size[0] // patch) * (size[1] // patch)
        self.embed = nn.Linear(3 * patch * patch, width)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.position = nn.Parameter(torch.randn(1, count + 1, width) * 0.1)
        self.block = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        b, c, h, w = x.shape
        p = self.patch
        x = x.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * p)
        x = torch.cat([self.token.expand(b, -1, -1), self.embed(x)], 1) + self.position
        return self.head(self.norm(self.block(x))[:, 0])


class SliceAttention(nn.Module):
    """Pool points into a few slices, which attend to each other, and scatter the result back to the points."""

    def __init__(self, width: int, heads: int, slices: int):
        super().__init__()
        self.heads = heads
        self.inside, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.weigh = nn.Linear(width // heads, slices)
        self.qkv = nn.Linear(width // heads, 3 * (width // heads), bias=False)

    def forward(self, x):
        b, n, width = x.shape
        points = self.inside(x).view(b, n, self.heads, -1).transpose(1, 2)
        weights = self.weigh(points).softmax(-1)
        tokens = torch.einsum("bhnc,bhng->bhgc", points, weights) / (weights.sum(2) + 1e-5).unsqueeze(-1)
        tokens = F.scaled_dot_product_attention(*self.qkv(tokens).chunk(3, -1))
        mixed = torch.einsum("bhgc,bhng->bhnc", tokens, weights)
        return self.out(mixed.transpose(1, 2).reshape(b, n, width))


class LatentAttention(nn.Module):
    """Cross-attention of a few learned, replicated queries to many points."""

    def __init__(self, width: int, heads: int, latents: int):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, width))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x):
        return self.attention(self.latents.expand(x.shape[0], -1, -1), x, x, need_weights=False)[0]
