"""Benchmarks that compare shardfield with the alternatives of a user, as ratios within one run.

`shardfield bench NAME ...` runs them, prints a table for each and writes JSON files, from which docs/performance.md is
generated. A benchmark is a module with a docstring, a dataclass `Settings` (`quick` and `cuda` override its defaults in
a quick run and on a device), and a function `run(settings, device, table)` that fills a Table.
"""

# In the order of docs/performance.md. A module is imported when its benchmark runs.
BENCHMARKS = {
    "rank": "a rank of P, simulated: ops, models and first steps, against plain torch on a field of the rank's size",
    "scaling": "one field on 1 to 8 gloo ranks: time over ideal, computing alone, and the prediction of `plan`",
    "overhead": "host time of calls and of training steps of small models: plain torch, DTensor, shardfield",
    "redistribute": "change of placements: bytes and time, against DTensor's redistribute",
    "memory": "peak memory of a training step of a UNet, a ViT and a TFNO on a rank, against one process",
    "halo": "a CNN on a sharded field: bytes sent, overlap with computation, scaling",
    "attention": "a sharded sequence: ring attention against gathering keys and values, and against one rank",
    "strategies": "memory and bytes of each strategy of attention on 1 to 64 ranks, counted",
    "fft": "a spectral layer on a sharded field: four methods",
    "tfno": "a layer of neuraloperator's TFNO on different numbers of ranks",
    "kernels": "local work of a rank: block attention, moments, halo packing, modes; a step as a CUDA graph",
    "knn": "nearest neighbors against brute force and a k-d tree",
    "graph": "message passing on a sharded graph, against gathering all nodes",
    "points": "clouds of millions of points: a Transolver's step, nearest neighbors, planning",
    "changing": "points and edges that change in every step: planning, neighbor lists, memory",
    "compile": "a compiled step: against torch.compile on plain tensors, and with delayed messages",
    "train": "a training step on a sharded field: scaling, reading data, and memory limits",
    "virtual": "virtual ranks in one process: memory and time by their number, and a field larger than the memory",
    "predict": "a forecast written while it is computed: against no output, and against gathering to one rank",
    "sfno": "a spherical model at 721 x 1440: one rank against plain torch, and 60 days of steps",
    "faults": "killed ranks: time lost, equal losses; how long a checkpoint blocks",
}
