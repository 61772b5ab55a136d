"""Attention on a sharded sequence: ring attention against gathering keys and values, and against one rank.

"gather" is what a user writes without a ring: keys and values are replicated, and a mask selects the rows of the local
queries. In "one rank", one rank computes everything while the others wait. Measured are forward and forward + backward,
causal and not, with the memory beyond the inputs. Delayed messages: each message arrives 5 ms later, and the ring is
compared with the slower of its arithmetic and its messages. Causal work: the largest number of attention scores on a
rank over the mean of all ranks. One rank: a ShardTensor against plain torch. A rank of 8: its share of a ring,
simulated as in `bench rank`, against the fastest single call with the same queries and keys. A causal share is compared
per score that is computed. TFLOP/s count the two products with scores; backward counts 2.5 times as many.

What is found. A rank's share of a ring of 8 on an H200 reaches 611 TFLOP/s forward and 556 with backward, a single call
of cuDNN's kernel 681 and 585, of flash attention 348 and 323. A causal share computes half the scores, in more and
smaller tiles and after an exchange into zigzag order: its forward is host-bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..comm import ring as rings
from ..ops.attention import attention_strategy, sdpa
from .measure import Times, busy_seconds, delay_messages, interleave, max_over_ranks, peak_memory, wall_seconds
from .rank import shard_of, simulated_meshes
from .ranks import domain_mesh, measure_on_ranks, shard_tensor
from .table import Table
from .traffic import checked_traffic

attend: Any = F.scaled_dot_product_attention
OVERLAP_BOUND = "the slower of arithmetic and messages"
CASES = [(causal, backward) for causal in (False, True) for backward in (False, True)]


SHARE_OF = 8  # ranks of the simulated ring
SHARE_BARS = {False: 590e12, True: 540e12}  # FLOP/s of a rank on an H200: forward, forward + backward


@dataclass(frozen=True)
class Settings:
    ranks: tuple[int, ...] = (1, 2, 4)
    length: int = 4096
    heads: int = 3  # not divisible by 2 or 4 ranks: otherwise heads might be sharded instead of the sequence
    width: int = 64
    rounds: int = 5
    delay_ms: float = 5.0
    dtype: str = "float32"

    quick: ClassVar[dict[str, Any]] = {"length": 512, "rounds": 3}
    cuda: ClassVar[dict[str, Any]] = {"length": 65536, "heads": 8, "width": 128, "dtype": "bfloat16"}


class Inputs:
    """Queries, keys and values of one problem, as full tensors and as sharded ones."""

    def __init__(self, settings: Settings, mesh: DeviceMesh):
        shape = (1, settings.heads, settings.length, settings.width)
        dtype: torch.dtype = getattr(torch, settings.dtype)
        generator = torch.Generator().manual_seed(0)
        full = [torch.randn(shape, generator=generator).to(mesh.device_type, dtype) for _ in range(3)]
        self.shards = [shard_tensor(t, mesh, 2).requires_grad_() for t in full]
        self.full = [t.requires_grad_() for t in full]

    def clear(self) -> None:
        for t in (*self.full, *self.shards):
            t.grad = None


def ring(x: Inputs, causal: bool, backward: bool) -> None:
    x.clear()
    out = attend(*x.shards, is_causal=causal)
    if backward:
        out.to_local().sum().backward()


def gather(x: Inputs, causal: bool, backward: bool) -> None:
    x.clear()
    q, k, v = x.shards
    local = q.to_local()
    replicated = [t.redistribute(placements=[Replicate()]) for t in (k, v)]
    # A rank's gradient of keys and values comes from its own queries: a partial sum.
    keys, values = (t.to_local(grad_placements=[Partial()]) for t in replicated)
    mask = None
    if causal:
        first = q.offsets(0)
        rows = torch.arange(first, first + local.shape[2], device=local.device)
        mask = rows[:, None] >= torch.arange(k.shape[2], device=local.device)
    out = attend(local, keys, values, mask)
    if backward:
        out.sum().backward()


def single_rank(x: Inputs, causal: bool, backward: bool) -> None:
    x.clear()
    if dist.get_rank() == 0:
        out = attend(*x.full, is_causal=causal)
        if backward:
            out.sum().backward()


def overlap(x: Inputs, settings: Settings, device: str) -> Times:
    """Time the ring, its arithmetic alone (all blocks are local) and its messages alone, with delayed messages."""
    mesh = x.shards[0].device_mesh
    size = mesh.size(0)
    q, k, v = (t.to_local().detach() for t in x.shards)
    blocks = [(k.clone(), v.clone()) for _ in range(size)]
    position = rings.Ring((mesh.get_group(0),), (size,), (mesh.get_local_rank(),))

    def arithmetic() -> None:
        for key, value in blocks:
            attend(q, key, value)

    def messages() -> None:
        for _ in rings.iterate_blocks(rings.pack([k, v]), [2 * k.numel()] * size, position):
            pass

    calls: dict[str, Callable[[], None]] = {
        "ring": partial(ring, x, False, False),
        "arithmetic alone": arithmetic,
        "messages alone": messages,
    }
    with torch.no_grad(), delay_messages(settings.delay_ms / 1e3):
        return interleave(calls, settings.rounds, partial(wall_seconds, device=device))


def scores_of(call: Callable[[], Any]) -> float:
    """Return the scores per head that this rank computes in a call; 0 if the call does not use a ring."""
    works: list[Any] = []
    before = sdpa.attend

    def recorded(work: Any, *args: Any) -> Any:
        works.append(work)
        return before(work, *args)

    sdpa.attend = recorded  # type: ignore[assignment]
    try:
        with torch.no_grad():
            call()
    finally:
        sdpa.attend = before
    return works[0].scores if works else 0.0


def causal_imbalance(x: Inputs) -> float:
    """Return the number of scores that this rank computes over the mean of all ranks."""
    length = x.full[0].shape[2]
    return scores_of(partial(ring, x, True, False)) / (length * (length + 1) / 2 / dist.get_world_size()) or 1.0


def check(x: Inputs) -> None:
    """Check that both methods give the same gradients, approximately in half precision."""
    grads = []
    for method in (gather, ring):
        method(x, True, True)
        grads.append([t.grad.to_local() for t in x.shards if t.grad is not None])
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if grads[0][0].dtype is torch.float32 else {"rtol": 0.1, "atol": 0.1}
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def compare_on_rank(device: str, settings: Settings) -> dict[str, Any]:
    """Return seconds and bytes by case and method, on a rank."""
    x = Inputs(settings, domain_mesh(device))
    methods: dict[str, Callable[[Inputs, bool, bool], None]] = {"gather": gather, "ring": ring, "one rank": single_rank}
    check(x)
    results: dict[str, Any] = {"times": {}, "peaks": {}, "sent": {}}
    for causal, backward in CASES:
        case = ("causal, " if causal else "") + ("forward + backward" if backward else "forward")
        calls = {name: partial(call, x, causal, backward) for name, call in methods.items()}
        results["times"][case] = interleave(calls, settings.rounds, partial(wall_seconds, device=device))
        x.clear()
        results["peaks"][case] = {name: peak_memory(call, device) for name, call in calls.items()}
        sent = {name: checked_traffic(call).bytes for name, call in calls.items() if name != "one rank"}
        results["sent"][case] = sent
    return results | {"overlap": overlap(x, settings, device), "imbalance": causal_imbalance(x)}


def time_one_rank(device: str, settings: Settings) -> Times:
    """Time forward and backward of a ShardTensor and of plain torch, on one rank."""
    x = Inputs(settings, domain_mesh(device))
    calls = {"plain torch": partial(single_rank, x, False, True), "shardfield": partial(ring, x, False, True)}
    return interleave(calls, settings.rounds, partial(busy_seconds, device=device))


def ring_share(settings: Settings, device: str, table: Table) -> None:
    """Time one rank's share of a ring, and a single call with its queries and all keys by each of torch's kernels."""
    rows, dtype = settings.length // SHARE_OF, getattr(torch, settings.dtype)
    heads, width = settings.heads, settings.width
    torch.manual_seed(0)
    with simulated_meshes((SHARE_OF,), device) as meshes:
        local = [torch.randn(1, heads, rows, width, device=device, dtype=dtype) for _ in range(3)]
        shards = [shard_of(meshes[SHARE_OF], t, 2).requires_grad_() for t in local]
        keys = [t.repeat(1, 1, SHARE_OF, 1).requires_grad_() for t in local[1:]]
        full = [local[0].requires_grad_(), *keys]
        grad = torch.randn_like(local[0])
        names = (
            (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
            if device != "cpu"
            else (SDPBackend.FLASH_ATTENTION,)
        )

        def one_call(backend: Any, backward: bool) -> None:
            with sdpa_kernel(backend):
                out = attend(*full)
            if backward:
                torch.autograd.grad(out, full, grad)

        def share(causal: bool, backward: bool) -> None:
            with attention_strategy("ring"):  # with as many heads as ranks, redistributing to heads may be cheaper
                out = attend(*shards, is_causal=causal)
            if backward:
                torch.autograd.grad(out.to_local(), [t._local_tensor for t in shards], grad)

        scores = {causal: scores_of(partial(share, causal, False)) for causal in (False, True)}
        for backward in (False, True):
            calls: dict[str, Callable[[], None]] = {
                f"one call, {backend.name.lower()}": partial(one_call, backend, backward) for backend in names
            }
            calls |= {name: partial(share, name == "causal ring", backward) for name in ("ring", "causal ring")}
            times = interleave(calls, settings.rounds, partial(busy_seconds, device=device, repeats=3), warmup=2)
            case = f"a rank of {SHARE_OF}, {'forward + backward' if backward else 'forward'}"
            table.add_times(case, times)
            flops = 4 * heads * width * (3.5 if backward else 1)
            work = {name: flops * scores[name == "causal ring"] for name in times}
            speeds = {name: work[name] / sorted(of)[len(of) // 2] for name, of in times.items()}
            table.add_counts(f"{case}: speed", speeds, "TFLOP/s")
            fastest = min((n for n in times if n.startswith("one call")), key=lambda n: sum(times[n]))
            for name in ("ring", "causal ring"):
                per_score = [t / work[name] * work[fastest] for t in times[name]]
                of_call = [a / b for a, b in zip(per_score, times[fastest], strict=True)]
                bar = 1.05 if device == "cuda" else None
                table.add_ratio(f"{case}, per score", name, of_call, "the fastest single call", bar)
                if device == "cuda":
                    at_speed = [t * SHARE_BARS[backward] / work[name] for t in times[name]]
                    goal = f"the time at {SHARE_BARS[backward] / 1e12:g} TFLOP/s"
                    table.add_ratio(f"{case}, against the chip", name, at_speed, goal, 1.0)


def run(settings: Settings, device: str, table: Table) -> None:
    if settings.length % SHARE_OF == 0:
        ring_share(settings, device, table)
    if 1 in settings.ranks:
        times = measure_on_ranks(time_one_rank, 1, device, settings)[0]
        table.add_times("1 rank, forward + backward", times, "plain torch", bars={"shardfield": 1.05})
    for ranks in (r for r in settings.ranks if r > 1):
        by_rank = measure_on_ranks(compare_on_rank, ranks, device, settings)
        for case in by_rank[0]["times"]:
            table.add_times(f"{ranks} ranks, {case}", max_over_ranks([t["times"][case] for t in by_rank]), "gather")
            for quantity, unit in (("peaks", "MB"), ("sent", "kB")):
                largest = {name: max(t[quantity][case][name] for t in by_rank) for name in by_rank[0][quantity][case]}
                name = "memory" if quantity == "peaks" else "sent"
                table.add_counts(f"{ranks} ranks, {case}: {name}", largest, unit, "gather")
        times = max_over_ranks([t["overlap"] for t in by_rank])
        parts = zip(times["arithmetic alone"], times["messages alone"], strict=True)
        case = f"{ranks} ranks, messages {settings.delay_ms:g} ms late"
        table.add_times(case, {OVERLAP_BOUND: [max(at) for at in parts]} | times, OVERLAP_BOUND, bars={"ring": 1.15})
        imbalance = max(t["imbalance"] for t in by_rank)
        table.add_ratio(f"{ranks} ranks, causal: the largest share of scores", "ring", [imbalance], "the mean", 1.05)
