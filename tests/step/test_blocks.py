"""Blocks are found as people write them."""

from torch import nn

from trainstep.base.config import SIZES
from trainstep.step.blocks import blocks_in_runs, find_blocks, find_stacks, without_numbers
from trainstep.step.model.transformer import TransformerBlock, build_transformer


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


def test_runs_of_blocks_do_not_reach_from_one_list_into_another():
    parts = nn.ModuleDict({name: nn.ModuleList(nn.Linear(2, 2) for _ in range(3)) for name in ("encoder", "decoder")})
    assert blocks_in_runs(parts, 2) == [
        [*parts["encoder"][:2]],
        [parts["encoder"][2]],
        [*parts["decoder"][:2]],
        [parts["decoder"][2]],
    ]


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


def test_blocks_by_the_list_they_lie_in():
    model = nn.ModuleDict({"encoder": nn.ModuleList([Layer(), Layer()]), "decoder": nn.ModuleList([Layer()])})
    assert [len(stack) for stack in find_stacks(model)] == [2, 1]


def test_a_layer_that_is_a_list_of_its_parts():
    """As x-transformers has them: the norms of a layer, its attention, its residual."""
    layers = nn.ModuleList(nn.ModuleList([nn.ModuleList([nn.LayerNorm(2)]), Layer()]) for _ in range(2))
    stacks = find_stacks(nn.ModuleDict({"layers": layers}))
    assert [[type(block) for block in stack] for stack in stacks] == [[Layer], [nn.LayerNorm]] * 2


def test_the_list_of_a_weights_parametrizations_is_no_stack():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.ModuleList([Layer()]))
    assert [type(block) for block in find_blocks(model)] == [Layer]
