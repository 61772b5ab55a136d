"""Models that are redundant or unbalanced on tiny fields, at sizes from which on the bars of the models page hold.

Work that does not depend on the field (the bias tables of SwinV2, the embeddings of DiT) is done by every rank, and an
exchange list has an entry per edge, however few channels the nodes have. Both vanish beside a field of usual size.
"""

from __future__ import annotations

from tests.models.graphcast import GraphCast, build_tensors
from tests.zoo import science, vision, zoo
from tests.zoo.entry import ROUNDED, SINGLE, Entry, imported


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


def transformers_swin_128():
    return zoo.transformers_swin(128, 32)


def zoedepth_128():
    return zoo.transformers_zoedepth(128, 64)


def attentive_fp_512():
    return zoo.pyg_attentive_fp(512, 128)


def uno_64():
    return zoo.neuralop_uno(16, 8)


def xcit_128():
    """Two samples: of one, torch's batch norm has wrong gradients on a CPU if the gradient is channels-last."""
    return vision.timm_xcit(64)


def maxvit_128():
    return vision.vit_pytorch_maxvit(32)


def aurora_128():
    return science.Aurora(64, 128, 32)


def wxformer_128():
    return science.credit_wxformer(128, 16)


def crossformer_128():
    return science.credit_crossformer(128, 16)


def avit_128():
    return science.the_well_avit((128, 192), 96)


def afno_128():
    return science.the_well_afno((128, 192), 64)


def s2transformer_64():
    return science.spherical("SphericalTransformer", num_heads=2, img_size=(64, 128), embed_dim=32)


def song_unet_64():
    return science.SongUNet((64, 96), model_channels=32)


def stormcast_64():
    return science.physicsnemo_stormcast((64, 96), model_channels=32)


def graphcast_512():
    """The published width, layers and kinds of edges; 162 of its 40,962 mesh nodes, a grid of 8 degrees."""
    return GraphCast(78, width=512), build_tensors(2, 23, 45, features=78)


# The bars of the models page.
BARS = {"balance": 1.25, "redundancy": 1.05}
MODELS: dict[str, Entry] = {
    "swin_128": Entry("timm Swin, larger", (1, 3, 128, 128), package="timm", steps=1, **BARS),
    "swinv2_128": Entry("timm SwinV2, larger", (1, 3, 128, 128), package="timm", steps=1, **BARS),
    "gcn_512": Entry("torch_geometric GCN, larger", None, (0,), None, **BARS),
    "sage_512": Entry("torch_geometric SAGE, larger", None, (0,), None, **BARS),
    "gat_512": Entry("torch_geometric GAT, larger", None, (0,), None, **BARS),
    "graph_unet_1024": Entry("torch_geometric GraphUNet, larger", None, (0,), None, **BARS),
    "graphcast_512": Entry("GraphCast-like", None, (0,), None, sharded=("state", "grid", "mesh"), steps=1, **BARS),
    "fno_1d_128": Entry("neuraloperator FNO 1-D, larger", (2, 2, 128), (2,), None, ROUNDED, **BARS),
    "anemoi_400": Entry(
        "anemoi graph transformer, larger", (1, 2, 1, 400, 3), (3,), None, package="anemoi.models", **BARS
    ),
    "swinunetr_64": Entry(  # ends with 2 x 4 tokens
        "MONAI SwinUNETR, larger", (1, 1, 64, 128), package="monai", unbalanced=("__getitem__",), steps=1, **BARS
    ),
    "transformers_swin_128": Entry("transformers Swin, larger", (1, 3, 128, 128), steps=1, **BARS),
    "zoedepth_128": Entry("transformers ZoeDepth, larger", (1, 3, 128, 128), steps=1, redundancy=1.07),
    "attentive_fp_512": Entry("torch_geometric AttentiveFP, larger", None, (0,), None, **BARS),
    "uno_64": Entry("neuraloperator UNO, larger", (1, 2, 64, 80), tolerance=ROUNDED, steps=1, **BARS),
    "xcit_128": Entry("timm XCiT, larger", (2, 3, 128, 192), package="timm", steps=1, **BARS),
    "maxvit_128": Entry(
        "vit-pytorch MaxViT, larger", (1, 3, 128, 128), (2, 3), (2, 3), 1e-8, "vit_pytorch", steps=1, **BARS
    ),
    "aurora_128": Entry(
        "Microsoft Aurora, larger", (1, 2, 7, 64, 128), (3, 4), (3, 4), package="aurora", steps=1, redundancy=1.1
    ),
    "wxformer_128": Entry(
        "CREDIT WXFormer, larger",
        (1, 7, 2, 128, 128),
        (3, 4),
        (3, 4),
        package="credit",
        unbalanced=("pad",),
        steps=1,
        **BARS,
    ),
    "crossformer_128": Entry(
        "CREDIT CrossFormer, larger", (1, 7, 2, 128, 128), (3, 4), (3, 4), package="credit", steps=1, **BARS
    ),
    "avit_128": Entry("the_well AViT, larger", (1, 128, 192, 3), (1, 2), (1, 2), package="the_well", steps=1, **BARS),
    "afno_128": Entry(
        "the_well AFNO, larger", (1, 128, 192, 3), (1, 2), (1, 2), SINGLE, package="the_well", steps=1, **BARS
    ),
    "s2transformer_64": Entry(
        "torch-harmonics S2 transformer, larger", (1, 3, 64, 128), tolerance=SINGLE, steps=1, **BARS
    ),
    "song_unet_64": Entry("PhysicsNeMo SongUNet, larger", (1, 3, 64, 96), package="physicsnemo", steps=1, **BARS),
    "stormcast_64": Entry(
        "PhysicsNeMo StormCastUNet, larger", (1, 3, 64, 96), tolerance=SINGLE, package="physicsnemo", steps=1, **BARS
    ),
    "dit_32": Entry("diffusers DiT, larger", (1, 4, 32, 32), package="diffusers", **BARS),
}
