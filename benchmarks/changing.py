"""Run the benchmark that this file is named after. The other files in this folder are symbolic links to it.

`python benchmarks/halo.py --quick` is `shardfield bench halo --quick`.
"""

import sys
from pathlib import Path

from shardfield.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", Path(__file__).stem, *sys.argv[1:]]))
