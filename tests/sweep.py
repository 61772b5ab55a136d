"""A sweep over PyTorch's own operator database: every sample is right or refused, on all ranks alike.

For each operator that takes float64, each sample input, each tensor argument and each of its dims: that argument is
cut unevenly along that dim over the ranks, and outputs and gradients are compared with the plain call. Run
`python tests/sweep.py --help`, or `make sweep` for all of it (it writes docs/op-coverage.md).
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from harness import differs, mesh_of, shard, whole  # noqa: E402

import shardfield.dispatch as dispatch  # noqa: E402
from shardfield import ShardingError, ShardTensor  # noqa: E402
from shardfield.layout import Layout  # noqa: E402
from shardfield.testing import RanksFailed, run_on_ranks  # noqa: E402

# Results that are not a function of the arguments: only shape, dtype and layout can be checked.
RANDOM = ("dropout", "bernoulli", "rand", "multinomial", "normal", "empty", "uniform", "cauchy", "exponential", "geometric", "log_normal", "rrelu")
# Results that are defined up to a sign, a phase or an order: compared by what they reconstruct, which is not done here.
AMBIGUOUS = ("svd", "eig", "eigh", "qr", "pca_lowrank", "svd_lowrank", "lobpcg", "geqrf", "ormqr", "householder", "lu", "triangular", "lstsq", "pinv")


def operators() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float64 in op.supported_dtypes("cpu")]


def leaves(value: Any, found: list) -> Any:
    """The tensors in nested lists, tuples and dicts, in order."""
    dispatch.map_tensors(value, lambda t: found.append(t) or t)
    return found


def replace(value: Any, new: list) -> Any:
    left = iter(new)
    return dispatch.map_tensors(value, lambda _: next(left))


def copies(tensors: list, grad: bool) -> list:
    return [t.detach().clone().requires_grad_(grad and (t.is_floating_point() or t.is_complex())) for t in tensors]


def cut_of(size: int, parts: int, turn: int) -> list[int]:
    """Uneven lengths that differ from turn to turn; a piece is empty when there is little to share."""
    lengths = [size // (parts + 1)] * parts
    lengths[turn % parts] += size - sum(lengths)
    return lengths


def run_operator(name: str, variant: str, limit: int, per_sample: int) -> list[tuple[str, str, str]]:
    """On a rank: (verdict, where, why) of every try of one operator."""
    warnings.simplefilter("ignore")
    op = next(o for o in operators() if o.name == name and o.variant_test_name == variant)
    mesh = mesh_of((torch.distributed.get_world_size(),))
    found: list[tuple[str, str, str]] = []
    torch.manual_seed(0)
    try:
        samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=False))
    except Exception as error:  # noqa: BLE001: samples that need what is not installed
        return [("no samples", name, repr(error))]
    turn = 0
    for number, sample in enumerate(samples[:limit]):
        call = (sample.input, sample.args, sample.kwargs)
        tensors = leaves(call, [])
        tries = [(i, d) for i, t in enumerate(tensors) for d in range(t.ndim) if t.layout == torch.strided]
        for which, dim in tries[:per_sample]:
            turn += 1
            where = f"{name} {variant} sample {number} argument {which} dim {dim}"
            found.append(one(op, call, tensors, which, dim, mesh, turn, where))
    return found


def one(op, call, tensors, which, dim, mesh, turn, where) -> tuple[str, str, str]:
    grad = op.supports_autograd
    plain = copies(tensors, grad)
    torch.manual_seed(1)
    try:
        ref_call = replace(call, plain)
        ref = op(ref_call[0], *ref_call[1], **ref_call[2])
    except Exception as error:  # noqa: BLE001
        return "one device refuses", where, repr(error)[:200]
    mine: list[Any] = copies(tensors, grad)
    size = tensors[which].shape[dim]
    lengths = cut_of(size, mesh.size(), turn)
    from torch.distributed.tensor import Shard

    layout = Layout.of(mesh, [Shard(dim)], tensors[which].shape, {dim: lengths})
    mine[which] = ShardTensor(shard(tensors[which], layout).requires_grad_(mine[which].requires_grad), layout)
    where += f" cut {'+'.join(map(str, lengths))}"
    dispatch._warned.clear()
    torch.manual_seed(1)
    try:
        got_call = replace(call, mine)
        got = op(got_call[0], *got_call[1], **got_call[2])
        return judge(op, where, ref, got, plain, mine)
    except ShardingError as error:
        return "refused", where, str(error)[:300]
    except Exception as error:  # noqa: BLE001
        return "error", where, f"{type(error).__name__}: {error}"[:300]


def judge(op, where, ref, got, plain, mine) -> tuple[str, str, str]:
    ending = "gather" if dispatch._warned else "rule"
    loose = any(word in op.name for word in RANDOM)
    refs, gots = leaves(ref, []), leaves(got, [])
    if len(refs) != len(gots):
        return "WRONG", where, f"{len(gots)} results, should be {len(refs)}"
    for r, g in zip(refs, gots, strict=True):
        if isinstance(g, ShardTensor) and g._local_tensor.shape != g._layout.local_shape:
            return "WRONG", where, f"holds {tuple(g._local_tensor.shape)}, its layout says {g._layout.local_shape}"
        value = whole(g)
        if r.layout != torch.strided:
            continue
        if loose or any(word in op.name for word in AMBIGUOUS):
            why = None if value.shape == r.shape and value.dtype == r.dtype else f"{value.shape} {value.dtype}"
        else:
            why = differs(value, r, 1e-7)
        if why:
            return "WRONG", where, why
    if loose or any(word in op.name for word in AMBIGUOUS):
        return ending, where, ""
    outs = [(r, g) for r, g in zip(refs, gots, strict=True) if r.requires_grad and r.layout == torch.strided]
    if not outs:
        return ending, where, ""
    seeds = [torch.cos(torch.arange(r.numel(), dtype=torch.float64)).view(r.shape).to(r.dtype) for r, _ in outs]
    try:
        torch.autograd.backward([r for r, _ in outs], seeds)
    except Exception:  # noqa: BLE001: one device has no gradient here
        return ending, where, ""
    if any(not g.requires_grad for _, g in outs):
        return "WRONG", where, "the result lost its gradient"
    dispatch.run_backward([g for _, g in outs], seeds, None, False, None)
    for i, (p, m) in enumerate(zip(plain, mine, strict=True)):
        if p.grad is None or p.grad.layout != torch.strided:
            continue
        if m.grad is None:
            return "WRONG", where, f"argument {i} got no gradient"
        why = differs(whole(m.grad), p.grad, 1e-6)
        if why:
            return "WRONG", where, f"gradient of argument {i}: {why}"
    return ending, where, ""


def run_operators(names: list[tuple[str, str]], limit: int, per_sample: int) -> dict[str, list]:
    return {f"{n}.{v}" if v else n: run_operator(n, v, limit, per_sample) for n, v in names}


def merged(answers: list[list]) -> list[tuple[str, str, str]]:
    """One verdict per try: where ranks disagree, that is the finding."""
    out = []
    for verdicts in zip(*answers, strict=True):
        kinds = {v[0] for v in verdicts}
        if "WRONG" in kinds:
            out.append(next(v for v in verdicts if v[0] == "WRONG"))
        elif len(kinds) > 1:
            out.append(("ranks disagree", verdicts[0][1], f"{[v[0] for v in verdicts]} {verdicts[0][2]}"))
        else:
            out.append(verdicts[0])
    return out


def sweep(names: list[tuple[str, str]], world: int, limit: int, per_sample: int, timeout: float = 120.0) -> dict[str, list]:
    """Verdicts by operator; one call of the ranks each, so that a hang is pinned to its operator."""
    table = {}
    for name, variant in names:
        label = f"{name}.{variant}" if variant else name
        try:
            table[label] = merged(run_on_ranks(run_operator, world, name, variant, limit, per_sample, timeout=timeout))
        except RanksFailed as error:
            table[label] = [("hang", label, str(error)[:600])]
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--limit", type=int, default=10, help="samples per operator")
    parser.add_argument("--per-sample", type=int, default=6, help="(argument, dim) pairs per sample")
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--stride", type=int, default=1, help="every n-th operator")
    parser.add_argument("--offset", type=int, default=0, help="where to begin; with --stride, one share of the work")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", default="WRONG,ranks disagree,hang,error,refused")
    args = parser.parse_args()
    names = [(o.name, o.variant_test_name) for o in operators() if args.only in o.name][args.offset :: args.stride]
    begin = time.time()
    table = sweep(names, args.world, args.limit, args.per_sample)
    counts = collections.Counter(v[0] for rows in table.values() for v in rows)
    shown = args.show.split(",")
    for label, rows in table.items():
        seen = collections.Counter(v[0] for v in rows)
        for kind in shown:
            first = next((v for v in rows if v[0] == kind), None)
            if first:
                print(f"{kind:15s} {seen[kind]:4d} of {len(rows):4d} {label}: {first[1]}: {first[2]}")
    judged = sum(n for k, n in counts.items() if k not in ("one device refuses", "no samples"))
    right = counts["rule"] + counts["gather"]
    print(f"\n{dict(counts)}; right {right / max(judged, 1):.1%}, by a rule {counts['rule'] / max(judged, 1):.1%}; {time.time() - begin:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(table))


if __name__ == "__main__":
    main()
