"""`shardfield profile`: waiting is measured and named, the trace is complete, and bad options are refused."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from shardfield import cli
from shardfield.planning import Cost
from shardfield.profiling import command
from shardfield.profiling.spans import PREFIX
from shardfield.profiling.summary import Summary, advice, format_summary
from shardfield.profiling.trace import PARTS, RankProfile, merge, read_rank
from shardfield.testing import run_on_ranks
from shardfield.train.recipes.cnn import CNNConfig

DELAY = 0.06
MODEL = "tests.profiling.test_profile:make_model"
CONFIG = CNNConfig(
    height=12, width=8, channels=4, batch_size=4, n_train=8, n_test=4, picture=False, resume="never", graphs=False
)


def event(name, begin, length, sequence=None, tid=1):
    args = {} if sequence is None else {"Sequence number": sequence}
    return {"ph": "X", "name": name, "ts": begin, "dur": length, "tid": tid, "args": args}


TABLE = [
    {"kind": "barrier"},
    {"kind": "step", "number": 0},
    {"kind": "module", "module": "conv"},
    {"kind": "call", "module": "conv", "op": "conv2d"},
    {"kind": "send", "of": "exchange", "message": 0, "module": "conv", "op": "conv2d", "bytes": 64},
    {
        "kind": "wait",
        "of": "exchange",
        "message": 0,
        "module": "conv",
        "op": "conv2d",
        "bytes": 64,
        "blocking": False,
    },
    {"kind": "wait", "of": "parameters", "message": None, "module": "", "op": "", "bytes": 0, "blocking": False},
    {"kind": "data"},
    {"kind": "phase", "module": "(optimizer)", "op": "step"},
]


def span(number, begin, length):
    return event(f"{PREFIX}{number}", begin, length)


def trace_of_a_step():
    """One step of 1,000 us on thread 1; another thread carries a message."""
    events = [
        span(0, 0, 10),
        span(1, 100, 1000),
        span(7, 100, 50),  # data
        span(2, 150, 250),
        span(3, 160, 200),
        event("Halo", 165, 190, sequence=5),
        span(4, 170, 10),
        event("aten::empty", 172, 2),
        span(5, 200, 100),
        event("aten::convolution", 310, 40, sequence=5),
        event("aten::copy_", 315, 20),  # a part of it
        event("FSDP::all_gather (conv)", 410, 90),
        span(6, 420, 70),
        event("autograd::engine::evaluate_function: HaloBackward", 500, 100, sequence=5),
        event("HaloBackward", 505, 90, sequence=5),
        event("aten::convolution_backward", 510, 60, sequence=9),
        span(6, 575, 10),  # a wait in the backward of the call
        event("torch.distributed.ddp.reducer::copy_bucket_to_grad", 650, 5),
        span(8, 700, 100),
        event("aten::_fused_adamw_", 710, 80),
        event("aten::add", 900, 10),
        event("gloo:send", 175, 500, tid=1),
        event("aten::zeros", 300, 400, tid=2),
    ]
    memory = [
        {"ph": "i", "name": "[memory]", "ts": at, "tid": 1, "args": {"Total Allocated": nbytes}}
        for at, nbytes in ((50, 7), (200, 100), (300, 500), (900, 120))
    ]
    return {"traceEvents": events + memory}


def test_a_trace_is_read():
    made = read_rank(trace_of_a_step(), TABLE, 3)
    assert made.steps == 1 and made.seconds == pytest.approx(1e-3)
    micro = {part: round(1e6 * made.parts[part], 3) for part in PARTS}
    # computing: empty 2, convolution 40, its backward 60, the optimizer's 80, add 10; parameters: 70, 10, the gap of 50
    assert micro == {"computing": 192, "domain": 100, "parameters": 130, "data": 50, "host": 528}
    waits = {key: round(1e6 * seconds) for key, (seconds, _) in made.waits.items()}
    assert waits == {
        ("conv", "conv2d", "exchange"): 100,
        ("conv", "FSDP all_gather", "parameters"): 70,
        ("conv", "conv2d", "parameters"): 10,
        ("(parameters)", "DDP all_reduce", "parameters"): 50,
    }
    computing = {module: round(1e6 * seconds) for module, seconds in made.computing.items()}
    assert computing == {"conv": 102, "(optimizer)": 80, "(step)": 10}
    assert made.sent == {("conv", "conv2d", "exchange"): [1, 64]}
    assert made.peak == 400 and made.unnamed == 0.0
    assert RankProfile.from_json(json.loads(json.dumps(made.as_json()))) == made


def test_a_wait_without_a_module_is_unnamed():
    events = [span(0, 0, 1), span(1, 10, 100), span(6, 20, 30)]
    table = [*TABLE[:1], {"kind": "step", "number": 0}, *TABLE[2:]]
    made = read_rank({"traceEvents": events}, table, 0)
    assert made.unnamed == 0.0  # inside a step it is the message of the loss
    table[1] = {"kind": "other"}
    with pytest.raises(ValueError, match="no step"):
        read_rank({"traceEvents": events}, table, 0)
    made.unnamed = 1e-5
    assert summary_of([made]).named == pytest.approx(2 / 3)


def test_a_wait_in_the_backward_of_an_unknown_call_is_unnamed():
    trace = trace_of_a_step()
    named = [dict(e, args=dict(e["args"])) for e in trace["traceEvents"]]
    assert read_rank({"traceEvents": named}, TABLE, 0).unnamed == 0.0
    for e in trace["traceEvents"]:
        if e["name"] == "autograd::engine::evaluate_function: HaloBackward":
            e["args"]["Sequence number"] = 77  # of no call in the trace
    made = read_rank(trace, TABLE, 0)
    assert made.unnamed == pytest.approx(1e-5) and made.waits["?", "?", "parameters"][1] == 1
    assert summary_of([made]).named == pytest.approx(1 - 10 / 230)
    assert "95.7% of the waiting" in format_summary(summary_of([made]))


def test_traces_are_merged_on_one_clock():
    first = read_rank(trace_of_a_step(), TABLE, 0)
    shifted = trace_of_a_step()
    for e in shifted["traceEvents"]:
        e["ts"] += 5000.0
    merged = merge([first, read_rank(shifted, TABLE, 1)], {})["traceEvents"]
    by_rank = [[{k: v for k, v in e.items() if k != "pid"} for e in merged if e["pid"] == r] for r in (0, 1)]
    assert by_rank[0][3:] == by_rank[1][3:]
    begins = [e for e in merged if e["ph"] == "b"]
    assert [e["args"] for e in begins] == [{"module": "conv", "op": "conv2d", "bytes": 64}] * 2
    assert len([e for e in merged if e["ph"] == "e"]) == 2
    waits = [e for e in merged if e.get("cat") == "wait"]
    assert len(waits) == 8 and all(e["args"]["module"] and e["args"]["op"] for e in waits)


def summary_of(ranks, **more):
    values = {"predicted": None, "gathers": [], "lost": []} | more
    return Summary("cnn", "1 x 2 ranks", 0.01, ranks, **values)


def rank_with(rank=0, **parts):
    return RankProfile(rank, 1, sum(parts.values()), parts=dict.fromkeys(PARTS, 0.0) | parts)


def test_advice():
    even = [rank_with(r, computing=0.9, host=0.1) for r in (0, 1)]
    assert advice(summary_of(even)) == ["nothing stands out"]
    assert "no sharding rule: head sort" in advice(summary_of(even, gathers=["head sort"]))[0]
    assert "lost sharding: head pad" in advice(summary_of(even, lost=["head pad"]))[0]
    uneven = [rank_with(0, computing=0.9, host=0.1), rank_with(1, computing=0.4, domain=0.6)]
    uneven[1].waits["conv", "conv2d", "exchange"] = [0.6, 1]
    texts = advice(summary_of(uneven))
    assert any("rank 0 computes 1.38 times the mean" in t for t in texts)
    assert any("30% waiting for messages of the domain, most of it in conv conv2d (exchange)" in t for t in texts)
    assert any("parameters and gradients" in t for t in advice(summary_of([rank_with(computing=0.7, parameters=0.3)])))
    assert any("host's Python" in t for t in advice(summary_of([rank_with(computing=0.3, host=0.7)])))
    assert any("waiting for data" in t for t in advice(summary_of([rank_with(computing=0.8, data=0.2)])))
    late = [rank_with(0, computing=0.4, data=0.6), rank_with(1, computing=0.4, domain=0.6)]
    late[1].waits["(data)", "loader", "all_gather"] = [0.6, 1]
    told = advice(summary_of(late))
    assert told == ["60% waiting for data of this rank or another: a faster store, chunks aligned to shards"]
    text = format_summary(summary_of(uneven, predicted=Cost(0.02, 0.01, 0.005, 0.005)))
    assert "2.00" in text and len(text.splitlines()) < 40


def test_messages_of_other_libraries_are_not_counted_as_none():
    rank = rank_with(computing=0.5, parameters=0.3, domain=0.2)
    rank.waits = {("(model)", "FSDP all_gather", "parameters"): [0.3, 1], ("conv", "conv2d", "exchange"): [0.2, 1]}
    rank.sent = {("conv", "conv2d", "exchange"): [2, 640]}
    ends = {line.split()[0]: line.split()[-3:] for line in format_summary(summary_of([rank])).splitlines() if line}
    assert ends["(model)"][-2:] == ["-", "-"] and ends["conv"] == ["2", "640", "B"]


def profile_with_delay(folder: Path, strategy: str):
    """Profile the recipe cnn; rank 1 sleeps before features.5, whose halos rank 0 waits for."""
    kind, recipe = command.RECIPES["cnn"]

    def delayed(config, mesh, log):
        task = recipe(config, mesh, log)
        if dist.get_rank() == 1:
            task.model.features[5].register_forward_pre_hook(lambda module, args: time.sleep(DELAY))
        return task

    command.RECIPES["cnn"] = (kind, delayed)
    try:
        config = replace(CONFIG, out=folder, domain=(2,), strategy=strategy)
        summary = command.profile_ranks(Namespace(name="cnn", steps=2, warmup=1), config, "cpu")
    finally:
        command.RECIPES["cnn"] = (kind, recipe)
    if summary is None:
        return None
    first = summary.ranks[0]
    return summary.named, first.waiting, max(first.waits.items(), key=lambda i: i[1][0])[0], summary.predicted


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_waiting_is_measured_and_named(strategy, tmp_path):
    (named, waiting, longest, predicted), other = run_on_ranks(profile_with_delay, 2, tmp_path, strategy)
    assert other is None  # rank 0 reports
    assert named >= 0.95
    assert waiting >= 2 * 0.9 * DELAY  # what is known to have been waited for has been measured
    assert longest == ("features.5", "conv2d", "exchange")
    assert predicted is not None and 0 < predicted.seconds < 60
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        own = [e for e in trace if e["pid"] == rank]
        assert {"M", "X", "b", "e", "C"} <= {e["ph"] for e in own}
        messages = [e for e in own if e["ph"] == "b"]
        assert messages and all(e["args"]["module"] and e["args"]["op"] for e in messages)
        begun = {e["id"]: e["ts"] for e in messages}
        assert all(e["ts"] >= begun[e["id"]] for e in own if e["ph"] == "e")
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["steps"] == 2 and content["advice"]
    assert "features" in (tmp_path / "modules.html").read_text()
    assert not list(tmp_path.glob("rank-*.json"))


def make_model():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, stride=2, padding=1))


def profile_own_model(folder: Path):
    options = Namespace(name=f"{__name__}:make_model", steps=1, warmup=1, shape=(2, 3, 7, 5), dims=(2, 3))
    config = replace(CONFIG, out=folder, domain=(2, 2), batch_size=2)
    summary = command.profile_ranks(options, config, "cpu")
    return None if summary is None else (summary.named, len(summary.ranks), {m for m, *_ in summary.computing()})


def test_own_models_on_2_x_2_ranks(tmp_path):
    named, ranks, modules = run_on_ranks(profile_own_model, 4, tmp_path)[0]
    assert named >= 0.95 and ranks == 4 and {"0", "1", "2"} <= modules


@pytest.mark.parametrize(
    "words, text",
    [
        (["cnm"], "did you mean 'cnn'"),
        (["cnn", "--steps", "0"], "--steps is 0"),
        (["cnn", "--shape", "1,2"], "--shape and --dims are for package.module:function"),
        ([MODEL], "--shape is needed"),
        ([MODEL, "--shape", "2,x"], "positive integers"),
        ([MODEL, "--shape", "2,3,8,8", "--dims", "4"], "--dims"),
        ([MODEL, "--shape", "2,3,8,8", "--dims", "2", "--domain", "2", "2"], "2 dims"),
        (["cnn", "--epochs", "0"], "--epochs is 0"),
    ],
)
def test_bad_options(words, text, capsys):
    assert cli.main(["profile", *words]) == 2
    assert text in capsys.readouterr().err


def test_the_command_alone(tmp_path, capsys):
    words = [MODEL, "--shape", "2,3,8,6", "--out", str(tmp_path), "--steps", "1", "--warmup", "1"]
    assert cli.main(["profile", *words]) == 0
    out = capsys.readouterr().out
    assert "1 x 1 ranks" in out and "no prediction" in out and "what to change" in out
