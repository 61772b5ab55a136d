"""The rules, one file per family. Importing this package registers them."""

from . import autograd as autograd
from . import dims as dims
from . import einsum as einsum
from . import extreme as extreme
from . import index as index
from . import join as join
from . import mask as mask
from . import metadata as metadata
from . import moments as moments
from . import norm as norm
from . import order as order
from . import pointwise as pointwise
from . import product as product
from . import put as put
from . import quantile as quantile
from . import random as random
from . import reduce as reduce
from . import scan as scan
from . import softmax as softmax
from . import split as split
from . import subscript as subscript
from . import take as take
from . import view as view
