"""Run random programs: `python -m tests.fuzz --programs 2000 --seed 0`. Every failure is shrunk and printed.

Programs come in blocks of 25, and a block is drawn by hypothesis from its seed: `--seed 17 --programs 1` runs block 17
again. A block ends with its first failure. `--virtual` runs all ranks in one process, ten times faster, without
compiling programs.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
from pathlib import Path

from tests.harness.virtual import VirtualRanks

from .block import run_block


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first block")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a program hangs")
    parser.add_argument("--no-shrink", action="store_true", help="show failures as they are drawn")
    parser.add_argument("--log", type=Path, help="append the outcome of each block to this file")
    parser.add_argument("--virtual", action="store_true", help="run the ranks in one process")
    args = parser.parse_args()
    virtual = VirtualRanks() if args.virtual else None
    total: collections.Counter = collections.Counter()
    seed, begun = args.seed, time.monotonic()
    while total["right"] < args.programs:
        block = run_block(seed, timeout=args.timeout, shrink=not args.no_shrink, virtual=virtual)
        total.update(block.counts)
        line = {"seed": seed, **block.counts, "seconds": round(time.monotonic() - begun)}
        if block.failure:
            line["failure"] = block.failure
            print(f"--- seed {seed}\n{block.failure}\n", flush=True)
        for text, count in block.refusals.most_common(3):
            print(f"refused {count}: {text}", flush=True)
        print(f"seed {seed}: {dict(block.counts)}; in all {dict(total)}, {line['seconds']} s", flush=True)
        if args.log:
            with open(args.log, "a") as file:
                file.write(json.dumps(line) + "\n")
        seed += 1
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
