"""Train on a mesh: models on data x domain ranks, the training loop, checkpoints."""

from .checkpoint import Checkpoints as Checkpoints
from .checkpoint import full_state_dict as full_state_dict
from .checkpoint import load_full_state_dict as load_full_state_dict
from .checkpoint_index import CheckpointError as CheckpointError
from .complex_params import real_pairs as real_pairs
from .config import TrainConfig as TrainConfig
from .loop import Trainer as Trainer
from .loop import fit as fit
from .nonfinite import NonFinite as NonFinite
from .parallel import clip_grad_norm_ as clip_grad_norm_
from .parallel import no_sync as no_sync
from .parallel import parallelize as parallelize
from .preemption import Preempted as Preempted
from .rollout import rollout as rollout
from .task import Task as Task
