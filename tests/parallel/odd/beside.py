"""Blocks that leave something beside their output, such as the auxiliary loss of a mixture of experts."""

from torch import nn

from tests.parallel.odd.nets import UNUSED, Block, net, plain, plain_block
from tests.parallel.odd.runs import WIDTH, Scenario, mean_loss, steps


class AuxBlock(Block):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        self.leave((gates.mean(0) ** 2).sum())
        return super().forward(x) * gates.amax(-1, keepdim=True)

    def leave(self, aux):
        self.aux = aux


class OfWeights(AuxBlock):
    """Leaves what depends on its weights alone."""

    def forward(self, x):
        self.aux = (self.up.weight @ self.down.weight).pow(2).sum()
        return plain_block(self, x) + 0 * self.router(x).sum()


class IntoList(AuxBlock):
    def leave(self, aux):
        self.__dict__["found"].append(aux)


class Detached(AuxBlock):
    def forward(self, x):
        return super().forward(x.detach())


def _with_aux(net, x):
    return plain(net, x) + sum(block.aux for block in net.blocks)


def _aux_only(net, x):
    """The last block's output is not used, what it left is."""
    x = net.first(x)
    *others, last = net.blocks
    for block in others:
        x = block(x)
    last(x)
    return net.head(net.norm(x)) + last.aux


def _share_list(net):
    net.found = []
    for block in net.blocks:
        block.__dict__["found"] = net.found


def _with_list(net, x):
    net.found.clear()
    return plain(net, x) + sum(net.found)


def apart(run, x):
    """The auxiliary losses have a backward of their own before the other."""
    loss = mean_loss(run, x)
    with run.no_sync():
        sum(block.aux for block in run.inner.blocks).backward(retain_graph=True)
    loss.backward()


SCENARIOS = {
    "aux attribute": Scenario("blocks leave an auxiliary loss in an attribute", net(block=AuxBlock, forward=_with_aux)),
    "aux in a list": Scenario(
        "blocks append an auxiliary loss to a shared list", net(block=IntoList, then=_share_list, forward=_with_list)
    ),
    "aux of weights": Scenario(
        "what blocks leave depends on their weights alone", net(block=OfWeights, forward=_with_aux)
    ),
    "aux alone": Scenario(
        "a block whose output is not used, but what it left is", net(block=AuxBlock, forward=_aux_only), settings=UNUSED
    ),
    "aux without input": Scenario(
        "a block of which only what it left is used, and whose inputs have no graph",
        net(block=Detached, forward=_aux_only),
        settings=UNUSED,
    ),
    "aux apart": Scenario("auxiliary losses with a backward of their own", net(block=AuxBlock), train=steps(of=apart)),
}
