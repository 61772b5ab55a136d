"""The pictures of README and docs are what their scripts draw, can be read in both color schemes, and are used."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from docs._figures import FIGURES

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
