"""More models of images, volumes and videos; `MODELS` has their shardings."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.entry import SINGLE, Entry, imported


class DiffusersDiT(nn.Module):
    """diffusers' DiT at one time step and class."""

    def __init__(self, size=16, heads=2):
        super().__init__()
        self.model = imported("diffusers").DiTTransformer2DModel(
            num_attention_heads=heads, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=size,
            norm_num_groups=4,
        )  # fmt: skip

    def forward(self, x):
        return self.model(x, torch.tensor([3]), torch.tensor([1]), return_dict=False)[0]


class DiffusersWan(nn.Module):
    """diffusers' transformer of Wan videos at one time step and text."""

    def __init__(self):
        super().__init__()
        self.model = imported("diffusers").WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=2, ffn_dim=32,
            text_dim=8, freq_dim=16,
        )  # fmt: skip
        self.register_buffer("text", torch.rand(1, 5, 8, generator=torch.Generator().manual_seed(3)))

    def forward(self, x):
        return self.model(x, torch.tensor([3]), self.text, return_dict=False)[0]


def monai_unetr():
    return imported("monai.networks.nets").UNETR(
        in_channels=1, out_channels=2, img_size=(32, 48), feature_size=4, hidden_size=16, mlp_dim=32, num_heads=2,
        spatial_dims=2,
    )  # fmt: skip


def monai_vnet():
    return imported("monai.networks.nets").VNet(spatial_dims=2, in_channels=1, out_channels=2, dropout_prob_down=0.0,
        dropout_prob_up=(0.0, 0.0))  # fmt: skip


DPT = {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8}
VIT = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 32, "patch_size": 4}


def transformers_dpt():
    t = imported("transformers")
    config = t.DPTConfig(**VIT, **DPT, intermediate_size=32, backbone_out_indices=[0, 1, 2, 3], hidden_act="gelu")
    return t.DPTForDepthEstimation(config)


def transformers_depth_anything():
    t = imported("transformers")
    backbone = t.Dinov2Config(
        **VIT, mlp_ratio=2, out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False
    )
    config = t.DepthAnythingConfig(
        backbone_config=backbone, reassemble_hidden_size=16, patch_size=4, head_hidden_size=8, **DPT
    )
    return t.DepthAnythingForDepthEstimation(config)


def transformers_videomae():
    """Return a video transformer: tokens of two frames each, all in one sequence."""
    t = imported("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = t.VideoMAEConfig(image_size=(16, 24), patch_size=4, num_frames=4, tubelet_size=2, **sizes)
    return t.VideoMAEModel(config)


LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 512, "attention_dropout": 0.0}


class Llama(nn.Module):
    """transformers' Llama on embedded tokens: rotary positions, grouped queries, causal attention, all logits."""

    def __init__(self):
        super().__init__()
        t = imported("transformers")
        self.model = t.LlamaForCausalLM(t.LlamaConfig(**LLAMA))

    def forward(self, x):
        return self.model(inputs_embeds=x, use_cache=False).logits


def timm_vit_16k():
    model = imported("timm.models").VisionTransformer
    return model(img_size=256, patch_size=2, embed_dim=8, depth=1, num_heads=2, mlp_ratio=2, num_classes=5)


def timm_xcit(width=16):
    model = imported("timm.models").Xcit
    return model(img_size=64, patch_size=8, embed_dim=width, depth=2, num_heads=2, num_classes=5, cls_attn_layers=1)


def vit_pytorch_maxvit(width=8):
    model = imported("vit_pytorch.max_vit").MaxViT
    return model(num_classes=5, dim=width, depth=(1, 1), dim_head=8, dim_conv_stem=width, window_size=4, channels=3)


MODELS: dict[str, Entry] = {
    "DiffusersDiT": Entry("diffusers DiT", (1, 4, 16, 16), package="diffusers", redundancy=1.2),
    "DiffusersWan": Entry("diffusers Wan", (1, 4, 3, 16, 24), (3, 4), (3, 4), SINGLE, package="diffusers"),
    "monai_unetr": Entry("MONAI UNETR", (1, 1, 32, 48), package="monai"),
    "monai_vnet": Entry("MONAI VNet", (1, 1, 64, 64), package="monai"),
    "transformers_dpt": Entry("transformers DPT", (1, 3, 32, 32), package="transformers"),
    "transformers_depth_anything": Entry("transformers DepthAnything", (1, 3, 32, 32), package="transformers"),
    "transformers_videomae": Entry("transformers VideoMAE", (1, 4, 3, 16, 24), (3, 4), (3, 4), package="transformers"),
    "Llama": Entry("transformers Llama", (2, 37, 32), (1,), None, package="transformers"),
    "timm_vit_16k": Entry("timm ViT, 16,384 tokens", (1, 3, 256, 256), package="timm", steps=1),
    "timm_xcit": Entry("timm XCiT", (2, 3, 64, 96), package="timm"),
    "vit_pytorch_maxvit": Entry("vit-pytorch MaxViT", (2, 3, 32, 32), tolerance=1e-8, package="vit_pytorch"),
}
