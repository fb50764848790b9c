"""Blocks that leave something beside their output, such as the auxiliary loss of a mixture of experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.parallel.odd.nets import UNUSED, Block, Net
from tests.parallel.odd.runs import STEPS, WIDTH, Run, Scenario, mean_loss


class AuxBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Any:
        gates = self.router(x).softmax(-1)
        self.leave((gates.mean(0) ** 2).sum())
        return super().forward(x) * gates.amax(-1, keepdim=True)

    def leave(self, aux: Tensor) -> None:
        self.aux = aux


class AuxAttribute(Net):
    block = AuxBlock

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.aux for block in self.blocks)


class AuxOnly(Net):
    """The last block's output is not used, what it left is."""

    block = AuxBlock

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks[:-1]:
            x = block(x)
        self.blocks[-1](x)
        return self.head(self.norm(x)) + self.blocks[-1].aux


class OfWeightsBlock(AuxBlock):
    """What it leaves depends on its weights alone."""

    def forward(self, x: Tensor) -> Any:
        self.aux = (self.up.weight @ self.down.weight).pow(2).sum()
        return Block.forward(self, x) + 0 * self.router(x).sum()


class AuxOfWeights(AuxAttribute):
    block = OfWeightsBlock


class ListBlock(AuxBlock):
    def leave(self, aux: Tensor) -> None:
        self.__dict__["found"].append(aux)


class AuxInList(Net):
    """Into a list that all blocks share."""

    block = ListBlock

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        for block in self.blocks:
            block.__dict__["found"] = self.found

    def forward(self, x: Tensor) -> Tensor:
        self.found.clear()
        return super().forward(x) + sum(self.found)


class DetachedBlock(AuxBlock):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.detach())


class AuxWithoutInput(AuxOnly):
    """Nothing that comes into the blocks has a graph."""

    block = DetachedBlock


def aux_apart(run: Run) -> None:
    """The auxiliary losses have a backward of their own before the other."""

    def apart(x: Tensor) -> None:
        loss = mean_loss(run, x)
        with run.no_sync():
            sum(block.aux for block in run.inner.blocks).backward(retain_graph=True)
        loss.backward()

    for step in range(STEPS):
        run.each_rank(step, apart)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()


class PlainAux(Net):
    block = AuxBlock


SCENARIOS: dict[str, Scenario] = {
    "aux attribute": Scenario("blocks leave an auxiliary loss in an attribute", AuxAttribute),
    "aux in a list": Scenario("blocks append an auxiliary loss to a shared list", AuxInList),
    "aux of weights": Scenario("what blocks leave depends on their weights alone", AuxOfWeights),
    "aux alone": Scenario("a block whose output is not used, but what it left is", AuxOnly, settings=UNUSED),
    "aux without input": Scenario(
        "a block of which only what it left is used, and whose inputs have no graph", AuxWithoutInput, settings=UNUSED
    ),
    "aux apart": Scenario("auxiliary losses with a backward of their own", PlainAux, train=aux_apart),
}
