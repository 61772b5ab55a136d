"""The pictures of README and docs are what their scripts draw, can be read in both color schemes, and are used."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from docs._figures import FIGURES

from shardfield.bench.charts import Panel, panels
from tests.launch import ROOT

FOLDER = ROOT / "docs/figures"


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_those_of_their_scripts(name):
    drawn = FIGURES[name]()
    assert drawn == (FOLDER / f"{name}.svg").read_text(), "run `make figures`"
    ElementTree.fromstring(drawn)
    assert not re.search(r'(fill|stroke)="(#000|black|#fff(fff)?" stroke)', drawn), "black is not seen on dark pages"


def test_figures_are_used_and_small():
    pages = "".join(p.read_text() for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    files = sorted(FOLDER.glob("*.svg"))
    assert [f.name for f in files if f"figures/{f.name}" not in pages] == []
    pictures = [*files, *(ROOT / "docs").rglob("*.png")]
    assert {p.name: p.stat().st_size for p in pictures if p.stat().st_size > 150_000} == {}


def test_plots_without_a_common_name_have_a_legend_each():
    lines = [(1.0, 2.0), (2.0, 3.0)]
    one = panels("t", [Panel("a", {"x": lines}), Panel("b", {"x": lines, "y": lines})])
    two = panels("t", [Panel("a", {"x": lines}), Panel("b", {"y": lines})])
    assert (one.count(">x</text>"), one.count(">y</text>")) == (1, 1)
    places = {name: float(re.search(rf'x="([\d.]+)"[^>]*>{name}</text>', two)[1]) for name in "xy"}
    assert places["y"] - places["x"] > 230  # beside each other, each above its plot
    assert len(set(re.findall(r'<circle[^>]*fill="(#\w+)"', two))) == 1  # colors start again
