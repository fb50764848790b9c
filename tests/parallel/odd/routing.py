"""Which blocks are called, in which order, and whether all ranks agree on it."""

from torch import nn

from tests.parallel.odd.nets import UNUSED, Block, Net, net, plain
from tests.parallel.odd.runs import WIDTH, Scenario, to_target


def _calls(choose):
    """A body that calls the blocks of these numbers, chosen for a net at its rank and step, one after another."""

    def body(net, x):
        for number in choose(net):
            x = net.blocks[number](x)
        return x

    return body


def _late(numbers):
    """`numbers` on rank 1 from the third step on."""
    return net(body=_calls(lambda net: numbers if net.rank and net.step > 1 else range(4)))


def _on_second(numbers, **change):
    return net(body=_calls(lambda net: numbers if net.rank else range(4)), **change)


def _expert(net, x):
    """Inside of a block, each rank uses another of two experts."""
    for block in net.blocks:
        block.chosen = net.rank
    return Net.body(net, x)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.chosen = 0

    def forward(self, x):
        return x + self.experts[self.chosen](x)


class Spare(Block):
    """One rank does not use a layer inside."""

    def __init__(self):
        super().__init__()
        self.spare, self.chosen = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        return super().forward(x) + (0 if self.chosen else self.spare(x))


def _larger(net):
    net.blocks[2] = Block(24)


def _sparing(net, x):
    y = plain(net, x)
    return y if net.rank else y + net.spare(x)


def _spare():
    return nn.Linear(WIDTH, WIDTH)


def _encoding(net, x):
    return net.encode(x)


def _call_forward(net, x):
    for block in net.blocks:
        x = block.forward(x)
    return x


OTHER_ORDER, SKIP = [0, 2, 1, 3], [0, 1, 3]
SCENARIOS = {
    "other blocks by step": Scenario(
        "other blocks in other steps, the same on all ranks",
        net(body=_calls(lambda net: [0, 1 + net.step % 2, 3])),
        settings=UNUSED,
    ),
    "experts by rank": Scenario(
        "inside blocks, each rank uses another expert", net(block=Expert, body=_expert), settings=UNUSED
    ),
    "blocks by rank": Scenario(
        "each rank calls another of two blocks", net(body=_calls(lambda net: [0, 1 + net.rank, 3])), settings=UNUSED
    ),
    "order by rank": Scenario("ranks call blocks in another order", _on_second(OTHER_ORDER)),
    "order by rank, later": Scenario("ranks call blocks in another order from the third step on", _late(OTHER_ORDER)),
    "skipped on one rank": Scenario("one rank skips a block", _on_second(SKIP), settings=UNUSED),
    "skipped, odd size": Scenario(
        "one rank skips a block larger than the others", _on_second(SKIP, then=_larger), settings=UNUSED
    ),
    "skipped later": Scenario("one rank skips a block from the third step on", _late(SKIP), settings=UNUSED),
    "unused": Scenario("a layer that is never used", net(spare=_spare)),
    "unused, allowed": Scenario(
        "a layer that is never used, and the wrapper is told", net(spare=_spare), settings=UNUSED
    ),
    "unused on one rank": Scenario(
        "a layer of the model that one rank does not use", net(spare=_spare, forward=_sparing), settings=UNUSED
    ),
    "unused in a block": Scenario(
        "a layer inside blocks that one rank does not use", net(block=Spare, body=_expert), settings=UNUSED
    ),
    "all called twice": Scenario("all blocks called twice over", net(body=_calls(lambda net: [0, 1, 2, 3] * 2))),
    "each called twice": Scenario(
        "each block called twice in a row", net(body=_calls(lambda net: [0, 0, 1, 1, 2, 2, 3, 3]))
    ),
    "forward called": Scenario("`block.forward(x)`, not `block(x)`", net(body=_call_forward)),
    "other method": Scenario(
        "forward that calls another method",
        net(then=lambda changed: setattr(type(changed), "encode", plain), forward=_encoding),
    ),
    "inner called": Scenario("the module called, not the wrapper", Net, loss=lambda run, x: to_target(run.inner(x), x)),
}
