"""Spectral convolutions send the kept modes for any grid size; errors, lazy spectra, precision."""

from __future__ import annotations

import gc
import itertools
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from shardfield import ShardingError, ShardTensor, runtime, strict
from shardfield.comm import collectives, consensus, grad_deferral
from shardfield.layout import Layout
from shardfield.ops.spectral import (
    mode_placement,
    partial_dft,
    spectral_conv,
    spread_weight,
    truncated_fft,
    truncated_ifft,
)
from shardfield.planning import simulated
from shardfield.testing import run_on_ranks
from tests.harness import any_rank, local_shard, no_gathers, world_mesh

BATCH, CHANNELS, MODES = 1, 2, (4, 6)  # for a real field 4 x 4 modes are kept


def kept_bytes(batch: int, channels: int, modes: tuple[int, int], itemsize: int) -> int:
    """Return the bytes of the block of kept modes."""
    return batch * channels * modes[0] * (modes[1] // 2 + 1) * itemsize


def compared(mesh: tuple[int, ...]) -> int:
    """Return the bytes of a consensus: a few integers for each mesh axis."""
    return sum(2 * (size - 1) * 8 * consensus.CONSENSUS_INTS // size for size in mesh)


def made(shape, placements, mesh_shape, **kind) -> ShardTensor:
    """Return a random ShardTensor."""
    layout = Layout.of(world_mesh(mesh_shape), placements, shape)
    full = torch.randn(shape, generator=torch.Generator().manual_seed(0), **kind)
    return ShardTensor(local_shard(full, layout).requires_grad_(), layout)


def written_out(x, weight, modes):
    """Compute the layer as models write it, with torch.fft."""
    height, width = x.shape[2:]
    spectrum = torch.fft.fftshift(torch.fft.rfftn(x, dim=(-2, -1), norm="forward"), dim=(-2,))
    first = height // 2 - modes[0] // 2
    kept = (slice(None), slice(None), slice(first, first + modes[0]), slice(0, modes[1] // 2 + 1))
    out = torch.zeros(x.shape[0], weight.shape[1], height, width // 2 + 1, dtype=weight.dtype)
    out[kept] = torch.einsum("bixy,ioxy->boxy", spectrum[kept], weight)
    out = torch.fft.ifftshift(out, dim=(-2,))
    return torch.fft.irfftn(out, s=(height, width), dim=(-2, -1), norm="forward")


def sent_by_layer(layer, mesh_shape, grid, field_placements, weight_placements) -> tuple[int, int]:
    """Return, on each rank, bytes sent forward and backward by a layer on a field of this grid."""
    x = made((BATCH, CHANNELS, *grid), field_placements, mesh_shape, dtype=torch.float64)
    weight = made((CHANNELS, CHANNELS, 4, 4), weight_placements, mesh_shape, dtype=torch.complex128)
    count = [0]
    runtime.active.meter = lambda kind, messages, nbytes: count.__setitem__(0, count[0] + nbytes)
    try:
        with strict():
            out = layer(x, weight, MODES)._local_tensor
            forward, count[0] = count[0], 0
            torch.autograd.backward(out, torch.ones_like(out))
        return forward, count[0]
    finally:
        runtime.active.meter = None


@pytest.mark.parametrize(
    ("mesh", "field_placements", "weight_placements", "rounds"),
    [
        # replicated weights: one all_reduce of the block forward and backward, for each axis
        ((2,), [Shard(2)], [Replicate()], 1.0),
        ((2,), [Shard(3)], [Replicate()], 1.0),
        ((4,), [Shard(2)], [Replicate()], 1.5),
        ((2, 2), [Shard(2), Shard(3)], [Replicate(), Replicate()], 2.0),
        # weights sharded by modes: a reduce_scatter before the product and an all_gather after it
        ((2,), [Shard(2)], [Shard(2)], 1.0),
        ((4,), [Shard(2)], [Shard(2)], 1.5),
    ],
    ids=str,
)
def test_bytes_follow_the_modes(mesh, field_placements, weight_placements, rounds):
    layers = [spectral_conv] if Shard(2) in weight_placements else [spectral_conv, written_out]
    ranks = torch.Size(mesh).numel()
    block = kept_bytes(BATCH, CHANNELS, MODES, 16)
    for layer in layers:
        for grid in [(16, 24), (32, 48)]:
            got = run_on_ranks(sent_by_layer, ranks, layer, mesh, grid, field_placements, weight_placements, timeout=60)
            # one consensus for the layer, or one each for a slice, a write and an inverse
            forward = rounds * block + (1 if layer is spectral_conv else 3) * compared(mesh)
            assert got == [(forward, rounds * block)] * ranks, f"{layer.__name__} on a grid of {grid}"


def sent_by_transform(ranks: int, grid: tuple[int, int]) -> int:
    """Return, on each rank, bytes sent by a truncated transform into shards of the modes."""
    x = made((BATCH, CHANNELS, *grid), [Shard(2)], (ranks,), dtype=torch.float32)
    count = [0]
    runtime.active.meter = lambda kind, messages, nbytes: count.__setitem__(0, count[0] + nbytes)
    try:
        with strict():
            truncated_fft(x, (2, 3), (range(-2, 2), range(4))).redistribute(placements=[Shard(2)])
        return count[0]
    finally:
        runtime.active.meter = None


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_do_not_grow_with_the_field(ranks):
    def part(ranks: int, block: int) -> int:
        return block * (ranks - 1) // ranks

    got = run_on_ranks(sent_by_transform, ranks, ranks, (8, 12), timeout=60)
    assert got == [part(ranks, kept_bytes(BATCH, CHANNELS, MODES, 8)) + compared((ranks,))] * ranks


def globe(trained: bool) -> tuple[float, list[int]]:
    """Run a layer that keeps 64 x 33 modes unchanged on 64 channels of a 720 x 1440 field made of these modes.

    Return the difference from the field, and the bytes sent up to the modes, the field and the gradients.
    """
    height, width, low = 720, 1440, slice(360 - 32, 360 + 32)
    layout = Layout.of(world_mesh((8,)), [Shard(2)], (1, 64, height, width))
    rows, columns = torch.arange(*layout.span(2)) / height, torch.arange(width) / width
    waves = [torch.cos(6.2831853 * ((c % 31 + 1) * rows[:, None] + (c % 32) * columns)) for c in range(64)]
    x = ShardTensor(torch.stack(waves)[None].requires_grad_(trained), layout)
    weight = torch.ones(64, 64, 33, dtype=torch.cfloat, requires_grad=trained)
    sent = [0]
    runtime.active.meter = lambda kind, messages, nbytes: sent.__setitem__(-1, sent[-1] + nbytes)
    try:
        with torch.set_grad_enabled(trained), strict():
            spectrum = torch.fft.fftshift(torch.fft.rfft2(x, norm="forward"), dim=-2)
            modes = spectrum[..., low, :33]
            sent.append(0)
            out = torch.zeros_like(spectrum)
            out[..., low, :33] = modes * weight
            y = torch.fft.irfft2(torch.fft.ifftshift(out, dim=-2), s=(height, width), norm="forward")
            sent.append(0)
            if trained:
                torch.autograd.backward(y._local_tensor, x._local_tensor.detach())
    finally:
        runtime.active.meter = None
    far = [y] if not trained else [y, x.grad]  # the layer is a projection, and so is its adjoint
    return max(float((t._local_tensor - x._local_tensor).abs().max()) for t in far), sent


def test_global_field_on_eight_ranks():
    """At most 1.5 MB per rank and transform for a 33 MB shard, of which a transpose would send 29 MB."""
    share = kept_bytes(1, 64, (64, 64), 8) * 7 // 8
    assert share == 946_176 < 1.5e6
    for far, sent in run_on_ranks(globe, 8, False, timeout=60):
        assert far < 1e-4 and sent == [share + compared((8,)), share + compared((8,)), 0]
    # trainable weights: one all_reduce of the modes for both transforms, and one of their gradients
    for far, sent in run_on_ranks(globe, 8, True, timeout=60):
        assert far < 1e-4 and sent == [2 * share + compared((8,)), compared((8,)), 2 * share]


COMPLEX = (RuntimeError, TypeError)  # older and newer versions of torch
BAD = {
    "more modes than the weight has": (lambda x, w: spectral_conv(x, w, (6, 6)), ValueError),
    "a real weight": (lambda x, w: spectral_conv(x, w.real, (4, 6)), ValueError),
    "a weight of half the precision": (lambda x, w: spectral_conv(x, w.to(torch.complex64), (4, 6)), ValueError),
    "other channels": (lambda x, w: spectral_conv(x, w[:1], (4, 6)), ValueError),
    "too many dims": (lambda x, w: spectral_conv(x, w, (4, 6, 2)), ValueError),
    "no such norm": (lambda x, w: spectral_conv(x, w, (4, 6), norm="both"), RuntimeError),
    "an empty grid": (lambda x, w: spectral_conv(x, w, (4, 6), output_shape=(0, 4)), ValueError),
    "half precision": (lambda x, w: truncated_fft(x.bfloat16(), (2,), ((0,),)), RuntimeError),
    "a complex field where a real one is needed": (lambda x, w: torch.fft.rfft2(x * 1j), COMPLEX),
    "the modes of a real one, later": (lambda x, w: torch.fft.rfft(x * 1j, dim=2)[:, :, :2], COMPLEX),
    "real modes": (lambda x, w: truncated_ifft(x, (2,), ((0,),), (4,)), RuntimeError),
    "a size too many": (lambda x, w: torch.fft.irfft2(torch.fft.rfft2(x), s=(8, 9, 2)), RuntimeError),
    "a size of nothing": (lambda x, w: torch.fft.irfft2(filled(x), s=(8, 0)), RuntimeError),
    "a block of another shape": (lambda x, w: filled(x, lambda b: torch.cat([b, b], -1)), RuntimeError),
    "modes that are not there": (lambda x, w: truncated_fft(x, (4,), ((0,),)), IndexError),
    "a dim twice": (lambda x, w: truncated_fft(x, (2, -2), ((0,), (0,))), RuntimeError),
}


def filled(x, change=lambda block: block):
    """Write some modes of a field into zeros."""
    spectrum = torch.fft.rfft2(x)
    out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
    out[..., :2, :2] = change(spectrum[..., :2, :2])
    return out


def refusals() -> list[str]:
    """Return, on each rank, the bad calls that do not raise what they should."""
    x = made((1, 2, 8, 9), [Shard(2)], (2,), dtype=torch.float64)
    w = torch.randn(2, 2, 4, 4, dtype=torch.complex128)
    wrong = []
    for name, (bad, error) in BAD.items():
        try:
            bad(x, w)
        except error:
            passed = False
        else:
            passed = True
        if any_rank(passed):
            wrong.append(name)
    return wrong


def test_bad_calls_raise_on_all_ranks():
    assert run_on_ranks(refusals, 2, timeout=60) == [[], []]


def put(x, *index):
    """Write modes at an index and invert the spectrum."""
    spectrum = torch.fft.rfft2(x)
    out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
    out[index] = spectrum[..., :2, :2]
    return torch.fft.irfft2(out)


def without_origin(block):
    """Return the same modes without the origin that a slice of a spectrum has."""
    return ShardTensor(block._local_tensor, block._layout.bare)


# calls that differ between ranks: `n` is 0, and 1 on the last rank
APART = {
    "s of an inverse": lambda x, w, n: torch.fft.irfft2(filled(x), s=(8, 8 + n)),
    "s of an inverse, on one rank": lambda x, w, n: torch.fft.irfft2(filled(x), s=(8, 8) if n else None),
    "s of an inverse of modes without origin": lambda x, w, n: torch.fft.irfft2(
        filled(x, without_origin), s=(8, 8 + n)
    ),
    "s of an inverse of modes without origin, on one rank": lambda x, w, n: torch.fft.irfft2(
        torch.fft.ifftshift(filled(x, without_origin), dim=-2), s=(8, 8) if n else None
    ),
    "s of an inverse, one of nothing": lambda x, w, n: torch.fft.irfft2(filled(x), s=(8, 8 * (1 - n))),
    "one s too many": lambda x, w, n: torch.fft.irfft2(filled(x), s=(8, 8, 2)[: 2 + n]),
    "the norm of an inverse": lambda x, w, n: torch.fft.irfft2(filled(x), norm=("forward", "ortho")[n]),
    "n of an inverse": lambda x, w, n: torch.fft.irfft(torch.fft.ifft(filled(x), dim=2), n=8 + n),
    "s of a transform": lambda x, w, n: torch.fft.rfft2(x, s=(10, 8 + n)),
    "n along a sharded dim": lambda x, w, n: torch.fft.fft(x, n=9 + n, dim=2),
    "n along a sharded dim, on one rank that of the field": lambda x, w, n: torch.fft.fft(x, n=8 + n, dim=2)[:, :, :2],
    "n along another dim": lambda x, w, n: torch.fft.rfft(x, n=3 + n, dim=1),
    "n of a hermitian one": lambda x, w, n: torch.fft.hfft(x, n=3 + n, dim=1),
    "how many modes": lambda x, w, n: torch.fft.rfft2(x)[..., : 2 + n, :2],
    "which modes": lambda x, w, n: torch.fft.rfft2(x)[..., n : 2 + n, :2],
    "modes or all of them": lambda x, w, n: torch.fft.rfft2(x)[..., : 2 + 6 * n, : 2 + 3 * n],
    "modes or a list of them": lambda x, w, n: torch.fft.rfft2(x)[..., [0, 1] if n else slice(0, 2), :2],
    "modes or their sum": lambda x, w, n: torch.fft.rfft2(x).sum() if n else torch.fft.rfft2(x)[..., :2, :2],
    "modes that are not there": lambda x, w, n: torch.fft.rfft2(x)[(..., slice(2), slice(2), 0, 0, 0)[: 3 + 3 * n]],
    "the norm of a transform": lambda x, w, n: torch.fft.rfft2(x, norm=("forward", "ortho")[n])[..., :2, :2],
    "shifted or not": lambda x, w, n: torch.fft.fftshift(torch.fft.rfft2(x), dim=2 if n else 3)[..., :2, :2],
    "modes known already": lambda x, w, n: (lambda s: (s[..., :2, :2], s[..., 2 * n : 2 + 2 * n, :2]))(
        torch.fft.rfft2(x)
    ),
    "where modes are put": lambda x, w, n: put(x, ..., slice(n, 2 + n), slice(2)),
    "modes put where they do not fit": lambda x, w, n: put(x, ..., slice(2 + n), slice(2)),
    "modes put where there is nothing": lambda x, w, n: put(x, *[...] + [slice(2)] * 2 + [0] * 3 * n),
    "n_modes": lambda x, w, n: spectral_conv(x, w, (4, 6 - 2 * n)),
    "more n_modes than the weight has": lambda x, w, n: spectral_conv(x, w, (4 + 2 * n, 6)),
    "output_shape": lambda x, w, n: spectral_conv(x, w, (4, 6), output_shape=(8 + n, 8)),
    "modes of a truncated transform": lambda x, w, n: truncated_fft(x, (2,), ((0, 1 + n),)),
    "sizes of a truncated inverse": lambda x, w, n: truncated_ifft(x * 1j, (2,), (range(8),), (9 + n,)),
}


def apart(mesh_shape: tuple[int, ...], field_placements: list) -> list[tuple[str, str]]:
    """Return, on each rank, the errors of calls that differ on one rank."""
    odd = int(dist.get_rank() == dist.get_world_size() - 1)
    found = []
    for name, call in APART.items():
        x = made((1, 2, 8, 8), field_placements, mesh_shape, dtype=torch.float64)
        w = torch.randn(2, 2, 4, 4, dtype=torch.complex128)
        try:
            call(x, w, odd)
        except Exception as error:
            found.append((name, f"{type(error).__name__}: {error}"))
        else:
            found.append((name, ""))
        dist.barrier()
    return found


@pytest.mark.parametrize(("mesh", "field_placements"), [((2,), [Shard(2)]), ((2, 2), [Shard(2), Shard(3)])], ids=str)
def test_calls_that_differ_between_ranks_raise_on_all(mesh, field_placements):
    first, *others = run_on_ranks(apart, torch.Size(mesh).numel(), mesh, field_placements, timeout=60)
    for name, error in first:
        assert error.startswith("ShardingError: the ranks of DeviceMesh") and "do not make the same call" in error, name
        assert error.count("\n  at (") == torch.Size(mesh).numel(), f"{name}: {error}"
    assert all(other == first for other in others)


def spread(mesh_shape: tuple[int, ...], field_placements: list) -> list[str]:
    """Compare, on each rank, a layer with its weight sharded by modes with one whose weight is replicated."""
    x = made((1, 2, 8, 10), field_placements, mesh_shape, dtype=torch.float64)
    full = torch.randn(2, 3, 4, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert spread_weight(full, x) is full
    weight = spread_weight(full, x, above=full.nbytes - 1)
    assert (
        weight.is_leaf and weight.requires_grad and weight.to_local().nbytes * len(field_placements) * 2 == full.nbytes
    )
    with strict():
        for w in (full, weight):
            spectral_conv(x, w, MODES).square().sum().backward()
    assert weight.to_local().grad.shape == weight.to_local().shape
    return [] if torch.allclose(weight.grad.full_tensor(), full.grad) else ["gradients differ"]


@pytest.mark.parametrize(("mesh", "field_placements"), [((2,), [Shard(2)]), ((2, 2), [Shard(2), Shard(3)])], ids=str)
def test_weights_sharded_by_modes(mesh, field_placements):
    for wrong in run_on_ranks(spread, torch.Size(mesh).numel(), mesh, field_placements, timeout=60):
        assert not wrong


# mesh, placements of the field, modes kept; whether modes are sharded, and how often the block is sent each way
SHARES = [
    ((2,), [Shard(2)], (4, 6), True, 1.0),
    ((2,), [Shard(3)], (5, 4), True, 1.0),  # 5 x 3 modes: 3 + 2
    ((3,), [Shard(2)], (5, 6), True, 4 / 3),
    ((4,), [Shard(2)], (3, 4), False, 1.5),  # fewer modes than ranks along each dim
    ((2, 2), [Shard(2), Shard(3)], (5, 4), True, 1.5),  # an all_reduce per axis would send 2
    ((2, 2), [Shard(2), Shard(2)], (1, 6), True, 1.5),  # only one dim has enough modes: the other axis reduces halves
    ((2, 2), [Shard(2), Shard(0)], (4, 6), True, 0.5),  # one sample each
]
# the layer, and the gradient of its weight: None: no gradients at all; False: none for it; True: averaged later
MIXED = {
    "written out, no gradient": (written_out, None),
    "the layer, no gradient": (spectral_conv, None),
    "the layer, frozen": (spectral_conv, False),
    "the layer, averaged later": (spectral_conv, True),
    "written out, averaged later": (written_out, True),
}


def in_shares(mesh_shape, field_placements, modes) -> tuple[list[str], dict[str, tuple[int, int, bool]]]:
    """Return, on each rank, differences from one device with blocks sharded by modes, and the bytes sent."""
    full = torch.randn(2, 2, 24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(
        2, 2, modes[0], modes[1] // 2 + 1, dtype=torch.complex128, generator=torch.Generator().manual_seed(1)
    )
    mesh = world_mesh(mesh_shape)
    wrong, sent, rows = [], {}, []
    for name, (layer, learned) in MIXED.items():
        own = torch.nn.Parameter(weight.clone(), requires_grad=bool(learned))
        if learned:
            grad_deferral.defer_to_average(own, [mesh.get_group(a) for a in range(mesh.ndim)])
        x = made(full.shape, field_placements, mesh_shape, dtype=torch.float64)
        alone, theirs = full.clone().requires_grad_(), weight.clone().requires_grad_(bool(learned))
        rows.clear()
        runtime.active.meter = lambda kind, messages, nbytes: rows.append((kind, nbytes))
        with (
            mock.patch.object(mode_placement, "MIN_SHARDED_BYTES", 0),
            no_gathers(),
            torch.set_grad_enabled(learned is not None),
        ):
            got, wanted = layer(x, own, modes), written_out(alone, theirs, modes)
            forward = len(rows)
            if learned is not None:
                torch.autograd.backward(got._local_tensor, torch.ones_like(got._local_tensor))
                wanted.sum().backward()
        runtime.active.meter = None
        bytes_of = [sum(n for _, n in part) for part in (rows[:forward], rows[forward:])]
        sent[name] = (*bytes_of, any(kind == "exchange" for kind, _ in rows))
        pairs = {"output": (got.full_tensor(), wanted)}
        if learned is not None:
            pairs["input"] = (x.grad.full_tensor(), alone.grad)
        if learned:
            average = own.grad.clone()
            for axis in range(mesh.ndim):
                average = collectives.all_reduce(average, mesh.get_group(axis)) / mesh.size(axis)
            pairs["weight"] = (average, theirs.grad)
        wrong += [f"{name}: {k}" for k, (a, b) in pairs.items() if not torch.allclose(a, b, rtol=1e-10, atol=1e-12)]
    runtime.active.deferring_groups.clear()
    return wrong, sent


@pytest.mark.parametrize(("mesh", "field_placements", "modes", "shared", "rounds"), SHARES, ids=str)
def test_large_blocks_are_sharded_by_modes(mesh, field_placements, modes, shared, rounds):
    ranks = torch.Size(mesh).numel()
    found = run_on_ranks(in_shares, ranks, mesh, field_placements, modes, timeout=60)
    for wrong, _ in found:
        assert not wrong
    block = kept_bytes(2, 2, modes, 16)
    for name, (layer, learned) in MIXED.items():
        results = [sent[name] for _, sent in found]
        assert all(scattered == shared for *_, scattered in results), name
        # ranks with more modes send more: the total is that of an even sharding
        checks = (1 if layer is spectral_conv else 3) * compared(mesh)
        assert sum(forward for forward, *_ in results) == pytest.approx(ranks * (rounds * block + checks), abs=ranks), (
            name
        )
        back = 0 if learned is None else rounds * block
        assert sum(backward for _, backward, _ in results) == pytest.approx(ranks * back, abs=ranks), name


def shards_small_blocks() -> list[bool]:
    """Return, on each rank, whether blocks are sharded that are small, or whose weight's gradient is not deferred."""
    found = []
    runtime.active.deferring_groups.clear()  # of models that other tests have parallelized on these ranks
    for large, learned in ((0, True), (1 << 20, False)):
        for layer in (written_out, spectral_conv):
            x = made((2, 2, 24, 16), [Shard(2)], (2,), dtype=torch.float64)
            weight = torch.randn(2, 2, 4, 4, dtype=torch.complex128, requires_grad=learned)
            kinds = set()
            runtime.active.meter = lambda kind, *_, kinds=kinds: kinds.add(kind)
            with mock.patch.object(mode_placement, "MIN_SHARDED_BYTES", large), torch.set_grad_enabled(learned):
                layer(x, weight, (4, 6))
            runtime.active.meter = None
            found.append("exchange" in kinds)
    return found


def test_small_blocks_stay_replicated():
    assert run_on_ranks(shards_small_blocks, 2, timeout=60) == [[False] * 4] * 2


def bytes_of_lazy_spectrum() -> tuple[list[int], list[str]]:
    """Return, on each rank, the bytes sent up to each use of a lazy spectrum, and uses that failed to raise."""
    x = made((1, 2, 8, 9), [Shard(2)], (2,), dtype=torch.float64)
    sent = [0]
    seen = []
    wrong = []
    runtime.active.meter = lambda kind, messages, nbytes: sent.__setitem__(0, sent[0] + nbytes)
    try:
        spectrum = torch.fft.fftshift(torch.fft.rfft2(x), dim=-2)
        assert spectrum.shape == (1, 2, 8, 5) and spectrum.dtype == torch.complex128 and "deferred" in repr(spectrum)
        assert spectrum.requires_grad and not spectrum.is_leaf and spectrum.grad is None and spectrum.is_complex()
        assert spectrum.element_size() == 16 and spectrum.nbytes == 16 * 80 and not spectrum.is_floating_point()
        assert torch.zeros_like(spectrum).shape == spectrum.shape and not torch.fft.fft(x.detach(), dim=2).requires_grad
        with torch.no_grad():
            assert torch.fft.rfft2(x).grad_fn is None
        seen.append(sent[0])
        block = spectrum[..., 3:5, :2]
        seen.append(sent[0])
        assert spectrum.abs().shape == (1, 2, 8, 5)
        seen.append(sent[0])
        assert spectrum[..., 3:5, :2].shape == (1, 2, 2, 2)  # computes a slice of it
        assert spectrum.grad_fn is not None
        for name, call in {
            "parts were taken, and its gradient lacks theirs": lambda: spectrum.retain_grad(),
            "parts were taken, and a hook would not see them": lambda: spectrum.register_hook(print),
            "parts were taken: no gradient by it": lambda: torch.autograd.grad(block.abs().sum(), spectrum),
            "a part of a part": lambda: stale(x.detach()),
        }.items():
            try:
                call()
            except ShardingError:
                continue
            wrong.append(name)
    finally:
        runtime.active.meter = None
    return seen, wrong


def stale(x):
    spectrum = torch.fft.rfft2(x)
    corner = spectrum[..., :2, :2][..., :1]
    spectrum.zero_()
    return corner.abs()  # raises when it is read: a rank may have dropped it before the write


WRITES = {
    "after to_local()": lambda x, earlier: x.to_local().add_(1),
    "through a slice of it": lambda x, earlier: x[:, :1].to_local().add_(1),
    "through a DTensor": lambda x, earlier: x.to_dtensor().to_local().add_(1),
    "through an earlier local tensor": lambda x, earlier: earlier.add_(1),
    "on one rank": lambda x, earlier: x.to_local().add_(1) if dist.get_rank() else x.to_local(),
    "on one rank, through an earlier local tensor": lambda x, earlier: earlier.add_(1) if dist.get_rank() else None,
}


def written_behind() -> list[str]:
    """Return, on each rank, failures with lazy spectra whose field was written through its local tensor."""
    wrong = []
    full = torch.randn(1, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = torch.fft.rfft2(full)
    for mode in (torch.enable_grad, torch.inference_mode):
        for name, write in WRITES.items():
            for use in (slice(0, 2), slice(None)):
                with mode():
                    layout = Layout.of(world_mesh((2,)), [Shard(2)], full.shape)
                    earlier = local_shard(full, layout).clone()
                    x = ShardTensor.from_local(earlier, layout.mesh, [Shard(2)], "chunk", full.shape)
                    # inference tensors have no version counter: their spectrum is not lazy
                    refused = mode is torch.enable_grad and "earlier" in name
                    spectrum = torch.fft.fftshift(torch.fft.rfft2(x), dim=3)
                    write(x, earlier)
                    try:
                        got = torch.fft.ifftshift(spectrum, dim=3)[..., use, :].full_tensor()
                        fine = not refused and torch.allclose(got, wanted[..., use, :])
                    except ShardingError as error:
                        fine = refused and "was written after its transform" in str(error)
                if any_rank(not fine):
                    wrong.append(f"{name}, {mode.__name__}, {use}")
    return wrong


def test_write_to_the_field_of_a_lazy_spectrum():
    assert run_on_ranks(written_behind, 2, timeout=60) == [[], []]


def part_written_behind() -> list[bool]:
    """Check that a write to a slice of a lazy spectrum through its local tensor changes the spectrum."""
    found = []
    for ranks in ((1,), (0, 1), ()):
        x = made((1, 2, 8, 8), [Shard(2)], (2,), dtype=torch.float64).detach()
        spectrum, wanted = torch.fft.rfft2(x), torch.fft.rfft2(x.full_tensor())
        part = spectrum[..., :2, :2]
        if dist.get_rank() in ranks or not ranks:
            local = part.to_local()
            if len(ranks) == 2:
                local.mul_(2)
                wanted[..., :2, :2] *= 2
        found.append(torch.allclose(spectrum.clone().full_tensor(), wanted))
    return found


def test_write_to_a_slice_of_a_lazy_spectrum():
    assert all(map(all, run_on_ranks(part_written_behind, 2, timeout=60)))


class Observer:
    """A write observer that has outlived its tensor, as one in a reference cycle does until it is collected."""

    def before_write(self, local: torch.Tensor) -> None:
        """Ignore the write."""

    before_export = before_write


def overlapping_blocks_written() -> bool:
    """Write overlapping blocks of modes while one rank alone has a write observer."""
    x = made((2, 8, 8), [Shard(2)], (2,), dtype=torch.float64).detach()
    observer = Observer()
    if dist.get_rank() == 0:
        runtime.active.write_observers.add(observer)
    found = []
    full = x.full_tensor()
    with runtime.observing(min_scattered=16):  # the blocks are sharded, and so is what they are written into
        for field in (x, full):
            spectrum = torch.fft.rfft2(field)
            out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
            out[..., 0:2, 0:2] = spectrum[..., 0:2, 0:2] * 2
            out[..., 1:3, 1:3] = spectrum[..., 1:3, 1:3] * 2
            found.append(torch.fft.irfft2(out))
    return torch.allclose(found[0].full_tensor(), found[1])


def test_an_observer_on_one_rank_changes_no_message():
    assert run_on_ranks(overlapping_blocks_written, 2, timeout=20) == [True, True]


def left_behind() -> list[str]:
    """Return, on each rank, uses of a lazy spectrum that leave a reference to the field."""
    held = []
    gc.disable()
    try:
        for name, use in {
            "a part": lambda s: s[..., :2, :2].abs(),
            "a part, and all of it": lambda s: s[..., :2, :2] + s.abs()[..., :2, :2],
            "a part, written": lambda s: s[..., :2, :2].mul_(2),
            "all of it, a part written": lambda s: (s[..., :2, :2], s.abs())[0].mul_(2),
            "zeros like it": lambda s: torch.zeros_like(s),
        }.items():
            x = made((1, 2, 8, 9), [Shard(2)], (2,), dtype=torch.float64).detach()
            known = weakref.ref(x._local_tensor)
            use(torch.fft.fftshift(torch.fft.rfft2(x), dim=-2))
            del x
            held += [name] if known() is not None else []
    finally:
        gc.enable()
    return held


def test_lazy_spectrum_leaves_no_reference():
    assert run_on_ranks(left_behind, 2, timeout=60) == [[], []]


def test_spectrum_is_lazy():
    for seen, wrong in run_on_ranks(bytes_of_lazy_spectrum, 2, timeout=60):
        assert seen[0] == 0 and seen[1] == 2 * 2 * 2 * 16 + compared((2,)) and seen[2] > 2 * seen[1]
        assert not wrong


def in_single(mesh_shape: tuple[int, ...], field_placements: list) -> list[str]:
    """Compare, on each rank, float32, no_grad and inference mode with one device."""
    x = made((2, 3, 10, 12), field_placements, mesh_shape, dtype=torch.float32)
    weight = torch.randn(3, 4, *MODES, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))[..., :4]
    full = x.full_tensor().detach()
    wrong = []
    for name, mode in {"grad": torch.enable_grad, "no grad": torch.no_grad, "inference": torch.inference_mode}.items():
        for layer in (written_out, spectral_conv):
            with mode(), no_gathers():
                got = layer(x if name == "grad" else x.detach(), weight, MODES).full_tensor()
            wanted = written_out(full, weight, MODES)
            far = (got - wanted).abs().max() / wanted.abs().max()
            if far > 1e-5 or got.dtype != torch.float32:
                wrong.append(f"{layer.__name__}, {name}: {far}")
    return wrong


def under_autocast() -> list[float]:
    """Return, on each rank, the difference of a layer from one device under autocast, and its bytes."""
    x = made((2, 3, 10, 12), [Shard(2)], (2,), dtype=torch.float32)
    weight = torch.randn(3, 4, *MODES, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))[..., :4]
    count = [0]
    found = []
    for kind in (torch.float32, torch.bfloat16):
        runtime.active.meter = lambda kind, messages, nbytes: count.__setitem__(0, count[0] + nbytes)
        with torch.autocast("cpu", dtype=torch.bfloat16), strict():
            got = written_out(x.to(kind), weight, MODES)
            runtime.active.meter = None
            wanted = written_out(x.full_tensor().to(kind), weight, MODES)
        assert got.dtype == wanted.dtype == torch.float32
        found.append(float((got.full_tensor() - wanted).abs().max() / wanted.abs().max()))
    return [*found, count[0]]


def test_autocast_does_not_change_transforms():
    for *far, sent in run_on_ranks(under_autocast, 2, timeout=60):
        assert max(far) < 1e-5 and sent == 2 * (kept_bytes(2, 3, MODES, 8) + 3 * compared((2,)))


@pytest.mark.parametrize(("mesh", "field_placements"), [((2,), [Shard(2)]), ((2, 2), [Shard(2), Shard(3)])], ids=str)
def test_single_precision_and_inference(mesh, field_placements):
    for wrong in run_on_ranks(in_single, torch.Size(mesh).numel(), mesh, field_placements, timeout=60):
        assert not wrong


@pytest.mark.parametrize("rows", [None, (2, 5), (3, 3)])
@pytest.mark.parametrize("size", [7, 8])
def test_matrix_products_equal_transforms(size, rows):
    """Compare modes by a matrix product and by torch.fft, in any order, of any sign, repeated, and their gradients."""
    choices: list[tuple[int, ...]] = [(0, 1, 2), (-2, -1, 0, 1), (4, 0, -4, 4), (3,), ()]
    for first, last, dims in itertools.product(choices, [*choices, tuple(range(size // 2 + 1))], [(1, 2), (0, 2)]):
        shape = [3, 3, size]
        shape[dims[0]] = 5 if rows is None else rows[1] - rows[0]
        along = [
            partial_dft.DimModes(dims[0], 9 if rows else 5, first, rows),
            partial_dft.DimModes(dims[1], size, last),
        ]
        x = torch.randn(shape, dtype=torch.float64)
        y = torch.randn(3, len(first), len(last), dtype=torch.complex128).movedim(1, dims[0])
        found = []
        for few, by_steps in ((False, False), (True, False), (True, True)):
            inputs = [v.clone().requires_grad_() for v in (x, x + 1j * x.flip(0), y)]
            runtime.active.dft_matrices = runtime.Cache(256)
            with (
                mock.patch.object(partial_dft, "_prefers_matmul", lambda a, x, few=few: few),
                mock.patch.object(partial_dft, "transforms_active", lambda of_torch=by_steps: of_torch),
            ):  # by_steps: torch differentiates the steps
                outs = [partial_dft.forward_dft(v, along, "ortho") for v in inputs[:2]]
                outs += [partial_dft.inverse_dft(inputs[2], along, "forward", real) for real in (False, True)]
            seeds = [torch.ones_like(o) * 0.5 for o in outs]
            found.append([*outs, *torch.autograd.grad(outs, inputs, seeds)])
        for a, *others in zip(*found, strict=True):
            for b in others:
                torch.testing.assert_close(a, b)
        assert not found[0][3].is_complex()
    runtime.active.dft_matrices = runtime.Cache(256)


def test_an_inverse_that_pads_modes_computes_a_ranks_rows_only():
    """On one rank of many, the field of a few modes is as large as the rank's shard, also on another grid."""
    with simulated(512, 100):
        mesh = DeviceMesh("cpu", torch.arange(512), mesh_dim_names=("rows",))
        layout = Layout.of(mesh, [Shard(1)], (2, 4096, 16))
        x = ShardTensor(torch.randn(layout.local_shape), layout)
        kept = torch.fft.rfft2(x)[:, :3, :3]
        assert kept.placements == (Replicate(),)
        assert torch.fft.irfft2(kept, s=(4096, 16)).to_local().shape == (2, 8, 16)
        assert torch.fft.irfft2(kept * 2, s=(8192, 16)).to_local().shape == (2, 16, 16)
        assert torch.fft.irfft2(kept).placements == (Replicate(),)  # a small field
