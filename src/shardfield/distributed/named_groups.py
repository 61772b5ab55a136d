"""Process groups by name: subgroups of consecutive ranks, groups orthogonal to them, trees of groups."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch.distributed as dist

from ..errors import UndefinedGroupError, WorldError
from . import world as worlds
from .config import ProcessGroupConfig, ProcessGroupNode
from .groups import RankLists, orthogonal_groups, split_groups


def format_names(names: Iterable[str]) -> str:
    return ", ".join(repr(n) for n in names) or "none"


class NamedGroups:
    """Methods of `DistributedManager` that create process groups and look them up by name."""

    _world: worlds.World
    _groups: dict[str, dist.ProcessGroup]
    _group_ranks: dict[str, RankLists]
    _group_names: dict[dist.ProcessGroup, str]

    def _ensure_process_group(self) -> None:
        raise NotImplementedError

    @property
    def group_names(self) -> list[str]:
        """The names of the process groups created so far."""
        return list(self._groups)

    def group(self, name: str | None = None) -> dist.ProcessGroup | None:
        """Return this rank's group of that name; without a name return None, which means all ranks in torch."""
        if name is None:
            return None
        if name not in self._groups:
            raise UndefinedGroupError(f"no process group is named {name!r}; there are {format_names(self._groups)}")
        return self._groups[name]

    def group_size(self, name: str | None = None) -> int:
        """Return the number of ranks in a group."""
        return self._world.launch.world_size if name is None else dist.get_world_size(self.group(name))

    def group_rank(self, name: str | None = None) -> int:
        """Return this rank's position in a group."""
        return self._world.launch.rank if name is None else dist.get_rank(self.group(name))

    def group_name(self, group: dist.ProcessGroup | None = None) -> str | None:
        """Return the name of a group; None for None."""
        if group is None:
            return None
        if group not in self._group_names:
            raise UndefinedGroupError(
                f"that process group was not made by name here; there are {format_names(self._groups)}"
            )
        return self._group_names[group]

    # All ranks must call these together, with the same arguments.

    @classmethod
    def create_process_subgroup(
        cls, name: str, size: int, group_name: str | None = None, verbose: bool = False
    ) -> None:
        """Split the group `group_name` (None: all ranks) into groups of `size` consecutive ranks."""
        self = cls()
        if group_name is None:
            parents = [list(range(self._world.launch.world_size))]
        else:
            self.group(group_name)  # raises for an unknown name
            parents = self._group_ranks[group_name]
        self._make_groups(name, split_groups(parents, size), verbose)

    @classmethod
    def create_orthogonal_process_group(
        cls, orthogonal_group_name: str, group_name: str, verbose: bool = False
    ) -> None:
        """Group the ranks at the same position in their groups `group_name`."""
        self = cls()
        self.group(group_name)
        self._make_groups(orthogonal_group_name, orthogonal_groups(self._group_ranks[group_name]), verbose)

    @classmethod
    def create_group_from_node(cls, node: ProcessGroupNode, parent: str | None = None, verbose: bool = False) -> str:
        """Create the group of a node and the group orthogonal to it; return the name of the latter."""
        if node.size is None:
            raise WorldError(f"process group {node.name!r} has no size yet: call config.set_leaf_group_sizes first")
        cls.create_process_subgroup(node.name, node.size, parent, verbose)
        orthogonal = f"__orthogonal_to_{node.name}"
        cls.create_orthogonal_process_group(orthogonal, node.name, verbose)
        return orthogonal

    @classmethod
    def create_groups_from_config(cls, config: ProcessGroupConfig, verbose: bool = False) -> None:
        """Create all groups of a tree. The children of a node are orthogonal to each other.

        Warns, since the interface is experimental.
        """
        warnings.warn("create_groups_from_config is experimental and may change", stacklevel=2)
        cls.create_group_from_node(config.root, verbose=verbose)
        pending = [config.root_id]
        while pending:
            parent = pending.pop(0)
            for child in config.children(parent):
                pending.append(child.name)
                # Each child splits the group that is orthogonal to the previous child.
                parent = cls.create_group_from_node(child, parent, verbose)

    def _make_groups(self, name: str, ranks_of_groups: RankLists, verbose: bool) -> None:
        if name in self._groups:
            raise WorldError(f"there is a process group {name!r} already")
        self._ensure_process_group()
        # torch requires that every rank creates every group in the same order, even groups without this rank.
        for ranks in ranks_of_groups:
            group = dist.new_group(ranks, timeout=self._world.timeout)
            if self._world.launch.rank in ranks:
                worlds.wait_until_joined(group)
                self._groups[name] = group
                self._group_names[group] = name
        self._group_ranks[name] = ranks_of_groups
        if verbose and self._world.launch.rank == 0:
            print(f"Process group '{name}':", *ranks_of_groups, sep="\n    ")
