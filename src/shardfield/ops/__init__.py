"""The rules, one file per family. Importing this package registers them."""

from . import adaptive as adaptive
from . import attention as attention
from . import autograd as autograd
from . import batch_norm as batch_norm
from . import classes as classes
from . import compare as compare
from . import conv as conv
from . import copies as copies
from . import diagonal as diagonal
from . import difference as difference
from . import dims as dims
from . import distance as distance
from . import einsum as einsum
from . import embed as embed
from . import extreme as extreme
from . import factory as factory
from . import fft as fft
from . import grid as grid
from . import histogram as histogram
from . import index as index
from . import interpolate as interpolate
from . import join as join
from . import linalg as linalg
from . import loss as loss
from . import mask as mask
from . import metadata as metadata
from . import moments as moments
from . import norm as norm
from . import normalise as normalise
from . import order as order
from . import pad as pad
from . import patches as patches
from . import pointwise as pointwise
from . import pool as pool
from . import product as product
from . import put as put
from . import quantile as quantile
from . import random as random
from . import rearrange as rearrange
from . import recurrent as recurrent
from . import reduce as reduce
from . import scan as scan
from . import scatter as scatter
from . import script as script
from . import search as search
from . import softmax as softmax
from . import sparse as sparse
from . import spectral as spectral
from . import split as split
from . import subscript as subscript
from . import take as take
from . import unique as unique
from . import unpool as unpool
from . import view as view

from . import borders as borders  # isort: skip  (it stands before rules that are in the table by now)
from .methods import install as _install  # isort: skip

_install()
