"""Kinds of parameters and modules."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.parallel.odd.nets import Block, Net, net, plain
from tests.parallel.odd.reading import position_read
from tests.parallel.odd.runs import WIDTH, Scenario


def _of_table(net, x):
    return plain(net, x) + net.table(torch.arange(x.shape[0]) % 3)


def _listed(net, x):
    return plain(net, (x @ net.list[0] @ net.list[1]) * net.named["gain"]) @ net.named["turn"]


class Adapted(Block):
    """A frozen layer with a trained low-rank part beside it, through which backward comes before the layer."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.low, self.high = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x, cache):
        y = self.norm(x)
        cache.states.append(y)
        return x + self.down(torch.tanh(self.up(y) + self.high(self.low(y))))


def _cached(net, x):
    """States of all blocks go from one to the next in an object, so that backward is not seen leaving a block."""
    cache = SimpleNamespace(states=[])
    for block in net.blocks:
        x = block(x, cache)
    return x


def _freeze(net):
    net.blocks[1].requires_grad_(False)
    net.first.weight.requires_grad_(False)


def _freeze_all_but_one(net):
    net.requires_grad_(False)
    net.blocks[2].up.bias.requires_grad_(True)


def _spectral_norm(net):
    parametrizations.spectral_norm(net.blocks[1].up)
    net.blocks[1].up.parametrizations.eval()  # no power iteration, which counts calls


class TorchEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.rank = self.step = 0

    def forward(self, x):
        return self.encoder(x[None])[0]


class NoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.rank = self.step = 0
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))

    def forward(self, x):
        return self.layers(x)


class TwoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def _hook_modules(net):
    net.blocks[1].register_forward_hook(lambda module, inputs, output: output * 2)
    net.blocks[2].register_full_backward_hook(
        lambda module, into, out: tuple(None if each is None else each / 2 for each in into)
    )


def _hook_tensors(net):
    _hook_modules(net)
    net.head.weight.register_hook(lambda gradient: gradient / 10)


def _hook_accumulation(net):
    def divide(parameter):
        parameter.grad.div_(10)

    net.head.weight.register_post_accumulate_grad_hook(divide)


def _checkpointed(use_reentrant):
    def body(net, x):
        for block in net.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return net(body=body)


def _checkpoint_inside(block, x):
    return x + checkpoint(lambda x: block.down(torch.tanh(block.up(x))), block.norm(x), use_reentrant=False)


def _gradient_penalty(net, x):
    x = x.clone().requires_grad_()
    y = plain(net, x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + 0.01 * slope.pow(2).sum()


def _functional_call(net, x):
    """The first block runs with other weights in the place of its own."""
    first, *others = net.blocks
    scaled = {name: each * 0.9 for name, each in first.named_parameters()}
    x = torch.func.functional_call(first, scaled, (x,))
    for block in others:
        x = block(x)
    return x


def _blocks(change):
    return lambda net: [change(block) for block in net.blocks]


def _linear(dtype):
    return lambda: nn.Linear(WIDTH, WIDTH, dtype=dtype)


def _zeros(*shape):
    return lambda: nn.Parameter(torch.zeros(shape))


SCENARIOS = {
    "LSTM": Scenario(
        "nn.LSTM", net(memory=lambda: nn.LSTM(WIDTH, WIDTH), forward=lambda net, x: plain(net, net.memory(x)[0]))
    ),
    "complex": Scenario(
        "a complex parameter",
        net(
            turn=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 3),
            forward=lambda net, x: plain(net, (x.to(torch.complex64) @ net.turn).abs()),
        ),
    ),
    "zero-size": Scenario(
        "parameters without elements",
        net(
            nothing=_zeros(0, WIDTH),
            none=_zeros(0),
            forward=lambda net, x: plain(net, x) + net.nothing.sum() + net.none.sum(),
        ),
    ),
    "scalar": Scenario(
        "a parameter without dimensions",
        net(gain=lambda: nn.Parameter(torch.tensor(1.3)), forward=lambda net, x: plain(net, x) * net.gain),
    ),
    "sparse": Scenario(
        "nn.Embedding(sparse=True)", net(table=lambda: nn.Embedding(5, WIDTH, sparse=True), forward=_of_table)
    ),
    "transposed": Scenario(
        "a parameter that is a transposed view",
        net(
            weight=lambda: nn.Parameter(torch.randn(12, WIDTH).t() / 3),
            forward=lambda net, x: plain(net, torch.tanh(x @ net.weight) @ net.weight.t()),
        ),
    ),
    "float64": Scenario(
        "a layer in float64",
        net(wide=_linear(torch.float64), forward=lambda net, x: plain(net, net.wide(x.double()).float())),
    ),
    "integers": Scenario(
        "a parameter of integers",
        net(
            codes=lambda: nn.Parameter(torch.arange(4 * WIDTH).view(4, WIDTH) % 3, requires_grad=False),
            forward=lambda net, x: plain(net, x * net.codes[: x.shape[0]].float()),
        ),
    ),
    "one row": Scenario(
        "a weight of one row", net(last=lambda: nn.Linear(WIDTH, 1), forward=lambda net, x: plain(net, x) * net.last(x))
    ),
    "frozen": Scenario("frozen blocks", net(then=_freeze)),
    "adapters": Scenario("low-rank adapters of frozen layers, and a cache of states", net(block=Adapted, body=_cached)),
    "almost all frozen": Scenario("all frozen but one bias", net(then=_freeze_all_but_one)),
    "weight norm": Scenario(
        "parametrizations.weight_norm", net(then=_blocks(lambda block: parametrizations.weight_norm(block.up)))
    ),
    "old weight norm": Scenario("nn.utils.weight_norm", net(then=lambda net: nn.utils.weight_norm(net.blocks[1].up))),
    "spectral norm": Scenario("parametrizations.spectral_norm", net(then=_spectral_norm)),
    "convolution": Scenario(
        "nn.Conv1d",
        net(
            convolution=lambda: nn.Conv1d(1, 3, 3, padding=1),
            forward=lambda net, x: plain(net, net.convolution(x[:, None]).sum(1)),
        ),
    ),
    "attention": Scenario(
        "nn.MultiheadAttention",
        net(
            attention=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
            forward=lambda net, x: plain(net, net.attention(x[None], x[None], x[None])[0][0]),
        ),
    ),
    "encoder": Scenario("nn.TransformerEncoder", TorchEncoder),
    "parameter lists": Scenario(
        "nn.ParameterList and nn.ParameterDict",
        net(
            list=lambda: nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(2)),
            named=lambda: nn.ParameterDict({"gain": torch.ones(WIDTH), "turn": torch.eye(WIDTH)}),
            forward=_listed,
        ),
    ),
    "root parameter": Scenario(
        "a parameter of the model itself",
        net(
            position=lambda: nn.Parameter(torch.randn(16, WIDTH) / 3),
            forward=lambda net, x: plain(net, x + net.position[: x.shape[0]]),
        ),
    ),
    "no blocks": Scenario("a model without blocks", NoBlocks),
    "nested blocks": Scenario("lists of blocks in blocks", net(block=TwoBlocks)),
    "shared module": Scenario(
        "one layer in two blocks", net(then=lambda net: setattr(net.blocks[3], "up", net.blocks[0].up))
    ),
    "buffers": Scenario(
        "a buffer",
        net(
            then=lambda net: net.register_buffer("scale", torch.rand(WIDTH) + 0.5),
            forward=lambda net, x: plain(net, x * net.scale),
        ),
    ),
    "batch norm": Scenario(
        "nn.BatchNorm1d, each rank its own statistics",
        net(between=lambda: nn.BatchNorm1d(WIDTH), forward=lambda net, x: plain(net, net.between(x))),
    ),
    "module hooks": Scenario("hooks that change outputs and gradients", net(then=_hook_modules)),
    "tensor hooks": Scenario("a hook on a parameter that changes its gradient", net(then=_hook_tensors)),
    "accumulation hooks": Scenario("a post-accumulation hook on a parameter", net(then=_hook_accumulation)),
    "checkpoint": Scenario("blocks checkpointed in forward", _checkpointed(False)),
    "reentrant checkpoint": Scenario("blocks checkpointed in forward, reentrant", _checkpointed(True)),
    "checkpoint inside": Scenario("a checkpoint inside blocks", net(block=_checkpoint_inside)),
    "checkpoint across": Scenario(
        "one checkpoint across all blocks", net(body=lambda net, x: checkpoint(Net.body, net, x, use_reentrant=False))
    ),
    "compiled blocks": Scenario("compiled blocks", net(then=_blocks(lambda block: block.compile(backend="aot_eager")))),
    "compiled whole": Scenario(
        "a compiled model that reads a weight", net(**position_read, then=lambda net: net.compile(backend="aot_eager"))
    ),
    "gradient penalty": Scenario("a loss with a gradient in it (create_graph)", net(forward=_gradient_penalty)),
    "functional call": Scenario("a block run by torch.func.functional_call", net(body=_functional_call)),
}
