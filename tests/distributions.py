"""Build the wheel and the sdist of this repository as pip does, without fetching anything."""

import subprocess
import sys
from pathlib import Path

from tests.launch import ROOT


def build(kind: str, folder: Path) -> Path:
    """Build a "wheel" or an "sdist" into a folder, and return its path."""
    code = f"import sys, hatchling.build; print(hatchling.build.build_{kind}(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stderr
    return folder / made.stdout.split()[-1]
