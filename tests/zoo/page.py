"""Write docs/models.md from the results of test_zoo.py: python -m tests.zoo.page results.jsonl docs/models.md"""

import json
import sys
from pathlib import Path

HEAD = """# Models that run unmodified

Public models, run unmodified on unevenly sharded fields and compared with the same model on one device: outputs, the
gradients of input and parameters, and the parameters and buffers after three steps of gradient descent, in float64.
The error is the largest difference, relative to the largest number, on any rank. Gathers are calls without a sharding
rule. "Lost" counts the functions with a result at least as large as a rank's share of the operands that is no longer
sharded over one of their mesh axes ([lost shardings](bring-your-model.md#see-what-it-sends-explain-and-strict)).
Bytes are those that rank 0 sends in a forward and backward pass.

Balance is the largest share of the work that a rank has, times the number of ranks, over the same figure of the
input's uneven shards: 1 where the work is divided as the input is. Redundancy is the work of all ranks over that of
one device: 1 where nothing is computed twice. Work is the FLOPs of matrix products, convolutions, attention and
Fourier transforms, and one for each element of any other op, packing a message and preparing an index included. The
fields of this table are tiny, so that halos, indices and layers on a few rows show in both figures.

neuraloperator uses `torch.cfloat` in its layers, so that its results are rounded to single precision on one device
too. With `torch.complex128` in its place it agrees to ten digits (`tests/ops/spectral/test_neuralop.py`).
Models that call `float()` in their layers (torch-harmonics, the_well's AFNO, DoMINO, StormCast, Wan's
norms) are compared in single precision.
[Graphs](graphs.md) has more about graph networks, [Spherical models](sphere.md) about spherical ones. `make
test-models` repeats all of this and writes this page; `shardfield check` tests [your model](bring-your-model.md).

| model | input | mesh | sharded dims | error | gathers | lost | balance | redundancy | bytes | messages |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def main(results: Path, page: Path) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    lines = []
    for title, shape, mesh, dims, error, gathers, lost, balance, redundancy, nbytes, messages in rows:
        size = " x ".join(map(str, shape))
        lines.append(
            f"| {title} | {size} | {' x '.join(map(str, mesh))} | {', '.join(map(str, dims))} | {error:.0e} "
            f"| {gathers} | {len(lost)} | {balance:.2f} | {redundancy:.2f} | {nbytes:,} | {messages} |\n"
        )
    page.write_text(HEAD + "".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
