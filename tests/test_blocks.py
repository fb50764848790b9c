from torch import nn

from trainstep.blocks import find_blocks, without_numbers
from trainstep.config import SIZES
from trainstep.model.transformer import TransformerBlock, build_transformer


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x):
        return self.inner[1](self.inner[0](x))


def test_our_model():
    blocks = find_blocks(build_transformer(SIZES["tiny"], device="meta"))
    assert [type(block) for block in blocks] == [TransformerBlock] * 4


def test_outermost_lists_only():
    model = nn.Sequential(nn.Embedding(3, 2), nn.ModuleDict({"h": nn.ModuleList([Layer(), Layer()])}), nn.Linear(2, 3))
    assert [type(block) for block in find_blocks(model)] == [Layer, Layer]


def test_a_sequential_of_one_repeated_class_counts():
    model = nn.ModuleDict(
        {"body": nn.Sequential(Layer(), Layer(), Layer()), "head": nn.Sequential(nn.ReLU(), nn.ReLU())}
    )
    assert len(find_blocks(model)) == 3


def test_a_module_without_lists_has_none():
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


def test_numbers_in_names_are_only_whole_parts():
    assert without_numbers("h.10.mlp.0") == "h.*.mlp.*"
    assert without_numbers("conv1.fc2.3x") == "conv1.fc2.3x"
    assert without_numbers("7") == "*"


def test_a_dict_of_a_layers_parts_is_no_block():
    """It is never called, so compiling or checkpointing it would change nothing, in silence."""
    inner = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    parts = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(2), "experts": inner}) for _ in range(1))
    assert find_blocks(nn.ModuleDict({"layers": parts})) == list(inner)
