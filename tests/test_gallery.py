"""Run the scripts and notebooks of the gallery in a small form, and check what they print and draw."""

import json
import re

import pytest

from tests.launch import ROOT

EXAMPLES = ROOT / "examples"
SMALL = {  # ranks, options, what is printed, and the range it must be in
    "darcy": (2, "--samples 16 --epochs 2 --fine 61", r"relative L2 error (\d\.\d+)", 0.0, 0.8),
    "shallow_water": (
        2,
        "--flows 8 --epochs 8 --nlat 8 --records 6 --steps 1",
        r"error (\d\.\d+) of persistence",
        0.0,
        0.9,
    ),
    "aero": (2, "--bodies 16 --epochs 2 --points 64 --test-points 64", r"relative L2 error (\d\.\d+)", 0.0, 0.95),
    "molecules": (2, "--atoms 64 --steps 40", r"relative error of forces (\d\.\d+)", 0.0, 0.6),
    "segmentation": (4, "--volumes 8 --epochs 12 --size 16", r"Dice score (\d\.\d+)", 0.6, 1.0),
}


@pytest.mark.parametrize("name", SMALL)
def test_gallery_script(name, forks, tmp_path):
    ranks, options, pattern, low, high = SMALL[name]
    out, *others = forks.run(EXAMPLES / f"gallery_{name}.py", tmp_path, ranks, *options.split(), "--out", "a.png")
    assert low < float(re.search(pattern, out)[1]) < high and not any(others), out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_every_gallery_script_is_in_the_gallery():
    scripts = {path.stem.removeprefix("gallery_") for path in EXAMPLES.glob("gallery_*.py")}
    page = (ROOT / "docs/gallery.md").read_text()
    assert scripts == set(SMALL) == set(re.findall(r"gallery/(\w+)\.png", page))
    assert scripts == {path.stem for path in (ROOT / "docs/gallery").glob("*.png")}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda p: p.name)
def test_notebook(path, forks, tmp_path):
    cells = json.loads(path.read_text())["cells"]
    program = tmp_path / f"{path.stem}.py"
    program.write_text("\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code"))
    (out,) = forks.run(program, tmp_path)
    losses = [tuple(map(float, found)) for found in re.findall(r"loss ([\d.]+) to ([\d.]+)", out)]
    assert len(losses) == 4 and len(set(losses)) == 1 and losses[0][1] < losses[0][0], out
    assert f"examples/{path.name}" in (ROOT / "docs/gallery.md").read_text()
