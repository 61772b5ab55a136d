"""The picture of `explain()`: every module and call is in it, gathers and lost shardings are marked."""

import re

import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardfield import explain, scatter_tensor
from shardfield.debug.explain import Report, Row
from shardfield.distributed import DistributedManager
from shardfield.testing import run_on_ranks


def draw(path):
    DistributedManager.initialize()
    mesh = DistributedManager().initialize_mesh((-1,), mesh_dim_names=("domain",))
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh())
    field = scatter_tensor(torch.ones(1, 1, 5, 4), 0, mesh, (Shard(2),))
    with explain() as report:
        model(field).sum().backward()
    if mesh.get_rank() == 0:
        report.html(path)
    return report.messages


def test_a_report_is_drawn(tmp_path):
    messages, _ = run_on_ranks(draw, 2, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "Sequential/0" in text and "conv2d" in text and f"{messages} messages" in text
    assert not re.search(r"https?://|<script|src=|@import", text)  # one file, without others
    assert "prefers-color-scheme: dark" in text


def test_marks_and_markup():
    report = Report()
    gathered, lost = Row("net/<b>", "sort & search", []), Row("net/head", "pad", [])
    gathered.ending, gathered.bytes, gathered.messages = "gather", 4_000_000, 3
    lost.lost, lost.back_bytes = {"h": 1024}, 2_000_000
    twice = [Row("net/tail", "relu", []), Row("net/tail", "relu", [])]
    report.rows = [gathered, lost, *twice]
    text = explain_page(report)
    assert "net/&lt;b&gt;" in text and "sort &amp; search" in text and "<b>" not in text
    assert '<span class="mark gather">gather</span>' in text
    assert "lost sharding over axis &#x27;h&#x27; (1024 bytes)" in text
    assert "relu x 2" in text and text.count("relu") == 1
    widths = [float(w) for w in re.findall(r"width:([\d.]+)%\"", text)]
    assert widths == [100.0, 100.0, 50.0, 50.0]  # module and call: forward of one, backward of the other
    assert "4 MB" in text


def test_the_bytes_come_first_and_long_outcomes_wrap():
    report = Report()
    report.rows = [Row("net", "attention", [])]
    text = explain_page(report)
    heads = re.findall(r"<th>([^<]*)</th>", text)
    assert heads.index("bytes") < heads.index("by") < heads.index("in")  # in sight on a phone, where the table scrolls
    cells = re.findall(r'<td class="(\w+)"', text)
    assert cells == ["bars", "number", "number", "op", "bars", "number", "number", "by", "layout", "layout"]
    # A long outcome in one line took the width of the layouts, which then had a line for each character.
    assert "td.by .mark { white-space: normal; }" in text and "overflow-wrap: anywhere" not in text


def explain_page(report):
    from shardfield.debug.explain_html import page

    return page(report)


def test_an_empty_report_is_drawn():
    assert "0 calls" in explain_page(Report())
