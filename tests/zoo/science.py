"""Models of weather and physics packages in small configurations; `MODELS` has their shardings."""

from __future__ import annotations

import copy
import math
from datetime import datetime

import torch
from torch import nn

from tests.zoo.entry import SINGLE, Entry, Single, imported


class Aurora(nn.Module):
    """Microsoft's Aurora: Perceiver encoder over levels, 3-D Swin U-Net, Perceiver decoder.

    The field has two times of one surface variable and of two variables on three pressure levels.
    """

    def __init__(self, height=32, width=64, channels=16):
        super().__init__()
        self.height, self.width = height, width
        self.aurora = imported("aurora").Aurora(
            surf_vars=("2t",),
            static_vars=("lsm",),
            atmos_vars=("t", "q"),
            window_size=(2, 4, 4),
            encoder_depths=(2, 2),
            encoder_num_heads=(2, 4),
            decoder_depths=(2, 2),
            decoder_num_heads=(4, 2),
            latent_levels=4,
            embed_dim=channels,
            num_heads=2,
            use_lora=False,
        )
        self.register_buffer("lsm", torch.rand(height, width, generator=torch.Generator().manual_seed(3)))

    def forward(self, x):
        aurora = imported("aurora")
        t, q = x[:, :, 1:4], x[:, :, 4:]
        found = self.aurora(
            aurora.Batch(
                surf_vars={"2t": 280 + 20 * x[:, :, 0]},
                static_vars={"lsm": self.lsm},
                atmos_vars={"t": 250 + 10 * t, "q": 0.003 * q},
                metadata=aurora.Metadata(
                    lat=torch.linspace(88, -88, self.height, dtype=torch.float64),
                    lon=torch.arange(self.width, dtype=torch.float64) * (360 / self.width),
                    time=(datetime(2026, 1, 1, 12),),
                    atmos_levels=(100, 500, 850),
                ),
            )
        )
        return found.surf_vars["2t"], found.atmos_vars["t"], 1e3 * found.atmos_vars["q"]


class Anemoi(nn.Module):
    """ECMWF's anemoi: graph transformers from a grid to fewer hidden nodes, between those, and back to the grid."""

    def __init__(self, nodes=43, hidden=17, channels=16):
        super().__init__()
        config = imported("omegaconf").OmegaConf.create
        layers, here = "anemoi.models.layers", {"num_channels": channels, "num_heads": 2, "mlp_hidden_ratio": 2}
        here |= {"num_chunks": 1, "graph_attention_backend": "pyg", "sub_graph_edge_attributes": ["length"]}
        here |= {"trainable_size": 2, "layer_kernels": {}}
        forward = here | {"_target_": f"{layers}.mapper.GraphTransformerForwardMapper"}
        backward = here | {"_target_": f"{layers}.mapper.GraphTransformerBackwardMapper"}
        encoder = {"source_datasets": ["data"], "dataset_fusing_strategy": "not_supported", "mapper": forward}
        target = ["prognostics", "forcings", "coordinates", "trainable_parameters"]
        decoder = {"target_datasets": ["data"], "target_node_features": target, "mapper": backward}
        model = {
            "model": {"hidden_nodes_name": "hidden", "latent_skip": True},
            "node_trainable_parameters": {"data": 2, "hidden": 2},
            "encoders": {"first": encoder},
            "decoders": {"last": decoder},
            "processor": here | {"_target_": f"{layers}.processor.GraphTransformerProcessor", "num_layers": 2},
            "latent_aggregator": {"_target_": f"{layers}.aggregator.SumAggregator"},
            "residual": {"_target_": f"{layers}.residual.SkipConnection"},
        }
        graph = imported("torch_geometric.data").HeteroData()
        generator = torch.Generator().manual_seed(3)
        for name, number in (("data", nodes), ("hidden", hidden)):
            graph[name].x = torch.rand(number, 2, generator=generator)
            graph[name].num_nodes = number
        for source, to in (("data", "hidden"), ("hidden", "hidden"), ("hidden", "data")):
            length = torch.cdist(graph[to].x, graph[source].x)
            nearest = length.topk(4, largest=False)
            receiver = torch.arange(len(length)).repeat_interleave(4)
            graph[source, "to", to].edge_index = torch.stack([nearest.indices.flatten(), receiver])
            graph[source, "to", to].length = nearest.values.reshape(-1, 1)
        names = {"t": 0, "q": 1, "orography": 2}
        indices = imported("anemoi.models.data_indices.collection").IndexCollection
        self.model = imported("anemoi.models.models").AnemoiModelEncProcDec(
            model_config=config({"model": model}),
            data_indices={"data": indices(config({"forcing": ["orography"], "diagnostic": []}), names)},
            statistics={"data": {}},
            n_step_input=2,
            n_step_output=1,
            graph_data=graph,
        )

    def forward(self, x):
        return self.model({"data": x})["data"]


def credit_wxformer(size=64, width=8):
    return imported("credit.models.wxformer.crossformer").CrossFormer(
        image_height=size, image_width=size, channels=2, levels=2, surface_channels=2, input_only_channels=1,
        dim=tuple(n * width for n in (1, 2, 4, 8)), depth=(1, 1, 1, 1), dim_head=8,
        global_window_size=(4, 4, 2, 1), local_window_size=2,
        cross_embed_kernel_sizes=((4, 8), (2, 4), (2, 4), (2, 4)), cross_embed_strides=(2, 2, 2, 2),
    )  # fmt: skip


def credit_crossformer(size=64, width=8):
    return imported("credit.models.crossformer").CrossFormer(
        image_height=size, image_width=size, channels=2, levels=2, surface_channels=2, input_only_channels=1,
        dim=tuple(n * width for n in (1, 2, 4, 8)), depth=(1, 1, 1, 1), dim_head=8,
        global_window_size=(4, 4, 2, 1), local_window_size=2,
        cross_embed_kernel_sizes=((4, 8), (2, 4), (2, 4), (2, 4)), cross_embed_strides=(2, 2, 2, 2),
    )  # fmt: skip


def the_well(name: str, size, **options):
    return getattr(imported("the_well.benchmark.models"), name)(3, 2, len(size), size, **options)


def the_well_unet_classic():
    return the_well("UNetClassic", (64, 96), init_features=4)


def the_well_unet_convnext():
    return the_well("UNetConvNext", (64, 96), init_features=4, stages=4, blocks_per_stage=1, blocks_at_neck=1)


def the_well_avit(size=(64, 96), width=48):
    return the_well("AViT", size, hidden_dim=width, num_heads=2, processor_blocks=2)


def the_well_afno(size=(64, 96), width=16):
    return Single(the_well("AFNO", size, hidden_dim=width, n_blocks=2, cmlp_diagonal_blocks=2))


def the_well_refno():
    return the_well("ReFNO", (32, 48), hidden_dim=6, blocks=2)


def the_well_dilated_resnet():
    return the_well("DilatedResNet", (32, 48), blocks=2, levels_per_block=3, hidden_dim=6)


def spherical(name: str, **options):
    models = imported("torch_harmonics.examples.models")
    sizes = {"img_size": (32, 64), "in_chans": 3, "out_chans": 2, "embed_dim": 8, "num_layers": 2, "scale_factor": 2}
    return Single(getattr(models, name)(**sizes | options))


def torch_harmonics_lsno():
    return spherical("LocalSphericalNeuralOperator")


def torch_harmonics_s2transformer():
    return spherical("SphericalTransformer", num_heads=2)


def physicsnemo_pangu():
    pangu = imported("physicsnemo.models.pangu").Pangu
    return pangu(img_size=(32, 64), embed_dim=16, num_heads=(2, 4, 4, 2), window_size=(2, 4, 4))


class GeoTransolver(nn.Module):
    """PhysicsNeMo's GeoTransolver on points with their positions, and four numbers for all of them."""

    def __init__(self):
        super().__init__()
        model = imported("physicsnemo.models.geotransolver").GeoTransolver
        sizes = {"n_hidden": 16, "n_head": 2, "n_layers": 2, "slice_num": 5}
        self.model = model(8, 3, geometry_dim=3, global_dim=4, use_te=False, **sizes)
        self.register_buffer("everywhere", torch.rand(1, 1, 4, generator=torch.Generator().manual_seed(3)))

    def forward(self, points):
        return self.model(points, global_embedding=self.everywhere, geometry=points[..., :3])


class PhysicsNeMoTransolver(nn.Module):
    """PhysicsNeMo's Transolver on points with their positions."""

    def __init__(self):
        super().__init__()
        model = imported("physicsnemo.models.transolver").Transolver
        sizes = {"n_hidden": 16, "n_head": 2, "n_layers": 2, "slice_num": 5}
        self.model = model(5, 2, embedding_dim=3, use_te=False, **sizes)

    def forward(self, points):
        return self.model(points[..., 3:], points[..., :3])


class DoMINO(nn.Module):
    """PhysicsNeMo's DoMINO: points in a volume, on a surface and of a geometry, each with what is known of it.

    The grids around the geometry are inputs too, so that they can be sharded.
    """

    NEIGHBORS = 3
    COLUMNS = {
        "volume_mesh_centers": (3,), "pos_volume_closest": (3,), "pos_volume_center_of_mass": (3,), "sdf_nodes": (1,),
        "geometry_coordinates": (3,), "surface_mesh_centers": (3,), "pos_surface_center_of_mass": (3,),
        "surface_normals": (3,), "surface_areas": (), "surface_mesh_neighbors": (NEIGHBORS, 3),
        "surface_neighbors_normals": (NEIGHBORS, 3), "surface_neighbors_areas": (NEIGHBORS,),
    }  # fmt: skip

    def __init__(self, grid=(8, 8, 8)):
        super().__init__()
        config = imported("physicsnemo.models.domino.config")
        found = config.Config(copy.deepcopy(dict(config.DEFAULT_MODEL_PARAMS)))
        found.interp_res, found.num_neighbors_surface = list(grid), self.NEIGHBORS + 1
        found.num_neighbors_volume = 1  # more of them are drawn at random
        for part in ("geometry_local", "nn_basis_functions", "aggregation_model", "parameter_model"):
            found[part].base_layer = 8
        found.position_encoder.base_neurons = 8
        found.geometry_rep.geo_conv.base_neurons = 4
        found.geometry_rep.geo_conv |= {
            "volume_radii": [0.5, 1.0],
            "volume_neighbors_in_radius": [4, 8],
            "surface_radii": [0.5],
            "surface_neighbors_in_radius": [4],
        }
        found.geometry_rep.base_filters = found.geometry_rep.geo_processor.base_filters = 2
        found.geometry_local |= {
            "volume_neighbors_in_radius": [4],
            "surface_neighbors_in_radius": [4],
            "volume_radii": [0.5],
            "surface_radii": [0.5],
        }
        self.model = imported("physicsnemo.models.domino.model").DoMINO(3, 2, 2, model_parameters=found)
        generator = torch.Generator().manual_seed(3)
        shapes = {"volume_min_max": (2, 3), "surface_min_max": (2, 3)}
        shapes |= {"global_params_values": (2, 1), "global_params_reference": (2, 1)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.rand(1, *shape, generator=generator))

    def forward(self, points, **grids):
        data = {name: value for name, value in self.named_buffers(recurse=False)} | grids
        at = 0
        for name, shape in self.COLUMNS.items():
            wide = math.prod(shape)
            data[name] = points[..., at : at + wide].reshape(*points.shape[:2], *shape)
            at += wide
        for name in ("surface_areas", "surface_neighbors_areas"):
            data[name] = data[name].abs() + 0.1
        return self.model(data)


SONG = {"model_channels": 8, "channel_mult": [1, 2], "num_blocks": 1, "attn_resolutions": [16], "dropout": 0.0}


class SongUNet(nn.Module):
    """PhysicsNeMo's SongUNet at one noise level."""

    def __init__(self, size=(32, 48), **options):
        super().__init__()
        unets = imported("physicsnemo.models.diffusion_unets")
        self.unet = unets.SongUNet(img_resolution=list(size), in_channels=3, out_channels=2, **SONG | options)

    def forward(self, x):
        return self.unet(x, x.new_full((1,), 0.3))


def physicsnemo_stormcast(size=(32, 48), **options):
    unets = imported("physicsnemo.models.diffusion_unets")
    return unets.StormCastUNet(img_resolution=list(size), img_in_channels=3, img_out_channels=2, **SONG | options)


DOMINO_GRIDS = {"grid": (8, 8, 8, 3), "surf_grid": (8, 8, 8, 3), "sdf_grid": (8, 8, 8), "sdf_surf_grid": (8, 8, 8)}


def physicsnemo_domino():
    generator = torch.Generator().manual_seed(3)
    grids = {name: torch.rand(1, *shape, generator=generator) for name, shape in DOMINO_GRIDS.items()}
    return Single(DoMINO()), {"points": torch.randn(1, 29, 44, generator=generator), **grids}


MODELS: dict[str, Entry] = {
    "Aurora": Entry("Microsoft Aurora", (1, 2, 7, 32, 64), (3, 4), (3, 4), package="aurora"),
    "Anemoi": Entry(
        "anemoi graph transformer",
        (1, 2, 1, 43, 3),
        (3,),
        None,
        package="anemoi.models",
        redundancy=1.2,
    ),  # fmt: skip
    "credit_wxformer": Entry(
        "CREDIT WXFormer", (1, 7, 2, 64, 64), (3, 4), (3, 4), package="credit", unbalanced=("pad",)
    ),
    "credit_crossformer": Entry("CREDIT CrossFormer", (1, 7, 2, 64, 64), (3, 4), (3, 4), package="credit"),
    "the_well_unet_classic": Entry("the_well UNetClassic", (1, 3, 64, 96), package="the_well"),
    "the_well_unet_convnext": Entry("the_well UNetConvNext", (1, 3, 64, 96), package="the_well"),
    "the_well_avit": Entry("the_well AViT", (1, 64, 96, 3), (1, 2), (1, 2), package="the_well"),
    "the_well_afno": Entry("the_well AFNO", (1, 64, 96, 3), (1, 2), (1, 2), SINGLE, package="the_well"),
    "the_well_refno": Entry("the_well ReFNO", (1, 32, 48, 3), (1, 2), (1, 2), package="the_well"),
    "the_well_dilated_resnet": Entry("the_well DilatedResNet", (1, 3, 32, 48), package="the_well"),
    "torch_harmonics_lsno": Entry("torch-harmonics LSNO", (1, 3, 32, 64), tolerance=SINGLE),
    "torch_harmonics_s2transformer": Entry("torch-harmonics S2 transformer", (1, 3, 32, 64), tolerance=SINGLE),
    "physicsnemo_pangu": Entry("PhysicsNeMo Pangu", (1, 72, 32, 64), package="physicsnemo"),
    "GeoTransolver": Entry("PhysicsNeMo GeoTransolver", (1, 37, 8), (1,), None, package="physicsnemo"),
    "PhysicsNeMoTransolver": Entry("PhysicsNeMo Transolver", (1, 37, 8), (1,), None, package="physicsnemo"),
    "physicsnemo_domino": Entry(
        "PhysicsNeMo DoMINO", None, (1,), None, SINGLE, package="physicsnemo", sharded=("points", *DOMINO_GRIDS)
    ),
    "SongUNet": Entry("PhysicsNeMo SongUNet", (1, 3, 32, 48), package="physicsnemo"),
    "physicsnemo_stormcast": Entry(
        "PhysicsNeMo StormCastUNet", (1, 3, 32, 48), tolerance=SINGLE, package="physicsnemo"
    ),
}
