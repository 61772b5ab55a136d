"""The rules, one file per family. Importing this package registers them."""

from . import autograd as autograd
from . import metadata as metadata
from . import pointwise as pointwise
from . import reduce as reduce
from . import view as view
