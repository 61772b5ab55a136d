"""Write docs/models.md from the results of test_zoo.py: python -m tests.zoo.page results.jsonl docs/models.md"""

import json
import sys
from pathlib import Path

HEAD = """# Models that run unmodified

Public models, run unmodified on unevenly sharded fields and compared with the same model on one device: outputs, the
gradients of input and parameters, and the parameters after three steps of gradient descent, in float64. The error is
the largest difference, relative to the largest number. Gathers are calls without a sharding rule. Bytes are those
that one rank sends in a forward and backward pass.

neuraloperator uses `torch.cfloat` in its layers, so that its results are rounded to single precision on one device
too. With `torch.complex128` in its place it agrees to ten digits (`tests/ops/spectral/test_neuralop.py`).
[Graphs](graphs.md) has more about graph networks, [Spherical models](sphere.md) about spherical ones. `make
test-models` repeats all of this and writes this page; `shardfield check` tests [your model](bring-your-model.md).

| model | input | mesh | sharded dims | error | gathers | bytes | messages |
|---|---|---|---|---|---|---|---|
"""


def main(results: Path, page: Path) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    lines = []
    for title, shape, mesh, dims, error, gathers, nbytes, messages in rows:
        size = " x ".join(map(str, shape))
        lines.append(
            f"| {title} | {size} | {' x '.join(map(str, mesh))} | {', '.join(map(str, dims))} | {error:.0e} "
            f"| {gathers} | {nbytes:,} | {messages} |\n"
        )
    page.write_text(HEAD + "".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
