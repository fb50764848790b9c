"""Which blocks are called, in which order, and whether all ranks agree on it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.parallel.odd.nets import UNUSED, Block, Net
from tests.parallel.odd.runs import WIDTH, Run, Scenario, to_target


class MoE(Net):
    """Another block in every other step."""

    def body(self, x: Tensor) -> Tensor:
        for index in [0, 1 + self.step % 2, 3]:
            x = self.blocks[index](x)
        return x


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[self.chosen](x)


class RoutedInside(Net):
    """Inside of a block, each rank uses another expert."""

    block = Expert

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.chosen = self.rank
        return super().body(x)


class RoutedBlocks(Net):
    """Each rank calls another of two blocks."""

    def body(self, x: Tensor) -> Tensor:
        for index in [0, 1 + self.rank, 3]:
            x = self.blocks[index](x)
        return x


class OrderByRank(Net):
    def body(self, x: Tensor) -> Tensor:
        for index in [0, 1, 2, 3] if self.rank == 0 else [0, 2, 1, 3]:
            x = self.blocks[index](x)
        return x


class LateOrderByRank(OrderByRank):
    """After two steps in one order."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) if self.step > 1 else Net.body(self, x)


class SkippedOnOneRank(Net):
    def body(self, x: Tensor) -> Tensor:
        for index in [0, 1, 2, 3] if self.rank == 0 else [0, 1, 3]:
            x = self.blocks[index](x)
        return x


class OddSizes(SkippedOnOneRank):
    """The block that one rank skips is larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = Block(24)


class LateSkip(SkippedOnOneRank):
    def body(self, x: Tensor) -> Tensor:
        return super().body(x) if self.step > 1 else Net.body(self, x)


class UnusedModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class UnusedOnOneRank(UnusedModule):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.spare(x) if self.rank == 0 else y


class UnusedInBlock(Net):
    """A layer inside of a block that one rank does not use."""

    class block(Block):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(WIDTH, WIDTH)
            self.used = True

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) + (self.spare(x) if self.used else 0)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.used = self.rank == 0
        return super().body(x)


class CalledTwice(Net):
    def body(self, x: Tensor) -> Tensor:
        return super().body(super().body(x))


class SameTwice(Net):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


class CallsForward(Net):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class OtherMethod(Net):
    """Computes in a method that is not forward."""

    def encode(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def inner_called(run: Run, x: Tensor) -> Tensor:
    """The module is called, not the wrapper."""
    return to_target(run.inner(x), x)


SCENARIOS: dict[str, Scenario] = {
    "other blocks by step": Scenario("other blocks in other steps, the same on all ranks", MoE, settings=UNUSED),
    "experts by rank": Scenario("inside blocks, each rank uses another expert", RoutedInside, settings=UNUSED),
    "blocks by rank": Scenario("each rank calls another of two blocks", RoutedBlocks, settings=UNUSED),
    "order by rank": Scenario("ranks call blocks in another order", OrderByRank),
    "order by rank, later": Scenario("ranks call blocks in another order from the third step on", LateOrderByRank),
    "skipped on one rank": Scenario("one rank skips a block", SkippedOnOneRank, settings=UNUSED),
    "skipped, odd size": Scenario("one rank skips a block larger than the others", OddSizes, settings=UNUSED),
    "skipped later": Scenario("one rank skips a block from the third step on", LateSkip, settings=UNUSED),
    "unused": Scenario("a layer that is never used", UnusedModule),
    "unused, allowed": Scenario("a layer that is never used, and the wrapper is told", UnusedModule, settings=UNUSED),
    "unused on one rank": Scenario("a layer of the model that one rank does not use", UnusedOnOneRank, settings=UNUSED),
    "unused in a block": Scenario("a layer inside blocks that one rank does not use", UnusedInBlock, settings=UNUSED),
    "all called twice": Scenario("all blocks called twice over", CalledTwice),
    "each called twice": Scenario("each block called twice in a row", SameTwice),
    "forward called": Scenario("`block.forward(x)`, not `block(x)`", CallsForward),
    "other method": Scenario("forward that calls another method", OtherMethod),
    "inner called": Scenario("the module called, not the wrapper", Net, loss=inner_called),
}
