"""What blocks take and return."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.parallel.odd.nets import UNUSED, Block, Net
from tests.parallel.odd.runs import WIDTH, Run, Scenario, to_target

Pair = namedtuple("Pair", ("output", "extra"))


@dataclasses.dataclass
class Output:
    hidden: Tensor
    extra: Tensor | None = None


class WeightBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.up.weight


class ReturnsWeight(Net):
    block = WeightBlock

    def body(self, x: Tensor) -> Tensor:
        penalty: Any = 0
        for block in self.blocks:
            x, weight = block(x)
            penalty = penalty + weight.norm()
        return x + 0.01 * penalty


class ViewBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.up.weight.t()[:, :WIDTH]


class ReturnsView(ReturnsWeight):
    block = ViewBlock


class KeepsWeight(Net):
    """A block keeps its weight in a list that is read later."""

    class block(Block):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            self.__dict__["kept"] = [self.up.weight]
            return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 0.01 * sum(block.kept[0].norm() for block in self.blocks)


def _packed(kind: str) -> type[Net]:
    def pack(hidden: Tensor, extra: Tensor) -> Any:
        return {
            "dictionary": lambda: {"hidden": hidden, "extra": [extra]},
            "named tuple": lambda: Pair(hidden, extra),
            "dataclass": lambda: Output(hidden, extra),
            "object": lambda: SimpleNamespace(hidden=hidden, extra=extra),
            "nested": lambda: (None, [Output(hidden, extra)]),
        }[kind]()

    def unpack(packed: Any) -> tuple[Tensor, Tensor]:
        if kind == "dictionary":
            return packed["hidden"], packed["extra"][0]
        if kind == "nested":
            packed = packed[1][0]
        return (packed[0], packed[1]) if isinstance(packed, tuple) else (packed.hidden, packed.extra)

    class Packed(Block):
        def forward(self, packed: Any) -> Any:
            x, extra = unpack(packed)
            y = super().forward(x)
            return pack(y, extra + y.mean())

    class PackedNet(Net):
        block = Packed

        def body(self, x: Tensor) -> Tensor:
            packed = pack(x, x.sum() * 0)
            for block in self.blocks:
                packed = block(packed)
            x, extra = unpack(packed)
            return x + extra

    return PackedNet


class RootDataclass(Net):
    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x))


def dataclass_loss(run: Run, x: Tensor) -> Tensor:
    return to_target(run.module(x).hidden, x)


class KeywordBlock(Block):
    def forward(self, *, x: Tensor, scale: float = 1.0) -> Any:
        return super().forward(x) * scale


class KeywordArguments(Net):
    block = KeywordBlock

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x, scale=0.9)
        return x


class InPlace(Net):
    """A block that changes its input in place."""

    class block(Block):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.rand(WIDTH))

        def forward(self, x: Tensor) -> Any:
            x.add_(self.shift)
            return super().forward(x)


class NoGradBlock(Net):
    """The first blocks run without gradients."""

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x


class DetachedBetween(Net):
    def body(self, x: Tensor) -> Tensor:
        return self.blocks[3](self.blocks[2](self.blocks[1](self.blocks[0](x)).detach()))


SCENARIOS: dict[str, Scenario] = {
    "returns its weight": Scenario("a block that returns its weight", ReturnsWeight),
    "returns a view": Scenario("a block that returns a view of its weight", ReturnsView),
    "keeps its weight": Scenario("a block that puts its weight aside, read later", KeepsWeight),
    "dictionary": Scenario("blocks that take and return dictionaries", _packed("dictionary")),
    "named tuple": Scenario("blocks that take and return named tuples", _packed("named tuple")),
    "dataclass": Scenario("blocks that take and return dataclasses", _packed("dataclass")),
    "object": Scenario("blocks that take and return objects", _packed("object")),
    "nested": Scenario("blocks that take and return a dataclass in a list in a tuple", _packed("nested")),
    "root dataclass": Scenario("a model that returns a dataclass", RootDataclass, loss=dataclass_loss),
    "keywords": Scenario("blocks called with keywords only", KeywordArguments),
    "in place": Scenario("blocks that change their input in place", InPlace),
    "no_grad block": Scenario("a block run without gradients", NoGradBlock, settings=UNUSED),
    "detached between": Scenario("the graph is cut between blocks", DetachedBetween, settings=UNUSED),
}
