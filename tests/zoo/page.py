"""Write docs/models.md from the results of test_zoo.py: python -m tests.zoo.page results.jsonl docs/models.md"""

import json
import sys
from pathlib import Path

PAGE = """---
hide: [toc]
---

# Models that run unmodified

Find out whether your model runs on sharded fields as it is. One command compares it with one device, forward and
backward, and names the first submodule that differs:

```bash
python -m shardfield check mypackage.model:make --shape 1,3,64,64 --mesh 2
```

[Bring your model](bring-your-model.md) explains its output. This page lists public models that pass the same
comparison, in small configurations: on unevenly sharded fields, in float64, outputs, gradients of input and
parameters, and the parameters and buffers after three steps of gradient descent.

## At the size of a global weather field

A training step of the models below (forward, backward, AdamW with FSDP) on one device and on 8 simulated ranks that
share one sample along its rows. Peak is the largest peak memory of a rank over that of one device; 0.125 is an
eighth. No call gathers or loses a sharding. `tests/planning/test_bars.py` repeats this and refuses a balance above
1.25, a redundancy above 1.05 and a peak above 0.16. Work is FLOPs alone here.

| model | input | balance | redundancy | peak | one device |
|---|---|---|---|---|---|
| UNet, 32 channels, 5 levels | 3 x 721 x 1440 | 1.02 | 1.02 | 0.133 | 4.1 GB |
| ViT, 256 channels, 12 layers, patches of 8 | 3 x 721 x 1440 | 1.07 | 1.00 | 0.158 | 2.7 GB |
| AFNO, 256 channels, 4 layers, patches of 8 | 3 x 721 x 1440 | 1.06 | 1.00 | 0.152 | 1.1 GB |
| Transolver attention, 128 channels, 64 slices | 262,144 points | 1.00 | 1.00 | 0.125 | 0.9 GB |
| torch-harmonics SFNO, 256 channels, 6 layers | 3 x 721 x 1440 | 1.01 | 1.00 | 0.156 | 20.8 GB |

Some costs do not shrink with a rank's share: FSDP's gathered parameters, and in the SFNO the Legendre polynomials of
721 latitudes, 0.44 GB on every rank. They show more in smaller models: a ViT of 4 layers has a peak of 0.163, an SFNO
of 4 layers 0.162, and narrower SFNOs more.

A five-level UNet on 1,000 rows and 48 ranks has one or two rows a rank at its coarsest level. Its balance is 1.10,
its redundancy 1.00.

## Public models

Each line names the models of a folded table. Its columns:

- **error**: the largest difference on any rank, relative to the largest number;
- **gathers**: calls without a sharding rule;
- **lost**: functions with a large result that is no longer sharded over a mesh axis of their operands ([lost
  shardings](bring-your-model.md#see-what-it-sends-explain-and-strict));
- **balance**: the largest share of the work that a rank has, divided by the largest share of the input that a rank
  holds: 1 where the work is divided as the input is;
- **redundancy**: the work of all ranks together, divided by the work of one device: 1 where nothing is computed
  twice;
- **bytes**, **messages**: what rank 0 sends in a forward and a backward pass.

@TABLES@
<details markdown>
<summary>How work is counted, and why tiny fields have redundancy</summary>

Balance and redundancy are those of a step after the first: the first one also plans, and reads index tensors and
tables once. Work is the FLOPs of matrix products, convolutions, attention and Fourier transforms. Any other op counts
one for each element, also where it packs a message or prepares an index.

The fields of these tables are tiny, so that halos, indices and layers on a few rows show. Redundancy above 1.05 has
two causes:

- Every rank does the work that does not depend on the field: the bias tables of SwinV2 and BEiT, the embeddings of DiT
  and of anemoi's graph, the queries of Aurora's Perceiver.
- An exchange of rows has a few operations per edge, beside layers of 3 to 8 channels (GCN, SAGE, GAT).

`grid_sample` along a sharded dim is composed of several operators, which count more than torch's one kernel: no work is
done twice, and a layer of deformable attention has a redundancy of 1.09 at 128 channels.

The rows "larger" show from which size on a balance of 1.25 and a redundancy of 1.05 hold: images of 128 x 128 (32 x
32 tokens of DiT), graphs with 128 channels, however few nodes (1,024 of GraphUNet, which multiplies sparse matrices).
Two models have a higher redundancy on 2 x 2 ranks. Aurora has 1.09 at 64 x 128 points and 32 channels: its Perceiver
computes the queries of every token from parameters alone, on every rank. ZoeDepth has 1.054 at 128 x 128: every rank
computes the table of biases of all pairs of tokens.

A result counts as large from 64 elements on a rank; the default is 8,192. With the default, four models of this size
keep small values replicated, and their redundancy is higher: anemoi 1.7, AFNO 1.3, LSNO and S2 transformer 2.0.

</details>

<details markdown>
<summary>Exceptions: single precision, models that are not in the tables</summary>

- neuraloperator uses `torch.cfloat` in its layers, so that its results are rounded to single precision on one device
  too. With `torch.complex128` in its place it agrees to ten digits (`tests/ops/spectral/test_neuralop.py`).
- Models that call `float()` in their layers (torch-harmonics, the_well's AFNO, DoMINO, StormCast, Wan's norms) are
  compared in single precision.
- The ViT of 16,384 tokens takes one step instead of three.
- neuraloperator's FNO 1-D and UNO write a few modes into an empty spectrum of a tiny field: there the sharding is
  lost.
- Four of these small models have [unbalanced
  results](bring-your-model.md#see-what-it-sends-explain-and-strict): on 2 x 2 ranks FNO 3-D keeps four of seven modes,
  SwinUNETR ends with two tokens (eight in the larger one), and WXFormer pads windows, two along rows, that both axes
  shard; one rank has the 12 nodes that GraphUNet pools.
- DoMINO's points and the grids around its geometry are sharded.
- transformers' Llama also generates from a sharded prompt, with its own cache of keys and values
  (`tests/zoo/test_generation.py`).
- torch_cluster and torch_scatter have no wheel for CPUs and this release of torch. Operators with their names stand
  in for them in the tests.
- natten's attention is compared without its kernels, and forward alone (`tests/zoo/test_natten.py`).

</details>

[Graphs](graphs.md) has more about graph networks, [Spherical models](sphere.md) about spherical ones. `make
test-models` repeats all of this and writes this page.
"""


COLUMNS = """| model | input | mesh | sharded dims | error | gathers | lost | balance | redundancy | bytes | messages |
|---|---|---|---|---|---|---|---|---|---|---|
"""
PACKAGES = (
    ("timm", "vit-pytorch"),
    ("transformers", "torch "),
    ("diffusers",),
    ("MONAI", "3-D UNet"),
    ("neuraloperator",),
    ("torch-harmonics", "Microsoft Aurora", "CREDIT", "anemoi"),
    ("the_well",),
    ("PhysicsNeMo", "Transolver attention"),
    ("torch_geometric", "MeshGraphNet", "GraphCast-like"),
)


def names(rows: list[list], package: str) -> str:
    """Return the models of one package: "timm: ResNet; ConvNeXt"."""
    found = dict.fromkeys(row[0].removesuffix(", larger").removeprefix(package).strip() for row in rows)
    return f"{package.strip()}: {'; '.join(found)}" if any(found) else package.strip()


def table(packages: tuple[str, ...], rows: list[list]) -> str:
    """Return the rows of some packages as a folded table, with the names of their models to open it by."""
    of = {package: [row for row in rows if row[0].startswith(package)] for package in packages}
    summary = ". ".join(names(found, package) for package, found in of.items() if found)
    lines = [f"<details markdown>\n<summary>{summary}</summary>\n\n{COLUMNS}"]
    for title, shape, mesh, dims, error, gathers, lost, balance, redundancy, nbytes, messages in rows:
        size = " x ".join(map(str, shape))
        lines.append(
            f"| {title} | {size} | {' x '.join(map(str, mesh))} | {', '.join(map(str, dims))} | {error:.0e} "
            f"| {gathers} | {len(lost)} | {balance:.2f} | {redundancy:.2f} | {nbytes:,} | {messages} |\n"
        )
    return "".join(lines) + "\n</details>\n\n"


def main(results: Path, page: Path) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    groups = {package: [row for row in rows if row[0].startswith(package)] for package in PACKAGES}
    assert sum(map(len, groups.values())) == len(rows), "a model of no package in PACKAGES"
    page.write_text(
        PAGE.replace("@TABLES@\n", "".join(table(packages, group) for packages, group in groups.items() if group))
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
