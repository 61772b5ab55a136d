"""`shardfield doctor`: every check fails on a process that has the fault, and ranks report what one of them has."""

from __future__ import annotations

import doctest
import json
import time

import pytest
import torch
import torch.distributed as dist

from shardfield import cli
from shardfield.comm import collectives
from shardfield.doctor import checks, command, links
from shardfield.doctor.checks import Finding, Process, check_process
from shardfield.doctor.links import LinkTime, check_links, measure_pairs, rounds_of
from shardfield.testing import run_on_ranks

HEALTHY = Process(
    env={}, python="3.12.1", torch="2.13.0+cpu", cuda_build=False, driver=False, devices=0, nccl=None, gloo=True,
    threads=1, cores=4, files=4096, files_max=1 << 20, shared=1 << 33, leaves="in Python",
)  # fmt: skip
RANK = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
GPUS = HEALTHY._replace(cuda_build=True, driver=True, devices=4, nccl="2.27.3", env=RANK | {"LOCAL_WORLD_SIZE": "4"})

FAULTS = [
    (HEALTHY._replace(python="3.10.4"), "python", "problem", "older than 3.11"),
    (HEALTHY._replace(python="3.15.0"), "python", "warning", "newer than 3.13"),
    (HEALTHY._replace(torch="2.10.1"), "torch", "problem", "older than 2.11"),
    (HEALTHY._replace(torch="2.16.0a0"), "torch", "warning", "newer than 2.15"),
    (HEALTHY._replace(torch="unknown"), "torch", "problem", "older"),
    (HEALTHY._replace(env={"RANK": "0"}), "launcher", "problem", "not WORLD_SIZE"),
    (HEALTHY._replace(env=RANK | {"RANK": "x"}), "launcher", "problem", "RANK=x is not an integer"),
    (
        HEALTHY._replace(env={"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"}),
        "launcher",
        "problem",
        "sbatch reserved 4 tasks",
    ),
    (HEALTHY._replace(gloo=False), "gloo", "problem", "no gloo"),
    (GPUS._replace(nccl=None), "nccl", "problem", "no NCCL"),
    (GPUS._replace(shared=1 << 26), "shared memory", "warning", "64 MiB"),
    (GPUS._replace(devices=0, cuda_build=False, nccl=None), "devices", "problem", "no CUDA"),
    (GPUS._replace(devices=0, env={"CUDA_VISIBLE_DEVICES": ""}), "devices", "problem", "sees no GPU"),
    (GPUS._replace(env=RANK | {"LOCAL_WORLD_SIZE": "8"}), "devices", "problem", "8 ranks on this host share 4 GPUs"),
    (GPUS._replace(env={}), "devices", "warning", "one process uses one of them"),
    (HEALTHY._replace(files=256), "open files", "warning", "1024 are advised"),
    (HEALTHY._replace(files=256, files_max=256), "open files", "warning", "1024 are advised"),
    (HEALTHY._replace(env=RANK | {"MASTER_ADDR": "no.such.host.invalid"}), "rendezvous", "problem", "cannot resolve"),
]


@pytest.mark.parametrize("process, name, level, text", FAULTS, ids=[f"{n} {t}" for _, n, _, t in FAULTS])
def test_a_fault_is_found_and_alone(process, name, level, text):
    findings, _ = check_process(process)
    (wrong,) = [f for f in findings if f.level != "ok"]
    assert (wrong.name, wrong.level) == (name, level)
    assert text in wrong.text and wrong.mend


def test_a_healthy_process_has_no_findings():
    for process in (HEALTHY, HEALTHY._replace(env=RANK), GPUS):
        findings, launch = check_process(process)
        assert not [f for f in findings if f.level != "ok"] and launch is not None
    large = HEALTHY._replace(env=RANK | {"WORLD_SIZE": "4096"})
    assert "16640 are advised" in next(f.text for f in check_process(large)[0] if f.name == "open files")


def facts(host="a", cores=range(4), threads=1):
    return {"host": host, "cores": list(cores), "threads": threads}


def test_threads():
    check = command.check_threads
    assert check([facts(threads=4)]).level == "ok"
    assert check([facts(threads=2)] * 2).level == "ok"
    assert check([facts(threads=4)] * 2) == Finding(
        "threads", "problem", "2 ranks with 8 threads on 4 cores: they wait for each other", "export OMP_NUM_THREADS=2"
    )
    assert check([facts()] * 2).mend == "export OMP_NUM_THREADS=2"  # idle cores
    assert check([facts()] * 6).text == "6 ranks with 6 threads on 4 cores: ranks share cores"
    assert check([facts(cores=(0, 1), threads=2), facts(cores=(2, 3), threads=2)]).level == "ok"  # srun binds tasks
    assert check([facts("a", threads=4), facts("b", threads=4)]).level == "ok"
    assert check([facts("a", threads=4), facts("b", threads=8)]).level == "problem"


def test_ranks_that_differ_are_named():
    found = command.check_agreement([{"torch": "2.13", "X": "1"}, {"torch": "2.13"}, {"torch": "2.12", "X": "1"}])
    assert found.level == "problem"
    assert found.text == "torch is 2.13 on ranks 0-1, 2.12 on rank 2; X is 1 on ranks 0, 2, not set on rank 1"
    both, one = Finding("python", "ok", "3.12"), Finding("gloo", "problem", "missing", "install")
    merged = command.merge_findings([[both], [both, one]])
    assert merged == [both, one._replace(text="rank 1: missing")]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
def test_every_pair_is_in_one_round(ranks):
    rounds = rounds_of(ranks)
    for pairs in rounds:
        assert len({r for p in pairs for r in p}) == 2 * len(pairs)  # disjoint
    assert sorted(p for pairs in rounds for p in pairs) == sorted((a, b) for b in range(ranks) for a in range(b))


@pytest.mark.parametrize("ranks", [17, 64, 100])
def test_pairs_of_many_ranks(ranks):
    rounds = rounds_of(ranks)
    assert len(rounds) == (ranks - 1).bit_length()
    assert {r for pairs in rounds for p in pairs for r in p} == set(range(ranks))


def test_slow_links_are_found_within_their_kind():
    hosts = ["a", "a", "b", "b"]
    between = [LinkTime(a, b, 1 << 20, 0.02) for a in (0, 1) for b in (2, 3)]
    inside = [LinkTime(0, 1, 1 << 20, 0.001), LinkTime(2, 3, 1 << 20, 0.001)]
    assert [f.level for f in check_links(between + inside, hosts)] == ["ok"]
    assert check_links([LinkTime(0, 1, 1024, 1e-4)], ["a", "a"])[0].text == "1 pair of ranks"  # nothing to compare
    between[1] = between[1]._replace(seconds=0.2)
    (found,) = check_links(between + inside, hosts)
    assert found.level == "warning" and "ranks 0 and 3 (a, b): 1 MiB take 200 ms, 10.0 times" in found.text
    table = links.link_table(between + inside)
    assert len(table) == 2 and table[1].endswith("0-3")


def measure_with_slow_pair():
    """Measure with a clock that adds 50 ms to the exchanges of ranks 0 and 2."""
    partner = [None]
    start = collectives.start_sends

    def start_sends(sends, *rest, **named):
        partner[0] = sends[0][0] if sends else None
        return start(sends, *rest, **named)

    extra = [0.0]

    def clock():
        if {dist.get_rank(), partner[0]} == {0, 2}:
            extra[0] += 0.05
        return time.perf_counter() + extra[0]

    collectives.start_sends = start_sends
    try:
        times = measure_pairs(torch.device("cpu"), [1 << 10, 1 << 14], clock)
    finally:
        collectives.start_sends = start
    return times, check_links(times, ["a"] * dist.get_world_size())


def test_links_are_measured_on_ranks():
    results = run_on_ranks(measure_with_slow_pair, 4)
    assert all(r == results[0] for r in results)  # all ranks have the same times
    times, findings = results[0]
    assert {(t.a, t.b, t.nbytes) for t in times} == {
        (a, b, n) for b in range(4) for a in range(b) for n in (1024, 16384)
    }
    assert any("ranks 0 and 2" in f.text for f in findings)


def examine(fault: int):
    """Examine a world in which one rank has another version and a fault of its own."""
    process = HEALTHY._replace(threads=2 if dist.get_rank() == fault else 1)
    own, _ = check_process(process._replace(files=256) if dist.get_rank() == fault else process)
    findings, times = command.examine_ranks(process, own, None)
    return [tuple(f) for f in findings if f.level != "ok"], times


def test_a_fault_of_one_rank_is_reported_by_all():
    results = run_on_ranks(examine, 2, 1)
    assert results[0] == results[1]
    found = {name: text for name, _, text, _ in results[0][0]}
    assert found["open files"].startswith("rank 1: limit 256")
    assert "threads is 1 on rank 0, 2 on rank 1" in found["agreement"]


PROGRAM = "import sys\nfrom shardfield.cli import main\nsys.exit(main(['doctor', *sys.argv[1:]]))\n"


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_command_under_a_launcher(ranks, forks, tmp_path):
    program = tmp_path / "doctor.py"
    program.write_text(PROGRAM)
    out, *others = forks.run(program, tmp_path, ranks, "--json")
    content = json.loads(out)
    assert content["ranks"] == ranks and not any(others)  # rank 0 prints
    assert len(content["links"]) == len(links.SIZES) * ranks * (ranks - 1) // 2
    assert all(0 < t["seconds"] < 60 for t in content["links"])
    assert {"launcher", "rendezvous", "agreement", "links"} <= {f["name"] for f in content["findings"]}


def test_the_command_alone(capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "python" in out and out.splitlines()[-1].endswith(("warning", "warnings", "nothing is wrong"))
    monkeypatch.setattr(checks, "TORCHES", ((99, 0), (99, 1)))
    assert cli.main(["doctor"]) == 1
    assert "mend: install torch 99.0 to 99.1" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["doctor"]) == 1  # a launcher's variables are missing
    assert "launcher" in capsys.readouterr().out
    assert cli.main(["doctor", "--wat"]) == 2


def test_a_world_that_cannot_connect(capsys, monkeypatch):
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**variables, "SHARDFIELD_TIMEOUT": "0.5"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("rank 1: ") and "cannot connect" in err and "start all 2 ranks" in err


def test_examples_in_docstrings():
    assert not doctest.testmod(links).failed and not doctest.testmod(command).failed


def test_info(capsys, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith(" cores, no accelerator")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith(" cores, 8 x cuda")
