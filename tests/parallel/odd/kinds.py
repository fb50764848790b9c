"""Kinds of parameters and modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.parallel.odd.nets import Block, Net
from tests.parallel.odd.reading import PositionRead
from tests.parallel.odd.runs import WIDTH, Scenario


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


SCENARIOS: dict[str, Scenario] = {
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
}
