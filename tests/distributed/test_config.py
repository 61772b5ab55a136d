"""Trees of process groups, and the ranks of groups and meshes. No process is started."""

import doctest

import pytest

from shardfield.distributed import ProcessGroupConfig, ProcessGroupNode, config, groups
from shardfield.distributed.groups import complete_shape, orthogonal_groups, split_groups
from shardfield.errors import WorldError


@pytest.mark.parametrize("module", [config, groups])
def test_docstring_examples(module):
    failed, tried = doctest.testmod(module)
    assert tried and not failed


def tree():
    world = ProcessGroupNode("world")
    it = ProcessGroupConfig(world)
    it.add_node(ProcessGroupNode("model"), parent=world)
    it.add_node(ProcessGroupNode("data"), parent="world")
    it.add_node(ProcessGroupNode("spatial"), parent="model")
    it.add_node(ProcessGroupNode("channel"), parent="model")
    return it


def test_sizes_propagate_up_the_tree(capsys):
    it = tree()
    assert it.leaf_groups() == ["data", "spatial", "channel"]
    it.set_leaf_group_sizes({"data": 4, "spatial": 2, "channel": 3}, update_parent_sizes=False)
    assert it.get_node("model").size is None
    assert it.update_parent_sizes(verbose=True) == 24
    assert [it.get_node(n).size for n in ("world", "model", "data")] == [24, 6, 4]
    assert "model from None to 6" in capsys.readouterr().out
    assert [n.name for n in it.children("model")] == ["spatial", "channel"]
    it.set_leaf_group_sizes({"data": 5})
    assert it.root.size == 30


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda it: it.add_node(ProcessGroupNode("data"), "world"), "'data' already"),
        (lambda it: it.add_node(ProcessGroupNode("x"), "nowhere"), "no process group 'nowhere'.*world, model, data"),
        (lambda it: it.get_node("nowhere"), "no process group 'nowhere'"),
        (lambda it: it.set_leaf_group_sizes({"model": 2}), "not a leaf: its size follows from spatial, channel"),
        (lambda it: it.set_leaf_group_sizes({"nowhere": 2}), "no process group 'nowhere'"),
        (lambda it: it.set_leaf_group_sizes({"data": 0}), "'data': a size of 0"),
        (lambda it: it.set_leaf_group_sizes({"data": 2}), "not set: spatial, channel"),
    ],
)
def test_invalid_trees_are_rejected(wrong, message):
    with pytest.raises(WorldError, match=message):
        wrong(tree())


def test_ranks_of_groups():
    world = [list(range(8))]
    model = split_groups(world, 4)
    assert split_groups(model, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert orthogonal_groups(model) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert orthogonal_groups(world) == [[r] for r in range(8)]
    for size in (3, 0, -1, 16):
        with pytest.raises(WorldError, match=f"8 ranks cannot be split into groups of {size}"):
            split_groups(world, size)


@pytest.mark.parametrize("shape, full", [((-1,), (8,)), ((2, -1), (2, 4)), ((8, -1), (8, 1)), ([2, 2, 2], (2, 2, 2))])
def test_mesh_shapes(shape, full):
    assert complete_shape(shape, "abc"[: len(shape)], 8) == full


@pytest.mark.parametrize(
    "shape, names, message",
    [
        ((3, -1), "ab", "must divide the number of processes, which is 8"),
        ((3,), "a", "must multiply to the number of processes, which is 8"),
        ((2, 2), "ab", "must multiply to"),
        ((4, 4), "ab", "must multiply to"),
        ((16, -1), "ab", "must divide"),
        ((-1, -1), "ab", "only one size can be -1"),
        ((0, -1), "ab", "at least 1"),
        ((-2, 4), "ab", "at least 1"),
        ((2, 4), "a", "2 sizes and 1 names"),
        ((2, 4), "aa", "same name"),
        ((2, 4), ("a", ""), "at least one letter"),
        ((), "", "at least one axis"),
    ],
)
def test_invalid_mesh_shapes_are_rejected(shape, names, message):
    with pytest.raises(WorldError, match=message):
        complete_shape(shape, names, 8)
