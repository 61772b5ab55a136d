"""Write all pictures: `make figures`."""

from pathlib import Path

from . import FIGURES

folder = Path(__file__).parent.parent / "figures"
for name, draw in FIGURES.items():
    (folder / f"{name}.svg").write_text(draw())
