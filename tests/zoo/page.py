"""Write docs/models.md from the results of test_zoo.py: python -m tests.zoo.page results.jsonl docs/models.md"""

import json
import sys
from pathlib import Path

HEAD = """---
hide: [toc]
---

# Models that run unmodified

The tables below list public models in small configurations. Each runs unmodified on unevenly sharded fields, in
float64, and is compared with the same model on one device: outputs, the gradients of input and parameters, and the
parameters and buffers after three steps of gradient descent. All of them agree. The columns:

- **error**: the largest difference on any rank, relative to the largest number;
- **gathers**: calls without a sharding rule;
- **lost**: functions with a large result that is no longer sharded over a mesh axis of their operands ([lost
  shardings](bring-your-model.md#see-what-it-sends-explain-and-strict));
- **balance**: how evenly the work is divided, relative to the input. It is the largest share of the work that a rank
  has, divided by the largest share of the input that a rank holds: 1 where the work is divided as the input is;
- **redundancy**: the work of all ranks together, divided by the work of one device: 1 where nothing is computed twice.
  Both are of a step after the first: the first one also plans, and reads index tensors and tables once;
- **bytes**, **messages**: what rank 0 sends in a forward and a backward pass.

Work is the FLOPs of matrix products, convolutions, attention and Fourier transforms. Any other op counts one for each
element, also where it packs a message or prepares an index. The fields of the second table are tiny, so that halos,
indices and layers on a few rows show in balance and redundancy.

By default a result of 8,192 elements or more on a rank counts as large. In the second table, 64 elements do. With the
default, four models of this size keep small values replicated, and their redundancy is higher: anemoi 1.7, AFNO 1.3,
LSNO and S2 transformer 2.0.

Redundancy above 1.05 on these tiny fields has two causes. Every rank does the work that does not depend on the field:
the bias tables of SwinV2, the embeddings of DiT and of anemoi's graph. And an exchange of rows has a few operations per
edge, beside layers of 3 to 8 channels (GCN, SAGE, GAT). The rows "larger" at the end show from which size on a balance
of 1.25 and a redundancy of 1.05 hold: images of 128 x 128 (32 x 32 tokens of DiT), graphs with 128 channels, however
few nodes. GraphUNet multiplies sparse matrices of all nodes, which gathers.

Attention whose bias requires grad computes its scores again in backward, where one device stores them. A BEiT of four
layers, alone, has a redundancy of 1.16 for this reason; no work of its attention is done by two ranks.

## At the size of a global weather field

A training step of the models below (forward, backward, AdamW with FSDP) on one device and on 8 simulated ranks that
share one sample along its rows. Peak is the largest peak memory of a rank over that of one device; 0.125 is an eighth.
No call gathers or loses a sharding. `tests/planning/test_bars.py` repeats this and refuses a balance above 1.25, a
redundancy above 1.05 and a peak above 0.16. Work is FLOPs alone here.

| model | input | balance | redundancy | peak | one device |
|---|---|---|---|---|---|
| UNet, 32 channels, 5 levels | 3 x 721 x 1440 | 1.02 | 1.02 | 0.133 | 4.1 GB |
| ViT, 256 channels, 12 layers, patches of 8 | 3 x 721 x 1440 | 1.07 | 1.00 | 0.158 | 2.7 GB |
| AFNO, 256 channels, 4 layers, patches of 8 | 3 x 721 x 1440 | 1.06 | 1.00 | 0.152 | 1.1 GB |
| Transolver attention, 128 channels, 64 slices | 262,144 points | 1.00 | 1.00 | 0.125 | 0.9 GB |
| torch-harmonics SFNO, 256 channels, 6 layers | 3 x 721 x 1440 | 1.01 | 1.00 | 0.156 | 20.8 GB |

Replicated tables weigh in the peak of the SFNO: the Legendre polynomials of 721 latitudes are 0.44 GB on every rank.
Costs that do not shrink with a rank's share (these tables, FSDP's gathered parameters) weigh more in smaller models: a
ViT of 4 layers has a peak of 0.163, an SFNO of 4 layers 0.162, and narrower SFNOs more. A five-level UNet on 1,000
rows and 48 ranks, which has one or two rows a rank at its coarsest level, has a balance of 1.10 and a redundancy of
1.00.

## Public models

neuraloperator uses `torch.cfloat` in its layers, so that its results are rounded to single precision on one device
too. With `torch.complex128` in its place it agrees to ten digits (`tests/ops/spectral/test_neuralop.py`).
Models that call `float()` in their layers (torch-harmonics, the_well's AFNO, DoMINO, StormCast, Wan's norms) are
compared in single precision.

The ViT of 16,384 tokens takes one step instead of three. transformers' Llama also generates from a sharded prompt, with
its own cache of keys and values (`tests/zoo/test_generation.py`). DoMINO's points and the grids around its geometry are
sharded. What loses a sharding: the few modes that neuraloperator's FNO 1-D and UNO write into an empty spectrum of a
tiny field. torch_cluster and torch_scatter are not in the table: they have no wheel for CPUs and the torch release of
this environment. Operators with their names stand in for them in the tests. natten's attention is compared without its
kernels, and forward alone (`tests/zoo/test_natten.py`).

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
