"""Weights that are read, or changed, outside of the forward of the module that owns them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.odd.nets import Block, Net
from tests.parallel.odd.runs import WIDTH, Run, Scenario, mean_loss


class TiedByAssignment(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.first.weight


class TiedByReading(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(self.body(self.first(x))), self.first.weight)


class PositionRead(Net):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.position.weight[: x.shape[0]])


class OneRowRead(Net):
    """Broadcast, so that no shape tells a shard from the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Embedding(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.mask.weight.mean(0))


class DecayInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * sum(each.pow(2).sum() for each in self.parameters())


class NormInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * self.blocks[1].up.weight.norm()


class NormBeforeUse(Net):
    def forward(self, x: Tensor) -> Tensor:
        penalty = 0.1 * self.blocks[0].down.weight.norm() + 0.1 * self.head.weight.norm()
        return super().forward(x) + penalty


class NormOfWhatWasJustUsed(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 0.1 * self.head.weight.norm() + 0.1 * self.blocks[-1].up.weight.norm()


class ListOfOthersWeights(Net):
    def forward(self, x: Tensor) -> Tensor:
        weights = [block.up.weight for block in self.blocks]
        x = self.body(self.first(x))
        return self.head(self.norm(x)) + 0.01 * torch.stack([w.norm() for w in weights]).sum()


class ReaderBlock(Block):
    """Uses a neighbour's weight, which it does not own."""

    def forward(self, x: Tensor) -> Tensor:
        other = self.__dict__.get("other")
        return super().forward(x) + (0 if other is None else F.linear(x, other.down.weight @ other.up.weight))


class BlockReadsAnother(Net):
    block = ReaderBlock

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].__dict__["other"] = self.blocks[0]
        self.blocks[1].__dict__["other"] = self.blocks[3]


class BlockReadsRoot(Net):
    block = ReaderBlock

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        root = self.__dict__
        for block in self.blocks:
            block.__dict__["other"] = SimpleNamespace(
                down=SimpleNamespace(weight=torch.eye(WIDTH)), up=SimpleNamespace()
            )
            block.__dict__["other"] = _Late(root)


class _Late:
    """Looks the root's weight up when it is asked."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self.down = SimpleNamespace(weight=torch.eye(WIDTH))

    @property
    def up(self) -> Any:
        return SimpleNamespace(weight=self._root["_parameters"]["gate"])


class ReadInCheckpoint(TiedByReading):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.body(self.first(x)))
        return checkpoint(lambda x: F.linear(x, self.first.weight), x, use_reentrant=False)


class ChangesAnother(Net):
    """An in-place change of another module's weight in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class ClampingBlock(Block):
    """Changes its own weight in place in forward."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.up.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class ChangesItself(Net):
    block = ClampingBlock


class KeptTranspose(Net):
    """A product with a transposed weight that was taken before the blocks ran."""

    def __init__(self) -> None:
        super().__init__()
        del self.head, self.norm

    def forward(self, x: Tensor) -> Tensor:
        transposed = self.first.weight.t()
        return self.body(self.first(x)) @ transposed


def penalty_of_parameters(run: Run, x: Tensor) -> Tensor:
    """Elementwise: each element's gradient depends on that element."""
    return mean_loss(run, x) + 0.01 * sum(each.pow(2).sum() for each in run.parameters())


def norm_of_parameters(run: Run, x: Tensor) -> Tensor:
    return mean_loss(run, x) + 0.1 * sum(each.norm() for each in run.parameters())


def norm_of_inner(run: Run, x: Tensor) -> Tensor:
    return mean_loss(run, x) + 0.1 * sum(each.norm() for each in run.inner.parameters())


def head_in_loss(run: Run, x: Tensor) -> Tensor:
    """The loss uses the head's weight, as chunked losses do."""
    return mean_loss(run, x) + F.linear(run.module(x), run.inner.head.weight).pow(2).mean()


SCENARIOS: dict[str, Scenario] = {
    "tied by assignment": Scenario("a tied weight, `head.weight = first.weight`", TiedByAssignment),
    "tied by reading": Scenario("tied heads as `F.linear(x, self.first.weight)`", TiedByReading),
    "position read": Scenario("`x + self.position.weight[:T]`", PositionRead),
    "mean read": Scenario("`x + self.mask.weight.mean(0)`", OneRowRead),
    "decay in forward": Scenario("a penalty on all of `self.parameters()` in forward", DecayInForward),
    "norm in forward": Scenario("a norm of a block's weight in forward", NormInForward),
    "norm before use": Scenario("norms of weights before their owners are called", NormBeforeUse),
    "norm after use": Scenario("norms of weights whose owners were called just before", NormOfWhatWasJustUsed),
    "weights in a list": Scenario("weights put aside before the blocks run, used after", ListOfOthersWeights),
    "block reads another": Scenario("a block that reads another block's weight", BlockReadsAnother),
    "block reads the root": Scenario("blocks that read a parameter of the whole model", BlockReadsRoot),
    "read in a checkpoint": Scenario("a weight read in a checkpointed function", ReadInCheckpoint),
    "kept transpose": Scenario("a transposed weight put aside", KeptTranspose),
    "changed by another": Scenario("a weight changed in place by another module's forward", ChangesAnother),
    "changed by itself": Scenario("a weight changed in place by its own block's forward", ChangesItself),
    "penalty in the loss": Scenario("Σ p² of the wrapper's parameters in the loss", Net, loss=penalty_of_parameters),
    "norms in the loss": Scenario("Σ ‖p‖ of the wrapper's parameters in the loss", Net, loss=norm_of_parameters),
    "inner norms in the loss": Scenario("Σ ‖p‖ of the module's parameters in the loss", Net, loss=norm_of_inner),
    "head in the loss": Scenario("a loss that uses the head's weight", Net, loss=head_in_loss),
}
