"""Training on a mesh: models on data x domain ranks, the loop, checkpoints."""

from .complex_params import real_pairs as real_pairs
from .parallelize import clip_grad_norm_ as clip_grad_norm_
from .parallelize import no_sync as no_sync
from .parallelize import parallelize as parallelize
