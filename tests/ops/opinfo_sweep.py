"""Sweep over PyTorch's operator database: every sample is right or refused, with the same verdict on all ranks.

For each operator that takes float64, each sample input, each tensor argument and each of its dims: that argument is
sharded unevenly along that dim over the ranks, and outputs and gradients are compared with the plain call. Run
`python -m tests.ops.opinfo_sweep --help`, or `make sweep` for all of it (it writes docs/op-coverage.md).
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import shardfield.dispatch.registry as dispatch
from shardfield import ShardingError, ShardTensor, runtime
from shardfield.layout import Layout
from shardfield.testing import RanksFailed, run_on_ranks
from tests.harness import describe_mismatch, local_shard, to_full_tensor, world_mesh

# Results that are not a function of the arguments: only shape, dtype and layout can be checked.
RANDOM = (
    "dropout",
    "bernoulli",
    "rand",
    "multinomial",
    "normal",
    "empty",
    "uniform",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "rrelu",
    "attention",
    "fractional_max_pool",
)
# Results that are defined up to a sign, a phase or an order: compared by what they reconstruct, which is not done here.
AMBIGUOUS = (
    "svd",
    "eig",
    "eigh",
    "qr",
    "pca_lowrank",
    "svd_lowrank",
    "lobpcg",
    "geqrf",
    "ormqr",
    "householder",
    "lu",
    "triangular",
    "lstsq",
    "pinv",
)


def operators() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float64 in op.supported_dtypes("cpu")]


def leaves(value: Any, found: list) -> Any:
    """Collect the tensors in nested lists, tuples and dicts, in order."""
    dispatch.map_tensors(value, lambda t: found.append(t) or t)
    return found


def replace(value: Any, new: list) -> Any:
    left = iter(new)
    return dispatch.map_tensors(value, lambda _: next(left))


def copies(tensors: list, grad: bool) -> list:
    return [t.detach().clone().requires_grad_(grad and (t.is_floating_point() or t.is_complex())) for t in tensors]


def uneven_sizes(size: int, parts: int, turn: int) -> list[int]:
    """Return uneven shard sizes that differ from turn to turn; a shard is empty when the dim is small."""
    lengths = [size // (parts + 1)] * parts
    lengths[turn % parts] += size - sum(lengths)
    return lengths


def run_operator(name: str, variant: str, limit: int, per_sample: int) -> list[tuple[str, str, str]]:
    """Return, on a rank, (verdict, where, why) of every try of one operator."""
    warnings.simplefilter("ignore")
    op = next(o for o in operators() if o.name == name and o.variant_test_name == variant)
    mesh = world_mesh((torch.distributed.get_world_size(),))
    found: list[tuple[str, str, str]] = []
    torch.manual_seed(0)
    try:
        samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=False))
    except Exception as error:  # samples that need packages that are not installed
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
        torch.manual_seed(2)
        again_call = replace(call, copies(tensors, grad))
        again = op(again_call[0], *again_call[1], **again_call[2])
        loose = is_random(op, ref, again)
    except Exception as error:
        return "one device refuses", where, repr(error)[:200]
    mine: list[Any] = copies(tensors, grad)
    size = tensors[which].shape[dim]
    lengths = uneven_sizes(size, mesh.size(), turn)
    from torch.distributed.tensor import Shard

    layout = Layout.of(mesh, [Shard(dim)], tensors[which].shape, {dim: lengths})
    mine[which] = ShardTensor(local_shard(tensors[which], layout).requires_grad_(mine[which].requires_grad), layout)
    where += f" sharded as {'+'.join(map(str, lengths))}"
    runtime.active.warned.clear()
    torch.manual_seed(1)
    try:
        got_call = replace(call, mine)
        got = op(got_call[0], *got_call[1], **got_call[2])
        return judge(op, where, ref, got, plain, mine, loose)
    except ShardingError as error:
        return "refused", where, str(error)[:300]
    except Exception as error:
        return "error", where, f"{type(error).__name__}: {error}"[:300]


def is_random(op, ref, again) -> bool:
    """Return whether results are not a function of the arguments: by name, or because they depend on the seed."""
    pairs = zip(leaves(ref, []), leaves(again, []), strict=True)
    dense = [(a, b) for a, b in pairs if a.layout == b.layout == torch.strided and a.dtype != torch.complex32]
    return any(word in op.name for word in RANDOM) or any(
        a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in dense
    )


def judge(op, where, ref, got, plain, mine, loose) -> tuple[str, str, str]:
    # Other entries, of shardings that a rule loses, are "function: lost sharding" and "file:line".
    ending = "gather" if any(":" not in entry for entry in runtime.active.warned) else "rule"
    refs, gots = leaves(ref, []), leaves(got, [])
    if len(refs) != len(gots):
        return "WRONG", where, f"{len(gots)} results, should be {len(refs)}"
    for r, g in zip(refs, gots, strict=True):
        if isinstance(g, ShardTensor) and g._local_tensor.shape != g._layout.local_shape:
            return "WRONG", where, f"holds {tuple(g._local_tensor.shape)}, its layout says {g._layout.local_shape}"
        value = to_full_tensor(g)
        if r.layout != torch.strided:
            continue
        if loose or any(word in op.name for word in AMBIGUOUS):
            why = None if value.shape == r.shape and value.dtype == r.dtype else f"{value.shape} {value.dtype}"
        else:
            wide = torch.complex64 if r.dtype == torch.complex32 else r.dtype  # torch has no comparison of complex32
            why = describe_mismatch(value.to(wide), r.to(wide), 1e-7)
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
    except Exception:  # one device has no gradient here
        return ending, where, ""
    if any(not g.requires_grad for _, g in outs):
        return "WRONG", where, "the result lost its gradient"
    dispatch.run_backward([g for _, g in outs], seeds, None, False, None)
    for i, (p, m) in enumerate(zip(plain, mine, strict=True)):
        if p.grad is None or p.grad.layout != torch.strided:
            continue
        if m.grad is None:
            return "WRONG", where, f"argument {i} got no gradient"
        why = describe_mismatch(to_full_tensor(m.grad), p.grad, 1e-6)
        if why:
            return "WRONG", where, f"gradient of argument {i}: {why}"
    return ending, where, ""


def run_operators(names: list[tuple[str, str]], limit: int, per_sample: int) -> dict[str, list]:
    return {f"{n}.{v}" if v else n: run_operator(n, v, limit, per_sample) for n, v in names}


def merged(answers: list[list]) -> list[tuple[str, str, str]]:
    """Return one verdict per try; ranks that disagree are a verdict of their own."""
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


def sweep(
    names: list[tuple[str, str]], world: int, limit: int, per_sample: int, timeout: float = 120.0
) -> dict[str, list]:
    """Return verdicts by operator; each operator is one call of the ranks, so that a hang names its operator."""
    table = {}
    for name, variant in names:
        label = f"{name}.{variant}" if variant else name
        try:
            table[label] = merged(run_on_ranks(run_operator, world, name, variant, limit, per_sample, timeout=timeout))
        except RanksFailed as error:
            table[label] = [("hang", label, str(error)[:600])]
    return table


def counted(table: dict[str, list]) -> collections.Counter:
    return collections.Counter(verdict for rows in table.values() for verdict, _, _ in rows)


def judged(counts: collections.Counter) -> int:
    """Return the number of tries that one device accepts."""
    return sum(n for verdict, n in counts.items() if verdict not in ("one device refuses", "no samples"))


def page(table: dict[str, list], about: str) -> str:
    """Return the text of docs/op-coverage.md."""
    counts = counted(table)
    total = max(judged(counts), 1)
    names = {kind: [] for kind in ("gather", "refused", "error", "WRONG", "hang", "ranks disagree")}
    for label, rows in sorted(table.items()):
        seen = collections.Counter(v[0] for v in rows)
        for kind, found in names.items():
            if seen[kind]:
                found.append(f"`{label}` ({seen[kind]} of {len(rows)})")
    bad = sum(counts[k] for k in ("error", "WRONG", "hang", "ranks disagree"))
    lines = [
        "# Op coverage",
        "",
        "Find out whether a torch function has a sharding rule, or gathers its operands: the lists below name all that",
        "gather for some sample. `with shardfield.strict():` finds the gathers of your own model.",
        "",
        "`make sweep` calls PyTorch's operator database in float64, each tensor argument sharded unevenly along each",
        "of its dims in turn, compares outputs and gradients with the plain call, and writes this page. The shares",
        "must not fall.",
        "",
        f"{about}",
        "",
        "| | tries | share |",
        "|---|---|---|",
        f"| right, by a rule | {counts['rule']} | {counts['rule'] / total:.1%} |",
        f"| right, gathered | {counts['gather']} | {counts['gather'] / total:.1%} |",
        f"| refused on all ranks | {counts['refused']} | {counts['refused'] / total:.1%} |",
        f"| wrong, hanging or raising otherwise | {bad} | {bad / total:.1%} |",
        f"| all that one device accepts | {total} | |",
        "",
    ]
    titles = {"gather": "Gathered", "refused": "Refused", "error": "Raising something else"}
    titles |= {"WRONG": "Wrong", "hang": "Hanging", "ranks disagree": "Ranks disagree"}
    for kind, found in names.items():
        if found:
            lines += [f"## {titles[kind]}", "", ", ".join(found) + ".", ""]
    return "\n".join(lines)


def shares(text: str) -> tuple[float, float]:
    """Return (right, by a rule) of a page, in percent."""
    found = [float(x) for x in re.findall(r"^\| right, .*\| ([0-9.]+)% \|$", text, re.MULTILINE)]
    return (sum(found), found[0]) if len(found) == 2 else (0.0, 0.0)


def write_page(table: dict[str, list], path: Path, about: str) -> None:
    """Write the page, unless a number decreased."""
    new = page(table, about)
    if path.exists():
        before, after = shares(path.read_text()), shares(new)
        if after[0] < before[0] - 0.05 or after[1] < before[1] - 0.05:
            raise SystemExit(
                f"coverage fell: right {before[0]:.1f}% -> {after[0]:.1f}%, "
                f"by a rule {before[1]:.1f}% -> {after[1]:.1f}%"
            )
    path.write_text(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--limit", type=int, default=10, help="samples per operator")
    parser.add_argument("--per-sample", type=int, default=6, help="(argument, dim) pairs per sample")
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--stride", type=int, default=1, help="every n-th operator")
    parser.add_argument("--offset", type=int, default=0, help="where to begin; with --stride, one share of the work")
    parser.add_argument("--json", type=Path, help="write the verdicts here")
    parser.add_argument("--merge", type=Path, nargs="+", help="take verdicts from these files instead of running")
    parser.add_argument("--page", type=Path, help="write docs/op-coverage.md")
    parser.add_argument("--show", default="WRONG,ranks disagree,hang,error,refused")
    args = parser.parse_args()
    if args.page and (args.only or args.stride > 1):
        parser.error("--page needs the whole database: leave out --only and --stride")
    begin = time.time()
    if args.merge:
        files = [json.loads(path.read_text()) for path in args.merge]
        table, about = {k: v for f in files for k, v in f["table"].items()}, files[0]["about"]
    else:
        names = [(o.name, o.variant_test_name) for o in operators() if args.only in o.name]
        table = sweep(names[args.offset :: args.stride], args.world, args.limit, args.per_sample)
        about = f"torch {torch.__version__}, {args.world} ranks, up to {args.limit} samples of each operator."
    for label, rows in table.items():
        seen = collections.Counter(v[0] for v in rows)
        for kind in args.show.split(","):
            first = next((v for v in rows if v[0] == kind), None)
            if first:
                print(f"{kind:15s} {seen[kind]:4d} of {len(rows):4d} {label}: {first[1]}: {first[2]}")
    counts = counted(table)
    total = max(judged(counts), 1)
    right, ruled = (counts["rule"] + counts["gather"]) / total, counts["rule"] / total
    print(f"\n{dict(counts)}; right {right:.1%}, by a rule {ruled:.1%}; {time.time() - begin:.0f} s")
    if args.json:
        args.json.write_text(json.dumps({"about": about, "table": table}))
    if args.page:
        write_page(table, args.page, about)


if __name__ == "__main__":
    main()
