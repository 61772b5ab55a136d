"""A spectral layer on a field that is sharded along its rows: bytes sent and time of four methods.

The layer of a Fourier neural operator (transform, keep modes, mix channels, transform back), forward and backward.
"modes" is `shardfield.ops.spectral.spectral_conv`, which computes and sends only the kept modes. "written" is the layer
as models write it, in torch.fft; its spectra are lazy until an index selects the modes. "swap" is the same with eager
spectra, for which the shards move to dims that are not transformed. "gather" replicates the field and shards it again
after the layer. All methods give the same result, which is checked first. The benchmark `tfno` measures a layer of a
model on different numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..ops.spectral.truncation import spectral_conv
from ..tensor import ShardTensor
from .measure import interleave, max_over_ranks, rank_seconds
from .ranks import domain_mesh, make_sharded_field, measure_on_ranks, rank_label
from .table import Table
from .traffic import checked_traffic


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (1, 2, 4)
    grid: tuple[int, ...] = (256, 256)
    channels: int = 16
    modes: tuple[int, ...] = (32, 32)
    rounds: int = 7

    quick: ClassVar[dict[str, Any]] = {"grid": (64, 64), "channels": 4, "modes": (8, 8), "rounds": 3}
    cuda: ClassVar[dict[str, Any]] = {"grid": (720, 1440), "channels": 64, "modes": (64, 64)}


def torch_fft_layer(
    x: Tensor, weight: Tensor, modes: tuple[int, int], take: Callable = lambda spectrum: spectrum
) -> Tensor:
    """Compute the layer with torch.fft; `take` is applied to the spectrum."""
    height, width = x.shape[2:]
    spectrum = torch.fft.fftshift(take(torch.fft.rfftn(x, dim=(2, 3), norm="forward")), dim=(2,))
    first = height // 2 - modes[0] // 2
    kept = (slice(None), slice(None), slice(first, first + modes[0]), slice(0, modes[1] // 2 + 1))
    out = torch.zeros(x.shape[0], weight.shape[1], height, width // 2 + 1, dtype=weight.dtype, device=weight.device)
    out[kept] = torch.einsum("bixy,ioxy->boxy", spectrum[kept], weight)
    out = torch.fft.ifftshift(out, dim=(2,))
    return torch.fft.irfftn(out, s=(height, width), dim=(2, 3), norm="forward")


def resharded_layer(x: ShardTensor, weight: Tensor, modes: tuple[int, int]) -> Tensor:
    """Run the layer on a materialized spectrum, whose slices carry no origin: fields and spectra are resharded."""
    return torch_fft_layer(x, weight, modes, lambda spectrum: spectrum.view_as(spectrum))


def gathered_layer(x: ShardTensor, weight: Tensor, modes: tuple[int, int]) -> Tensor:
    """Compute the layer on a replicated field."""
    full = x.redistribute(placements=[Replicate()])
    return torch_fft_layer(full, weight, modes).redistribute(placements=[Shard(2)])


METHODS: dict[str, Callable] = {
    "modes": spectral_conv,
    "written": torch_fft_layer,
    "swap": resharded_layer,
    "gather": gathered_layer,
}


def compare_on_rank(device: str, settings: Settings) -> dict[str, Any]:
    """Return seconds of forward + backward, and bytes sent in each direction, by method, on a rank."""
    mesh = domain_mesh(device)
    modes, channels = tuple(settings.modes), settings.channels
    x = make_sharded_field(mesh, (1, channels, *settings.grid)).requires_grad_()
    torch.manual_seed(0)
    shape = (channels, channels, modes[0], modes[1] // 2 + 1)
    weight = torch.randn(shape, dtype=torch.cfloat).to(device).requires_grad_()
    fields: dict[str, Any] = dict.fromkeys(METHODS, x)
    methods = dict(METHODS)
    if mesh.size() == 1:
        fields["plain torch"] = x.to_local().detach().clone().requires_grad_()
        methods["plain torch"] = torch_fft_layer
    outs: dict[str, Tensor] = {}

    def forward(method: str) -> None:
        outs[method] = methods[method](fields[method], weight, modes)

    def backward(method: str) -> None:
        weight.grad = fields[method].grad = None
        outs.pop(method).square().sum().backward()

    def both(method: str) -> None:
        forward(method)
        backward(method)

    sent: dict[str, dict[str, int]] = {"forward": {}, "backward": {}}
    results = []
    for method in methods:
        both(method)
        sent["forward"][method] = checked_traffic(partial(forward, method)).bytes
        out = outs[method].detach()
        sent["backward"][method] = checked_traffic(partial(backward, method)).bytes
        assert weight.grad is not None
        full = [t.full_tensor() if isinstance(t, ShardTensor) else t for t in (out, fields[method].grad)]
        results.append((*full, weight.grad.clone()))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max()))
    times = interleave(
        {method: partial(both, method) for method in methods}, settings.rounds, partial(rank_seconds, device=device)
    )
    return {"times": times, "sent": sent}


def run(settings: Settings, device: str, table: Table) -> None:
    for ranks in settings.ranks:
        by_rank = measure_on_ranks(compare_on_rank, ranks, device, settings)
        table.add_times(
            f"{rank_label(ranks)}, forward + backward", max_over_ranks([t["times"] for t in by_rank]), "modes"
        )
        for direction in ("forward", "backward") if ranks > 1 else ():
            sent = [t["sent"][direction] for t in by_rank]
            largest = {method: max(s[method] for s in sent) for method in sent[0]}
            table.add_counts(f"{rank_label(ranks)}, {direction}: sent", largest, "kB", "modes")
