"""Models that are redundant or unbalanced on tiny fields, at sizes from which on the bars of the models page hold.

Work that does not depend on the field (the bias tables of SwinV2, the embeddings of DiT) is done by every rank, and an
exchange list has an entry per edge, however few channels the nodes have. Both vanish beside a field of usual size.
"""

from __future__ import annotations

from tests.zoo import science, vision, zoo
from tests.zoo.entry import ROUNDED, Entry, imported


def swin_128():
    return zoo.timm().SwinTransformer(img_size=128, **LARGER_SWIN)


def swinv2_128():
    return zoo.timm().SwinTransformerV2(img_size=128, **LARGER_SWIN)


LARGER_SWIN = zoo.SWIN | {"embed_dim": 32}


def graph_of(layer: str):
    return zoo.TwoLayers(layer, features=(128, 128, 128)), zoo.ring_of(512, 128)


def gcn_512():
    return graph_of("GCNConv")


def sage_512():
    return graph_of("SAGEConv")


def gat_512():
    return graph_of("GATConv")


def graph_unet_1024():
    return zoo.graph_unet(128), zoo.ring_of(1024, 128)


def fno_1d_128():
    fno = imported("neuralop.models").FNO
    return fno(n_modes=(16,), hidden_channels=32, in_channels=2, out_channels=1, n_layers=2)


def anemoi_400():
    return science.Anemoi(nodes=400, hidden=100, channels=192)


def dit_32():
    return vision.DiffusersDiT(size=32, heads=4)


swinunetr_64 = zoo.monai_swinunetr

# The bars of the models page.
BARS = {"balance": 1.25, "redundancy": 1.05}
MODELS: dict[str, Entry] = {
    "swin_128": Entry("timm Swin, larger", (1, 3, 128, 128), package="timm", steps=1, **BARS),
    "swinv2_128": Entry("timm SwinV2, larger", (1, 3, 128, 128), package="timm", steps=1, **BARS),
    "gcn_512": Entry("torch_geometric GCN, larger", None, (0,), None, **BARS),
    "sage_512": Entry("torch_geometric SAGE, larger", None, (0,), None, **BARS),
    "gat_512": Entry("torch_geometric GAT, larger", None, (0,), None, **BARS),
    "graph_unet_1024": Entry("torch_geometric GraphUNet, larger", None, (0,), None, **BARS),
    "fno_1d_128": Entry("neuraloperator FNO 1-D, larger", (2, 2, 128), (2,), None, ROUNDED, **BARS),
    "anemoi_400": Entry(
        "anemoi graph transformer, larger", (1, 2, 1, 400, 3), (3,), None, package="anemoi.models", **BARS
    ),
    "swinunetr_64": Entry("MONAI SwinUNETR, larger", (1, 1, 64, 128), package="monai", steps=1, **BARS),
    "dit_32": Entry("diffusers DiT, larger", (1, 4, 32, 32), package="diffusers", **BARS),
}
