"""Benchmarks: what shardfield costs beside what a user would pick instead, as ratios within one run.

`shardfield bench NAME ...` runs them, prints a table each and writes JSON; docs/performance.md is made of those files.
A benchmark is a module with a docstring that says what is asked, a dataclass `Settings` (its `quick` and `cuda` are
what differs in a quick run and on a device), and a function `run(settings, device, table)` that fills a Table.
"""

# In the order in which pages show them. The modules are imported when they are run.
BENCHMARKS = {
    "overhead": "what a call and a model's step cost before any arithmetic: plain torch, DTensor, shardfield",
    "redistribute": "from layout to layout: bytes and time, against DTensor's redistribute",
    "memory": "the most that a training step of a UNet, a ViT and a TFNO holds on a rank, against one process",
    "halo": "a CNN on a cut field: what is sent, whether it hides, how the step scales",
    "attention": "a sequence in pieces: the ring against gathering keys and values, and against one rank",
    "fft": "a spectral layer on a cut field, in four ways",
    "tfno": "a layer of neuraloperator's TFNO on more and fewer ranks",
    "kernels": "what one rank does between messages: folding, merging, packing, modes; and its step as a CUDA graph",
    "knn": "nearest neighbours against brute force and a tree",
    "graph": "message passing on a mesh in pieces, against gathering all nodes",
    "compile": "a step as one program: against torch.compile on plain tensors, and with late messages",
    "train": "a training step on a cut field: scaling, reading, and what fits into memory",
}
