"""`shardfield bench`: interleaved rounds, medians, result tables, the page, and the count of traffic."""

import json
import re
import runpy
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from shardfield import ShardfieldError, ShardTensor, cli, runtime, scatter_tensor, sync_module_over_mesh
from shardfield.bench import BENCHMARKS, attention_plots, measure, overhead, page, plots, scaling, table
from shardfield.bench import command as bench
from shardfield.bench.charts import Dot, dots
from shardfield.bench.ranks import domain_mesh, make_sharded_field
from shardfield.bench.table import Row
from shardfield.bench.traffic import CommCounter, checked_traffic, comm_counts
from shardfield.comm import collectives as comm_collectives
from shardfield.testing import run_on_ranks
from tests.launch import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def test_candidates_are_interleaved():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    found = measure.interleave(calls, 3, lambda call: call() or float(len(order)), warmup=1)
    assert order == list("abbaabba"), "rounds of all candidates in alternating order; the first is a warm-up"
    assert found == {"a": [4.0, 5.0, 8.0], "b": [3.0, 6.0, 7.0]}


def test_medians_and_ratios():
    assert measure.spread([5.0]) == (5.0, 5.0, 5.0)
    assert measure.spread([1.0, 9.0, 2.0, 3.0, 4.0]) == (3.0, 2.0, 4.0)
    found = table.Table("halo", {"rounds": 3}, "cpu")
    # a slow phase in round 2 slows both: the ratio of medians is 2, and so is that of every round
    found.add_times("step", {"a": [1.0, 10.0, 1.1], "b": [2.0, 20.0, 2.2]}, "a", "s", {"b": 1.9})
    found.add_counts("sent", {"a": 1000, "b": 250}, "kB", "a", {"b": 0.25})
    a, b, _, sent = found.rows
    assert (a.median, a.ratio, a.met) == (1.1, None, None)
    assert (b.ratio, b.ratio_low, b.ratio_high, b.against, b.met) == (2.0, 2.0, 2.0, "a", False)
    assert (sent.median, sent.unit, sent.ratio, sent.met) == (0.25, "kB", 0.25, True)
    assert "2; bar 1.9: not met" in str(found) and "0.25; bar 0.25: met" in str(found)
    results = measure.max_over_ranks([{"a": [1.0, 5.0]}, {"a": [3.0, 4.0]}])
    assert results == {"a": [3.0, 5.0]}, "a round takes as long as on its slowest rank"


def made(name="halo", label="Some Maker", gpu=None, quick=False):
    found = table.Table(name, {"ranks": (2, 4), "rounds": 3}, "cuda" if gpu else "cpu", quick, commit="abc")
    found.machine = {"cpu": label, "cores": 2, "memory_gb": 4, "gpu": gpu, "load": 0.5}
    found.add_times(
        "step", {"plain torch": [1e-3] * 3, "shardfield": [2e-3] * 3}, "plain torch", bars={"shardfield": 1.5}
    )
    found.add_text("one sample", "4 ranks", "trains")
    found.add_skipped("PhysicsNeMo", "not installed")
    return found


def test_failing_peer_is_reported():
    def fail():
        raise RuntimeError(
            "[enforce fail at /x/pair.cc:801] state. Pair is not connected ([127.0.0.1]:65414 < there)\nmore"
        )

    good, bad = overhead.runnable_calls({overhead.PLAIN: int, overhead.DTENSOR: fail})
    assert list(good) == [overhead.PLAIN]
    assert bad == {overhead.DTENSOR: "RuntimeError: state. Pair is not connected"}, (
        "the first line of its error, without addresses and paths"
    )
    with pytest.raises(RuntimeError):
        overhead.runnable_calls({overhead.OURS: fail})


def test_results_file(tmp_path):
    path = made().write(tmp_path)
    assert path.name == "halo.some-maker-2-cores.json"
    full = json.loads(path.read_text())
    assert full.keys() == {
        *("name", "date", "commit", "device", "machine", "versions", "settings", "skipped", "rows"),
    }
    assert full["settings"] == {"ranks": [2, 4], "rounds": 3, "quick": False}
    assert {"python", "torch", "shardfield"} <= full["versions"].keys()
    row = full["rows"][1]
    want = {"case", "candidate", "median", "low", "high", "unit", "ratio", "ratio_low", "ratio_high", "against", "bar"}
    assert row.keys() == want | {"met"}
    assert (row["median"], row["unit"], row["ratio"], row["bar"], row["met"]) == (2.0, "ms", 2.0, 1.5, False)
    again = table.read_table(path)
    assert again.as_json() == full | {"rows": again.as_json()["rows"]} and again.rows == made().rows
    assert made(quick=True).rows[1].bar is None, "targets hold for the sizes they were set for"


def test_page_compares_machines(tmp_path):
    made().write(tmp_path)
    made(gpu={"name": "NVIDIA H200", "count": 1, "memory_gb": 139}).write(tmp_path)
    (tmp_path / "history.toml").write_text(
        '[[change]]\nwhat = "a call"\nbefore = "2 us"\nafter = "1 us"\nby = "less"\nwhere = "a machine"\n'
        'values = [["one call", 2, 1]]\n'
    )
    text = page.page(tmp_path)
    assert "| case | candidate | H200 | ratio | Some Maker, 2 cores | ratio |" in text
    assert (
        "|  | shardfield | 2 ms | 2 of plain torch; bar 1.5: not met | 2 ms | 2 of plain torch; bar 1.5: not met |"
        in text
    )
    for label in ("H200", "Some Maker, 2 cores"):
        assert f"| halo | step | shardfield over plain torch | 2 | 1.5 | {label} |" in text
    assert "<summary>The 2 bars that are not met</summary>" in text and "that are met</summary>" not in text
    assert "| one sample | 4 ranks | trains |  | trains |  |" in text
    assert "commit abc, load 0.5 at the start." in text
    assert "Not measured on this machine: PhysicsNeMo: not installed." in text
    assert "python -m shardfield bench halo" in text and "| a call | 2 us | 1 us | less | a machine |" in text
    assert "figures/perf-before-and-after.svg" in text
    assert "one call" in page.plots(tmp_path)["perf-before-and-after"]


def test_every_benchmark_can_be_started_as_a_file(monkeypatch):
    for name in BENCHMARKS:
        calls = []
        monkeypatch.setattr(cli, "main", calls.append)
        monkeypatch.setattr("sys.argv", [f"{name}.py", "--quick"])
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
        assert calls == [["bench", name, "--quick"]]


def test_page_is_up_to_date():
    kept = (ROOT / "docs" / "performance.md").read_text()
    assert page.page(RESULTS) == kept, "run `make performance`"
    drawn = page.plots(RESULTS)
    files = {path.stem: path.read_text() for path in (ROOT / "docs/figures").glob("perf-*.svg")}
    assert drawn.keys() == files.keys() == set(re.findall(r"\(figures/(perf-[\w-]+)\.svg\)", kept))
    assert [name for name in drawn if drawn[name] != files[name]] == [], "run `make performance`"
    for name, svg in page.attention_plot(RESULTS).items():
        assert (ROOT / f"docs/figures/{name}.svg").read_text() == svg, "run `make performance`"
    assert all(f"\n## {name}\n" in kept for name in BENCHMARKS), "every benchmark has results"


def test_results_name_hardware_and_nothing_private():
    for path in RESULTS.iterdir():
        found = re.findall(r"/(?:home|root|work|tmp|usr)/|\d+\.\d+\.\d+\.\d+|https?:", path.read_text())
        assert not found, f"{path.name} has {found}"


def test_scaling_is_compared_with_a_share_of_one_rank():
    """Ratios are of ideal time, the shortest round counts, and a prediction too low is as wrong as one too high."""
    found = table.Table("scaling", {}, "cpu")
    one = {"measured": [8.0, 9.0], "computing alone": [8.0, 8.0], scaling.PLAIN: [8.0, 8.0], "predicted": [8.0, 8.0]}
    many = {"measured": [1.6, 1.25], "computing alone": [1.1, 1.2], scaling.PLAIN: [1.0, 1.0], "predicted": [1.0, 1.1]}
    scaling.add_rows(found, "UNet, small", scaling.ModelCase(lambda: None, (), 0, 0.88), {1: one, 8: many})
    rows = {(r.case, r.candidate): r for r in found.rows}
    measured = rows["UNet, small: of ideal, 8 ranks", "measured"]
    assert (measured.ratio, measured.against, measured.met) == (1.25, "0.125 of 1 rank", False)
    assert rows["UNet, small: of ideal, 8 ranks", "computing alone"].ratio == 1.1
    assert rows["UNet, small: prediction, 8 ranks", "predicted"].ratio == 1.25
    assert plots.scaling_points(found)["UNet, small"]["measured"] == {1: 8500.0, 8: 1425.0}


def test_plot_of_attention():
    """Speeds are of all ranks, from times; memory and bytes of a rank are counted."""
    times = table.Table("attention", {"heads": 2, "width": 8, "length": 64}, "cpu")
    times.add_times("1 rank, forward + backward", {"plain torch": [1e-3], "shardfield": [1e-3]})
    times.add_times("2 ranks, forward + backward", {"ring": [5e-4], "gather": [1e-3], "one rank": [1e-3]})
    flops = 3.5 * 4 * 2 * 8 * 64**2
    speeds = attention_plots.attention_speeds(times)
    assert {name: list(of) for name, of in speeds.items()} == {"ring": [1, 2], "gather": [2]}
    assert speeds["ring"][2] == pytest.approx(flops / 5e-4 / 1e12)
    counted = bench.run_benchmark("strategies", quick=True)
    memory, sent = (attention_plots.strategy_counts(counted, quantity) for quantity in ("memory", "sent"))
    keys = 2 * 8 * 512 * 128 * 4 / 1e6  # of one of two ranks
    assert memory["heads"][2] < memory["heads"][1] and sent["ring"] == {1: 0, 2: pytest.approx(3 * keys, rel=1e-2)}
    assert sent["gather"][2] == pytest.approx(2 * keys, rel=1e-2)
    assert "sent by a rank" in attention_plots.plot_attention(times, counted)


def test_plots_have_every_number():
    drawn = plots.plots_of("halo", [made()])
    ratios, times = drawn["perf-halo"], drawn["perf-halo-some-maker-2-cores-ms"]
    assert "step: shardfield / plain torch" in ratios and ratios.count("<circle") == 2, "a dot and its legend"
    assert 'stroke-width="2"' in ratios, "the bar"
    assert times.count("<circle") == 4, "two candidates and their legend"
    assert "not met" in plots.plot_bars([made()])


def test_zero_is_written_on_a_logarithmic_scale():
    drawn = dots("t", {"row": [Dot("a", 0.0), Dot("b", 0.0), Dot("c", 2.0)]}, "ratio")
    zeros = re.findall(r'<text x="([\d.]+)"[^>]*>0</text>', drawn)
    assert len(set(zeros)) == 2 and drawn.count("<circle") == 4, "three names in the legend, one dot"


def test_a_legend_leaves_room_for_the_label():
    names = [f"rank of {n}" for n in (1, 2, 8, 64, 512, 4096)]
    drawn = dots("t", {"row": [Dot(name, 1.0) for name in names]}, "us, on a machine with a long name")
    places = {text: (float(x), y) for x, y, text in re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)<', drawn)}
    label, last = places["us, on a machine with a long name"], places["rank of 4096"]
    assert last[1] != label[1] or last[0] + 80 < label[0] - 180, "the label ends at its place"


def test_a_ratio_just_above_its_bar_differs_from_it_in_print():
    row = Row("a case", "shardfield", ratio=1.0504, ratio_low=1.0, ratio_high=1.1, against="plain torch", bar=1.05)
    assert row.format_ratio() == "1.0504 (1 to 1.1); bar 1.05: not met"
    assert Row("a case", "shardfield", ratio=1.0496, bar=1.05).format_ratio() == "1.05; bar 1.05: met"


def test_command(capsys, tmp_path):
    assert cli.main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"^{name} ", listed, re.M) for name in BENCHMARKS)
    for words, why in (
        (["hallo"], "did you mean 'halo'?"),
        (["zzzz"], "the benchmarks are rank, scaling, overhead"),
        (["halo", "--rounds", "0"], "--rounds 0 should be 1 or more"),
        (["--page", str(tmp_path / "page.md")], "--out DIR"),
        (["halo", "fft", "--delay-ms", "3"], "unrecognized arguments: --delay-ms 3"),
    ):
        assert cli.main(["bench", *words]) == 2, words
        assert why in capsys.readouterr().err
    assert bench.parse_settings("halo", ["--ranks", "2", "3", "--delay-ms", "1"]) == {"ranks": (2, 3), "delay_ms": 1.0}
    with pytest.raises(ShardfieldError, match="halo has no setting 'modes'"):
        bench.run_benchmark("halo", modes=3)


@pytest.mark.slow
def test_benchmark_runs(capsys, tmp_path):
    words = [
        "bench",
        "--quick",
        "redistribute",
        "--ranks",
        "2",
        "--size",
        "16",
        "--rounds",
        "2",
        "--out",
        str(tmp_path),
    ]
    assert cli.main(words) == 0
    (path,) = tmp_path.iterdir()
    rows = {(r.case, r.candidate): r for r in table.read_table(path).rows}
    swap = "2 ranks, Shard(0) to Shard(1), 16 x 16"
    assert rows[swap, "shardfield"].ratio > 0 and rows[swap, "shardfield"].unit == "ms"
    assert rows[f"{swap}: sent", "shardfield"].median == 16 * 16 / 4 * 4 / 1e3, "a quarter of the matrix, as floats"
    assert "skipped: DTensor in 2 ranks, skewed" in capsys.readouterr().out


# ---------------------------------------------------------------------- traffic


def calls():
    """Return calls on ShardTensors that use every collective, and which of them torch's own count sees."""
    mesh = domain_mesh("cpu")
    x = make_sharded_field(mesh, (2, 4, 9, 8)).requires_grad_()
    weight = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    full = torch.arange(12.0).reshape(6, 2)
    linear = torch.nn.Linear(2, 2)
    return {
        "conv, both ways": lambda: F.conv2d(x, weight, padding=1).square().sum().backward(),
        "norm, both ways": lambda: F.group_norm(x, 2).square().sum().backward(),
        "softmax along the sharded dim": lambda: torch.softmax(x, 2),
        "sum to a number": lambda: x.sum().full_tensor(),
        "swap": lambda: x.redistribute(placements=[Shard(3)]),
        "gather, uneven": lambda: x.full_tensor(),
        "gather, even": lambda: make_sharded_field(mesh, (6, 2), 0).full_tensor(),
        "half precision": lambda: x.detach().bfloat16().sum().full_tensor(),
        "scatter": lambda: scatter_tensor(full if dist.get_rank() == 0 else None, 0, mesh, (Shard(0),)),
        "module": lambda: sync_module_over_mesh(linear, mesh),
    }


def agreeing():
    """Return, on each rank, the counts of torch's CommDebugMode and of our meter by kind; `traffic` compares bytes."""
    found = {}
    for name, call in calls().items():
        call()
        sent = checked_traffic(call)
        with CommDebugMode() as mode:
            call()
        collectives = {kind: row[0] for kind, row in sent.kinds.items() if kind not in ("exchange", "deliver")}
        found[name] = (collectives, comm_counts(mode), sent.messages)
    assert runtime.active.meter is None
    return found


def test_meter_agrees_with_torch():
    found = [case for ranks in (2, 3) for results in run_on_ranks(agreeing, ranks) for case in results.items()]
    for name, (ours, torchs, _) in found:
        assert ours == torchs, name
    assert {kind for _, (ours, _, _) in found for kind in ours} == {"all_reduce", "all_gather", "broadcast"}
    assert {name for name, (_, _, messages) in found if messages} == {name for name, _ in found}, "each call sends"


def disagreeing():
    """Check that a meter that misses a message is detected."""
    x = make_sharded_field(domain_mesh("cpu"), (2, 4, 8, 8))
    real = comm_collectives._record_sent

    try:
        comm_collectives._record_sent = lambda kind, messages, nbytes: real(kind, messages, nbytes - 1)
        checked_traffic(lambda: x.sum().full_tensor())
    except AssertionError as error:
        return str(error)
    finally:
        comm_collectives._record_sent = real
    return ""


def test_wrong_meter_is_detected():
    assert "torch's dispatcher saw {'all_reduce': [1, 4]}" in run_on_ranks(disagreeing, 2)[0]


def dtensors():
    """Return, on each rank, the bytes of DTensor's redistributions of an 8 x 8 matrix."""
    mesh = domain_mesh("cpu")
    rows, parts = (
        distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]),
        DTensor.from_local(torch.ones(8, 8), mesh, [Partial()]),
    )
    found = []
    for x, placement in ((rows, Replicate()), (parts, Shard(0)), (parts, Replicate())):
        with CommCounter() as mode:
            x.redistribute(placements=[placement]).to_local()
        found.append(mode.kinds)
    return found


def test_dtensor_traffic_is_counted():
    for results in run_on_ranks(dtensors, 2):
        assert results == [{"all_gather": [1, 128]}, {"reduce_scatter": [1, 128]}, {"all_reduce": [1, 256]}]


# ---------------------------------------------------------------------- memory and late messages


def watching():
    """Return, on each rank, the peak memory of a call that holds 3 and then 1 MB, and the delay of a late message."""

    def hold():
        first = [torch.empty(1_000_000, dtype=torch.uint8) for _ in range(3)]
        del first
        torch.empty(1_000_000, dtype=torch.uint8)

    held = measure.peak_memory(hold, "cpu")
    x = ShardTensor.from_local(torch.ones(2, 2), domain_mesh("cpu"), [Shard(0)])
    call = x.sum
    real = comm_collectives.start_all_reduce
    with measure.delay_messages(0.05):
        start = time.perf_counter()
        call().full_tensor()
        seconds = time.perf_counter() - start
    assert comm_collectives.start_all_reduce is real
    return held, seconds


def test_memory_and_late_messages():
    for held, seconds in run_on_ranks(watching, 2):
        assert 3_000_000 <= held < 3_100_000
        assert seconds >= 0.05


# ---------------------------------------------------------------------- a rank among many


def test_rank_among_many():
    rows = {(r.case, r.candidate): r for r in bench.run_benchmark("rank", quick=True, rounds=2, only="roll").rows}
    assert rows["roll", "rank of 8"].against == "plain torch" and rows["roll", "rank of 8"].ratio > 0
    assert rows["roll: sent", "rank of 8"].median == 3, "one row to the next rank, its gradient back, and the sum"
    assert ("roll: sent", "rank of 1") not in rows, "a rank alone sends nothing"
