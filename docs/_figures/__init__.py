"""The pictures of README and docs: each function returns one SVG file; `make figures` writes them to docs/figures."""

from . import curves, diagrams, front, layers, tables, tutorials

FIGURES = {
    "hero": front.hero,
    "curves": curves.curves,
    "peers": front.peers,
    "shards": diagrams.shards,
    "halo-exchange": diagrams.halo_exchange,
    "ring-attention": diagrams.ring_attention,
    "ring-neighbors": diagrams.ring_neighbors,
    "partial-dft": diagrams.partial_dft,
    "fsdp-domain": layers.fsdp_domain,
    "one-call": layers.one_call,
    "rank-h200": tables.as_bars(
        "Time of one rank of 8 over that of plain torch", "times plain torch", "comparison", "One rank of 8 on an H200"
    ),
    "graphs-h200": tables.as_bars(
        "Time of forward and backward with and without CUDA graphs", "ms", "compile", "Milliseconds on an H200"
    ),
    "virtual-h200": tables.as_dots(
        "Time and memory of a step on virtual ranks over those of plain torch",
        "times plain torch",
        "virtual-ranks",
        "A step on an H200, divided by that of plain torch",
    ),
    "spectral-cost": tables.as_dots(
        "Time and memory of a TFNO layer over those of plain tensors",
        "times plain tensors",
        "spectral",
        "Divided by plain tensors in one process",
    ),
} | {f"tutorial-{name}": tutorials.times(name) for name in tutorials.measured()}
