"""Run random programs: `python -m tests.fuzz --programs 2000 --seed 0`. Every failure is shrunk and printed.

Programs come in blocks of 25, and a block is drawn by hypothesis from its seed: `--seed 17 --programs 1` runs block 17
again. A block ends with its first failure. `--virtual` runs all ranks in one process, ten times faster, without
compiling programs. `--jobs` runs so many blocks at a time, each with ranks of its own; `--seconds` starts no further
block after that time.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import partial
from itertools import count
from pathlib import Path

from tests.harness.virtual import VirtualRanks

from .block import Block, run_block


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first block")
    parser.add_argument("--every", type=int, default=1, help="6: run the blocks that are compiled too, and no others")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a program hangs")
    parser.add_argument("--no-shrink", action="store_true", help="show failures as they are drawn")
    parser.add_argument("--log", type=Path, help="append the outcome of each block to this file")
    parser.add_argument("--virtual", action="store_true", help="run the ranks in one process")
    parser.add_argument("--jobs", type=int, default=1, help="blocks at a time, in processes of their own")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which no block is started")
    args = parser.parse_args()
    total: collections.Counter = collections.Counter()
    begun = time.monotonic()
    for seed, block in blocks(args):
        total.update(block.counts)
        seconds = round(time.monotonic() - begun)
        if block.failure:
            print(f"--- seed {seed}\n{block.failure}\n", flush=True)
        for text, times in block.refusals.most_common(3):
            print(f"refused {times}: {text}", flush=True)
        print(f"seed {seed}: {dict(block.counts)}; in all {dict(total)}, {seconds} s", flush=True)
        if args.log:
            line = {"seed": seed, **block.counts, "seconds": seconds}
            with open(args.log, "a") as file:
                file.write(json.dumps(line | ({"failure": block.failure} if block.failure else {})) + "\n")
        if total["right"] >= args.programs or seconds >= args.seconds:
            break
    return 1 if total["failed"] else 0


def blocks(args: argparse.Namespace) -> Iterator[tuple[int, Block]]:
    """Run blocks without end and return each with its seed when it is done. Blocks begun are finished at the end."""
    run = partial(run_block, timeout=args.timeout, shrink=not args.no_shrink)
    if args.jobs == 1:
        virtual = VirtualRanks() if args.virtual else None
        for seed in count(args.seed, args.every):
            yield seed, run(seed, virtual=virtual)
    seeds = count(args.seed, args.every)
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run, seed): seed for seed, _ in zip(seeds, range(args.jobs), strict=False)}
        while True:
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()
                seed = next(seeds)
                running[pool.submit(run, seed)] = seed


if __name__ == "__main__":
    sys.exit(main())
