"""Write docs/models.md from the results of test_models.py: python tests/zoo/page.py results.jsonl docs/models.md"""

import json
import sys
from pathlib import Path

HEAD = """# Models that run as they are

Models that nobody here wrote, run unmodified on fields in uneven pieces, against the same model on one device:
outputs, the gradients of input and parameters, and the parameters after three steps of gradient descent, in float64.
The error is the largest difference, relative to the largest number; gathers are calls that had no rule. Bytes are what
one rank sends in a forward and backward pass.

neuraloperator writes `torch.cfloat` into its layers, so that its numbers are rounded to single precision on one device
too; with that name standing for double precision it agrees to ten digits (`tests/ops/spectral/test_neuralop.py`).
More about graph networks is on the page about [graphs](graphs.md); spherical ones are on the page about
[the sphere](sphere.md). `make test-models` runs all of this again and writes this page; `shardfield check` does
it for [your model](bring-your-model.md).

| model | input | mesh | cut dims | error | gathers | bytes | messages |
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
