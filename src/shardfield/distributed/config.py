"""A tree of named process groups, whose sizes follow from those of the leaves."""

import math
from dataclasses import dataclass

from ..errors import UndefinedGroupError, WorldError


@dataclass(eq=False)
class ProcessGroupNode:
    """A named process group and its size, once it is set."""

    name: str
    size: int | None = None


class ProcessGroupConfig:
    """The nesting of a model's process groups.

    The children of a node are orthogonal: together they span their parent, whose size is the product of theirs.
    So only the sizes of the leaves are set. `DistributedManager.create_groups_from_config` creates the groups.

    >>> world = ProcessGroupNode("world")
    >>> config = ProcessGroupConfig(world)
    >>> config.add_node(ProcessGroupNode("model_parallel"), parent=world)
    >>> config.add_node(ProcessGroupNode("data_parallel"), parent="world")
    >>> config.add_node(ProcessGroupNode("spatial_parallel"), parent="model_parallel")
    >>> config.add_node(ProcessGroupNode("channel_parallel"), parent="model_parallel")
    >>> config.leaf_groups()
    ['data_parallel', 'spatial_parallel', 'channel_parallel']
    >>> config.set_leaf_group_sizes({"channel_parallel": 3, "spatial_parallel": 2, "data_parallel": 4})
    >>> config.get_node("model_parallel").size, config.get_node("world").size
    (6, 24)
    """

    def __init__(self, node: ProcessGroupNode):
        self.root = node
        self.root_id = node.name
        self._nodes = {node.name: node}
        self._children: dict[str, list[str]] = {node.name: []}

    def add_node(self, node: ProcessGroupNode, parent: str | ProcessGroupNode) -> None:
        """Add `node` below `parent`, a node of this tree or its name."""
        above = self.get_node(parent.name if isinstance(parent, ProcessGroupNode) else parent)
        if node.name in self._nodes:
            raise WorldError(f"the tree has a process group {node.name!r} already")
        self._nodes[node.name] = node
        self._children[node.name] = []
        self._children[above.name].append(node.name)

    def get_node(self, name: str) -> ProcessGroupNode:
        """Return the node of that name."""
        if name not in self._nodes:
            raise UndefinedGroupError(f"no process group {name!r} in the tree; it has {', '.join(self._nodes)}")
        return self._nodes[name]

    def children(self, name: str) -> list[ProcessGroupNode]:
        """Return the children of a node, in the order they were added."""
        return [self._nodes[child] for child in self._children[self.get_node(name).name]]

    def leaf_groups(self) -> list[str]:
        """Return the names of the groups without children, in the order they were added."""
        return [name for name, below in self._children.items() if not below]

    def set_leaf_group_sizes(self, group_sizes: dict[str, int], update_parent_sizes: bool = True) -> None:
        """Set the sizes of leaves, and by default update all sizes above them."""
        for name, size in group_sizes.items():
            node = self.get_node(name)
            if self._children[name]:
                raise WorldError(f"{name!r} is not a leaf: its size follows from {', '.join(self._children[name])}")
            if size < 1:
                raise WorldError(f"process group {name!r}: a size of {size}")
            node.size = size
        if update_parent_sizes:
            self.update_parent_sizes()

    def update_parent_sizes(self, verbose: bool = False) -> int:
        """Compute all sizes above the leaves, and return the size of the root."""
        unset = [name for name in self.leaf_groups() if self._nodes[name].size is None]
        if unset:
            raise WorldError(f"the sizes of these leaf groups are not set: {', '.join(unset)}")
        return self._update_sizes(self.root_id, verbose)

    def _update_sizes(self, name: str, verbose: bool) -> int:
        node = self._nodes[name]
        if self._children[name]:
            size = math.prod(self._update_sizes(child, verbose) for child in self._children[name])
            if verbose and node.size != size:
                print(f"Updating size of node {name} from {node.size} to {size}")
            node.size = size
        assert node.size is not None
        return node.size
