"""Generation with a cache of keys and values that is sharded along the sequence, against one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardfield import explain, scatter_tensor, strict
from shardfield.virtual import VirtualWorld

WIDTH, HEADS, RANKS = 32, 4, 4


class Decoder(nn.Module):
    """One layer of a decoder: `forward(x, cache)` returns the next states and the longer cache."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, cache=None):
        split = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = split
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return x + self.out(out.transpose(1, 2).flatten(2)), (k, v)


def generate(model, prompt, tokens):
    y, cache = model(prompt)
    states = [y[:, -1:]]
    for _ in range(tokens):
        y, cache = model(states[-1], cache)
        states.append(y)
    return torch.cat(states, 1), cache


@pytest.mark.parametrize("length", [5, 512])
def test_generation_with_a_sharded_cache(length):
    torch.manual_seed(0)
    model, prompt = Decoder().double(), torch.randn(2, length, WIDTH, dtype=torch.float64)

    def on_rank():
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("domain",))
        x = scatter_tensor(prompt, 0, mesh, (Shard(1),))
        with torch.no_grad(), strict():
            _, cache = model(x)
            with explain() as report:
                model(x[:, -1:], cache)
            states, cache = generate(model, x, 6)
        return states.full_tensor(), [t.full_tensor() for t in cache], cache[0].placements, report.bytes

    with torch.no_grad():
        expected = generate(model, prompt, 6)
    with VirtualWorld(RANKS) as world:
        results = world.run(on_rank)
    for states, cache, placements, nbytes in results:
        torch.testing.assert_close(states, expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(cache, list(expected[1]), rtol=1e-12, atol=1e-12)
        assert placements == (Shard(2),), "the cache stays sharded along the sequence"
        # One token of two samples: queries and results, not the keys of the cache.
        assert length < 100 or nbytes < 0.05 * 2 * expected[1][0].nbytes
