"""What blocks do with what they are given, and callers with what blocks return, trains as it does in one process."""

import copy
import dataclasses
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainstep.base.errors import UsageError
from trainstep.parallel import FullyShardedDataParallel

pytestmark = pytest.mark.distributed

WIDTH = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)

    def body(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x):
        return self.head(self.body(self.first(x)))


class Writing(Block):
    def forward(self, x, found):
        y = super().forward(x)
        if isinstance(found, dict):
            found[len(found)] = y.square().mean()
        else:
            found.append(y.square().mean())
        return y


class WritesInto(Net):
    """Blocks leave an auxiliary loss in a container that they are given, inside of another one here."""

    def __init__(self, make):
        super().__init__(Writing)
        self.make = make

    def body(self, x):
        outer = (self.make(),)
        for block in self.blocks:
            x = x + block(x, found=outer[0])
        found = outer[0]
        assert len(found) == len(self.blocks)
        return x + sum(found.values() if isinstance(found, dict) else found)


class Twice(Block):
    def forward(self, x, found, again):
        again.append((y := super().forward(x)).square().mean())
        return y


class WrittenByOthers(Net):
    """Into a list that a block is given twice, and that a hook of the block has as well."""

    def __init__(self):
        super().__init__(Twice)
        self.found = []
        for block in self.blocks:
            block.up.register_forward_hook(self._note)

    def _note(self, _, given, output):
        self.found.append(output.mean())

    def body(self, x):
        self.found.clear()
        for block in self.blocks:
            x = x + block(x, self.found, self.found)
        assert len(self.found) == 2 * len(self.blocks)
        return x + sum(self.found)


class NotedInput(Net):
    """A hook notes what a block is given; its output is not used."""

    def __init__(self):
        super().__init__()
        self.blocks[1].register_forward_pre_hook(self._note)

    def _note(self, _, given):
        self.noted = given[0]

    def body(self, x):
        x = self.blocks[0](x)
        self.blocks[1](x)
        return self.blocks[3](self.blocks[2](self.noted))


TABLE = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7))


class WithTable(Block):
    """Frozen parameters that all blocks have in one memory."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(TABLE, requires_grad=False)

    def forward(self, x):
        return super().forward(x @ self.table)


class ChangedInPlace(Net):
    """The caller adds to what a block returned, which is a view."""

    def __init__(self, frozen=()):
        super().__init__()
        for number in frozen:
            self.blocks[number].requires_grad_(False)

    def body(self, x):
        for block in self.blocks:
            y = block(x)
            assert y._base is not None, "a linear layer of three dimensions, on the CPU"
            y += x
            x = y
        return x


class Scaled(Block):
    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


class ChosenBySignature(Net):
    def __init__(self):
        super().__init__(Scaled)

    def body(self, x):
        for block in self.blocks:
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
    states: torch.Tensor


class Slotted(Block):
    def forward(self, x):
        return Output(super().forward(x))


class ReturnsSlots(Net):
    def __init__(self):
        super().__init__(Slotted)

    def body(self, x):
        for block in self.blocks:
            x = x + block(x).states
        return x


class UsedDetached(nn.Module):
    """A weight's gradient is there before backward is through with it, and the input needs none."""

    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x):
        return (F.softmax(x @ self.code.detach().t() + (x @ self.code.t()).mean(), dim=-1) @ self.code).sum(-1)


MODELS = {
    "a list that blocks append to": lambda: WritesInto(list),
    "a dict that blocks write into": lambda: WritesInto(dict),
    "a list that a hook writes into, too": WrittenByOthers,
    "an input that a hook notes": NotedInput,
    "frozen parameters of one memory": lambda: Net(WithTable),
    "an output that is changed in place": ChangedInPlace,
    "an output of frozen blocks that is changed in place": lambda: ChangedInPlace((2, 3)),
    "arguments by a signature": ChosenBySignature,
    "a part called boundary": lambda: Net(WithBoundary),
    "an output with slots": ReturnsSlots,
    "a weight that is used detached, too": UsedDetached,
}


def _input(rank, step):
    return torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def _apart(process, name):
    """How far the weights are from those of one process, after three steps."""
    torch.manual_seed(0)
    plain = MODELS[name]()
    sharded = FullyShardedDataParallel(copy.deepcopy(plain))
    ours, alone = (torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 0.1) for each in (sharded, plain))
    for step in range(3):
        sharded(_input(process.rank, step)).square().mean().backward()
        sharded.finish_gradient_synchronization()
        losses = [plain(_input(rank, step)).square().mean() for rank in range(process.world_size)]
        (sum(losses) / len(losses)).backward()
        for optimizer in (ours, alone):
            optimizer.step()
            optimizer.zero_grad()
    full = sharded.gather_full_parameters()
    return max((full[name] - weight).abs().max().item() for name, weight in plain.named_parameters())


@pytest.mark.parametrize("name", MODELS)
def test_trains_as_in_one_process(two, name):
    assert max(two.run(_apart, name)) < 1e-6


class Collecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x, found, *, given):
        found.append(self.layer(x))
        assert given[0].dtype == torch.bfloat16
        given.append(x)
        return found[-1]


def _of_the_wrapper(process):
    """In another dtype: what stood there is as it was given, what is written is there."""
    sharded = FullyShardedDataParallel(Collecting(), compute_dtype=torch.bfloat16)
    found, x = [], _input(process.rank, 0)
    given = [x]
    output = sharded(x, found, given=given)
    return found[0] is output, given[0] is x, len(given), given[1].dtype


def test_the_wrappers_own_arguments_are_written_into(two):
    assert two.run(_of_the_wrapper) == 2 * [(True, True, 2, torch.bfloat16)]


class Captured(Net):
    """A hook notes what is inside of the second block, whose output is not used."""

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[1].up.register_forward_hook(self._note)

    def _note(self, _, given, output):
        self.noted = output

    def body(self, x):
        x = self.blocks[0](x)
        self.blocks[1](x)
        return self.blocks[3](self.blocks[2](x)) + self.noted.mean()


def _captured(process):
    sharded = FullyShardedDataParallel(Captured())
    try:
        sharded(_input(process.rank, 0)).sum().backward()
    except UsageError as error:
        return str(error)
    return "no error"


def test_frozen_weights_that_backward_reaches_past_an_output_are_refused(two):
    for message in two.run(_captured):
        assert "backward came to blocks.1 and had not gone through the output" in message


class Constrained(Block):
    def forward(self, x):
        self.up.weight.data = torch.renorm(self.up.weight.data, 2, 0, 1.0)
        return super().forward(x)


def _constrained(process):
    sharded = FullyShardedDataParallel(Net(Constrained))
    with pytest.raises(UsageError, match=r"blocks\.0\.up\.weight was changed in place while it was gathered"):
        sharded(_input(process.rank, 0))


def test_a_weight_that_is_given_other_memory_is_refused(two):
    two.run(_constrained)
