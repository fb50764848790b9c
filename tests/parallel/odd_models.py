"""Odd models and odd ways to train them: what data parallel wrappers are held to, each beside one process.

Each scenario is a module, and how it is trained if that is odd. `odd_runs` trains it under every wrapper. What the
wrappers then do is docs/limits.md.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import namedtuple
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.parallel.odd_runs import STEPS, WIDTH, Run, Scenario, batch, mean_loss, sgd, three_steps, to_target

Pair = namedtuple("Pair", ("output", "extra"))


@dataclasses.dataclass
class Output:
    hidden: Tensor
    extra: Tensor | None = None


class Block(nn.Module):
    """A residual block."""

    def __init__(self, inner: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A first layer, blocks, a norm and a head; the models below change one thing of it."""

    block: type[nn.Module] = Block
    count = 4

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(self.count))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rank = self.step = 0

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.norm(self.body(self.first(x))))


# A weight read outside of its owner's forward.


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


# A block that leaves something beside its output.


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


# Routing and order.


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


# What a block takes and returns.


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


# Kinds of parameters and modules.


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.memory(x)[0])


class ComplexWeight(Net):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x.to(torch.complex64) @ self.turn).abs())


class ZeroSize(Net):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH))
        self.none = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum() + self.none.sum()


class Scalar(Net):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class SparseGradient(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table(torch.arange(x.shape[0]) % 3)


class Strided(Net):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, WIDTH).t() / 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x @ self.weight) @ self.weight.t())


class Wide(Net):
    """One layer in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.wide(x.double()).float())


class Integers(Net):
    """A parameter of integers, as quantized layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(4 * WIDTH).view(4, WIDTH) % 3, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.codes[: x.shape[0]].float())


class OneRow(Net):
    """Fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.last(x)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.first.weight.requires_grad_(False)


class Adapted(Block):
    """A frozen layer with a trained low-rank part beside it, through which backward comes before the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.low, self.high = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor, cache: Any) -> Tensor:  # type: ignore[override]
        y = self.norm(x)
        cache.states.append(y)
        return x + self.down(torch.tanh(self.up(y) + self.high(self.low(y))))


class AdaptedNet(Net):
    """States of all blocks go from one to the next in an object, so that backward is not seen leaving a block."""

    block = Adapted

    def body(self, x: Tensor) -> Tensor:
        cache = SimpleNamespace(states=[])
        for block in self.blocks:
            x = block(x, cache)
        return x


class AllButOneFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks[2].up.bias.requires_grad_(True)


class WeightNormed(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            parametrizations.weight_norm(block.up)


class SpectralNormed(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.blocks[1].up)
        self.blocks[1].up.parametrizations.eval()  # no power iteration, which counts calls


class OldWeightNormed(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.weight_norm(self.blocks[1].up)


class Convolution(Net):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.convolution(x[:, None]).sum(1))


class Attention(Net):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.attention(x[None], x[None], x[None])[0][0])


class TorchEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.rank = self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x[None])[0]


class ParameterLists(Net):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(2))
        self.named = nn.ParameterDict({"gain": torch.ones(WIDTH), "turn": torch.eye(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x @ self.list[0] @ self.list[1]) * self.named["gain"]) @ self.named["turn"]


class RootParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(16, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.position[: x.shape[0]])


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rank = self.step = 0
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class NestedBlocks(Net):
    class block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x)
            return x


class SharedModule(Net):
    """One module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].up = self.blocks[0].up


class Buffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Hooked(Net):
    """Hooks on modules that change outputs and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(_double)
        self.blocks[2].register_full_backward_hook(_halve)
        self.head.weight.register_hook(_tenth)


def _double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


def _halve(module: nn.Module, into: Any, out: Any) -> Any:
    return tuple(None if each is None else each / 2 for each in into)


def _tenth(gradient: Tensor) -> Tensor:
    return gradient / 10


class ParameterHooks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(_clamp)


def _clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.div_(10)


class ModuleHooks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(_double)
        self.blocks[2].register_full_backward_hook(_halve)


def _checkpointed(use_reentrant: bool) -> type[Net]:
    class Checkpointed(Net):
        def body(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x

    return Checkpointed


class CheckpointInside(Net):
    class block(Block):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return x + checkpoint(lambda x: self.down(torch.tanh(self.up(x))), self.norm(x), use_reentrant=False)


class CheckpointAcross(Net):
    """One checkpoint over all blocks."""

    def body(self, x: Tensor) -> Tensor:
        return checkpoint(super().body, x, use_reentrant=False)


class BatchNormed(Net):
    """Each rank its own statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.between(x))


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


class CompiledWhole(PositionRead):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="aot_eager")


class GradientPenalty(Net):
    """The loss has a gradient in it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = super().forward(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + 0.01 * slope.pow(2).sum()


class FunctionalCall(Net):
    """Runs a block with other weights in the place of its own."""

    def body(self, x: Tensor) -> Tensor:
        block = self.blocks[0]
        scaled = {name: each * 0.9 for name, each in block.named_parameters()}
        x = torch.func.functional_call(block, scaled, (x,))
        for block in self.blocks[1:]:
            x = block(x)
        return x


# Odd ways to train.


def _steps(change: Any = None, *, optimizer_first: bool = False, finish: bool = True, zero: bool = True) -> Any:
    """Three steps with `change(run)` between the gradients and the optimizer's step."""

    def train(run: Run) -> None:
        assert run.optimizer is not None
        for step in range(STEPS):
            run.backward(step)
            if finish:
                run.finish()
            if change is not None:
                change(run)
            run.optimizer.step()
            if zero:
                run.optimizer.zero_grad()

    return train


def clip_by_torch(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.parameters(), 0.05)


def clip_by_torch_inner(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.inner.parameters(), 0.05)


def clip_in_two(run: Run) -> None:
    total = nn.utils.get_total_norm([each.grad for each in run.parameters() if each.grad is not None])
    nn.utils.clip_grads_with_norm_(run.parameters(), 0.05, total)


def clip_own(run: Run) -> None:
    run.clip(0.05)


def clip_values(run: Run) -> None:
    nn.utils.clip_grad_value_(run.parameters(), 0.001)


def normalise_gradients(run: Run) -> None:
    for each in run.parameters():
        if each.grad is not None:
            each.grad /= each.grad.norm() + 1e-3


def clip_by_hand(run: Run) -> None:
    total = torch.sqrt(sum(each.grad.pow(2).sum() for each in run.parameters() if each.grad is not None))
    for each in run.parameters():
        if each.grad is not None:
            each.grad.mul_(torch.clamp(0.05 / total, max=1.0))


def centre_gradients(run: Run) -> None:
    for each in run.parameters():
        if each.grad is not None and each.dim() > 1:
            each.grad -= each.grad.mean(0, keepdim=True)


def halve_gradients(run: Run) -> None:
    for each in run.parameters():
        if each.grad is not None:
            each.grad.mul_(0.5)


def drop_gradients(run: Run) -> None:
    """One parameter's gradient is thrown away: nothing updates it."""
    for name, each in run.module.named_parameters():
        if name.endswith("head.weight"):
            each.grad = None


def halve_before_finish(run: Run) -> None:
    """What a user who scales gradients too early does."""
    for step in range(STEPS):
        run.backward(step)
        halve_gradients(run)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()


def forgotten_finish(run: Run) -> None:
    _steps(finish=False)(run)


def micro_batches(how: str) -> Any:
    def train(run: Run) -> None:
        assert run.optimizer is not None
        for step in range(STEPS):
            for micro in range(3):
                last = micro == 2
                if how == "no_sync" and not last:
                    with run.no_sync():
                        run.backward(step, micro, scale=1 / 3)
                else:
                    run.backward(step, micro, scale=1 / 3)
                if how == "finish each" or last:
                    run.finish()
            run.optimizer.step()
            run.optimizer.zero_grad()

    return train


def without_zero_grad(run: Run) -> None:
    _steps(zero=False)(run)


def zero_by_module(run: Run) -> None:
    assert run.optimizer is not None
    for step in range(STEPS):
        run.backward(step)
        run.finish()
        run.optimizer.step()
        run.module.zero_grad()


def zero_by_inner(run: Run) -> None:
    assert run.optimizer is not None
    for step in range(STEPS):
        run.backward(step)
        run.finish()
        run.optimizer.step()
        run.inner.zero_grad()


def discarded(how: str) -> Any:
    """Gradients of one batch are thrown away, and those of another used."""

    def train(run: Run) -> None:
        assert run.optimizer is not None
        for step in range(STEPS):
            run.backward(step, micro=1)
            run.finish()
            {"optimizer": run.optimizer, "module": run.module, "inner": run.inner}[how].zero_grad()
            run.backward(step)
            run.finish()
            run.optimizer.step()
            run.optimizer.zero_grad()

    return train


def zero_to_zeros(run: Run) -> None:
    assert run.optimizer is not None
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=False)
        run.backward(step)
        run.finish()
        run.optimizer.step()


def step_twice(run: Run) -> None:
    for step in range(STEPS):
        run.backward(step)
        run.finish()
        run.optimizer.step()
        run.optimizer.step()
        run.optimizer.zero_grad()


def two_backwards(run: Run) -> None:
    """The same graph differentiated twice."""

    def twice(x: Tensor) -> None:
        loss = mean_loss(run, x)
        with run.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()

    for step in range(STEPS):
        run.each_rank(step, twice)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()


def two_forwards(run: Run, x: Tensor) -> Tensor:
    """Two forwards, then one backward, as of siamese networks."""
    return (run.module(x) * run.module(x.flip(0))).mean()


def forward_without_gradients(run: Run, x: Tensor) -> Tensor:
    """A forward without gradients between forward and backward."""
    y = run.module(x)
    with torch.no_grad():
        target = run.module(x.flip(0))
    return (y - 0.1 * target).pow(2).mean()


def evaluate_between(run: Run) -> None:
    for step in range(STEPS):
        run.backward(step)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()
        with torch.no_grad():
            run.module.eval()(batch(step, 0))
        run.module.train()


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


def inner_called(run: Run, x: Tensor) -> Tensor:
    """The module is called, not the wrapper."""
    return to_target(run.inner(x), x)


def built_before(run: Run) -> None:
    """The optimizer has the parameters as they were before wrapping; only the module can be asked for them now."""
    run._optimizer = sgd(run.inner.parameters())
    three_steps(run)


def own_update(run: Run) -> None:
    for step in range(STEPS):
        run.backward(step)
        run.finish()
        with torch.no_grad():
            for each in run.parameters():
                if each.grad is not None:
                    each -= 0.1 * each.grad
        for each in run.parameters():
            each.grad = None


def own_decay(run: Run) -> None:
    with torch.no_grad():
        for each in run.parameters():
            each.mul_(0.99).clamp_(-0.2, 0.2)


def own_norms(run: Run) -> None:
    """Weights kept at norm 1 per row by hand."""
    with torch.no_grad():
        for name, each in run.inner.named_parameters():
            if name.endswith("weight") and each.dim() > 1:
                each.div_(each.norm())


def two_optimizers(run: Run) -> None:
    assert run.optimizer is not None
    parameters = run.parameters()
    one, other = sgd(parameters[:3]), sgd(parameters[3:])
    for step in range(STEPS):
        run.backward(step)
        run.finish()
        for each in (one, other):
            each.step()
            each.zero_grad()


def added_parameter(run: Run) -> None:
    run.inner.late = nn.Parameter(torch.ones(WIDTH, WIDTH) / 9)
    assert run.optimizer is not None
    _steps()(run)


class WithLate(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.late if hasattr(self, "late") else x)


def frozen_later(run: Run) -> None:
    for step in range(STEPS):
        if step == 1:
            run.inner.head.weight.requires_grad_(False)
        run.backward(step)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()


def replaced_later(run: Run) -> None:
    assert run.optimizer is not None
    run.inner.head.weight = nn.Parameter(torch.eye(WIDTH))
    run._optimizer = None
    _steps()(run)


def state_round_trip(run: Run) -> None:
    _steps()(run)
    state = {name: value.clone() for name, value in run.module.state_dict().items()}
    run.backward(0)
    run.finish()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.module.load_state_dict(state)


def plain_state(run: Run) -> None:
    """Takes over the whole state of the plain module."""
    torch.manual_seed(5)
    other = run.scenario.model().state_dict()
    target = run.module if run.scheme == "fsdp" else run.inner
    target.load_state_dict(other)
    _steps()(run)


def plain_state_of_inner(run: Run) -> None:
    torch.manual_seed(5)
    run.inner.load_state_dict(run.scenario.model().state_dict())
    _steps()(run)


def state_by_torch(run: Run) -> None:
    _steps()(run)
    get_state_dict(run.module, run.optimizer)


def foreign_state(run: Run) -> None:
    """The optimizer's state of one process, which has whole tensors."""
    _steps()(run)
    torch.manual_seed(0)
    plain = run.scenario.model()
    optimizer = run.scenario.optimizer(plain.parameters())
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    run.optimizer.load_state_dict(optimizer.state_dict())
    _steps()(run)


def scaled(run: Run) -> None:
    """torch's GradScaler; in the second step one rank's gradients overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    assert run.optimizer is not None
    for step in range(STEPS):
        run.backward(step, scale=scaler.get_scale() if scaler._scale is not None else 8.0)
        run.finish()
        scaler.scale(torch.zeros(()))
        if step == 1:
            last = run.parameters()[0].grad
            whole = run.scheme in ("alone", "ddp", "torch ddp")  # where all ranks have it
            if last is not None and (whole or run.rank == 1):
                last.mul_(float("inf"))
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()


def averaged_copy(run: Run) -> None:
    """A copy of the module for an average of the weights."""
    twin = copy.deepcopy(run.module)
    for step in range(STEPS):
        run.backward(step)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()
        with torch.no_grad():
            for mine, its in zip(run.module.parameters(), twin.parameters(), strict=True):
                its.lerp_(mine, 0.5)
    with torch.no_grad():
        for mine, its in zip(run.module.parameters(), twin.parameters(), strict=True):
            mine.copy_(its)


def averaged_elementwise(run: Run) -> None:
    """An average of the weights, kept beside them."""
    averages = [each.detach().clone() for each in run.parameters()]
    _steps(lambda run: torch._foreach_lerp_(averages, [each.detach() for each in run.parameters()], 0.5))(run)
    with torch.no_grad():
        for mine, average in zip(run.parameters(), averages, strict=True):
            mine.copy_(average)


def failed_forward(run: Run) -> None:
    """A forward fails midway on every rank, and training goes on."""
    for step in range(STEPS):
        handle = run.inner.blocks[2].register_forward_pre_hook(_fail)
        try:
            run.backward(step)
        except ArithmeticError:
            handle.remove()
        run.optimizer.zero_grad()
        run.backward(step)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()


def _fail(*_: Any) -> None:
    raise ArithmeticError("planned")


def gradients_by_hand(run: Run) -> None:
    """autograd.grad in the place of backward."""
    parameters = run.parameters()

    def by_hand(x: Tensor) -> None:
        gradients = torch.autograd.grad(mean_loss(run, x), parameters, allow_unused=True)
        for each, gradient in zip(parameters, gradients, strict=True):
            each.grad = gradient if each.grad is None or gradient is None else each.grad + gradient

    for step in range(STEPS):
        run.each_rank(step, by_hand)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()


def backward_on_one_rank(run: Run) -> None:
    """In the second step only rank 0 has a loss."""

    def maybe(x: Tensor) -> None:
        if run.inner.step != 1 or run.inner.rank == 0:
            mean_loss(run, x).backward()

    for step in range(STEPS):
        run.each_rank(step, maybe)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()


class Lion(torch.optim.Optimizer):
    """An elementwise optimizer that is not torch's."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    average = self.state[each].setdefault("average", torch.zeros_like(each))
                    each.sub_(torch.sign(average * 0.9 + each.grad * 0.1), alpha=group["lr"])
                    average.lerp_(each.grad, 0.1)


class DeclaredLion(Lion):
    is_elementwise = True


class Matrixwise(Lion):
    """Looks at whole matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad / (each.grad.norm() + 1e-3), alpha=group["lr"])


def lbfgs(run: Run) -> None:
    assert run.optimizer is not None
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            run.optimizer.zero_grad()
            run.backward(step)
            run.finish()
            return 0.0

        run.optimizer.step(closure)


def schedule(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    for step in range(STEPS):
        run.backward(step)
        run.finish()
        run.optimizer.step()
        scheduler.step()
        run.optimizer.zero_grad()


def matrices_only(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in parameters if each.dim() == 2], lr=0.01)


def uneven_shares(run: Run, x: Tensor) -> Tensor:
    """Rank 0 has half of the rows; every rank's mean counts the same."""
    return mean_loss(run, x[: 2 if run.inner.rank == 0 else None])


UNUSED = {"unused": True}
AFTER = {"overlap": False}

SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario("nothing odd", Net),
    # a weight read outside of its owner's forward
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
    # beside the output
    "aux attribute": Scenario("blocks leave an auxiliary loss in an attribute", AuxAttribute),
    "aux in a list": Scenario("blocks append an auxiliary loss to a shared list", AuxInList),
    "aux of weights": Scenario("what blocks leave depends on their weights alone", AuxOfWeights),
    "aux alone": Scenario("a block whose output is not used, but what it left is", AuxOnly, settings=UNUSED),
    "aux without input": Scenario(
        "a block of which only what it left is used, and whose inputs have no graph", AuxWithoutInput, settings=UNUSED
    ),
    "aux apart": Scenario("auxiliary losses with a backward of their own", PlainAux, train=aux_apart),
    # routing and order
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
    # what blocks take and return
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
    # kinds of parameters and modules
    "LSTM": Scenario("nn.LSTM", Recurrent),
    "complex": Scenario("a complex parameter", ComplexWeight),
    "zero-size": Scenario("parameters without elements", ZeroSize),
    "scalar": Scenario("a parameter without dimensions", Scalar),
    "sparse": Scenario("nn.Embedding(sparse=True)", SparseGradient),
    "transposed": Scenario("a parameter that is a transposed view", Strided),
    "float64": Scenario("a layer in float64", Wide),
    "integers": Scenario("a parameter of integers", Integers),
    "one row": Scenario("a weight of one row", OneRow),
    "frozen": Scenario("frozen blocks", Frozen),
    "adapters": Scenario("low-rank adapters of frozen layers, and a cache of states", AdaptedNet),
    "almost all frozen": Scenario("all frozen but one bias", AllButOneFrozen),
    "weight norm": Scenario("parametrizations.weight_norm", WeightNormed),
    "old weight norm": Scenario("nn.utils.weight_norm", OldWeightNormed),
    "spectral norm": Scenario("parametrizations.spectral_norm", SpectralNormed),
    "convolution": Scenario("nn.Conv1d", Convolution),
    "attention": Scenario("nn.MultiheadAttention", Attention),
    "encoder": Scenario("nn.TransformerEncoder", TorchEncoder),
    "parameter lists": Scenario("nn.ParameterList and nn.ParameterDict", ParameterLists),
    "root parameter": Scenario("a parameter of the model itself", RootParameter),
    "no blocks": Scenario("a model without blocks", NoBlocks),
    "nested blocks": Scenario("lists of blocks in blocks", NestedBlocks),
    "shared module": Scenario("one layer in two blocks", SharedModule),
    "buffers": Scenario("a buffer", Buffers),
    "batch norm": Scenario("nn.BatchNorm1d, each rank its own statistics", BatchNormed),
    "module hooks": Scenario("hooks that change outputs and gradients", ModuleHooks),
    "tensor hooks": Scenario("a hook on a parameter that changes its gradient", Hooked),
    "accumulation hooks": Scenario("a post-accumulation hook on a parameter", ParameterHooks),
    "checkpoint": Scenario("blocks checkpointed in forward", _checkpointed(False)),
    "reentrant checkpoint": Scenario("blocks checkpointed in forward, reentrant", _checkpointed(True)),
    "checkpoint inside": Scenario("a checkpoint inside blocks", CheckpointInside),
    "checkpoint across": Scenario("one checkpoint across all blocks", CheckpointAcross),
    "compiled blocks": Scenario("compiled blocks", Compiled),
    "compiled whole": Scenario("a compiled model that reads a weight", CompiledWhole),
    "gradient penalty": Scenario("a loss with a gradient in it (create_graph)", GradientPenalty),
    "functional call": Scenario("a block run by torch.func.functional_call", FunctionalCall),
    # optimizers
    "AdamW": Scenario("AdamW", Net, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01)),
    "LBFGS": Scenario("LBFGS", Net, train=lbfgs, optimizer=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=1)),
    "Muon": Scenario("Muon, on matrices", Net, optimizer=matrices_only),
    "Adafactor": Scenario("Adafactor", Net, optimizer=lambda p: torch.optim.Adafactor(p, lr=0.01)),
    "unknown optimizer": Scenario("an elementwise optimizer of one's own", Net, optimizer=Lion),
    "declared optimizer": Scenario("an elementwise optimizer of one's own, declared so", Net, optimizer=DeclaredLion),
    "matrix optimizer": Scenario("an optimizer of one's own that takes norms", Net, optimizer=Matrixwise),
    "schedule": Scenario("a learning-rate schedule", Net, train=schedule),
    "two optimizers": Scenario("two optimizers", Net, train=two_optimizers),
    "optimizer before": Scenario("an optimizer from the module's parameters()", Net, train=built_before),
    # gradients changed between backward and the step
    "torch's clip": Scenario("torch's clip_grad_norm_ of the wrapper's parameters", Net, train=_steps(clip_by_torch)),
    "torch's clip, inner": Scenario("torch's clip_grad_norm_ of the module's", Net, train=_steps(clip_by_torch_inner)),
    "clip in two": Scenario("torch's get_total_norm, clip_grads_with_norm_", Net, train=_steps(clip_in_two)),
    "own clip": Scenario("the wrapper's clip_grad_norm_", Net, train=_steps(clip_own)),
    "clip values": Scenario("torch's clip_grad_value_", Net, train=_steps(clip_values)),
    "clip by hand": Scenario("a clip written by hand", Net, train=_steps(clip_by_hand)),
    "normalised by hand": Scenario("each gradient divided by its norm", Net, train=_steps(normalise_gradients)),
    "centred by hand": Scenario("each gradient's mean row subtracted", Net, train=_steps(centre_gradients)),
    "halved by hand": Scenario("gradients halved", Net, train=_steps(halve_gradients)),
    "halved too early": Scenario(
        "gradients halved before finish_gradient_synchronization", Net, train=halve_before_finish
    ),
    "dropped by hand": Scenario("a gradient set to None", Net, train=_steps(drop_gradients)),
    "GradScaler": Scenario("torch's GradScaler, one rank overflows", Net, train=scaled),
    # when gradients are sent
    "forgotten finish": Scenario("finish_gradient_synchronization forgotten", Net, train=forgotten_finish),
    "forgotten, no overlap": Scenario(
        "finish_gradient_synchronization forgotten, overlap=False", Net, train=forgotten_finish, settings=AFTER
    ),
    "no_sync": Scenario("micro-batches under no_sync", Net, train=micro_batches("no_sync")),
    "finish each": Scenario("micro-batches, each finished", Net, train=micro_batches("finish each")),
    "finish last": Scenario("micro-batches, the last one finished", Net, train=micro_batches("finish last")),
    "finish last, no overlap": Scenario(
        "micro-batches, the last one finished, overlap=False", Net, train=micro_batches("finish last"), settings=AFTER
    ),
    "no zero_grad": Scenario("gradients added up over steps, never zeroed", Net, train=without_zero_grad),
    "zeroed by the wrapper": Scenario("zero_grad of the wrapper", Net, train=zero_by_module),
    "zeroed by the module": Scenario("zero_grad of the module", Net, train=zero_by_inner),
    "zeros": Scenario("zero_grad(set_to_none=False)", Net, train=zero_to_zeros),
    "discarded by the optimizer": Scenario(
        "gradients thrown away by optimizer.zero_grad", Net, train=discarded("optimizer")
    ),
    "discarded by the wrapper": Scenario("by the wrapper's zero_grad", Net, train=discarded("module")),
    "discarded by the module": Scenario("by the module's zero_grad", Net, train=discarded("inner")),
    "step twice": Scenario("two steps on the same gradients", Net, train=step_twice),
    "two backwards": Scenario("the same graph differentiated twice", Net, train=two_backwards),
    "two forwards": Scenario("two forwards, then one backward", Net, loss=two_forwards),
    "no_grad between": Scenario("a forward without gradients before backward", Net, loss=forward_without_gradients),
    "evaluation": Scenario("evaluation between steps", Net, train=evaluate_between),
    "autograd.grad": Scenario("torch.autograd.grad in the place of backward", Net, train=gradients_by_hand),
    "no loss on one rank": Scenario(
        "a step in which one rank has no loss", Net, train=backward_on_one_rank, settings=UNUSED
    ),
    "failed forward": Scenario("a forward that raises on all ranks, and is repeated", Net, train=failed_forward),
    "uneven shares": Scenario("other numbers of rows on other ranks", Net, loss=uneven_shares),
    # weights and state changed by hand
    "own update": Scenario("`p -= lr * p.grad`", Net, train=own_update),
    "own decay": Scenario("`p.mul_(0.99).clamp_(-0.2, 0.2)`", Net, train=_steps(own_decay)),
    "own norms": Scenario("the module's weights divided by their norms", Net, train=_steps(own_norms)),
    "average": Scenario("an elementwise average of the weights", Net, train=averaged_elementwise),
    "copied": Scenario("copy.deepcopy of the wrapper", Net, train=averaged_copy),
    "added parameter": Scenario("a parameter added after wrapping", WithLate, train=added_parameter),
    "frozen later": Scenario("a parameter frozen after wrapping", Net, train=frozen_later),
    "replaced later": Scenario("a parameter replaced after wrapping", Net, train=replaced_later),
    "state round trip": Scenario("load_state_dict of an earlier state_dict", Net, train=state_round_trip),
    "plain state": Scenario("load_state_dict of the plain module's state", Net, train=plain_state),
    "plain state, inner": Scenario(
        "the module's load_state_dict of the plain module's state", Net, train=plain_state_of_inner
    ),
    "get_state_dict": Scenario("torch.distributed.checkpoint's get_state_dict", Net, train=state_by_torch),
    "plain optimizer's state": Scenario("load_state_dict of the plain optimizer's state", Net, train=foreign_state),
}
"""Name → what is odd. Rows of docs/limits.md."""
