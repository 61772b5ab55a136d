"""`shardfield doctor`: run the checks, alone or on all ranks of a launcher, and print what is wrong."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .._version import __version__
from ..comm.consensus import gather_texts
from ..distributed import DistributedManager
from ..distributed.launch import Launch
from ..errors import ShardfieldError
from .checks import Finding, Process, check_process, this_process
from .links import LinkTime, check_links, link_table, measure_pairs


def command(words: list[str]) -> int:
    """Run `shardfield doctor` with these arguments. Return 0 without problems, else 1, the same on all ranks."""
    options = _parser().parse_args(words)
    process = this_process()
    findings, launch = check_process(process)
    if launch is None or launch.world_size == 1:
        findings.append(check_threads([_facts(process)]))
        _print(options, findings, [], 1)
        return _exit_code(findings)
    try:
        DistributedManager.initialize()
    except (ShardfieldError, RuntimeError, OSError) as error:
        findings.append(_connection_problem(error, launch))
        # Other ranks may have other errors, and none can be asked: each prints its own.
        sys.stderr.write(f"rank {launch.rank}: " + "\n".join(format_findings(_wrong(findings))) + "\n")
        return 1
    try:
        findings, times = examine_ranks(process, findings, DistributedManager().device if options.links else None)
        if dist.get_rank() == 0:
            _print(options, findings, times, dist.get_world_size())
        return _exit_code(findings)
    finally:
        DistributedManager.cleanup()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardfield doctor",
        description="Check versions, launcher, devices, limits, and the links between ranks; say how to mend them.",
        epilog="Under a launcher: torchrun --standalone --nproc-per-node 4 -m shardfield doctor",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-links", dest="links", action="store_false", help="do not measure the links")
    return parser


def _exit_code(findings: Sequence[Finding]) -> int:
    return int(any(f.level == "problem" for f in findings))


def _wrong(findings: Sequence[Finding]) -> list[Finding]:
    return [f for f in findings if f.level != "ok"]


def _connection_problem(error: Exception, launch: Launch) -> Finding:
    mend = f"start all {launch.world_size} ranks with one command, and open port {launch.port} of {launch.addr} to them"
    return Finding("rendezvous", "problem", f"the ranks cannot connect: {error}", mend)


# ---------------------------------------------------------------------- on all ranks


def _facts(process: Process) -> dict[str, Any]:
    """Return what the ranks must agree on, and where this one runs."""
    variables = {k: v for k, v in process.env.items() if k.startswith("SHARDFIELD_")}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(process.cores))
    return {
        "host": socket.gethostname(),
        "cores": cores,
        "threads": process.threads,
        "same": {
            "python": process.python,
            "torch": process.torch,
            "numpy": np.__version__,
            "shardfield": __version__,
            "NCCL": process.nccl or "none",
            "backend": dist.get_backend() if dist.is_initialized() else "none",
            "threads": str(process.threads),
            **variables,
        },
    }


def examine_ranks(
    process: Process, own: list[Finding], device: torch.device | None
) -> tuple[list[Finding], list[LinkTime]]:
    """Return the findings of all ranks, and the times of messages between tensors on `device` (None: no messages).

    All ranks call it; all return the same.
    """
    world = dist.group.WORLD
    assert world is not None
    reports = [json.loads(text) for text in gather_texts(json.dumps([own, _facts(process)]), world)]
    findings = merge_findings([[Finding(*f) for f in found] for found, _ in reports])
    facts = [each for _, each in reports]
    findings += [check_agreement([f["same"] for f in facts]), check_threads(facts)]
    if device is None:
        return findings, []
    times = measure_pairs(device)
    return findings + check_links(times, [f["host"] for f in facts]), times


def merge_findings(by_rank: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the findings of all ranks, each once; one that some ranks have alone names them."""
    ranks: dict[Finding, list[int]] = {}
    for rank, found in enumerate(by_rank):
        for finding in found:
            ranks.setdefault(finding, []).append(rank)
    order = [f.name for found in by_rank for f in found]
    merged = [
        f if len(who) == len(by_rank) else f._replace(text=f"{format_ranks(who)}: {f.text}") for f, who in ranks.items()
    ]
    return sorted(merged, key=lambda f: order.index(f.name))


def check_agreement(facts: Sequence[dict[str, str]]) -> Finding:
    """Check that the ranks have the same versions and the same variables."""
    differences = []
    for name in dict.fromkeys(name for each in facts for name in each):
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(facts):
            ranks.setdefault(each.get(name, "not set"), []).append(rank)
        if len(ranks) > 1:
            differences.append(f"{name} is " + ", ".join(f"{v} on {format_ranks(who)}" for v, who in ranks.items()))
    if not differences:
        return Finding("agreement", "ok", "all ranks have the same versions and variables")
    mend = "install the same packages on all hosts, and set the same variables on all ranks"
    return Finding("agreement", "problem", "; ".join(differences), mend)


def check_threads(facts: Sequence[dict[str, Any]]) -> Finding:
    """Check that the threads of the ranks of each host have a core each, and use most of the cores."""
    crowded, idle, shared = [], [], []
    for host in dict.fromkeys(f["host"] for f in facts):
        here = [f for f in facts if f["host"] == host]
        cores = len({core for f in here for core in f["cores"]})
        threads = sum(f["threads"] for f in here)
        text = f"{len(here)} rank{'s' * (len(here) > 1)} with {threads} thread{'s' * (threads > 1)} on {cores} cores"
        best = max(1, cores // len(here))
        if threads > cores and max(f["threads"] for f in here) > 1:
            crowded.append((text, best))
        elif best > 1 and 2 * threads <= cores:
            idle.append((text, best))
        elif len(here) > cores:
            shared.append(text)
    if crowded:
        text, best = crowded[0]
        return Finding("threads", "problem", f"{text}: they wait for each other", f"export OMP_NUM_THREADS={best}")
    if idle:
        text, best = idle[0]
        return Finding("threads", "warning", f"{text}: cores are idle", f"export OMP_NUM_THREADS={best}")
    if shared:
        return Finding("threads", "warning", f"{shared[0]}: ranks share cores", "start one rank per core at most")
    first = facts[0]
    return Finding("threads", "ok", f"{first['threads']} per rank, {len(first['cores'])} cores")


def format_ranks(ranks: Sequence[int]) -> str:
    """Format a sorted list of ranks as ranges.

    >>> format_ranks([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


# ---------------------------------------------------------------------- output


def format_findings(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each finding, and one below it that says how to mend it."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.name:<13} {finding.text}")
        if finding.mend:
            lines.append(f"{'':<22} mend: {finding.mend}")
    return lines


def _print(options: argparse.Namespace, findings: list[Finding], times: list[LinkTime], ranks: int) -> None:
    if options.json:
        content = {"ranks": ranks, "findings": [f._asdict() for f in findings], "links": [t._asdict() for t in times]}
        print(json.dumps(content, indent=1), flush=True)
        return
    lines = format_findings(findings)
    if times:
        lines += ["", "exchanges between pairs of ranks, all pairs at once", *link_table(times)]
    problems = sum(f.level == "problem" for f in findings)
    warnings = sum(f.level == "warning" for f in findings)
    counts = [f"{n} {word}{'s' * (n != 1)}" for n, word in ((problems, "problem"), (warnings, "warning"))]
    lines += ["", ", ".join(counts) if problems or warnings else "nothing is wrong"]
    print("\n".join(lines), flush=True)
