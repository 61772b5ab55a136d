"""Check an op on ShardTensors against the same op on one device: values, all gradients, errors and messages.

`cases` describes a call, `draw` draws values and layouts for its tensors, `run` calls both sides and judges errors,
`compare` compares results and gradients, `precision` does all of it in bf16 and under autocast, `inference` in
inference mode. All of them run on the ranks but `cases`, and `virtual`, which has all ranks in one process.
"""

from .cases import Case as Case
from .cases import Raises as Raises
from .cases import T as T
from .cases import case as case
from .cases import double_backward as double_backward
from .cases import raises as raises
from .compare import any_rank as any_rank
from .compare import describe_mismatch as describe_mismatch
from .compare import to_full_tensor as to_full_tensor
from .draw import DEVICE as DEVICE
from .draw import MESHES as MESHES
from .draw import draw_layout as draw_layout
from .draw import draw_shard_sizes as draw_shard_sizes
from .draw import local_shard as local_shard
from .draw import world_mesh as world_mesh
from .run import check_case as check_case
from .run import check_declared_error as check_declared_error
from .run import ignore_gather_warnings as ignore_gather_warnings
from .run import no_gathers as no_gathers
from .run import run_plain as run_plain
