"""torch-harmonics' neighborhood attention on the sphere, unmodified, on fields sharded along any dims."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

from shardfield import explain, strict
from shardfield.testing import run_on_ranks
from tests.ops.spectral.test_torch_harmonics import SHARDINGS, harmonics, on_sphere, trained
from tests.ops.stencil.test_conv import field


class Attentions(nn.Module):
    """Attention of a grid to itself, to a finer and to a coarser one, and to a field that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        attention = harmonics().NeighborhoodAttentionS2
        fine, coarse = (12, 24), (6, 12)
        # without biases: that of the keys has no gradient but rounding errors
        self.same = attention(4, fine, fine, num_heads=2, theta_cutoff=0.6, bias=False)
        self.down = attention(4, fine, coarse, num_heads=2, out_channels=6, theta_cutoff=0.7, use_qknorm=True)
        self.up = attention(4, coarse, fine, k_channels=6, theta_cutoff=0.8, bias=False, optimized_kernel=False)
        self.mix = nn.Conv2d(6, 4, 1)
        self.register_buffer("field", torch.randn(2, 4, *fine, generator=torch.Generator().manual_seed(5)))

    def forward(self, x):
        y = self.same(x)
        small = self.mix(self.down(F.avg_pool2d(y, 2), y, y))
        return self.up(y, small, small) + self.same(self.field, y, x) + self.same(y, self.field, self.field) + x


@pytest.mark.parametrize(("mesh", "placements", "lengths"), [*SHARDINGS[1:], ((4,), [Shard(-3)], None)])
def test_attention(mesh, placements, lengths):
    found = run_on_ranks(trained, 4, Attentions, torch.float32, mesh, placements, lengths, 4, timeout=180)
    assert max(found) < 1e-4


def sent() -> tuple[int, int, str]:
    """Return the bytes of attention, forward and backward, and the layout of its result."""
    attention = harmonics().NeighborhoodAttentionS2(3, (48, 24), (48, 24), theta_cutoff=0.15)
    _, x = on_sphere((4,), [Shard(-2)], None, (1, 3, 48, 24), torch.float32)
    with explain() as report, strict():
        out = attention(x.requires_grad_())
        out.sum().backward()
    row = next(r for r in report.rows if "attention" in r.op)
    return row.bytes, row.back_bytes, str(out._layout)


def test_a_rank_receives_bands_of_latitudes():
    """A distance of 0.15 rad reaches two of 48 latitudes on each side; keys and values are one message."""
    band = 2 * 2 * 3 * 24 * 4
    for rank, (forward, backward, layout) in enumerate(run_on_ranks(sent, 4)):
        assert forward == backward == (band if rank in (0, 3) else 2 * band)
        assert layout == "(1, 3, 48, 24) Shard(2) as 12+12+12+12 over 'h'"


def written_copies() -> None:
    """Check that the two orders of dims are copies, also where one device's memory has both."""
    layout = harmonics().attention._layout
    full, x = field((2,), [Shard(2)], (1, 1, 4, 5), None, torch.float32)
    turned = layout.to_nhwc(x)
    turned.zero_()
    back = layout.to_nchw(layout.to_nhwc(x))
    assert torch.equal(back.full_tensor(), full) and torch.equal(x.full_tensor(), full)


def test_orders_of_dims_are_copies():
    run_on_ranks(written_copies, 2)
