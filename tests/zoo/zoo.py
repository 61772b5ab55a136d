"""Small third-party models, each built by a function without arguments; `MODELS` has their shardings."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import ROUNDED, Entry, imported

FIELD = (1, 3, 32, 48)
SQUARE = (1, 3, 32, 32)
SWIN = {"patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "num_classes": 5}
SWIN |= {"drop_path_rate": 0.0}  # random numbers on ranks differ from one device


def timm():
    return imported("timm.models")


def timm_resnet():
    return timm().ResNet(timm().resnet.BasicBlock, [1, 1, 1, 1], num_classes=5, channels=(8, 8, 16, 16))


def timm_convnext():
    return timm().ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=5, patch_size=2)


def timm_vit():
    return timm().VisionTransformer(
        img_size=32, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5, dynamic_img_size=True
    )


def timm_swin():
    return timm().SwinTransformer(img_size=32, **SWIN)


def timm_swinv2():
    return timm().SwinTransformerV2(img_size=32, **SWIN)


def timm_sequencer():
    sizes = {"layers": (1, 1), "patch_sizes": (4, 2), "embed_dims": (16, 16), "hidden_sizes": (4, 4)}
    return timm().sequencer.Sequencer2d(num_classes=5, mlp_ratios=(2, 2), **sizes)


def transformers_vit():
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTModel(ViTConfig(image_size=32, patch_size=4, **sizes))


def transformers_segformer():
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
    sizes |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    return SegformerForSemanticSegmentation(SegformerConfig(**sizes, decoder_hidden_size=16, drop_path_rate=0.0))


def transformers_swin(size=32, width=8):
    from transformers import SwinConfig, SwinModel

    sizes = {"embed_dim": width, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    return SwinModel(SwinConfig(image_size=size, patch_size=2, drop_path_rate=0.0, **sizes))


def transformers_zoedepth(size=32, width=16):
    """BEiT with relative positions, a decoder at four scales, and a partly scripted head."""
    from transformers import BeitConfig, ZoeDepthConfig, ZoeDepthForDepthEstimation

    sizes = {"hidden_size": width, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": width}
    sizes |= {"out_features": [f"stage{i}" for i in range(1, 5)], "out_indices": None, "reshape_hidden_states": False}
    beit = BeitConfig(image_size=size, patch_size=4, use_relative_position_bias=True, drop_path_rate=0.0, **sizes)
    head = {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8, "bottleneck_features": 8, "bin_embedding_dim": 8}
    head |= {"num_attractors": [4, 2, 2, 1], "num_relative_features": 8}
    bins = [{"n_bins": 8, "min_depth": 0.001, "max_depth": 10.0}]
    return ZoeDepthForDepthEstimation(ZoeDepthConfig(backbone_config=beit, bin_configurations=bins, **head))


class DiffusersUNet(nn.Module):
    """diffusers' UNet at one time step."""

    def __init__(self):
        super().__init__()
        from diffusers import UNet2DModel

        self.unet = UNet2DModel(
            sample_size=32,
            in_channels=3,
            out_channels=3,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
        )

    def forward(self, x):
        return self.unet(x, 3).sample


def monai_swinunetr():
    from monai.networks.nets import SwinUNETR

    sizes = {"depths": (2, 2, 1, 1), "num_heads": (2, 2, 2, 2), "window_size": 4, "feature_size": 12}
    return SwinUNETR(in_channels=1, out_channels=2, spatial_dims=2, **sizes)


def monai_dynunet():
    from monai.networks.nets import DynUNet

    sizes = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [4, 8, 8]}
    return DynUNet(3, 1, 2, **sizes, deep_supervision=True, res_block=True, norm_name="batch", dropout=0.1)


def torch_encoder():
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)


class UNet3D(nn.Module):
    """Two levels, group norms, trilinear upsampling."""

    def __init__(self):
        super().__init__()

        def block(i, o, stride=1):
            return nn.Sequential(nn.Conv3d(i, o, 3, stride, 1), nn.GroupNorm(2, o), nn.SiLU())

        self.first, self.down, self.bottom, self.last = block(2, 4), block(4, 8, 2), block(8, 8), block(12, 4)
        self.out = nn.Conv3d(4, 1, 1)

    def forward(self, x):
        skip = self.first(x)
        deep = self.bottom(self.down(skip))
        up = F.interpolate(deep, size=skip.shape[2:], mode="trilinear", align_corners=False)
        return self.out(self.last(torch.cat([up, skip], 1)))


class Transolver(nn.Module):
    """Slice attention over mesh points: pool points into a few physical states that attend to each other."""

    def __init__(self, width=8, slices=5):
        super().__init__()
        self.lift, self.assign = nn.Linear(4, width), nn.Linear(width, slices)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 2)
        self.norm = nn.LayerNorm(width)

    def forward(self, points):
        x = self.lift(points)
        weights = torch.softmax(self.assign(self.norm(x)), -1)  # points x slices
        states = weights.transpose(1, 2) @ x / (weights.sum(1).unsqueeze(-1) + 1e-5)
        q, k, v = self.qkv(states).chunk(3, -1)
        return self.out(x + weights @ F.scaled_dot_product_attention(q, k, v))


def ring_of(nodes: int, features: int):
    """Return random features on a ring of nodes, each connected with the next two in both directions."""
    at = torch.arange(nodes)
    edges = torch.cat([torch.stack([at, (at + step) % nodes]) for step in (1, 2)], 1)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(nodes, features, generator=generator), torch.cat([edges, edges.flip(0)], 1)


class TwoLayers(nn.Module):
    """Two of torch_geometric's layers."""

    def __init__(self, name: str, features=(5, 8, 3)):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch_geometric.nn
        layer = getattr(torch_geometric.nn, name)
        self.first, self.second = layer(*features[:2]), layer(*features[1:])

    def forward(self, x, edges):
        return self.second(torch.relu(self.first(x, edges)), edges)


def pyg_gcn():
    return TwoLayers("GCNConv"), ring_of(23, 5)


def pyg_sage():
    return TwoLayers("SAGEConv"), ring_of(23, 5)


def pyg_gat():
    return TwoLayers("GATConv"), ring_of(23, 5)


def graph_unet(*sizes: int):
    """Pools the best half of the nodes, after it has multiplied the sparse adjacency matrix with itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch_geometric.nn import GraphUNet
    features, hidden, out = sizes * 3 if len(sizes) == 1 else sizes
    return GraphUNet(features, hidden, out, depth=2, pool_ratios=0.5)


def pyg_graph_unet():
    return graph_unet(5, 8, 3), ring_of(23, 5)


def pyg_attentive_fp(number=23, width=8):
    """Attention over edges and graphs, gated recurrent units on nodes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch_geometric.nn import AttentiveFP
    nodes, edges = ring_of(number, 5)
    of_edges = torch.rand(edges.shape[1], 3, generator=torch.Generator().manual_seed(1))
    return AttentiveFP(5, width, 3, 3, 2, 2), (nodes, edges, of_edges, torch.arange(number) // 9)


class MeshGraphNet(nn.Module):
    """Update edges from their nodes and nodes from their edges, with residuals."""

    def __init__(self, width=6, blocks=2):
        super().__init__()

        def mlp(i):
            return nn.Sequential(nn.Linear(i, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width))

        self.node_in, self.edge_in, self.out = mlp(5), mlp(10), nn.Linear(width, 2)
        self.edge_mlps = nn.ModuleList(mlp(3 * width) for _ in range(blocks))
        self.node_mlps = nn.ModuleList(mlp(2 * width) for _ in range(blocks))

    def forward(self, x, edges):
        sender, receiver = edges
        edge = self.edge_in(torch.cat([x[sender], x[receiver]], -1))
        x = self.node_in(x)
        for of_edge, of_node in zip(self.edge_mlps, self.node_mlps, strict=True):
            edge = edge + of_edge(torch.cat([x[sender], x[receiver], edge], -1))
            total = torch.zeros_like(x).index_add(0, receiver, edge)
            x = x + of_node(torch.cat([x, total], -1))
        return self.out(x)


def meshgraphnet():
    return MeshGraphNet(), ring_of(23, 5)


def neuralop_uno(width=4, modes=4):
    from neuralop.models import UNO

    return UNO(
        in_channels=2,
        out_channels=1,
        hidden_channels=width,
        uno_out_channels=[width] * 3,
        uno_n_modes=[[modes, modes]] * 3,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2, 2]],
        n_layers=3,
        channel_mlp_skip="linear",
    )


def fno(dims: int, **options):
    from neuralop.models import FNO

    return FNO(n_modes=(6,) * dims, hidden_channels=4, in_channels=2, out_channels=1, n_layers=2, **options)


def neuralop_fno_1d():
    return fno(1)


def neuralop_fno_2d():
    return fno(2)


def neuralop_fno_3d():
    return fno(3)


def neuralop_tfno():
    return fno(2, factorization="tucker", rank=0.42, norm="group_norm")


MODELS: dict[str, Entry] = {
    "timm_resnet": Entry("timm ResNet", FIELD),
    "timm_convnext": Entry("timm ConvNeXt", FIELD),
    "timm_vit": Entry("timm ViT, dynamic size", FIELD),
    "timm_swin": Entry("timm Swin", SQUARE),
    "timm_swinv2": Entry("timm SwinV2", SQUARE, redundancy=2.0),
    "timm_sequencer": Entry("timm Sequencer", FIELD),
    "transformers_vit": Entry("transformers ViT", SQUARE),
    "transformers_segformer": Entry("transformers SegFormer", FIELD),
    "transformers_swin": Entry("transformers Swin", SQUARE),
    "transformers_zoedepth": Entry("transformers ZoeDepth", SQUARE),
    "DiffusersUNet": Entry("diffusers UNet2D", FIELD),
    "monai_swinunetr": Entry(  # ends with 1 x 2 tokens
        "MONAI SwinUNETR", (1, 1, 32, 64), balance=1.35, unbalanced=("__getitem__", "conv_transpose2d")
    ),
    "monai_dynunet": Entry("MONAI DynUNet, 3-D", (1, 1, 12, 16, 20)),
    "torch_encoder": Entry("torch TransformerEncoderLayer", (2, 21, 16), (1,), None),
    "UNet3D": Entry("3-D UNet", (1, 2, 9, 12, 10)),
    "Transolver": Entry("Transolver attention", (2, 37, 4), (1,), None, redundancy=1.3),
    "pyg_gcn": Entry("torch_geometric GCN", None, (0,), None, redundancy=1.7),
    "pyg_sage": Entry("torch_geometric SAGE", None, (0,), None, redundancy=1.5),
    "pyg_gat": Entry("torch_geometric GAT", None, (0,), None, redundancy=1.5),
    "pyg_attentive_fp": Entry("torch_geometric AttentiveFP", None, (0,), None),
    "pyg_graph_unet": Entry("torch_geometric GraphUNet", None, (0,), None, redundancy=2.4, unbalanced=("__getitem__",)),
    "meshgraphnet": Entry("MeshGraphNet", None, (0,), None),
    "neuralop_fno_1d": Entry(
        "neuraloperator FNO 1-D", (2, 2, 20), (2,), None, ROUNDED, lost=("__setitem__",), redundancy=1.3
    ),
    "neuralop_fno_2d": Entry("neuraloperator FNO 2-D", (1, 2, 16, 20), tolerance=ROUNDED),
    "neuralop_fno_3d": Entry(
        "neuraloperator FNO 3-D", (1, 2, 8, 10, 12), tolerance=ROUNDED, unbalanced=("__getitem__",)
    ),
    "neuralop_tfno": Entry("neuraloperator TFNO", (1, 2, 16, 20), tolerance=ROUNDED),
    "neuralop_uno": Entry("neuraloperator UNO", (1, 2, 16, 20), tolerance=ROUNDED, lost=("__setitem__",)),
}
