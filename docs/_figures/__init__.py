"""The pictures of README and docs: each function returns one SVG file; `make figures` writes them to docs/figures."""

from . import curves, diagrams, front, layers, tutorials

FIGURES = {
    "hero": front.hero,
    "curves": curves.curves,
    "peers": front.peers,
    "shards": diagrams.shards,
    "halo-exchange": diagrams.halo_exchange,
    "ring-attention": diagrams.ring_attention,
    "partial-dft": diagrams.partial_dft,
    "fsdp-domain": layers.fsdp_domain,
    "one-call": layers.one_call,
} | {f"tutorial-{name}": tutorials.times(name) for name in tutorials.measured()}
