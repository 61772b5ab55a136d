"""Rules of all torch functions, one package per family. Importing this package registers them."""

from .attention import flex as flex
from .attention import packed as packed
from .attention import sdpa as sdpa
from .attention import sphere as sphere
from .elementwise import cross_entropy as cross_entropy
from .elementwise import like_factories as like_factories
from .elementwise import loss as loss
from .elementwise import pointwise as pointwise
from .elementwise import random as random
from .elementwise import recurrent as recurrent
from .indexing import basic_index as basic_index
from .indexing import embedding as embedding
from .indexing import embedding_bag as embedding_bag
from .indexing import gather_rows as gather_rows
from .indexing import getitem as getitem
from .indexing import index_put as index_put
from .indexing import mask as mask
from .indexing import point_search as point_search
from .indexing import scatter as scatter
from .indexing import searchsorted as searchsorted
from .matmul import cdist as cdist
from .matmul import einsum as einsum
from .matmul import linalg as linalg
from .matmul import matmul as matmul
from .matmul import sparse_mm as sparse_mm
from .normalization import batch_norm as batch_norm
from .normalization import layer_group_norm as layer_group_norm
from .protocol import autograd_bridge as autograd_bridge
from .protocol import metadata as metadata
from .protocol import torchscript as torchscript
from .reduction import compare as compare
from .reduction import histogram as histogram
from .reduction import minmax as minmax
from .reduction import quantile as quantile
from .reduction import reduce as reduce
from .reduction import softmax as softmax
from .reduction import var_mean as var_mean
from .reduction import vector_norm as vector_norm
from .shape import cat as cat
from .shape import diagonal as diagonal
from .shape import flip_roll as flip_roll
from .shape import permute as permute
from .shape import split as split
from .shape import view as view
from .shape import view_copies as view_copies
from .sorting import scan as scan
from .sorting import sort_topk as sort_topk
from .sorting import unique as unique
from .spectral import fft as fft
from .spectral import truncation as truncation
from .stencil import adaptive_pool as adaptive_pool
from .stencil import conv as conv
from .stencil import diff as diff
from .stencil import disco as disco
from .stencil import fold_unfold as fold_unfold
from .stencil import gradient as gradient
from .stencil import grid_sample as grid_sample
from .stencil import interpolate as interpolate
from .stencil import lazy_pad as lazy_pad
from .stencil import pad as pad
from .stencil import pool as pool
from .stencil import unpool as unpool

from .protocol.method_install import install_methods as _install  # isort: skip  (after all rules are registered)

_install()
