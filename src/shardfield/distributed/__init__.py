"""The process world: who this process is, its groups and meshes, and the collectives over them."""

from .config import ProcessGroupConfig as ProcessGroupConfig
from .config import ProcessGroupNode as ProcessGroupNode
from .manager import DistributedManager as DistributedManager
