"""What blocks do with what they are given, and callers with what blocks return: of FSDP alone, whose calls go through
boundaries."""

import dataclasses
import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parallel.odd.nets import Block, net, plain_block
from tests.parallel.odd.runs import WIDTH, Scenario


def _write(block, x, found, *again):
    y = plain_block(block, x)
    for each in (found, *again):
        if isinstance(each, dict):
            each[len(each)] = y.square().mean()
        else:
            each.append(y.square().mean())
    return y


def _writes_into(make):
    """Blocks leave an auxiliary loss in a container that they are given, inside of another one here."""

    def body(net, x):
        outer = (make(),)
        for block in net.blocks:
            x = x + block(x, found=outer[0])
        found = outer[0]
        assert len(found) == len(net.blocks)
        return x + sum(found.values() if isinstance(found, dict) else found)

    return net(block=_write, body=body)


def _share_list(net):
    net.found = []
    for block in net.blocks:
        block.up.register_forward_hook(lambda module, given, output: net.found.append(output.mean()))


def _written_by_others(net, x):
    """Into a list that a block is given twice, and that a hook of the block has as well."""
    net.found.clear()
    for block in net.blocks:
        x = x + block(x, net.found, net.found)
    assert len(net.found) == 3 * len(net.blocks)
    return x + sum(net.found)


def _note_input(net):
    net.blocks[1].register_forward_pre_hook(lambda module, given: setattr(net, "noted", given[0]))


def _note_inside(net):
    net.blocks[1].requires_grad_(False)
    net.blocks[1].up.register_forward_hook(lambda module, given, output: setattr(net, "noted", output))


def _of_noted(net, x):
    """The second block's output is not used."""
    net.blocks[1](net.blocks[0](x))
    return net.blocks[3](net.blocks[2](net.noted))


def _beside_noted(net, x):
    net.blocks[1](net.blocks[0](x))
    return net.blocks[3](net.blocks[2](x)) + net.noted.mean()


TABLE = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7))


class WithTable(Block):
    """Frozen parameters that all blocks have in one memory."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(TABLE, requires_grad=False)

    def forward(self, x):
        return super().forward(x @ self.table)


def _with_bias(block, x):
    return F.linear(torch.tanh(block.up(x)), block.down.weight, block.norm.bias)


def _change_in_place(net, x):
    """The caller adds to what a block returned, which is a view."""
    x = x[None]
    for block in net.blocks:
        y = block(x)
        assert y._base is not None, "a linear layer of three dimensions, on the CPU"
        y += x
        x = y
    return x[0]


def _by_signature(net, x):
    for block in net.blocks:
        known = inspect.signature(block.forward).parameters
        x = x + block(x, **{name: value for name, value in {"scale": 0.5, "other": 2}.items() if name in known})
    return x


class WithBoundary(Block):
    def __init__(self):
        super().__init__()
        self.boundary, self.scale = nn.Linear(WIDTH, WIDTH), 0.5

    def forward(self, x):
        return super().forward(self.boundary(x)) * self.scale


@dataclasses.dataclass(slots=True)
class Output:
    states: Tensor


def _of_slots(net, x):
    for block in net.blocks:
        x = x + block(x).states
    return x


class UsedDetached(nn.Module):
    """A weight's gradient is there before backward is through with it, and the input needs none."""

    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x):
        return F.softmax(x @ self.code.detach().t() + (x @ self.code.t()).mean(), dim=-1) @ self.code


def _constrain(block, x):
    block.up.weight.data = torch.renorm(block.up.weight.data, 2, 0, 1.0)
    return plain_block(block, x)


def _freeze_last(net):
    net.blocks[2:].requires_grad_(False)


MODELS = {
    "a list that blocks append to": _writes_into(list),
    "a dict that blocks write into": _writes_into(dict),
    "a list that a hook writes into, too": net(block=_write, then=_share_list, body=_written_by_others),
    "an input that a hook notes": net(then=_note_input, body=_of_noted),
    "frozen parameters of one memory": net(block=WithTable),
    "an output that is changed in place": net(block=_with_bias, body=_change_in_place),
    "an output of frozen blocks that is changed in place": net(
        block=_with_bias, body=_change_in_place, then=_freeze_last
    ),
    "arguments by a signature": net(block=lambda self, x, scale=1.0: plain_block(self, x) * scale, body=_by_signature),
    "a part called boundary": net(block=WithBoundary),
    "an output with slots": net(block=lambda block, x: Output(plain_block(block, x)), body=_of_slots),
    "a weight that is used detached, too": UsedDetached,
    "a weight that is given other memory": net(block=_constrain),
    "frozen weights that backward reaches past an output": net(then=_note_inside, body=_beside_noted),
}
SCENARIOS = {name: Scenario(name, model) for name, model in MODELS.items()}
