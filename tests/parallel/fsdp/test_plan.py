"""Which parameters travel together, for models as people write them."""

import pytest
import torch
from torch import nn

from tests.parallel.nets import build
from trainstep.base.errors import UsageError
from trainstep.parallel.fsdp.shards import cut_rows, plan_groups


def names(root, chosen=None):
    return [[parameter.names[0] for parameter in group.parameters] for group in plan_groups(root, chosen)]


def test_blocks_and_the_largest_modules_around_them():
    root = build(blocks=2)
    block = ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"]
    assert names(root) == [
        ["position"],
        ["embedding.weight"],
        [f"blocks.0.{name}" for name in block],
        [f"blocks.1.{name}" for name in block],
        ["norm.weight", "norm.bias"],
        ["head.weight"],
    ]
    assert next(group.units for group in plan_groups(root)) == [root]


def test_a_tied_weight_is_a_group_of_both_units():
    root = build(blocks=1, tied=True)
    tied = next(group for group in plan_groups(root) if group.parameters[0].names[0] == "embedding.weight")
    assert tied.units == [root.embedding, root.head]
    assert tied.parameters[0].names == ["embedding.weight", "head.weight"]
    assert tied.parameters[0].slots == [(root.embedding, "weight"), (root.head, "weight")]


class Wrapped(nn.Module):
    """As libraries nest: model.inner.layers; a pooler of several modules; a Sequential; lists that are never called."""

    def __init__(self):
        super().__init__()
        self.inner = build(blocks=2)
        self.pooler = nn.MultiheadAttention(4, 2)
        self.tail = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.pairs = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2))
        self.loose = nn.ParameterList([nn.Parameter(torch.zeros(2, 2))])

    def forward(self):
        raise NotImplementedError


def test_nested_models_sequentials_and_lists():
    root = Wrapped()
    groups = dict(zip(map(tuple, names(root)), plan_groups(root), strict=True))
    assert ("pooler.in_proj_weight", "pooler.in_proj_bias", "pooler.out_proj.weight", "pooler.out_proj.bias") in groups
    assert ("tail.0.weight", "tail.0.bias") in groups
    assert ("pairs.1.0.weight", "pairs.1.0.bias") in groups
    assert ("inner.position",) in groups
    assert groups[("inner.position",)].units == [root.inner]
    assert groups[("loose.0",)].units == [root], "a list is never called, the module around it is"
    assert len([group for group in groups if group[0].startswith("inner.blocks.")]) == 2


def test_chosen_groups():
    root = build(blocks=2)
    assert names(root, [root]) == [[name for name, _ in root.named_parameters()]]
    one = names(root, [root.blocks[0].up])
    assert ["blocks.0.up.weight", "blocks.0.up.bias"] in one
    with pytest.raises(UsageError, match="a Linear that is not part of the module"):
        plan_groups(root, [nn.Linear(2, 2)])
    with pytest.raises(UsageError, match="blocks, a ModuleList, which is never called"):
        plan_groups(root, [root.blocks])


def test_modules_of_a_list_are_one_group():
    root = build(blocks=3)
    for pair in ([*root.blocks[:2]], tuple(root.blocks[:2]), root.blocks[:2]):
        chosen = plan_groups(root, [pair, root.blocks[2]])
        blocks = [group for group in chosen if group.parameters[0].names[0].startswith("blocks.")]
        assert [group.units for group in blocks] == [[root.blocks[0], root.blocks[1]], [root.blocks[2]]]
        assert [len(group.parameters) for group in blocks] == [10, 5]
    with pytest.raises(UsageError, match=r"groups has blocks\.0, a Block, twice; give it once"):
        plan_groups(root, [[root.blocks[0], root.blocks[1]], root.blocks[0]])
    with pytest.raises(
        UsageError, match=r"groups has blocks\.0 in one list with a module inside it; leave that one out"
    ):
        plan_groups(root, [[next(root.blocks[0].children()), root.blocks[0]]])
    with pytest.raises(UsageError, match="a Linear that is not part of the module"):
        plan_groups(root, [[root.blocks[0], nn.Linear(2, 2)]])
    for wrong, kind in ((3, "int"), (None, "NoneType"), ([[root.blocks[0]]], "list"), ("blocks", "str")):
        with pytest.raises(UsageError, match=f"groups has a {kind} that is not part of the module"):
            plan_groups(root, [wrong])
    assert names(root, [root.blocks[0], root.blocks[0]]) == names(root, [root.blocks[0]]), "a block at two places"


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_are_cut_as_torch_chunks(rows, ranks):
    whole = torch.arange(rows * 3).view(rows, 3)
    chunks = list(whole.chunk(ranks))
    for rank in range(ranks):
        own, padded_shape = cut_rows(whole.shape, rank, ranks)
        expected = chunks[rank] if rank < len(chunks) else whole[:0]
        assert torch.equal(whole[own], expected)
        assert padded_shape == (-(-rows // ranks) * ranks, 3)
